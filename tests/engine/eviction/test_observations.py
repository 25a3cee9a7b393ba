"""Attention arguments of hooks equal the model's own eager attention."""

from collections.abc import Generator

import attrs
import pytest
import torch
from tiny import FAMILIES, tiny_model
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.state import Memory

NUM_HEADS, NUM_KV_HEADS, WINDOW = 4, 2, 3
BUDGET, BUFFER = 9, 4
PROMPTS = [[5, 9, 40, 2, 2, 7, 11, 30, 1], [8, 1], [3] * 13, [17, 4, 4, 59, 21]]


@attrs.define(eq=False)
class Watch:
    """Records the arguments of every sequence's first compaction in every layer."""

    window_size: int = WINDOW
    seen: list[dict] = attrs.field(factory=list)

    @hookimpl(wrapper=True)
    def score(
        self,
        layer_idx: int,
        keys: Tensor,
        queries: Tensor,
        attn_weights: Tensor,
        attn_sums: Tensor,
        seq_len: Tensor,
        memory: Memory,
    ) -> Generator[None, Tensor, Tensor]:
        tensors = {
            "keys": keys,
            "queries": queries,
            "attn_weights": attn_weights,
            "attn_sums": attn_sums,
        }
        for b, notes in enumerate(memory.of(self)):
            if layer_idx not in notes:
                notes[layer_idx] = True
                row = {name: tensor[b].clone() for name, tensor in tensors.items()}
                self.seen.append(row | {"layer_idx": layer_idx, "seq_len": int(seq_len[b])})
        scores = yield
        return scores


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [3, 512])
def test_queries_weights_and_sums_equal_eager_attention(family: str, chunk: int) -> None:
    watch = Watch()
    plan = Plan.uniform("streaming", watch, budget=BUDGET, buffer=BUFFER)
    engine = Engine(tiny_model(family, seed=2), plan=plan, slots=3, chunk=chunk)
    results = engine.generate(PROMPTS, max_new_tokens=14).results()
    eager = tiny_model(family, seed=2, attn_implementation="eager")
    # Nothing is evicted before the first compaction, so a plain forward is the reference.
    reference = [
        eager_attention(eager, [*prompt, *result.tokens][: BUDGET + BUFFER])
        for prompt, result in zip(PROMPTS, results, strict=True)
    ]
    assert len(watch.seen) == 2 * len(PROMPTS)
    for row in watch.seen:
        assert row["seq_len"] == BUDGET + BUFFER
        assert row["queries"].shape == (NUM_HEADS, WINDOW, 8)
        assert row["attn_weights"].dtype == row["attn_sums"].dtype == torch.float32
        matches = [agrees(row, attentions[row["layer_idx"]]) for attentions in reference]
        assert sum(matches) == 1


def eager_attention(model: torch.nn.Module, tokens: list[int]) -> list[Tensor]:
    """Softmax weights of every layer, ``[H_q, T, T]``."""
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), output_attentions=True)
    return [attention[0] for attention in output.attentions]


def agrees(row: dict, attention: Tensor) -> bool:
    group = NUM_HEADS // NUM_KV_HEADS
    sums = attention.sum(dim=1).unflatten(0, (NUM_KV_HEADS, group)).sum(dim=1)
    keys = row["keys"].repeat_interleave(group, dim=0)
    logits = row["queries"] @ keys.transpose(1, 2) * keys.shape[-1] ** -0.5
    hidden = torch.ones(WINDOW, attention.shape[-1]).triu(attention.shape[-1] - WINDOW + 1).bool()
    from_queries = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return all(
        torch.allclose(ours, theirs, atol=1e-5)
        for ours, theirs in (
            (row["attn_weights"], attention[:, -WINDOW:]),
            (from_queries, attention[:, -WINDOW:]),
            (row["attn_sums"], sums),
        )
    )


@attrs.define(eq=False)
class ChecksFinite:
    """Reads the attention weights of a query window that is longer than the budget."""

    window_size: int = 8
    finite: list[bool] = attrs.field(factory=list)

    @hookimpl
    def score(self, positions: Tensor, attn_weights: Tensor) -> Tensor:
        self.finite.append(bool(attn_weights.isfinite().all()))
        return positions.float()


def test_weights_are_finite_when_all_rows_of_a_query_are_evicted() -> None:
    policy = ChecksFinite()
    plan = Plan.uniform(policy, budget=2, buffer=3)
    Engine(tiny_model(seed=2), plan=plan).generate([[1, 2, 3]], max_new_tokens=20).results()
    assert policy.finite
    assert all(policy.finite)


@attrs.define(eq=False)
class ReadsKeys:
    """Declares only ``keys``, so no track or query window is needed."""

    @hookimpl
    def score(self, keys: Tensor, budget: int) -> Tensor:
        return keys.norm(dim=-1)


@pytest.mark.parametrize(
    ("stack", "num_tracks", "window"),
    [((ReadsKeys(),), 0, 0), (("h2o",), 1, 0), (("snapkv",), 1, 8), (("h2o", "rkv"), 2, 8)],
    ids=["keys only", "sums", "ranks and queries", "sums and queries"],
)
def test_undeclared_tracks_are_not_stored(stack: tuple, num_tracks: int, window: int) -> None:
    plan = Plan.uniform(*stack, budget=9, buffer=4)
    run = Engine(tiny_model(num_layers=1), plan=plan, slots=1).generate(
        [[1, 2, 3]], max_new_tokens=7
    )
    run.results()
    rows = 3 + 7  # the slab is as long as the longest possible sequence
    row = NUM_KV_HEADS * (2 * 8 * 4 + 8 + 4 * num_tracks)  # keys, values, position, tracks
    assert run.report.peak_kv_bytes == rows * row + window * NUM_HEADS * 8 * 4
