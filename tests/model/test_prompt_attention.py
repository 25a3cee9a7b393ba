"""Attention of prompts to rows held before and to their own, against sums in double precision."""

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prompt_forwards import HEAD_DIM, Forward, expected, forwards
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvpolicy.attention import blocks, visible
from kvpolicy.attention.accumulators import ATTN_SUMS
from kvpolicy.attention.eager import attend
from kvpolicy.attention.softmax import PLAIN


@given(
    forwards,
    st.sampled_from([0, visible.SHARED_MASK_BYTES]),
    st.sampled_from([1, 300, blocks.BLOCK_BYTES]),
    st.booleans(),
)
def test_prompts_attend_to_what_comes_before_each_token(
    forward: Forward, shared_bytes: int, block_bytes: int, accumulates: bool
) -> None:
    tensors = forward.tensors()
    received = {ATTN_SUMS: torch.zeros(tensors[1].shape[:3])} if accumulates else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visible, "SHARED_MASK_BYTES", shared_bytes)
        patch.setattr(blocks, "BLOCK_BYTES", block_bytes)
        output = attend(
            *tensors,
            forward.visible,
            scaling=HEAD_DIM**-0.5,
            softmax=PLAIN,
            accumulated=received,
        )
    wanted = expected(forward, tensors)
    for b, length in enumerate(forward.lengths):
        torch.testing.assert_close(
            output[b, :, -length:].double(),
            wanted.output[b, :, -length:],
            atol=2e-6,
            rtol=1e-5,
        )
    assert output.isfinite().all()
    for name, track in received.items():
        torch.testing.assert_close(track.double(), wanted.accumulated[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "forward",
    [
        Forward([40], [17], 2, 2, None, 0),
        Forward([0, 40, 33], [17, 17, 4], 2, 3, None, 0),
        Forward([40, 33], [17, 4], 2, 2, 20, 0),
        Forward([40, 33], [17, 4], 2, 2, None, 0, value_dim=6),
        Forward([0], [17], 2, 2, None, 0, value_dim=12),
    ],
    ids=["one", "unequal", "window", "smaller values", "larger values"],
)
def test_every_precision_and_device_has_kernels(
    forward: Forward, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible, "SHARED_MASK_BYTES", 0)
    tensors = forward.tensors(dtype)
    seen = attrs.evolve(forward.visible, device=device)
    on_device = (tensor.to(device) for tensor in tensors)
    output = attend(*on_device, seen, scaling=HEAD_DIM**-0.5, softmax=PLAIN, accumulated={})
    wanted = expected(forward, tensors).output
    assert output.dtype == dtype
    atol = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2 * torch.finfo(dtype).eps)
    for b, length in enumerate(forward.lengths):
        torch.testing.assert_close(
            output[b, :, -length:].double().cpu(), wanted[b, :, -length:], atol=atol, rtol=0
        )


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made, beside views of others."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {
            one.untyped_storage().data_ptr()
            for one in tree_leaves((args, kwargs))
            if isinstance(one, Tensor)
        }
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, one.untyped_storage().nbytes())
        return made


def largest_made(forward: Forward, *, accumulates: bool) -> int:
    """Bytes of the largest tensor that attention makes."""
    tensors = forward.tensors()
    received = {ATTN_SUMS: torch.zeros(tensors[1].shape[:3])} if accumulates else {}
    with Largest() as largest:
        attend(*tensors, forward.visible, scaling=1.0, softmax=PLAIN, accumulated=received)
    return largest.num_bytes


BLOCK = 1 << 16  # bytes: the queries and rows below have 40 times as many weights
LONG = [
    Forward([1024], [256], 1, 2, None, 0),
    Forward([1024, 800], [256, 100], 1, 2, None, 0),
    Forward([1024, 800], [256, 256], 2, 2, None, 0),
]


@pytest.mark.parametrize("forward", LONG, ids=["one", "unequal", "rows unequal"])
def test_causal_attention_makes_neither_a_mask_nor_a_copy_of_rows(
    forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible, "SHARED_MASK_BYTES", 0)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK)
    queries, keys, _ = forward.tensors()
    assert largest_made(forward, accumulates=False) <= queries.nbytes < keys[:1].nbytes
    assert queries.nbytes < forward.visible.width * keys.shape[2]  # bytes of a mask


@pytest.mark.parametrize(
    ("forward", "accumulates"),
    [
        *((one, True) for one in LONG),
        (attrs.evolve(LONG[0], reach=300), False),
        (attrs.evolve(LONG[1], reach=300), True),
    ],
)
def test_weights_and_masks_are_made_in_blocks(
    forward: Forward, accumulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible, "SHARED_MASK_BYTES", 0)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK)
    queries, keys, _ = forward.tensors()
    all_weights = 4 * queries.shape[:3].numel() * keys.shape[2]
    most = max(BLOCK, queries.nbytes)
    assert largest_made(forward, accumulates=accumulates) <= most < all_weights / 16


def test_short_prompts_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    many = Forward([0] * 6, [3, 5, 5, 4, 1, 2], 1, 1, None, 0)
    assert len(many.visible.parts) == 1
    monkeypatch.setattr(visible, "SHARED_MASK_BYTES", 5 * 6 * 5 - 1)
    assert [part.visible.width for part in many.visible.parts] == [3, 5, 4, 1, 2]


def test_a_window_leaves_out_rows_that_no_query_of_a_block_sees() -> None:
    window = Forward([50], [10], 1, 1, 20, 0).visible
    assert window.rows(slice(0, 4)) == slice(31, 54)
    assert window.rows(slice(4, 10)) == slice(35, 60)


def test_what_all_see_needs_no_mask() -> None:
    alike = Forward([7, 7], [1, 1], 1, 1, None, 0).visible
    assert alike.mask(slice(0, 1), slice(0, 8)) is None
    chunk = Forward([7, 7], [4, 4], 1, 1, None, 0).visible
    assert chunk.seen_by_all(slice(2, 4)) == 10
    assert chunk.mask(slice(2, 4), slice(0, 10)) is None
    assert math.prod(chunk.mask(slice(2, 4), slice(10, 11)).shape) == 4


def test_other_devices_take_the_bias_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "SHARED_MASK_BYTES", 0)
    forward = Forward([40, 33], [17, 4], 2, 3, None, 0)
    meta = torch.device("meta")  # without numbers, but torch checks its arguments
    given = [tensor.to(meta) for tensor in forward.tensors()]
    seen = attrs.evolve(forward.visible, device=meta)
    output = attend(*given, seen, scaling=1.0, softmax=PLAIN, accumulated={})
    assert (output.device, output.shape) == (meta, given[0].shape)


@pytest.mark.parametrize(
    "forward",
    [
        Forward([0], [17], 2, 2, None, 0),
        Forward([40, 33], [17, 4], 2, 2, None, 0),
        Forward([40, 33], [1, 1], 2, 2, None, 0),
        Forward([0], [17], 2, 2, None, 0, value_dim=6),
    ],
    ids=["first", "masked", "a token", "smaller values"],
)
def test_no_plan_is_made_for_a_shape_on_a_gpu(
    forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN takes about a second for one, and prompts have any number of tokens."""
    fused, enabled = F.scaled_dot_product_attention, []

    def noted(*args: Any, **options: Any) -> Tensor:
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return fused(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    meta = torch.device("meta")
    given = [tensor.to(meta) for tensor in forward.tensors()]
    seen = attrs.evolve(forward.visible, device=meta)
    attend(*given, seen, scaling=1.0, softmax=PLAIN, accumulated={})
    assert enabled
    assert not any(enabled)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_the_bias_of_torch_is_what_the_two_parts_are() -> None:
    forward = Forward([40], [17], 1, 1, None, 0)
    given, bias = forward.tensors(), causal_lower_right(17, 57)
    expected = F.scaled_dot_product_attention(*given, attn_mask=bias, scale=0.3)
    found = attend(*given, forward.visible, scaling=0.3, softmax=PLAIN, accumulated={})
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
