"""What policies choose of a prompt that enters in larger chunks than the buffer, as loops say.

In the first layer of a model, queries and keys depend on their tokens alone, whatever was evicted
before; so loops over the tokens of a prompt can say what stays. Compactions come when there are
``budget + prefill_buffer`` rows, and at the end of the prompt if there are ``budget + buffer``.
"""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import reference
import torch
from tiny import shared_model

from kvpolicy import Engine, Plan, Request

BUDGET, BUFFER, PREFILL_BUFFER = 12, 4, 20
WINDOW, AHEAD = 4, 2
PATCH = (7, 3, 50, 11)
GROUP = 2  # query heads of a KV head

Vectors = list[list[list[float]]]  # of each head and token


def random_prompt(length: int) -> list[int]:
    rng = torch.Generator().manual_seed(length)
    return torch.randint(61, (length,), generator=rng).tolist()


def keys_and_queries(model: Any, tokens: list[int], first: int = 0) -> tuple[Vectors, Vectors]:
    """Keys and queries of tokens from a position on, in the first layer."""
    layer = model.model.layers[0]
    with torch.no_grad():
        states = layer.input_layernorm(model.model.embed_tokens(torch.tensor(tokens)))
        found = []
        for project in (layer.self_attn.k_proj, layer.self_attn.q_proj):
            heads = project(states).unflatten(-1, (-1, 8)).transpose(0, 1).tolist()
            found.append(
                [
                    [reference.rotated(one, first + t) for t, one in enumerate(of_head)]
                    for of_head in heads
                ]
            )
    return found[0], found[1]


@attrs.define
class OfHead:
    """One KV head with the rows that it holds, as positions, while a prompt enters."""

    model: Any
    prompt: list[int]
    all_keys: list[list[float]]
    all_queries: Vectors  # of its query heads
    head: int
    held: list[int] = attrs.field(factory=list)
    sums: reference.HeavyHitters = attrs.field(factory=lambda: reference.HeavyHitters(GROUP))

    @property
    def keys(self) -> list[list[float]]:
        return [self.all_keys[position] for position in self.held]

    def queries(self, first: int, end: int) -> Vectors:
        return [of_head[first:end] for of_head in self.all_queries]

    def take(self, position: int) -> None:
        self.held.append(position)
        self.sums.forward(self.keys, self.queries(position, position + 1))

    def keep(self, rows: list[int]) -> None:
        self.held = [self.held[row] for row in rows]
        self.sums.keep(rows)


def streaming(one: OfHead, end: int) -> list[int]:
    del end
    return reference.streaming(len(one.held), BUDGET, 4)


def h2o(one: OfHead, end: int) -> list[int]:
    """Attention of every query of the chunk counts."""
    del end
    recent = BUDGET // 2
    return reference.with_window(one.sums.scores()[:-recent], recent, BUDGET)


def snapkv(one: OfHead, end: int) -> list[int]:
    """The window is the end of the chunk."""
    sizes = {"window_size": WINDOW, "kernel_size": 1}
    scores = reference.snapkv(one.keys, one.queries(end - WINDOW, end), **sizes)
    return reference.with_window(scores, WINDOW, BUDGET)


def rkv(one: OfHead, end: int) -> list[int]:
    sizes = {"window_size": WINDOW, "kernel_size": 1}
    scores = reference.rkv(one.keys, one.queries(end - WINDOW, end), **sizes)
    return reference.with_window(scores, WINDOW, BUDGET)


def snapkv_prefill(one: OfHead, end: int) -> list[int]:
    sizes = {"window_size": WINDOW, "kernel_size": 1}
    scores = reference.snapkv_published(one.keys, one.queries(end - WINDOW, end), **sizes)
    return reference.with_window(scores, WINDOW, BUDGET)


def laq(one: OfHead, end: int) -> list[int]:
    """What looks ahead are the prompt's own next tokens, and all rows are before them."""
    totals = [0.0] * len(one.held)
    for of_head in one.queries(end, end + AHEAD):
        for query in of_head:
            for row, weight in enumerate(reference.attention(query, one.keys)):
                totals[row] += weight
    return reference.top_rows(totals, BUDGET)


def epicache(one: OfHead, end: int) -> list[int]:
    """The patched prompt comes behind the last token of the block."""
    _, queries = keys_and_queries(one.model, list(PATCH), end)
    of_group = queries[one.head * GROUP : (one.head + 1) * GROUP]
    weights = [reference.attention(query, one.keys) for of_head in of_group for query in of_head]
    return reference.top_rows([max(column) for column in zip(*weights, strict=True)], BUDGET)


WINDOWED = {"window_size": WINDOW, "kernel_size": 1}
CASES: dict[str, tuple[dict[str, Any], Callable[[OfHead, int], list[int]]]] = {
    "streaming": ({"policy": "streaming"}, streaming),
    "h2o": ({"policy": "h2o"}, h2o),
    "snapkv": ({"policy": "snapkv", **WINDOWED}, snapkv),
    "rkv": ({"policy": "rkv", **WINDOWED}, rkv),
    "laq": ({"policy": "laq", "n_lookahead": AHEAD, "n_local": 0, "kernel_size": 1}, laq),
    "epicache": ({"policy": "epicache", "prompt": list(PATCH)}, epicache),
}


def kept_by_loops(
    model: Any,
    prompt: list[int],
    choose: Callable[[OfHead, int], list[int]],
    most: float = BUDGET + PREFILL_BUFFER,
    most_at_end: int = BUDGET + BUFFER,
) -> list[list[int]]:
    """Positions that each head holds before the first token of the answer is brought in."""
    keys, queries = keys_and_queries(model, prompt)
    kept = []
    for head, of_head in enumerate(keys):
        of_group = queries[head * GROUP : (head + 1) * GROUP]
        one = OfHead(model, prompt, of_head, of_group, head)
        for position in range(len(prompt)):
            if len(one.held) >= most:
                one.keep(choose(one, position))
            one.take(position)
        if len(one.held) >= most_at_end:
            one.keep(choose(one, len(prompt)))
        kept.append(one.held)
    return kept


def kept_by_engine(model: Any, plan: Plan, prompt: list[int], chunk: int) -> list[list[int]]:
    engine = Engine(model, plan=plan, slots=1, chunk=chunk)
    (result,) = engine.generate([Request(prompt, 2, stop_ids=(), snapshot=True)]).results()
    assert result.snapshot is not None
    rows: list[list[int]] = result.snapshot.contents.layers[0].positions.tolist()
    assert [one[-1] for one in rows] == [len(prompt)] * len(rows)  # of the answer's first token
    return [one[:-1] for one in rows]


@pytest.mark.parametrize("chunk", [1024, 7])
@pytest.mark.parametrize("name", CASES)
def test_what_stays_of_a_staged_prompt_is_what_loops_choose(name: str, chunk: int) -> None:
    spec, choose = CASES[name]
    model = shared_model("llama", num_layers=1, dtype=torch.float64)
    sizes = {"budget": BUDGET, "buffer": BUFFER, "prefill_buffer": PREFILL_BUFFER}
    plan = Plan.from_dict({"stack": [spec], **sizes})
    # At its end a prompt has 14 rows, which fit, and 26, which do not; laq would look beyond it.
    at_end = BUDGET + 1 if name == "epicache" else BUDGET + BUFFER
    for length in (54, 66) if name != "laq" else (54,):
        prompt = random_prompt(length)
        kept = kept_by_loops(model, prompt, choose, most_at_end=at_end)
        assert kept_by_engine(model, plan, prompt, chunk) == kept


@pytest.mark.parametrize("chunk", [1024, 7])
def test_a_method_for_whole_prompts_sees_the_whole_prompt(chunk: int) -> None:
    model = shared_model("llama", num_layers=1, dtype=torch.float64)
    spec = {"policy": "snapkv", "phase": "prefill", **WINDOWED}
    plan = Plan.from_dict({"stack": [spec], "budget": BUDGET, "buffer": BUFFER})
    assert not plan.resolve(1).stages
    prompt = random_prompt(66)
    kept = kept_by_loops(model, prompt, snapkv_prefill, most=float("inf"))
    assert kept_by_engine(model, plan, prompt, chunk) == kept


@pytest.mark.parametrize("policy", ["epicache", "lazy_eviction"])
def test_a_method_whose_block_is_the_buffer_has_chunks_of_the_buffer(policy: str) -> None:
    sizes = {"budget": 64, "buffer": 32}
    left_open, named = (
        Plan.uniform(policy, **sizes, prefill_buffer=size).resolve(2) for size in (None, 32)
    )
    assert left_open == named
    assert Plan.uniform(policy, "protect", **sizes).resolve(2).stages is False
    assert Plan.uniform(policy, **sizes, prefill_buffer=48).resolve(2).stages
