"""Drawing against loop-written distributions, transformers, a published generator and itself."""

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from reference import nucleus, sampling_probs, splitmix64
from scipy import stats
from strategies import seeds
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvpolicy.attention import draw as module
from kvpolicy.attention.draw import NO_TOKEN, SamplingColumns, draw, uniform, weights

INT64 = st.integers(0, 2**63 - 1)
# How a slot draws: temperature, top-k, top-p, seed.
SLOTS = st.tuples(
    st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 5, 100]),
    st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    INT64,
)
# fp32 rounds logits, quotients and exponentials; the oracles are in double precision.
ROUNDING = 1e-5
# Tests on fixed numbers: each would fail for one of 100,000 good generators.
LEAST_P = 1e-5


def logits_of(seed: int, rows: int, vocab: int = 12) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def tied_logits(seed: int, rows: int, vocab: int = 12) -> Tensor:
    """Logits of few values, among them 0 and -0, and some tokens that are ruled out."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.tensor([-torch.inf, -1.5, -0.0, 0.0, 0.5, 2.0])
    logits = values[torch.randint(len(values), (rows, vocab), generator=rng)]
    logits[:, vocab // 2] = 0.5  # not all ruled out
    return logits


def columns(
    slots: list[tuple[float, int, float, int]], min_p: list[float] | None = None
) -> SamplingColumns:
    temperature, top_k, top_p, seed = zip(*slots, strict=True)
    return SamplingColumns(
        torch.tensor(temperature),
        torch.tensor(seed),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p or [0.0] * len(slots)),
    )


def one(temperature: float, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> SamplingColumns:
    return columns([(temperature, top_k, top_p, seed)])


def probabilities(logits: Tensor, how: SamplingColumns) -> Tensor:
    whole = weights(logits, how).double()
    return whole / whole.sum(dim=1, keepdim=True)


# --- the distribution -----------------------------------------------------------------------


@given(seeds, st.lists(SLOTS, min_size=1, max_size=4))
def test_each_slot_draws_from_its_own_filtered_distribution(seed: int, slots: list) -> None:
    logits = logits_of(seed, len(slots))
    ours = probabilities(logits, columns(slots))
    for row, (temperature, top_k, top_p, _) in enumerate(slots):
        expected = sampling_probs(
            logits[row].tolist(), temperature=temperature, top_k=top_k or None, top_p=top_p
        )
        assert ours[row].tolist() == pytest.approx(expected, abs=ROUNDING)


@given(seeds, SLOTS, st.integers(1, 40))
def test_of_equal_tokens_those_with_smaller_ids_are_kept(
    seed: int, slot: tuple, vocab: int
) -> None:
    logits = tied_logits(seed, 1, vocab)
    temperature, top_k, top_p, _ = slot
    expected, margin = nucleus(
        logits[0].tolist(), temperature=temperature, top_k=top_k, top_p=top_p
    )
    if margin > ROUNDING:
        ours = probabilities(logits, columns([slot]))[0]
        assert ours.tolist() == pytest.approx(expected, abs=ROUNDING)


@given(seeds, SLOTS, st.sampled_from([0.0, 0.01, 0.3, 1.0]))
def test_filters_equal_transformers(seed: int, slot: tuple, min_p: float) -> None:
    logits = logits_of(seed, 3)
    temperature, top_k, top_p, _ = slot
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    processors.append(MinPLogitsWarper(min_p))
    theirs = processors(torch.zeros(3, 1, dtype=torch.int64), logits.clone()).softmax(dim=-1)
    ours = probabilities(logits, columns([slot] * 3, [min_p] * 3)).float()
    torch.testing.assert_close(ours, theirs, atol=ROUNDING, rtol=0)


@given(seeds, st.lists(SLOTS, min_size=1, max_size=3))
def test_columns_that_no_slot_needs_may_be_left_out(seed: int, slots: list) -> None:
    slots = [(temperature, 0, 1.0, own) for temperature, _, _, own in slots]
    logits, how = logits_of(seed, len(slots)), columns(slots)
    without = attrs.evolve(how, top_k=None, top_p=None, min_p=None)
    assert torch.equal(weights(logits, how), weights(logits, without))


@pytest.mark.parametrize(
    ("top_p", "num"),
    [(0.25, 1), (math.nextafter(0.25, 1), 2), (0.26, 2), (0.5, 2), (0.75, 3), (1.0, 4)],
)
def test_nucleus_is_the_smallest_set_reaching_top_p(top_p: float, num: int) -> None:
    assert (weights(torch.zeros(1, 4), one(1.0, top_p=top_p)) > 0).tolist() == [
        [token < num for token in range(4)]
    ]


@pytest.mark.parametrize(
    "slot", [(1e-300, 0, 1.0), (1e-40, 0, 1.0), (1e-30, 0, 1.0), (1.0, 0, 5e-324)]
)
@pytest.mark.parametrize("best", [30.0, 3e38])
def test_numbers_that_round_to_zero_leave_the_likeliest_token(slot: tuple, best: float) -> None:
    logits = torch.tensor([[1.0, best, -torch.inf, -3e38]])
    for position in range(20):
        assert draw(logits, one(*slot), torch.tensor([position])).tolist() == [1]


def test_an_infinite_temperature_draws_all_tokens_that_are_not_ruled_out_alike() -> None:
    logits = torch.tensor([[9.0, -torch.inf, -9.0, 0.0]])
    assert probabilities(logits, one(1e300)).tolist() == [[1 / 3, 0, 1 / 3, 1 / 3]]


@pytest.mark.parametrize("values", [(0.0, -0.0), (-0.0, 0.0)])
def test_zero_and_minus_zero_are_equal(values: tuple[float, float]) -> None:
    assert (weights(torch.tensor([values]), one(1.0, top_k=1)) > 0).tolist() == [[True, False]]


@given(seeds, st.integers(1, 30_000), st.sampled_from([torch.float16, torch.bfloat16]))
def test_top_k_counts_in_large_vocabularies_and_short_types(
    seed: int, top_k: int, dtype: torch.dtype
) -> None:
    logits = logits_of(seed, 1, vocab=30_000).to(dtype)  # thousands of equal logits
    kept = weights(logits, one(1.0, top_k=top_k))[0] > 0
    order = logits[0].float().sort(descending=True, stable=True).indices
    assert kept.nonzero()[:, 0].tolist() == sorted(order[:top_k].tolist())


@pytest.mark.parametrize("middle", [-1.0, 0.0, 1.0, 2.0**-126])
def test_top_k_tells_neighbouring_numbers_apart(middle: float) -> None:
    """Their ranks end in ones, in zeros, and in zeros and a one."""
    centre, far = torch.tensor(middle), torch.tensor(torch.inf)
    values = torch.stack([centre.nextafter(-far), centre, centre.nextafter(far), centre + 2])
    logits = values[torch.tensor([[1, 0, 2, 0, 3, 1, 2, 0, 1, 2]])]
    order = logits[0].sort(descending=True, stable=True).indices.tolist()
    for top_k in range(1, 11):
        kept = weights(logits, one(1.0, top_k=top_k))[0] > 0
        assert kept.nonzero()[:, 0].tolist() == sorted(order[:top_k])


# --- greedy, and logits that name no token --------------------------------------------------


@given(seeds, INT64, st.booleans())
def test_temperature_zero_takes_the_first_of_the_likeliest_tokens(
    seed: int, own: int, is_mixed: bool
) -> None:
    logits = tied_logits(seed, 3)
    expected = [row.index(max(row)) for row in logits.tolist()]
    how = columns([(0.0, 3, 0.4, own)] * 3)
    if is_mixed:
        how.temperature[1] = 1.0
    tokens = draw(logits, how, torch.tensor([0, own, 7])).tolist()
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])
    assert draw(logits, SamplingColumns(), torch.tensor([0, own, 7])).tolist() == expected


@given(seeds, st.lists(SLOTS, min_size=2, max_size=4), st.data())
def test_logits_that_are_not_finite_name_no_token_and_leave_others_alone(
    seed: int, slots: list, data: st.DataObject
) -> None:
    slots = [(data.draw(st.sampled_from([0.0, slot[0]])), *slot[1:]) for slot in slots]
    logits, position = logits_of(seed, len(slots)), torch.arange(len(slots))
    expected = draw(logits, columns(slots), position)
    row = data.draw(st.integers(0, len(slots) - 1))
    bad = data.draw(st.sampled_from([torch.nan, -torch.nan, torch.inf]))
    where = data.draw(st.lists(st.integers(0, 11), min_size=1))
    logits[row, where] = bad
    expected[row] = NO_TOKEN
    assert torch.equal(draw(logits, columns(slots), position), expected)
    logits[row] = -torch.inf
    assert torch.equal(draw(logits, columns(slots), position), expected)


# --- random numbers -------------------------------------------------------------------------


def test_the_oracle_gives_the_published_numbers() -> None:
    assert splitmix64(1234567, 3) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(INT64, st.integers(0, 200))
def test_random_numbers_are_those_of_splitmix64_from_the_hash_of_the_seed(
    seed: int, position: int
) -> None:
    (state,) = splitmix64(seed, 1)
    expected = (splitmix64(state, position + 1)[-1] >> 11) / 2**53
    assert uniform(torch.tensor([seed]), torch.tensor([position])).tolist() == [expected]


@pytest.mark.parametrize("start", [0, 10**6, 2**62])
def test_random_numbers_are_uniform_over_positions_and_over_seeds(start: int) -> None:
    many, same = torch.arange(20_000) + start, torch.full((20_000,), 7)
    for numbers in (uniform(same, many), uniform(many, same)):
        assert stats.kstest(numbers.numpy(), "uniform").pvalue > LEAST_P


# Pairs that a weak hash relates: neighbours, equal sums, equal products, swapped arguments.
@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (1, -1), (1, 1), (64, 0)])
def test_random_numbers_of_neighbours_are_independent(seed_step: int, position_step: int) -> None:
    seed = torch.arange(200).repeat_interleave(200)
    position = torch.arange(200).repeat(200) + 1
    first = uniform(seed, position)
    second = uniform(seed + seed_step, position + position_step)
    cells = (first * 16).long() * 16 + (second * 16).long()
    counts = torch.bincount(cells, minlength=256)
    assert stats.chisquare(counts.numpy()).pvalue > LEAST_P


def test_swapped_seed_and_position_give_other_numbers() -> None:
    seed, position = torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100)
    assert len(uniform(seed, position).unique()) == 100 * 100


@pytest.mark.parametrize("argument", ["seed", "position"])
def test_any_changed_bit_changes_half_of_the_bits(argument: str) -> None:
    num = 1000
    numbers = {"seed": torch.arange(num), "position": torch.full((num,), 300)}
    bits = (uniform(**numbers) * 2**53).long()
    for bit in range(63):
        changed = numbers | {argument: numbers[argument] ^ (1 << bit)}
        flips = bits ^ (uniform(**changed) * 2**53).long()
        shares = torch.stack([(flips >> i & 1).double().mean() for i in range(53)])
        # Six standard errors, for 53 * 63 shares.
        assert (shares - 0.5).abs().max() < 6 * 0.5 / math.sqrt(num)


# --- drawing --------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("varied", ["seed", "position"])
@pytest.mark.parametrize("how", [(0.9, 0, 1.0), (0.9, 5, 0.95), (2.5, 0, 0.9)])
def test_frequencies_match_the_distribution(varied: str, how: tuple) -> None:
    logits, num = logits_of(3, 1, vocab=8), 4000
    numbers = torch.arange(num)
    seed, position = (numbers, 40) if varied == "seed" else (torch.full((num,), 11), numbers)
    many = attrs.evolve(columns([(*how, 0)] * num), seed=seed)
    tokens = draw(logits.expand(num, -1), many, torch.zeros(num, dtype=torch.int64) + position)
    expected = probabilities(logits, one(*how))[0]
    counts = torch.bincount(tokens, minlength=8)
    assert (counts[expected == 0] == 0).all()
    drawn = expected > 0
    test = stats.chisquare(counts[drawn].numpy(), (num * expected[drawn]).numpy())
    assert test.pvalue > LEAST_P


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(0, 2**53 - 1))
@example([0, 0], 0)
@example([1, 0], 2**52)
@example([1, 0, 0, 2], 2**53 - 1)
def test_a_share_belongs_to_the_token_whose_interval_holds_it(
    parts: list[int], numerator: int
) -> None:
    parts[-1] += 1
    logits = torch.tensor([parts]).double().log().float()
    likely = weights(logits, one(1.0))[0].tolist()
    total, reached = sum(likely), 0
    expected = None
    for token, part in enumerate(likely):
        reached += part
        if expected is None and numerator * total < reached * 2**53:
            expected = token
    with pytest.MonkeyPatch.context() as patch:
        share = torch.tensor([numerator / 2**53], dtype=torch.float64)
        patch.setattr(module, "uniform", lambda seed, position: share)
        token = draw(logits, one(1.0), torch.tensor([0])).tolist()
    assert token == [expected]


@given(seeds, st.lists(SLOTS, min_size=1, max_size=5), st.integers(1, 3000), st.data())
def test_a_slot_draws_the_same_token_alone_and_in_any_batch(
    seed: int, slots: list, vocab: int, data: st.DataObject
) -> None:
    logits, how = logits_of(seed, len(slots), vocab), columns(slots)
    position = torch.tensor(data.draw(st.lists(INT64, min_size=len(slots), max_size=len(slots))))
    row = data.draw(st.integers(0, len(slots) - 1))
    alone = attrs.evolve(
        how,
        **{name: column[row : row + 1] for name, column in attrs.asdict(how).items()},
    )
    batched = draw(logits, how, position)[row : row + 1]
    assert torch.equal(draw(logits[row : row + 1], alone, position[row : row + 1]), batched)
    assert torch.equal(weights(logits, how)[row], weights(logits[row : row + 1], alone)[0])


# --- on the device --------------------------------------------------------------------------


class OneWay(TorchDispatchMode):
    """Fails on operations that read values on the host or sort."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "sort", "topk", "unique", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, name
        return func(*args, **(kwargs or {}))


def mixed_slots() -> tuple[Tensor, SamplingColumns, Tensor]:
    slots = [(0.0, 0, 1.0, 1), (0.8, 5, 1.0, 2), (1.2, 0, 0.7, 3), (0.6, 9, 0.9, 4)]
    how = columns(slots, [0.0, 0.1, 0.0, 0.02])
    return logits_of(1, 4, vocab=50), how, torch.tensor([3, 1, 4, 1])


def test_the_mode_notices_a_read_value_and_a_sort() -> None:
    for act in (lambda: int(torch.ones(1)), lambda: torch.ones(2).sort()):
        with pytest.raises(AssertionError), OneWay():
            act()


def test_nothing_is_read_on_the_host_or_sorted() -> None:
    with OneWay():
        draw(*mixed_slots())


def test_no_shape_depends_on_values_and_no_tensor_comes_from_the_host() -> None:
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        logits, how, position = mixed_slots()
    logits, position = (_elsewhere(mode, tensor) for tensor in (logits, position))
    how = SamplingColumns(*(_elsewhere(mode, column) for column in attrs.astuple(how)))
    with mode:
        tokens = draw(logits, how, position)
    assert (tokens.shape, tokens.dtype, tokens.device.type) == ((4,), torch.int64, "meta")


def _elsewhere(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@pytest.mark.nightly
def test_drawing_is_one_graph_for_all_positions() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(draw, fullgraph=True, dynamic=False, backend="aot_eager")
    logits, how, position = mixed_slots()
    for step in range(4):
        logits = logits.roll(1, dims=1)
        expected = draw(logits, how, position + step)
        assert torch.equal(compiled(logits, how, position + step), expected)
    assert counters["stats"]["unique_graphs"] == 1
