"""Layers that attend to the rows of another layer: held once, and evicted for all of them."""

from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from any_model import tiny_random_model
from families import attention_implementation
from tiny import greedy_tokens
from torch import Tensor

from kvpolicy import (
    Engine,
    Lookahead,
    Plan,
    PolicyCache,
    PrefixStore,
    Request,
    SequenceSnapshot,
    hookimpl,
)
from kvpolicy.compat import cache_argument
from kvpolicy.engine.memory.footprint import footprint
from kvpolicy.errors import ModelError, PlanError

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 6]
LONG = [5, 9, 40, 2, 2, 7, 11, 30, 8, 16, 22, 3]

# Six layers; the last four attend to the rows of the first two, in turns.
NAMES = ["Gemma4ForCausalLM", "Gemma3nForCausalLM"]
NUM_READERS = 3

# Policies with the knobs that small budgets need.
POLICIES: dict[str, dict[str, Any]] = {
    "h2o": {"n_recent": 3},
    "snapkv": {"window_size": 3},
    "streaming": {"n_sink": 1},
    "skipkv": {"delimiters": (3, 7), "tau": 0.5, "window_size": 4},
}


@cache
def sharing_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    if not hasattr(transformers, name):
        pytest.skip("this release of transformers has no such model")
    return tiny_random_model(name).to(dtype)


def plan_of(policy: str, budget: int = 8) -> Plan:
    return Plan.uniform(policy, budget=budget, buffer=4, knobs={policy: POLICIES[policy]})


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_generate(name: str) -> None:
    """In batches of unequal prompts, whole and in chunks, and in ``generate`` itself."""
    model = sharing_model(name)
    expected = [greedy_tokens(model, prompt, 9) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 1
    for plan, chunk in ((Plan.uniform("full"), 512), (Plan.uniform("h2o", budget=64), 5)):
        run = Engine(model, plan=plan, slots=2, chunk=chunk).generate(PROMPTS, max_new_tokens=9)
        assert [list(result.tokens) for result in run.results()] == expected
    found = model.generate(
        torch.tensor(PROMPTS[:1]),
        **cache_argument(PolicyCache(model, Plan.uniform("full"))),
        max_new_tokens=9,
        do_sample=False,
    )
    assert found[0, len(PROMPTS[0]) :].tolist() == expected[0]


H2O = {"stack": [{"policy": "h2o", "n_recent": 3}]}

# What the layer without a window does in other layouts of rows; that with one does as `H2O`.
LAYOUTS: dict[str, dict[str, Any]] = {
    "laq": {"stack": ["laq"]},
    "merge": {"stack": [*H2O["stack"], "merge"]},
    "ragged": {"stack": [{"policy": "snapkv", "window_size": 3}, "adakv"], "heads": "shared"},
    "int8": H2O | {"rows": "int8"},
    "kept": H2O | {"prompt": "keep", "budget": 4},
    "staged": H2O | {"prefill_buffer": 12},
}


def layout_plan(layout: str) -> Plan:
    groups = [
        {"where": "attention[:1]", **H2O},
        {"where": "attention[1:]", **LAYOUTS[layout]},
    ]
    return Plan.from_dict({"budget": 16, "buffer": 4, "layers": groups})


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [*POLICIES, *LAYOUTS])
def test_a_sequence_in_a_batch_equals_itself_alone(name: str, case: str) -> None:
    """In double precision, as in `test_open_run`."""
    model = sharing_model(name, torch.float64)
    plan = plan_of(case) if case in POLICIES else layout_plan(case)
    prompts = [PROMPTS[0] * 3, PROMPTS[2] * 2, PROMPTS[1]]
    results = (
        Engine(model, plan=plan, slots=3, chunk=5).generate(prompts, max_new_tokens=13).results()
    )
    assert results[0].compactions > 0
    for prompt, result in zip(prompts, results, strict=True):
        (alone,) = Engine(model, plan=plan, chunk=5).generate([prompt], max_new_tokens=13)
        assert result.tokens == alone.tokens
        assert result.rows_evicted == alone.rows_evicted


@attrs.define(eq=False)
class Records:
    """Records the arguments of its first `score` call in each layer, after ``at`` tokens."""

    at: int
    recorded: dict[int, dict[str, Tensor]] = attrs.field(factory=dict)
    window_size: int = 4

    @hookimpl
    def due(self, seq_len: Tensor) -> Tensor:
        return seq_len >= self.at

    @hookimpl
    def score(
        self,
        layer_idx: int,
        queries: Tensor,
        attn_weights: Tensor,
        attn_sums: Tensor,
        attn_squares: Tensor,
        positions: Tensor,
    ) -> Tensor:
        seen = {"queries": queries, "weights": attn_weights, "sums": attn_sums}
        seen |= {"squares": attn_squares, "positions": positions}
        copies = {key: tensor.clone() for key, tensor in seen.items()}
        self.recorded.setdefault(layer_idx, copies)
        return positions.float()


def by_kv_head(of_layers: list[Tensor], num_kv_heads: int) -> Tensor:
    """Weights of several layers ``[1, H, L, T]`` with those of a KV head behind each other."""
    heads = [
        of_layer[:, kv * len(of_layer[0]) // num_kv_heads + member]
        for kv in range(num_kv_heads)
        for of_layer in of_layers
        for member in range(len(of_layer[0]) // num_kv_heads)
    ]
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize("name", NAMES)
def test_policies_read_the_attention_of_all_readers(name: str) -> None:
    """Windows have the heads of every reader, and what rows accumulate is the sum over them."""
    model = sharing_model(name)
    policy = Records(at=20)
    plan = Plan.uniform(policy, budget=3, buffer=64)
    (result,) = Engine(model, plan=plan, chunk=4).generate([LONG], max_new_tokens=12)
    seen = torch.tensor([[*LONG, *result.tokens][: policy.at]])
    with attention_implementation(model, "eager"), torch.no_grad():
        attentions = model(seen, output_attentions=True, use_cache=True).attentions
    config = model.config
    assert sorted(policy.recorded) == [0, 1]
    for layer_idx, found in policy.recorded.items():
        held = found["positions"][0, 0]  # a layer with a window holds its newest rows only
        readers = [attentions[one] for one in (layer_idx, layer_idx + 2, layer_idx + 4)]
        expected = by_kv_head(readers, config.num_key_value_heads)
        assert expected.shape[1] == NUM_READERS * config.num_attention_heads
        # A layer with a window no longer holds what the next query does not see.
        newest = slice(-1 if len(held) < policy.at else -4, None)
        weights = expected[:, :, newest, held]
        weights = weights / weights.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(found["weights"][:, :, newest], weights, atol=1e-5, rtol=1e-4)
        grouped = expected.unflatten(1, (config.num_key_value_heads, -1))
        for key, power in (("sums", 1), ("squares", 2)):
            received = (grouped**power).sum(dim=(2, 3))[..., held]
            torch.testing.assert_close(found[key], received, atol=1e-4, rtol=1e-4)


@attrs.define(eq=False)
class LooksAhead:
    """Looks ahead at given tokens after ``at`` others, and records their queries."""

    at: int
    tokens: tuple[int, ...]
    recorded: dict[int, Tensor] = attrs.field(factory=dict)
    lookahead_size: int = 4

    @hookimpl
    def due(self, seq_len: Tensor) -> Tensor:
        return seq_len >= self.at

    @hookimpl
    def lookahead(self) -> Lookahead:
        return Lookahead(self.tokens)

    @hookimpl
    def score(self, layer_idx: int, lookahead_queries: Tensor, positions: Tensor) -> Tensor:
        self.recorded.setdefault(layer_idx, lookahead_queries.clone())
        return positions.float()


@pytest.mark.parametrize("name", NAMES)
def test_queries_of_a_lookahead_are_those_of_the_tokens_themselves(name: str) -> None:
    model, tokens = sharing_model(name), (7, 9, 4, 31)
    ahead, records = LooksAhead(len(LONG), tokens), Records(len(LONG) + len(tokens))
    for policy, prompt in ((ahead, LONG), (records, [*LONG, *tokens])):
        plan = Plan.uniform(policy, budget=4, buffer=64)
        Engine(model, plan=plan).generate([prompt], max_new_tokens=2).results()
    assert sorted(ahead.recorded) == [0, 1]
    for layer_idx, queries in ahead.recorded.items():
        expected = records.recorded[layer_idx]["queries"]
        torch.testing.assert_close(queries, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_held_and_counted_once(name: str) -> None:
    model, plan = sharing_model(name), plan_of("snapkv", budget=10)
    found = footprint(plan, model, slots=2, longest=30)
    run = Engine(model, plan=plan, slots=2).generate([[5] * 20] * 2, max_new_tokens=10)
    results = run.results()
    assert found.num_bytes == run.cache.num_bytes
    assert [layer.rows_per_slot for layer in found.layers] == [6, 14, 0, 0, 0, 0]
    assert [layer.source for layer in found.layers] == [None, None, 0, 1, 0, 1]
    of_rows = [layer.kv_bytes_per_row for layer in found.layers]
    assert results[0].peak_bytes == 6 * of_rows[0] + 14 * of_rows[1]
    assert sum(of_rows[2:]) == 0


def test_a_sequence_goes_on_from_a_snapshot_and_a_prefix(tmp_path: Path) -> None:
    model = sharing_model(NAMES[0], torch.float64)
    plan = plan_of("h2o", budget=10)
    engine = Engine(model, plan=plan, slots=2, chunk=5)
    (whole,) = engine.generate([LONG], max_new_tokens=12).results()
    (first,) = engine.generate([Request(LONG, max_new_tokens=5, snapshot=True)]).results()
    assert first.snapshot is not None
    first.snapshot.save(tmp_path / "one.safetensors")
    taken = SequenceSnapshot.load(tmp_path / "one.safetensors")
    for result in engine.generate([Request(resume=taken, max_new_tokens=7)] * 2).results():
        assert [*first.tokens, *result.tokens] == list(whole.tokens)
    prompts = [[*LONG * 2, last] for last in (1, 2, 3)]
    store = PrefixStore(1 << 20, block_tokens=4)
    engine = Engine(model, plan=plan, slots=2, prefix_store=store)
    for prompt, result in zip(
        prompts, engine.generate(prompts, max_new_tokens=6).results(), strict=True
    ):
        (alone,) = Engine(model, plan=plan).generate([prompt], max_new_tokens=6).results()
        assert result.tokens == alone.tokens
    assert store.stats.reused_tokens > 0


def test_a_plan_is_about_the_layers_that_hold_rows() -> None:
    model = sharing_model(NAMES[0])
    engine = Engine(model, plan=plan_of("h2o"))
    assert [layer.has_rows for layer in engine.plan.layers] == [True] * 2 + [False] * 4
    with pytest.raises(PlanError, match=r"layer 4, which holds no rows.* 0, 1"):
        Engine(model, plan=Plan.from_dict({"layers": [{"where": [0, 1, 4], "stack": ["full"]}]}))


def test_weights_of_layers_with_several_readers_are_refused() -> None:
    plan = Plan.uniform("expected_attention", budget=32, buffer=4)
    with pytest.raises(ModelError, match="other layers attend to its rows"):
        Engine(sharing_model(NAMES[0]), plan=plan)


def test_a_layer_that_attends_to_other_keys_is_refused() -> None:
    sharing_model(NAMES[0])  # skips
    model = tiny_random_model(NAMES[0])
    attention = model.model.layers[4].self_attn
    attends = type(attention).forward

    class OfAnother(type(attention)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            shared = kwargs["shared_kv_states"]
            copies = {kind: tuple(one.clone() for one in shared[kind]) for kind in shared}
            return attends(self, *args, **(kwargs | {"shared_kv_states": copies}))

    attention.__class__ = OfAnother
    with pytest.raises(ModelError, match="layer 4 attends to other keys than those of layer 0"):
        Engine(model, plan=Plan.full_cache())
