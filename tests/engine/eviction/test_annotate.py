"""Annotations: policies give new rows numbers from what enters their attention, on every path."""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import attrs
import pytest
import torch
from families import FAMILIES, family_model
from hypothesis import given
from hypothesis import strategies as st
from strategies import costly, prompts, seeds
from tiny import shared_model, tiny_model
from torch import Tensor, nn

from kvpolicy import Engine, Plan, Request, hookimpl
from kvpolicy.engine.extensions.annotate import MOST_KEPT
from kvpolicy.engine.memory.footprint import footprint
from kvpolicy.engine.tracing import recording
from kvpolicy.errors import HookError, HookResultError, KVPolicyError, PolicyLoadError
from kvpolicy.model.decoder import attention_module
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.state import Memory
from kvpolicy.testing import keep_rows
from kvpolicy.testing.single_call import replay

HIDDEN = 32
DOUBLE = {"dtype": torch.float64}
CASES = [(family, number % 2 == 0) for number, family in enumerate(sorted(FAMILIES))]
PROMPTS = [[5, 9, 40, 2, 2, 7, 11, 30, 1], [8, 1], [3] * 13, [17, 4, 4, 59, 21]]


@attrs.define(eq=False, kw_only=True)
class Gate:
    """Forgets tokens at a rate that a gate reads from what enters the attention."""

    tracks: ClassVar[tuple[str, ...]] = ("log_rate",)

    gate: Tensor  # [M, H_kv]
    bias: float = 0.0
    annotates_in_step: bool = True
    calls: list[int] = attrs.field(factory=list)

    @hookimpl
    def annotate(self, states: Tensor) -> dict[str, Tensor]:
        self.calls.append(len(states))
        logits = states.float() @ self.gate.float() + self.bias
        return {"log_rate": nn.functional.logsigmoid(logits)}

    @hookimpl
    def score(self, positions: Tensor, seq_len: Tensor, tracks: Any) -> Tensor:
        age = seq_len.to(positions.device)[:, None, None] - positions
        return age * tracks["log_rate"]


def gates(seed: int, **options: Any) -> Gate:
    rng = torch.Generator().manual_seed(seed)
    return Gate(gate=torch.randn(HIDDEN, 2, generator=rng) * 0.2, **options)


def tokens(
    model: nn.Module,
    *stack: object,
    given: list[list[int]] = PROMPTS,
    budget: int = 12,
    buffer: int = 4,
    **options: Any,
) -> list[tuple[int, ...]]:
    plan = Plan.uniform(*stack, budget=budget, buffer=buffer)
    engine = Engine(model, plan=plan, **{"slots": 3, **options})
    return [result.tokens for result in engine.generate(given, max_new_tokens=24).results()]


# Which numbers


@attrs.define(eq=False, kw_only=True)
class Notes:
    """Stores the sum of each argument in a track, and notes the tracks at every compaction."""

    tracks: ClassVar[tuple[str, ...]] = ("states", "keys", "values", "positions")

    annotates_in_step: bool = True
    seen: list[dict[str, Any]] = attrs.field(factory=list)

    @hookimpl
    def annotate(
        self, states: Tensor, keys: Tensor, values: Tensor, positions: Tensor
    ) -> dict[str, Tensor]:
        assert states.shape == (len(positions), HIDDEN)
        assert positions.dtype == torch.int64
        shape = keys.shape[:2]
        return {
            "states": states.sum(dim=1, keepdim=True).expand(shape),
            "keys": keys.sum(dim=2),
            "values": values.sum(dim=2),
            "positions": positions[:, None].expand(shape).float(),
        }

    @hookimpl
    def score(
        self,
        layer_idx: int,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        tracks: Any,
        memory: Memory,
    ) -> Tensor:
        for name in self.tracks:
            assert tracks[name].dtype == torch.float32
        assert torch.equal(tracks["positions"], positions.float())
        close = {"rtol": 1e-3, "atol": 1e-3}
        assert torch.allclose(tracks["keys"], keys.float().sum(dim=3), **close)
        assert torch.allclose(tracks["values"], values.float().sum(dim=3), **close)
        for b, notes in enumerate(memory.of(self)):
            self.seen.append(
                {
                    "layer_idx": layer_idx,
                    "positions": positions[b].clone(),
                    "states": tracks["states"][b].clone(),
                    "of": notes,
                }
            )
        return positions * 7 % 11 + 0.01 * positions


def attention_inputs(model: nn.Module, sequence: list[int]) -> list[Tensor]:
    """What enters the attention of every layer of a plain forward, ``[T, M]``."""
    found: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args[0] if args else kwargs["hidden_states"])[0].clone())

    layers = range(model.config.num_hidden_layers)
    hooks = [
        attention_module(model, i).register_forward_pre_hook(note, with_kwargs=True) for i in layers
    ]
    with torch.no_grad():
        model(torch.tensor([sequence]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "in_step"), CASES)
def test_states_are_what_enters_the_attention_of_the_model(family: str, in_step: bool) -> None:
    notes = Notes(annotates_in_step=in_step)
    model, prompt = family_model(family, window=100), PROMPTS[2][:5] + PROMPTS[0]
    plan = Plan.uniform(notes, budget=40, buffer=3)
    engine = Engine(model, plan=plan, chunk=5)
    (result,) = engine.generate([prompt], max_new_tokens=35).results()
    # Nothing was evicted before the first compaction, so a plain forward is the reference.
    inputs = attention_inputs(model, [*prompt, *result.tokens])
    first = {one["layer_idx"]: one for one in reversed(notes.seen)}
    assert first
    for layer_idx, one in first.items():
        expected = inputs[layer_idx].sum(dim=1)[one["positions"]]
        assert torch.allclose(one["states"], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.nightly
@given(
    prompts(count=4),
    st.sampled_from(["llama", "gemma2", "phi3", "gpt_oss"]),
    st.booleans(),
    st.sampled_from([1, 3, 5, 512]),
    st.integers(1, 9),
    st.integers(1, 3),
    st.booleans(),
)
def test_annotations_stay_with_their_rows(
    given: list[list[int]],
    family: str,
    in_step: bool,
    chunk: int,
    buffer: int,
    slots: int,
    eager: bool,
) -> None:
    # `Notes` compares tracks with rows at every compaction; here windows slide as well.
    notes = Notes(annotates_in_step=in_step)
    options = {"chunk": chunk, "slots": slots, "eager": eager}
    tokens(family_model(family), notes, given=given, budget=5, buffer=buffer, **options)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("in_step", "eager", "chunk"),
    [(True, True, 4), (True, False, 64), (False, True, 64), (False, False, 4)],
)
def test_annotations_stay_with_their_rows_in_a_slab_that_slides(
    in_step: bool, eager: bool, chunk: int
) -> None:
    """All rows of a window are held, so nothing is compacted: read the tracks themselves."""
    model = family_model("mistral", window=6)
    plan = Plan.uniform(Notes(annotates_in_step=in_step), budget=20, buffer=4)
    engine = Engine(model, plan=plan, chunk=chunk, slots=2, eager=eager)
    run = engine.generate([[1, 2], [3, 4, 5] * 6], max_new_tokens=25)
    for _ in range(20):
        run.step()
    assert run.cache.slides.all()
    for seq in run.active:
        run.snapshot(seq.id)  # which annotates what was not annotated yet
    for layer in run.cache.layers:
        sums = layer.keys.sum(dim=3)
        assert torch.allclose(layer.tracks["keys"], sums, atol=1e-4)
        held = layer.positions >= 0
        positions = layer.tracks["positions"][held].long()
        assert torch.equal(positions, layer.positions[held])
        assert (layer.positions[0].diff() == 1).all()


# Which rows stay


@costly
@given(prompts(count=3), st.booleans(), st.integers(1, 9))
def test_a_constant_retention_keeps_the_newest_tokens(
    given: list[list[int]], in_step: bool, buffer: int
) -> None:
    model = shared_model(**DOUBLE)
    constant = Gate(gate=torch.zeros(HIDDEN, 2), bias=0.5, annotates_in_step=in_step)
    newest = tokens(model, PolicySpec("streaming", {"n_sink": 0}), given=given, buffer=buffer)
    assert tokens(model, constant, given=given, buffer=buffer) == newest


@pytest.mark.nightly
@given(
    prompts(count=4),
    seeds,
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([1, 3, 512]),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_annotations_through_the_ring_equal_those_in_the_step(
    given: list[list[int]],
    seed: int,
    buffer: int,
    slots: int,
    chunk: int,
    eager: bool,
    steps_per_read: int,
) -> None:
    model = shared_model(**DOUBLE)
    alone = tokens(model, gates(seed), given=given, buffer=buffer, slots=1)
    options = {"slots": slots, "chunk": chunk, "eager": eager, "steps_per_read": steps_per_read}
    for in_step in (True, False):
        gate = gates(seed, annotates_in_step=in_step)
        assert tokens(model, gate, given=given, buffer=buffer, **options) == alone


def test_the_ring_is_asked_when_it_is_full_and_before_a_compaction() -> None:
    gate = gates(0, annotates_in_step=False)
    plan = Plan(
        layers=(
            LayerGroup("0:1", (PolicySpec.of(gate),), budget=12, buffer=4),
            LayerGroup("1:", (PolicySpec.of("streaming"),), budget=12, buffer=4),
        )
    )
    prompt = [1, 2, 3, 4, 5, 6]
    Engine(shared_model(), plan=plan).generate([prompt], max_new_tokens=19).results()
    # The prompt; every 4 tokens; 2 before the slab of 16 rows is full; every 4 as it has 4 more.
    assert gate.calls == [6, 4, 4, 2, 4, 4]


@costly
@given(seeds, st.integers(1, 9), st.integers(1, 22), st.booleans())
def test_a_snapshot_has_the_annotations_of_all_rows(
    seed: int, buffer: int, steps: int, in_step: bool
) -> None:
    model = shared_model(**DOUBLE)
    plan = Plan.uniform(gates(seed, annotates_in_step=in_step), budget=12, buffer=buffer)
    engine = Engine(model, plan=plan)
    run = engine.generate([Request(PROMPTS[0], 24, stop_ids=())])
    for _ in range(steps):
        run.step()
    snapshot = run.snapshot(0)
    assert all((layer.tracks["log_rate"] < 0).all() for layer in snapshot.contents.layers)
    (whole,) = run.results()
    rest = Request(resume=snapshot, max_new_tokens=24 - len(snapshot.tokens), stop_ids=())
    (resumed,) = engine.generate([rest]).results()
    assert (*snapshot.tokens, *resumed.tokens) == whole.tokens


def test_policies_with_the_same_track_in_parts_have_tracks_of_their_own() -> None:
    @attrs.define(eq=False)
    class Both:
        parts: tuple = attrs.field(factory=lambda: (("a", gates(1)), ("b", ring)))

        @hookimpl
        def score(self, parts: Any) -> Tensor:
            first, second = parts.of(self)
            assert not torch.equal(first, second)
            return first + second

    ring = gates(2, annotates_in_step=False)
    both = Both()
    result = tokens(shared_model(**DOUBLE), both)

    @attrs.define(eq=False)
    class Alone:
        tracks: ClassVar[tuple[str, ...]] = ("a", "b")
        annotates_in_step: ClassVar[bool] = True

        @hookimpl
        def annotate(self, states: Tensor) -> dict[str, Tensor]:
            return {name: gates(i).annotate(states)["log_rate"] for i, name in ((1, "a"), (2, "b"))}

        @hookimpl
        def score(self, positions: Tensor, seq_len: Tensor, tracks: Any) -> Tensor:
            age = seq_len[:, None, None] - positions
            return age * tracks["a"] + age * tracks["b"]

    assert result == tokens(shared_model(**DOUBLE), Alone())


@given(seeds, st.integers(1, 20), st.integers(1, 12))
def test_one_compaction_of_given_tensors_equals_the_definition(
    seed: int, prompt: int, budget: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    keys, states = (torch.randn(*size, generator=rng) for size in ((2, 2, 20, 4), (2, 20, HIDDEN)))
    gate = gates(seed)
    log_rate = nn.functional.logsigmoid(states @ gate.gate)  # [B, T, H_kv]
    scores = (20 - torch.arange(20))[:, None] * log_rate
    best = scores.transpose(1, 2).topk(budget, dim=2).indices.sort(dim=2).values
    queries = keys.repeat(1, 2, 1, 1)
    few = {"budget": budget, "states": states}
    assert torch.equal(keep_rows(gate, keys, keys, queries, **few), best)
    assert torch.equal(keep_rows(gate, keys, keys, queries[:, :, -1:], **few), best)
    (kept,) = replay(gate, keys, keys, queries, prompt=prompt, compact_at=[20], **few)
    assert torch.equal(kept, best)


def test_a_compaction_without_states_is_refused_where_they_are_read() -> None:
    keys = torch.ones(1, 2, 6, 4)
    queries = torch.ones(1, 4, 1, 4)
    with pytest.raises(KVPolicyError, match=r"states .*annotate\(\)"):
        keep_rows(gates(0), keys, keys, queries, budget=3)
    by_keys = Answers(answer=lambda keys: {"a": keys[..., 0]})
    kept = keep_rows(["streaming", by_keys], keys, keys, queries, budget=5)
    assert kept.shape == (1, 2, 5)


# What it takes


def test_rings_are_counted() -> None:
    model, buffer = shared_model(), 5
    plan = Plan.uniform(gates(0, annotates_in_step=False), budget=12, buffer=buffer)
    in_step = Plan.uniform(gates(0), budget=12, buffer=buffer)
    of_rings = 2 * buffer * HIDDEN * 4  # two layers, fp32
    found = footprint(plan, model, slots=3, longest=100)
    assert found.num_bytes - footprint(in_step, model, slots=3, longest=100).num_bytes == (
        3 * of_rings
    )
    run = Engine(model, plan=plan, slots=3).generate(PROMPTS, max_new_tokens=24)
    assert run.cache.num_bytes == found.num_bytes
    run.results()
    assert run.report.peak_kv_bytes > found.num_bytes
    assert 0 < run.report.annotate_s < run.report.elapsed_s
    long = Plan.uniform(gates(0, annotates_in_step=False), budget=12, buffer=1000)
    shared = footprint(long, model, slots=1).shared_bytes_per_slot
    assert shared == 2 * MOST_KEPT * HIDDEN * 4


def test_hooks_are_on_annotated_layers_only() -> None:
    model = tiny_model(num_layers=3)
    plan = Plan(
        budget=12,
        layers=(
            LayerGroup("1:2", (PolicySpec.of(gates(0)),)),
            LayerGroup([0, 2], (PolicySpec.of("streaming"),)),
        ),
    )
    engine = Engine(model, plan=plan)
    engine.generate([[1, 2, 3]], max_new_tokens=3).results()
    twin = engine.adapter._twin.current()
    hooked = [bool(layer.self_attn._forward_pre_hooks) for layer in twin.model.layers]
    assert hooked == [False, True, False]
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)


# What is refused


@attrs.define(eq=False, kw_only=True)
class Answers:
    """Answers with what it is given, from some call on."""

    tracks: ClassVar[tuple[str, ...]] = ("a",)

    answer: Any
    annotates_in_step: bool = False
    after: int = 0
    calls: int = 0

    @hookimpl
    def annotate(self, keys: Tensor) -> Mapping[str, Tensor] | None:
        self.calls += 1
        return self.answer(keys) if self.calls > self.after else None


def raises(_: Tensor) -> None:
    msg = "no annotation"
    raise RuntimeError(msg)


WRONG = {
    "a tensor": (lambda keys: keys.sum(dim=2), "Tensor"),
    "another track": (lambda keys: {"b": keys.sum(dim=2)}, "track 'b'"),
    "a shape": (lambda keys: {"a": keys.sum(dim=(1, 2))}, r"\[9\].*\[9, 2\]"),
    "a dtype": (lambda keys: {"a": keys.sum(dim=2).long()}, "int64"),
    "an exception": (raises, r"annotate\(\) at layer 0"),
}


@pytest.mark.parametrize("name", [*WRONG])
def test_a_wrong_answer_names_policy_hook_and_layer(name: str) -> None:
    answer, message = WRONG[name]
    kind = HookError if name == "an exception" else HookResultError
    with pytest.raises(kind, match=message):
        tokens(shared_model(), Answers(answer=answer), given=PROMPTS[:1])


@cache
def tokens_without_annotations() -> list[tuple[int, ...]]:
    plan = Plan.uniform("streaming", budget=12, buffer=6)
    run = Engine(shared_model(), plan=plan).generate(PROMPTS[1:3], max_new_tokens=30)
    return [result.tokens for result in run.results()]


@pytest.mark.few(4)
@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("after", [1, 8])
@pytest.mark.parametrize("eager", [True, False])
def test_an_error_ends_the_sequences_of_the_call(in_step: bool, after: int, eager: bool) -> None:
    """In prefill and in a step those of the forward, through the ring one sequence."""
    policy = Answers(answer=raises, annotates_in_step=in_step, after=after)
    plan = Plan.uniform("streaming", policy, budget=12, buffer=6)
    engine = Engine(shared_model(), plan=plan, slots=2, on_hook_error="answer", eager=eager)
    results = engine.generate(PROMPTS[1:3], max_new_tokens=30).results()
    assert all("no annotation" in (one.error or "no annotation") for one in results)
    assert any(one.finish_reason == "error" for one in results)
    for one, whole in zip(results, tokens_without_annotations(), strict=True):
        assert one.tokens == whole[: len(one.tokens)]


def test_a_policy_that_annotates_declares_tracks() -> None:
    class Trackless:
        @hookimpl
        def annotate(self, keys: Tensor) -> None:
            return None

    with pytest.raises(PolicyLoadError, match="tracks"):
        Engine(shared_model(), plan=Plan.uniform("streaming", Trackless(), budget=12))


def test_a_wrapper_of_annotate_is_refused() -> None:
    class Wraps:
        tracks = ("a",)

        @hookimpl(wrapper=True)
        def annotate(self, keys: Tensor) -> Any:
            return (yield)

    with pytest.raises(PolicyLoadError, match=r"annotate\(\)"):
        Engine(shared_model(), plan=Plan.uniform("streaming", Wraps(), budget=12))


# Recordings


@pytest.mark.few(1)
@pytest.mark.parametrize("in_step", [True, False])
def test_calls_are_recorded(in_step: bool) -> None:
    model, gate = shared_model(), gates(0, annotates_in_step=in_step)
    plan = Plan.uniform(gate, budget=12, buffer=4)
    engine = Engine(model, plan=plan, slots=3)
    plain = engine.generate(PROMPTS, max_new_tokens=12).results()
    with recording(engine, hooks=["annotate"]) as trace:
        recorded = engine.generate(PROMPTS, max_new_tokens=12).results()
    assert [one.tokens for one in recorded] == [one.tokens for one in plain]
    first = trace.calls[0]
    assert (first.hook, first.layer, first.answered_by) == ("annotate", 0, "gate")
    assert str(first.arguments["states"]) == "float32[24, 32]"
    assert len(trace.calls) * 2 == len(gate.calls)
    assert {call.layer for call in trace.calls} == {0, 1}
    assert trace.totals()[0].calls == trace.num_calls
