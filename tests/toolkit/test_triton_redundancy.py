"""R-KV's redundancy in Triton against loops, and against the function that policies call."""

import slab_reference as reference
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import KINDS, fill, seeds
from triton_device import DEVICE

from kvpolicy.toolkit import key_redundancy as key_redundancy_in_tiles
from kvpolicy.toolkit.triton_redundancy import key_redundancy

# fp32 sums of up to 200 similarities, in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-7}
# A similarity so close to the threshold is rounded to either side.
MARGIN = 1e-5

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
RETAIN = st.sampled_from(["last", "first"])
THRESHOLDS = st.sampled_from([0.1, 0.5, 0.9])


@given(
    st.integers(1, 90), st.sampled_from([4, 20, 64]), DTYPES, st.sampled_from(KINDS), RETAIN,
    THRESHOLDS, seeds,
)  # fmt: skip
def test_redundancy_equals_loops_over_the_rows_that_count(
    num, dim, dtype, kind, retain, threshold, seed
) -> None:
    rng = torch.Generator().manual_seed(seed)
    keys = fill((2, 2, num, dim), kind, seed).to(dtype)
    num_rows = torch.randint(1, num + 1, (2, 2), generator=rng)
    wanted = torch.zeros(2, 2, num)
    for b, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        count = int(num_rows[b, head])
        rows = keys[b, head, :count].double().tolist()
        shares, margin = reference.redundancy(rows, threshold, retain)
        assume(margin > MARGIN)
        wanted[b, head, :count] = torch.tensor(shares)
        keys[b, head, count:] = float("nan")
    # As in slabs: more rows than asked for, and other layers between the slots.
    slab = torch.full((2, 3, 2, num + 4, dim), float("nan"), dtype=dtype, device=DEVICE)
    slab[:, 1, :, :num] = keys.to(DEVICE)
    share = key_redundancy(
        slab[:, 1, :, :num], threshold=threshold, retain=retain, num_rows=num_rows.to(DEVICE)
    )
    torch.testing.assert_close(share.cpu(), wanted, **TOLERANCE)


@given(st.integers(60, 200), DTYPES, st.sampled_from(KINDS), RETAIN, THRESHOLDS, seeds)
def test_redundancy_equals_that_in_tiles(num, dtype, kind, retain, threshold, seed) -> None:
    keys = fill((1, 2, num, 16), kind, seed).to(dtype)
    unit = keys.double() / (keys.double().norm(dim=-1, keepdim=True) + 1e-8)
    similarity = unit @ unit.mT
    similarity.diagonal(dim1=2, dim2=3).zero_()
    assume((similarity - threshold).abs().min() > MARGIN)
    share = key_redundancy(keys.to(DEVICE), threshold=threshold, retain=retain)
    wanted = key_redundancy_in_tiles(keys, threshold=threshold, retain=retain)
    torch.testing.assert_close(share.cpu(), wanted, **TOLERANCE)
