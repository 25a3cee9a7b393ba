"""A lookahead leaves no trace, and its queries are those of the tokens had they followed."""

import re
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest
import torch
from batches import generated_tokens
from families import family_model
from hypothesis import given
from hypothesis import strategies as st
from recorder import RecordsAndSteers
from strategies import costly, plans, prompts
from tiny import shared_model, tiny_tokenizer
from torch import Tensor, nn

from kvpolicy import Engine, Lookahead, Plan, PolicyCache, Request, hookimpl, observed_weights
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import Slab
from kvpolicy.engine.extensions.lookahead import LookaheadQueries
from kvpolicy.engine.tracing import recording
from kvpolicy.errors import HookError, HookResultError, PolicyLoadError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.forward_input import ForwardInput
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.state import Memory

NUM_LAYERS = 2
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss")  # windows, soft caps, sinks

# In double precision the order of additions does not matter.
models = st.builds(family_model, st.sampled_from(FAMILIES), dtype=st.just(torch.float64))


def llama(**options: Any) -> Any:
    return shared_model(num_layers=NUM_LAYERS, dtype=torch.float64, **options)


@attrs.define(eq=False)
class LooksAhead:
    """At the end of the prompt, rows that the next tokens would attend to stay."""

    lookahead_size: ClassVar[int] = 5
    gives_mass: ClassVar[bool] = True

    num: int = 5

    @hookimpl
    def lookahead(self, seq_len: int, prompt_len: int, memory: Memory) -> Lookahead | None:
        (own,) = memory.of(self)
        if seq_len < prompt_len or "asked" in own:
            return None
        own["asked"] = True
        return Lookahead(num_greedy=self.num)

    @hookimpl
    def score(
        self, keys: Tensor, positions: Tensor, seq_len: Tensor, lookahead_queries: Tensor | None
    ) -> Tensor | None:
        if lookahead_queries is None:
            return None
        num = lookahead_queries.shape[2]
        weights = observed_weights(lookahead_queries, keys, positions, seq_len + num)
        return weights.unflatten(1, (keys.shape[1], -1)).sum(dim=(2, 3))


@attrs.define(eq=False)
class Patched:
    """After every chunk, rows stay that a fixed text attends to."""

    lookahead_size: ClassVar[int] = 8
    gives_mass: ClassVar[bool] = True

    token_ids: tuple[int, ...] = (7, 3, 9)

    @hookimpl
    def lookahead(self) -> Lookahead:
        return Lookahead(token_ids=self.token_ids)

    @hookimpl
    def score(
        self, keys: Tensor, positions: Tensor, seq_len: Tensor, lookahead_queries: Tensor
    ) -> Tensor:
        num = lookahead_queries.shape[2]
        weights = observed_weights(lookahead_queries, keys, positions, seq_len + num)
        return weights.unflatten(1, (keys.shape[1], -1)).amax(dim=(2, 3))


@attrs.define(eq=False)
class Asks:
    """Asks for lookaheads, notes what it gets, and scores nothing. State is of all sequences."""

    lookahead_size: ClassVar[int] = 40
    gives_mass: ClassVar[bool] = True  # those of the policy below: it has no opinion

    answers: tuple[Lookahead, ...] = ()
    seen: list[dict[str, Any]] = attrs.field(factory=list)

    @hookimpl
    def lookahead(self, token_ids: Tensor, seq_len: int, prompt_len: int) -> Lookahead | None:
        assert len(token_ids) == seq_len
        self.seen.append({"tokens": token_ids.tolist(), "prompt_len": prompt_len})
        return self.answers[seq_len % len(self.answers)] if self.answers else None

    @hookimpl
    def score(self, layer_idx: int, seq_len: Tensor, lookahead_queries: Tensor | None) -> None:
        if lookahead_queries is not None:
            for length, queries in zip(seq_len.tolist(), lookahead_queries, strict=True):
                self.seen.append({"layer": layer_idx, "seq_len": length, "queries": queries})

    @property
    def queries(self) -> dict[tuple[int, int], Tensor]:
        """By length and layer, ``[H_q, P, D]``."""
        found = [one for one in self.seen if "queries" in one]
        return {(one["seq_len"], one["layer"]): one["queries"] for one in found}


def with_policy(plan: Plan, policy: object) -> Plan:
    """A plan with one more policy in each group."""
    added = tuple(
        attrs.evolve(group, stack=(*group.stack, PolicySpec.of(policy))) for group in plan.layers
    )
    return attrs.evolve(plan, layers=added)


def looks_ahead(plan: Plan) -> bool:
    """Whether another policy than `Asks` does, and would be given the queries of that."""
    return any(spec.policy in ("epicache", "laq") for group in plan.layers for spec in group.stack)


def specs(*policies: object) -> tuple[PolicySpec, ...]:
    return tuple(PolicySpec.of(policy) for policy in policies)


lookaheads = st.one_of(
    st.integers(1, 9).map(lambda num: Lookahead(num_greedy=num)),
    st.lists(st.integers(0, 60), min_size=1, max_size=12).map(lambda ids: Lookahead(token_ids=ids)),
)


def contents(cache: KVCache) -> list[Tensor]:
    counts = [
        torch.from_numpy(one.copy()) for one in (cache.rows, cache.compacted_at, cache.seq_len)
    ]
    slabs = [tensor.clone() for layer in cache.layers for tensor in layer.tensors]
    return [*counts, *slabs, *(tensor.clone() for tensor in cache.slot_tensors)]


@pytest.mark.nightly
@given(
    models,
    plans(num_layers=NUM_LAYERS).filter(lambda plan: not looks_ahead(plan)),
    prompts(count=3, max_len=40),
    st.lists(lookaheads, min_size=1, max_size=3),
    st.sampled_from([5, 512]),
    st.booleans(),
)
def test_a_lookahead_leaves_no_trace(
    model: nn.Module,
    plan: Plan,
    given_prompts: list[list[int]],
    answers: list[Lookahead],
    chunk: int,
    eager: bool,
) -> None:
    """Bit for bit: before and after it, and in all that follows."""
    compared = []
    look_ahead = LookaheadQueries.before_eviction

    def before_eviction(self: LookaheadQueries, sequences: Any, due: Any) -> None:
        before = contents(self.cache)
        memories = [str(seq.memory) for seq in sequences]
        tokens = [(seq.prompt, [*seq.tokens], seq.num_observed) for seq in sequences]
        look_ahead(self, sequences, due)
        compared.extend(map(torch.equal, before, contents(self.cache)))
        compared.append([str(seq.memory) for seq in sequences] == memories)
        assert tokens == [(seq.prompt, seq.tokens, seq.num_observed) for seq in sequences]

    def outcome(policy: object) -> Any:
        engine = Engine(
            model, tiny_tokenizer(), with_policy(plan, policy), slots=2, chunk=chunk, eager=eager
        )
        requests = [Request(one, 25, stop_ids=(), snapshot=True) for one in given_prompts]
        results = engine.generate(requests).results()
        tensors = [list(one.snapshot.contents.tensors) for one in results if one.snapshot]
        return [(one.tokens, one.compactions, one.error) for one in results], tensors

    asks = Asks(tuple(answers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LookaheadQueries, "before_eviction", before_eviction)
        tokens, tensors = outcome(asks)
    plain, expected = outcome(Asks())
    assert tokens == plain
    assert all(compared)
    pairs = zip(tensors, expected, strict=True)
    assert all(torch.equal(a, b) for own, other in pairs for a, b in zip(own, other, strict=True))


def queries_after(model: nn.Module, tokens: list[int], more: list[int]) -> list[Tensor]:
    """The queries of more tokens in a full cache, ``[H_q, P, D]`` for each layer."""
    adapter = ModelAdapter(model)
    slabs = [Slab(len(tokens) + len(more), len(more))] * NUM_LAYERS
    cache = adapter.new_cache(slabs, 1)
    for part in (tokens, more):
        step = EagerStep(cache, [0], [len(part)])
        adapter.forward(ForwardInput(torch.tensor([part]), step))
        step.commit()
    place = (torch.arange(len(more)) + len(tokens)) % len(more)
    return [layer.window[0][:, place] for layer in cache.layers if layer.window is not None]


@costly
@given(
    models,
    prompts(count=3, min_len=9, max_len=30),
    lookaheads,
    st.sampled_from([4, 512]),
)
def test_queries_are_those_of_the_tokens_had_they_followed(
    model: nn.Module, given_prompts: list[list[int]], answer: Lookahead, chunk: int
) -> None:
    """Nothing was evicted before the first compaction, so a full cache has them, too."""
    policy = Asks((answer,))
    engine = Engine(model, plan=Plan.uniform("streaming", policy, budget=8, buffer=32), chunk=chunk)
    longest = max(map(len, given_prompts))
    results = engine.generate(given_prompts, max_new_tokens=42 - longest + 5, stop_ids=()).results()
    asked = [one["tokens"] for one in policy.seen if "tokens" in one]
    first = [tokens for tokens in asked if len(tokens) == 40]
    whole = {tuple(prompt): result for prompt, result in zip(given_prompts, results, strict=True)}
    for tokens in first:
        (result,) = [r for p, r in whole.items() if tuple(tokens[: len(p)]) == p][:1]
        num = len(tokens) - next(len(p) for p in whole if tuple(tokens[: len(p)]) == p)
        if answer.token_ids is None:
            more = [result.tokens[num]]
            while len(more) < answer.num_greedy:
                logits = model(torch.tensor([tokens + more])).logits[0, -1]
                more.append(int(logits.argmax()))
        else:
            more = list(answer.token_ids)
        expected = queries_after(model, tokens, more)
        if len(first) == 1:
            for layer_idx, queries in enumerate(expected):  # a layer may be a whole window
                if (40, layer_idx) in policy.queries:
                    # Softmax weights are of fp32, whatever the model's precision.
                    found = policy.queries[40, layer_idx]
                    torch.testing.assert_close(found, queries, rtol=1e-4, atol=1e-5)


@costly
@given(
    models,
    plans(num_layers=NUM_LAYERS),
    prompts(count=2, max_len=40),
    st.sampled_from([LooksAhead, Patched]),
    st.sampled_from([3, 512]),
)
def test_a_sequence_with_lookaheads_goes_on_as_alone(
    model: nn.Module,
    plan: Plan,
    given_prompts: list[list[int]],
    policy: Callable[[], object],
    chunk: int,
) -> None:
    plan = with_policy(plan, policy())
    options = {"max_new_tokens": 11, "stop_ids": ()}
    engine = Engine(model, tiny_tokenizer(), plan, slots=3, max_tokens_per_forward=60)
    together = engine.generate(given_prompts, **options).results()
    alone = Engine(model, tiny_tokenizer(), plan, slots=1, chunk=chunk, eager=True)
    if policy is Patched:  # it is asked after each chunk
        alone = Engine(model, tiny_tokenizer(), plan, slots=1, eager=True)
    for prompt, result in zip(given_prompts, together, strict=True):
        (one,) = alone.generate([prompt], **options).results()
        assert one.error is None
        if one.compactions == result.compactions:
            assert one.tokens == result.tokens
    answers = generated_tokens(
        model, given_prompts[:1], 11, past_key_values=PolicyCache(model, plan, tiny_tokenizer())
    )
    (first,) = (
        Engine(model, tiny_tokenizer(), plan).generate(given_prompts[:1], **options).results()
    )
    assert list(first.tokens) == answers[0]


@pytest.mark.parametrize("num", [1, 3, 6])
def test_within_a_prompt_its_own_next_tokens_are_the_lookahead(num: int) -> None:
    model = llama()
    policy = Asks((Lookahead(num_greedy=num),))
    plan = Plan.uniform("streaming", policy, budget=12, buffer=4)
    prompt = [5, 17, 42, 9, 33, 2, 58, 21, 7, 45, 11, 29] * 2
    Engine(model, plan=plan).generate([prompt], max_new_tokens=1, stop_ids=()).results()
    expected = queries_after(model, prompt[:16], prompt[16 : 16 + num])
    for layer_idx, queries in enumerate(expected):  # nothing was evicted before
        found = policy.queries[16, layer_idx]
        torch.testing.assert_close(found, queries, rtol=1e-3, atol=1e-4)


def test_rows_that_the_next_tokens_attend_to_stay() -> None:
    """A prompt with a key that only the next tokens look at."""
    model = llama()
    prompt = [5, 17, 42, 9, 33, 2, 58, 21, 7, 45, 11, 29] * 4
    options = {"max_new_tokens": 24, "stop_ids": ()}
    (whole,) = Engine(model, plan=Plan.uniform("full")).generate([prompt], **options).results()

    def num_equal(policy: object) -> int:
        plan = Plan.uniform(policy, budget=30, buffer=18)
        (result,) = Engine(model, plan=plan).generate([prompt], **options).results()
        pairs = zip(result.tokens, whole.tokens, strict=True)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), 24)

    assert num_equal(LooksAhead()) >= num_equal("streaming")


def test_lookaheads_are_asked_once_for_each_stack_and_sequence() -> None:
    policy = Asks((Lookahead(num_greedy=2),))
    plan = Plan.uniform("streaming", policy, budget=12, buffer=4)
    engine = Engine(llama(), plan=plan)
    with recording(engine) as trace:
        engine.generate([list(range(30)), [4, 5]], max_new_tokens=8, stop_ids=()).results()
    asked = [one for one in policy.seen if "tokens" in one]
    # Four chunks fill the slab, and then tokens do twice; the other prompt is short.
    assert [len(one["tokens"]) for one in asked] == [16, 20, 24, 28, 32, 36]
    assert {one["prompt_len"] for one in asked} == {30}
    calls = [call for call in trace.calls if call.hook == "lookahead"]
    assert len(calls) == len(asked)
    assert calls[0].answer == "2 greedy tokens"
    assert calls[0].answered_by == "asks"


def test_greedy_lookaheads_end_before_a_stop_token() -> None:
    model = llama()
    prompt = list(range(16))
    plan = Plan.uniform("streaming", budget=12, buffer=4)
    (plain,) = Engine(model, plan=plan).generate([prompt], max_new_tokens=8, stop_ids=()).results()
    policy = Asks((Lookahead(num_greedy=8),))
    engine = Engine(model, plan=Plan.uniform("streaming", policy, budget=12, buffer=4))
    # Whatever is not the first token, which is known, ends the lookahead.
    engine.adapter.stop_ids = tuple(set(range(61)) - {plain.tokens[0]})
    engine.generate([prompt], max_new_tokens=3, stop_ids=()).results()
    num_equal = next(i for i, one in enumerate(plain.tokens) if one != plain.tokens[0])
    assert {queries.shape[1] for queries in policy.queries.values()} == {num_equal}
    engine.adapter.stop_ids = plain.tokens[:1]
    policy.seen.clear()
    engine.generate([prompt], max_new_tokens=3, stop_ids=()).results()
    assert policy.queries == {}


def test_lookaheads_of_some_layers_and_stacks_are_their_own() -> None:
    policy = Asks((Lookahead(token_ids=(1, 2, 3)),))
    other = Asks((Lookahead(num_greedy=2),))
    plan = Plan(
        layers=(
            LayerGroup("0:1", specs("streaming", policy), 12, 4),
            LayerGroup("1:2", specs("streaming", other), 14, 4),
        )
    )
    Engine(llama(), plan=plan).generate([range(40)], max_new_tokens=9, stop_ids=()).results()
    assert {layer for _, layer in policy.queries} == {0}
    assert {layer for _, layer in other.queries} == {1}
    assert {queries.shape[1] for queries in policy.queries.values()} == {3}
    assert {queries.shape[1] for queries in other.queries.values()} == {2}


def test_lookaheads_end_with_the_positions_of_the_model() -> None:
    policy = Asks((Lookahead(token_ids=range(40)),))
    engine = Engine(llama(), plan=Plan.uniform("streaming", policy, budget=12, buffer=40))
    most = engine.adapter.max_positions
    engine.generate([[3] * (most - 10)], max_new_tokens=20, stop_ids=()).results()
    for (seq_len, _), queries in policy.queries.items():
        assert queries.shape[1] == min(40, most - seq_len)


def test_steering_and_observing_policies_see_nothing_of_a_lookahead() -> None:
    def tokens(policy: object) -> Any:
        plan = Plan.uniform("streaming", RecordsAndSteers(), policy, budget=12, buffer=5)
        engine = Engine(llama(), tiny_tokenizer(), plan)
        results = engine.generate([range(20), [4, 5, 6]], max_new_tokens=24, stop_ids=()).results()
        return [one.tokens for one in results]

    assert tokens(Asks((Lookahead(num_greedy=4),))) == tokens(Asks())


def test_the_bytes_of_a_lookahead_are_reported() -> None:
    def transient(policy: object) -> int:
        plan = Plan.uniform("streaming", policy, budget=12, buffer=4)
        run = Engine(llama(), plan=plan).generate([range(30)], max_new_tokens=9, stop_ids=())
        run.results()
        assert run.report.lookahead_s > 0
        assert run.report.policy_s > run.report.lookahead_s
        return run.cache.transient_bytes

    cache = Engine(llama(), plan=Plan.uniform("full")).generate([[1]]).cache
    of_rows = int(cache.row_bytes.sum())
    of_queries = 8 * 4 * 8 * NUM_LAYERS  # fp64, 4 heads of size 8
    assert transient(Asks((Lookahead(token_ids=range(40)),))) == 40 * (of_rows + of_queries)


# What is refused


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: "ab", "str"),
        (lambda: Lookahead(), "token_ids"),
        (lambda: Lookahead(token_ids=[1], num_greedy=2), "num_greedy"),
        (lambda: Lookahead(num_greedy=9), "lookahead_size"),
        (lambda: Lookahead(token_ids=()), "0 tokens"),
        (lambda: Lookahead(token_ids=[3, 61]), "61"),
        (lambda: Lookahead(token_ids=[0.5]), r"0\.5"),
        (lambda: Lookahead(num_greedy=True), "num_greedy"),
    ],
)
def test_wrong_lookaheads_are_refused(answer: Callable[[], Any], message: str) -> None:
    @attrs.define(eq=False)
    class Wrong(Patched):
        @hookimpl
        def lookahead(self) -> Any:
            return answer()

    engine = Engine(llama(), plan=Plan.uniform(Wrong(), budget=12, buffer=4))
    with pytest.raises(HookResultError, match=rf"^policy 'wrong' .*{message}.* in lookahead\(\)"):
        engine.generate([range(30)]).results()


def test_a_failing_lookahead_ends_its_sequence_only() -> None:
    @attrs.define(eq=False)
    class FailsForSome(Patched):
        @hookimpl
        def lookahead(self, token_ids: Tensor) -> Lookahead:
            if token_ids[0] == 5:
                raise ValueError("five")
            return Lookahead(num_greedy=2)

    plan = Plan.uniform(FailsForSome(), budget=12, buffer=4)
    given_prompts = [[5] * 30, [6] * 30, [7] * 30]
    engine = Engine(llama(), plan=plan, on_hook_error="answer")
    results = engine.generate(given_prompts, max_new_tokens=9, stop_ids=()).results()
    assert [one.finish_reason for one in results] == ["error", "length", "length"]
    assert re.search(r"raised ValueError in lookahead\(\): five", results[0].error or "")
    alone = engine.generate(given_prompts[1:], max_new_tokens=9, stop_ids=()).results()
    assert [one.tokens for one in alone] == [one.tokens for one in results[1:]]
    with pytest.raises(HookError, match="five"):
        Engine(llama(), plan=plan).generate(given_prompts).results()


def test_a_policy_that_looks_ahead_says_how_much() -> None:
    @attrs.define(eq=False)
    class SaysNothing:
        @hookimpl
        def lookahead(self) -> Lookahead:
            return Lookahead(num_greedy=1)

    with pytest.raises(PolicyLoadError, match="lookahead_size"):
        Engine(llama(), plan=Plan.uniform(SaysNothing(), budget=12, buffer=4))
