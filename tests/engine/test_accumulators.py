"""What rows accumulate of attention: against loops, over chunks, batches, evictions and paths."""

from collections.abc import Generator, Sequence
from typing import Any

import attrs
import pytest
import slab_reference as reference
import torch
from families import WINDOWED, family_model
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds
from tiny import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import Engine, Plan, PolicyCache, hookimpl
from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.compat import cache_argument
from kvpolicy.engine.memory.footprint import footprint
from kvpolicy.hooks.stack import Stack
from kvpolicy.testing import replay

NUM_HEADS, NUM_KV_HEADS, GROUP, DIM = 4, 2, 2, 4
# fp32 sums over up to 60 queries, and over squares of logits of up to 10.
ATOL, LOGIT_ATOL = 1e-4, 1e-2

# Of one sequence in one layer at one compaction: numbers by accumulator and KV head and position.
Seen = dict[tuple[str, int, int], float]


@attrs.define(eq=False)
class Watch:
    """Notes what rows have accumulated, by prompt, layer and tokens seen; wraps other policies."""

    seen: dict[tuple[int, int, int], Seen] = attrs.field(factory=dict)

    @hookimpl(wrapper=True)
    def score(
        self,
        layer_idx: int,
        positions: Tensor,
        attn_sums: Tensor,
        attn_squares: Tensor,
        attn_squares_logit: Tensor,
        attn_squares_logit2: Tensor,
        seq_len: Tensor,
        prompt_len: Tensor,
    ) -> Generator[None, Tensor, Tensor]:
        sums = (attn_sums, attn_squares, attn_squares_logit, attn_squares_logit2)
        numbers = dict(zip(ACCUMULATORS, sums, strict=True))
        for b, length in enumerate(prompt_len.tolist()):
            self.seen[length, layer_idx, int(seq_len[b])] = {
                (name, head, row): number
                for name, track in numbers.items()
                for head in range(track.shape[1])
                for row, number in zip(
                    positions[b, head].tolist(), track[b, head].tolist(), strict=True
                )
            }
        scores = yield
        return scores


@attrs.define(eq=False)
class KeyLengths:
    """Rows with long keys stay: from anywhere, in each head others.

    Keys of one token are equally long wherever they are, but for rounding, which differs between
    paths and processors: they are made equal, and the newest of them stay.
    """

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return keys.double().norm(dim=-1).mul(1e3).round()


def assert_equal(one: Seen, other: Seen) -> None:
    assert one.keys() == other.keys()
    for key in one:
        atol = LOGIT_ATOL if "logit" in key[0] else ATOL
        assert one[key] == pytest.approx(other[key], abs=atol), key


# Against loops


def drawn(seed: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries of all tokens, ``[1, H, T, D]``."""
    rng = torch.Generator().manual_seed(seed)
    heads = (NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    sizes = [(1, number, num_tokens, DIM) for number in heads]
    keys, values, queries = (
        torch.randn(size, generator=rng, dtype=torch.float64) for size in sizes
    )
    return 2 * keys, values, queries


def attention(query: Tensor, keys: Tensor, values: Tensor) -> tuple[list[float], ...]:
    """Output of one query, weights and logits of all rows, in loops."""
    rows = keys.tolist(), values.tolist(), [True] * len(keys)
    return reference.attention(query.tolist(), *rows, DIM**-0.5)


def loops(
    keys: Tensor, values: Tensor, queries: Tensor, kept: dict[int, Tensor]
) -> dict[int, Seen]:
    """What rows have accumulated after numbers of tokens, where only ``kept`` rows stay.

    Args:
        keys: ``[H_kv, T, D]``.
        values: Likewise.
        queries: ``[H_q, T, D]``.
        kept: Positions that stay by number of tokens, ``[H_kv, K]``.
    """
    seen: dict[int, Seen] = {num: {} for num in kept}
    for head in range(NUM_KV_HEADS):
        numbers: dict[int, dict[str, float]] = {}
        for token in range(keys.shape[1]):
            numbers[token] = dict.fromkeys(ACCUMULATORS, 0.0)
            rows = list(numbers)
            group = range(head * GROUP, (head + 1) * GROUP)
            of_heads = [
                attention(queries[q, token], keys[head, rows], values[head, rows]) for q in group
            ]
            for index, row in enumerate(rows):
                weights, logits = ([one[part][index] for one in of_heads] for part in (1, 2))
                numbers[row] = {
                    name: reference.accumulated(name, before, weights, logits)
                    for name, before in numbers[row].items()
                }
            if token + 1 in kept:
                seen[token + 1] |= {
                    (name, head, row): number
                    for row, of_row in numbers.items()
                    for name, number in of_row.items()
                }
                numbers = {row: numbers[row] for row in kept[token + 1][head].tolist()}
    return seen


@given(seeds, st.integers(4, 12), st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_tracks_equal_loops_and_travel_with_their_rows(
    seed: int, prompt: int, gaps: list[int]
) -> None:
    budget, compact_at = 4, [prompt + sum(gaps[: i + 1]) for i in range(len(gaps))]
    keys, values, queries = drawn(seed, compact_at[-1])
    watch = Watch()
    stack = [KeyLengths(), watch]
    kept = replay(stack, keys, values, queries, budget=budget, prompt=prompt, compact_at=compact_at)
    stays = dict(zip(compact_at, (one[0] for one in kept), strict=True))
    expected = loops(keys[0], values[0], queries[0], stays)
    assert watch.seen
    for (_, _, num_tokens), seen in watch.seen.items():
        assert_equal(seen, expected[num_tokens])


@given(seeds, st.integers(1, 20))
def test_decoding_accumulates_what_prefill_does(seed: int, prompt: int) -> None:
    num_tokens = 20
    keys, values, queries = drawn(seed, num_tokens)
    notes = []
    for fed_at_once in (prompt, num_tokens):
        watch = Watch()
        replay(
            ["streaming", watch],
            keys,
            values,
            queries,
            budget=6,
            prompt=fed_at_once,
            compact_at=[num_tokens],
        )
        notes += watch.seen.values()
    assert_equal(*notes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_logits_in_half_precision_give_no_nan(dtype: torch.dtype) -> None:
    keys, values, queries = (30 * one.to(dtype) for one in drawn(3, 24))
    watch = Watch()
    replay(["streaming", watch], keys, values, queries, budget=6, prompt=9, compact_at=range(9, 25))
    numbers = [number for seen in watch.seen.values() for number in seen.values()]
    assert torch.tensor(numbers).isfinite().all()
    assert max(map(abs, numbers)) > 1e4  # logits were large indeed


# In engines

PROMPTS = [[5, 9, 40, 2, 2, 7, 11, 30, 1], [8, 1], [3] * 13, list(range(30, 3, -1))]


def notes_of(
    model: PreTrainedModel, *, budget: int = 8, buffer: int = 4, watch: Any = Watch, **options: Any
) -> dict[tuple[int, int, int], Seen]:
    """What rows have accumulated in a run over all prompts."""
    watch = watch()
    plan = Plan.uniform(KeyLengths(), watch, budget=budget, buffer=buffer)
    engine = Engine(model, plan=plan, **{"slots": 3, **options})
    engine.generate(PROMPTS, max_new_tokens=20, stop_ids=()).results()
    return watch.seen


def check_alike(model: PreTrainedModel, *variants: dict[str, Any], **shared: Any) -> None:
    wanted = notes_of(model, **shared)
    assert len(wanted) > 10
    for options in variants:
        seen = notes_of(model, **shared, **options)
        assert seen.keys() == wanted.keys(), options
        for key, notes in wanted.items():
            assert_equal(seen[key], notes)


VARIANTS = [{"chunk": 1, "slots": 1}, {"chunk": 5, "steps_per_read": 2}, {"eager": True}]


def test_chunks_neighbours_and_paths_do_not_matter() -> None:
    check_alike(tiny_model(seed=2, dtype=torch.float64), *VARIANTS)


def test_decode_in_numba_accumulates_what_torch_does() -> None:
    check_alike(tiny_model(seed=2), {"eager": True})


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral"])
def test_nor_do_they_with_windows_caps_and_sinks(family: str) -> None:
    assert family in WINDOWED
    model = family_model(family, dtype=torch.float64)
    check_alike(model, {"chunk": 1}, {"eager": True, "slots": 1}, budget=2, buffer=2)


@attrs.define(eq=False)
class Asked(Watch):
    """Compacts layers that hold a whole window, too, which need no compaction."""

    @hookimpl
    def due(self, num_rows: Tensor, seq_len: Tensor, budget: int) -> Tensor:
        return (num_rows > budget) & (seq_len % 7 == 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_nor_do_they_where_a_slab_slides_with_the_window(family: str) -> None:
    model = family_model(family, dtype=torch.float64)
    variants = [{"chunk": 1}, {"chunk": 4, "slots": 2, "eager": True}]
    check_alike(model, *variants, budget=3, buffer=60, watch=Asked)


def test_a_policy_cache_accumulates_what_an_engine_does() -> None:
    model = tiny_model(seed=2, dtype=torch.float64)
    prompt = PROMPTS[-1]
    notes = []
    for door in ("engine", "cache"):
        watch = Watch()
        plan = Plan.uniform("streaming", watch, budget=8, buffer=4)
        if door == "engine":
            engine = Engine(model, plan=plan, slots=1)
            engine.generate([prompt], max_new_tokens=20, stop_ids=()).results()
        else:
            model.generate(
                torch.tensor([prompt]),
                **cache_argument(PolicyCache(model, plan)),
                max_new_tokens=20,
                do_sample=False,
            )
        notes.append(watch.seen)
    assert notes[0].keys() == notes[1].keys()
    for key, seen in notes[0].items():
        assert_equal(seen, notes[1][key])


def _reader(name: str) -> type:
    """A policy that reads one argument."""
    scope: dict[str, Any] = {"hookimpl": hookimpl}
    exec(f"@hookimpl\ndef score(self, {name}): return {name}.double()", scope)
    return type("Reader", (), {"score": scope["score"]})


@pytest.mark.parametrize("name", ACCUMULATORS)
def test_each_costs_a_track_and_only_if_it_is_named(name: str) -> None:
    model = tiny_model(num_layers=1)
    sizes = [
        footprint(Plan.uniform(policy, budget=9, buffer=4), model, slots=1).bytes_per_slot
        for policy in (_reader("keys")(), _reader(name)())
    ]
    assert sizes[1] - sizes[0] == 13 * NUM_KV_HEADS * 4
    assert Stack([("one", _reader(name)())]).tracks == (name,)


# Policies


@attrs.define(eq=False)
class RemovedValues:
    """What removing the value of a row would have changed in all outputs so far (OBCache, S^V)."""

    @hookimpl
    def score(self, values: Tensor, attn_squares: Tensor) -> Tensor:
        return attn_squares * values.float().square().sum(dim=-1)


def kept_by_loops(
    keys: Tensor, values: Tensor, queries: Tensor, at: Sequence[int], budget: int
) -> list[list[list[int]]]:
    """Positions that `RemovedValues` keeps at each compaction in each head, token by token.

    Args:
        keys: ``[H_kv, T, D]``.
        values: Likewise.
        queries: ``[H_q, T, D]``.
        at: Numbers of tokens after which rows leave.
        budget: Rows that stay.
    """
    kept: list[list[list[int]]] = [[] for _ in at]
    for head in range(NUM_KV_HEADS):
        errors: dict[int, float] = {}
        for token in range(keys.shape[1]):
            errors[token] = 0.0
            rows = list(errors)
            for q in range(head * GROUP, (head + 1) * GROUP):
                query, held = queries[q, token], keys[head, rows]
                output, *_ = attention(query, held, values[head, rows])
                for index, row in enumerate(rows):
                    without = values[head, rows].clone()
                    without[index] = 0
                    removed, *_ = attention(query, held, without)
                    errors[row] += sum((a - b) ** 2 for a, b in zip(output, removed, strict=True))
            if token + 1 in at:
                best = sorted(rows, key=lambda row: (errors[row], row))[-budget:]
                errors = {row: errors[row] for row in sorted(best)}
                kept[at.index(token + 1)].append(sorted(best))
    return kept


@pytest.mark.parametrize("seed", range(3))
def test_a_policy_keeps_what_brute_force_keeps(seed: int) -> None:
    keys, values, queries = drawn(seed, 22)
    at, budget = [9, 12, 17, 22], 6
    kept = replay(RemovedValues(), keys, values, queries, budget=budget, prompt=9, compact_at=at)
    expected = kept_by_loops(keys[0], values[0], queries[0], at, budget)
    assert [one[0].tolist() for one in kept] == expected
