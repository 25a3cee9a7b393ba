"""A failing hook ends exactly the sequences of its call, or the run."""

from collections.abc import Callable, Generator
from typing import Any, ClassVar

import attrs
import pytest
import torch
from compare import result_values
from hypothesis import given
from hypothesis import strategies as st
from strategies import costly, plans, prompts
from tiny import shared_model, tiny_model
from torch import Tensor

from kvpolicy import Engine, Plan, PolicyCache, Request, hookimpl
from kvpolicy.compat import cache_argument
from kvpolicy.engine.engine import Run
from kvpolicy.engine.requests.results import HookFailure, Result
from kvpolicy.errors import HookError, HookResultError, KVPolicyError, ModelError
from kvpolicy.plan.spec import PolicySpec
from kvpolicy.state import Memory

NUM_LAYERS = 2
MARK = 60  # the policy fails for prompts that begin with this token
HOOKS = ("observe", "steer", "due", "score", "select", "evict")
MODEL = shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)


@attrs.define(eq=False)
class Fails:
    """Last in the stack: changes nothing, but fails in one hook for marked sequences."""

    hook: str = ""
    invalid_answer: bool = False  # returns an invalid value instead of raising
    error: BaseException = attrs.field(factory=lambda: IndexError("no such head"))

    def _fail_if_marked(self, hook: str, memory: Memory) -> object:
        marked = any(notes["marked"] for notes in memory.of(self))
        if hook != self.hook or not marked:
            return None
        if self.invalid_answer:
            return "invalid"
        raise self.error

    @hookimpl
    def observe(self, token_ids: Tensor, start: int, memory: Memory) -> object:
        (notes,) = memory.of(self)
        if start == 0:
            notes["marked"] = int(token_ids[0]) == MARK
        return self._fail_if_marked("observe", memory) if start else None

    @hookimpl
    def steer(self, memory: Memory) -> object:
        return self._fail_if_marked("steer", memory)

    @hookimpl
    def due(self, seq_len: Tensor) -> object:
        if self.hook != "due" or not (seq_len == 17).any():
            return None
        if self.invalid_answer:
            return seq_len
        raise self.error

    @hookimpl(wrapper=True)
    def score(self, memory: Memory) -> Generator[None, Any, Any]:
        answer = yield
        return self._fail_if_marked("score", memory) or answer

    @hookimpl
    def select(self, memory: Memory) -> object:
        return self._fail_if_marked("select", memory)

    @hookimpl
    def evict(self, rows: Any, keep: Tensor, memory: Memory) -> object:
        if self.hook == "evict" and any(notes["marked"] for notes in memory.of(self)):
            rows.keep(keep[:, :, 1:])  # corrupts the cache before failing
        return self._fail_if_marked("evict", memory)


def with_last(plan: Plan, policy: object) -> Plan:
    last = PolicySpec.of(policy)
    groups = [attrs.evolve(group, stack=(*group.stack, last)) for group in plan.layers]
    return attrs.evolve(plan, layers=tuple(groups))


def assert_no_slot_is_lost(run: Run) -> None:
    cache = run.cache
    assert run.scheduler.slots.num_free == cache.num_slots
    assert not cache.rows.any()
    assert not cache.seq_len.any()
    for layer in cache.layers:
        assert (layer.positions == -1).all()
        for tensor in (layer.keys, layer.values, *layer.tracks.values()):
            assert not tensor.any()


# --- on_hook_error="raise", the default -----------------------------------------------------


def test_hook_failure_ends_the_run_by_default() -> None:
    plan = Plan.uniform("h2o", Fails("score"), budget=8, buffer=4)
    run = Engine(MODEL, plan=plan).generate([[1, 2], [MARK, 3]], max_new_tokens=30)
    with pytest.raises(HookError, match=r"'fails'.*IndexError.*score.* 0"):
        run.results()
    for again in (run.results, run.step, lambda: next(iter(run))):
        with pytest.raises(KVPolicyError, match="run") as caught:
            again()
        assert isinstance(caught.value.__cause__, HookError)


def test_finished_results_are_available_after_a_failure() -> None:
    plan = Plan.uniform("h2o", Fails("score"), budget=8, buffer=4)
    run = Engine(MODEL, plan=plan, slots=1).generate([Request([MARK] * 30), Request([1, 2])])
    run.step()
    run.cancel(1)
    with pytest.raises(HookError):
        run.step()  # ends the second request and fails with the first
    again = iter(run)
    assert next(again).id == 1
    with pytest.raises(KVPolicyError, match="run"):
        next(again)


def test_interrupted_run_cannot_continue() -> None:
    plan = Plan.uniform("h2o", Fails("score", error=KeyboardInterrupt()), budget=8, buffer=4)
    run = Engine(MODEL, plan=plan).generate([[MARK, 2]], max_new_tokens=30)
    with pytest.raises(KeyboardInterrupt):
        run.results()
    with pytest.raises(KVPolicyError, match="KeyboardInterrupt"):
        run.results()


# --- on_hook_error="answer" -----------------------------------------------------------------


class TellsLayersApart:
    """Is asked layer by layer, and fails in each."""

    @hookimpl
    def due(self, layer_idx: int) -> Tensor:
        raise IndexError(layer_idx)


def test_a_failure_is_told_once_and_no_other_layer_is_asked() -> None:
    plan = Plan.uniform("streaming", TellsLayersApart(), budget=8, buffer=4)
    run, failures = Engine(MODEL, plan=plan, on_hook_error="answer").generate([[1], [2]]), []
    while run.num_open:
        failures += run.step().failures
    assert [(one.requests, one.layer_idx) for one in failures] == [((0, 1), 0)]


@pytest.mark.slow
@costly
@given(
    prompts(count=5, max_len=30),
    st.sets(st.integers(0, 4), max_size=3),
    plans(num_layers=NUM_LAYERS),
    st.sampled_from(HOOKS),
    st.booleans(),
    st.integers(1, 4),
    st.sampled_from([3, 11, 512]),
)
def test_failing_hook_ends_only_its_sequences(
    prompts: list[list[int]],
    marked: set[int],
    plan: Plan,
    hook: str,
    invalid_answer: bool,
    slots: int,
    chunk: int,
) -> None:
    prompts = [[token % MARK for token in prompt] for prompt in prompts]
    for number in marked:
        prompts[number][0] = MARK
    options = {"slots": slots, "chunk": chunk}
    failing, healthy = (with_last(plan, Fails(name, invalid_answer)) for name in (hook, ""))
    run = Engine(MODEL, plan=failing, on_hook_error="answer", **options).generate(
        prompts, max_new_tokens=12
    )
    results, failures = stepped(run)
    assert [result.id for result in results] == list(range(5))
    expected = Engine(MODEL, plan=healthy, **options).generate(prompts, max_new_tokens=12).results()
    for result, plain in zip(results, expected, strict=True):
        if result.finish_reason == "error":
            assert result.error is not None
            assert f"'fails' {'' if invalid_answer else 'raised IndexError'}" in result.error
            assert f"{hook}()" in result.error
            assert result.tokens == plain.tokens[: len(result.tokens)]
        else:
            assert result_values(result) == result_values(plain)
    failed = {result.id for result in results if result.error is not None}
    compacted = {one.id for one in expected if one.compactions}
    if hook in ("score", "select", "evict"):
        assert failed >= compacted & marked
        assert failed <= compacted
        assert bool(failed) == bool(compacted & marked)
    if hook == "observe":
        assert failed <= marked
    assert run.report.num_errors == len(failed)
    assert_no_slot_is_lost(run)
    assert failed == {number for failure in failures for number in failure.requests}
    for failure in failures:
        assert (failure.policy, failure.hook) == ("fails", hook)
        layer = "" if failure.layer_idx is None else f" at layer {failure.layer_idx}"
        what = "gave an invalid answer" if invalid_answer else "raised IndexError"
        assert failure.summary == f"policy 'fails' {what} in {hook}(){layer}"
        assert failure.error == ("HookResultError" if invalid_answer else "IndexError")


def stepped(run: Run) -> tuple[list[Result], list[HookFailure]]:
    """The results of a run in the order of its requests, and the hook calls that failed."""
    events = []
    while not run.done:
        events.append(run.step())
    results = [result for one in events for result in one.results]
    failures = [failure for one in events for failure in one.failures]
    return sorted(results, key=lambda result: result.id), failures


def test_failed_sequences_have_an_error_and_keep_their_tokens() -> None:
    plan = Plan.uniform("h2o", Fails("score"), budget=8, buffer=4)
    engine = Engine(MODEL, plan=plan, on_hook_error="answer")
    good, bad = engine.generate([[1, 2, 3], [MARK, 3]], max_new_tokens=30).results()
    assert (good.finish_reason, len(good.tokens)) == ("length", 30)
    assert bad.finish_reason == "error"
    assert "no such head" in bad.error
    assert len(bad.tokens) == 12 + 1 - 2  # sampled until the slab of 12 rows was full


class FailsAlways:
    calls = 0

    @hookimpl
    def score(self, layer_idx: int) -> Tensor:
        self.calls += 1
        raise LookupError


class FailsToObserve:
    """Fails for the first tokens of marked sequences."""

    @hookimpl
    def observe(self, token_ids: Tensor) -> None:
        if token_ids[0] == MARK:
            raise LookupError


@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_an_answer_that_was_complete_has_no_error_and_its_failure_is_told(
    max_new_tokens: int,
) -> None:
    plain, plan = (
        Plan.uniform("h2o", *others, budget=8, buffer=4) for others in ([], [FailsToObserve()])
    )
    (expected,) = Engine(MODEL, plan=plain).generate([[MARK, 3]], max_new_tokens=1).results()
    engine = Engine(MODEL, plan=plan, on_hook_error="answer")
    requests = [Request([MARK, 3], max_new_tokens), Request([1] * 20, 2)]
    (result, other), failures = stepped(engine.generate(requests))
    assert [failure.requests for failure in failures] == [(0,)]
    assert result.tokens == expected.tokens
    assert (result.error is None) == (max_new_tokens == 1)
    assert other.error is None


def test_hooks_are_not_called_for_failed_sequences() -> None:
    fails = FailsAlways()
    plan = Plan.uniform(fails, budget=8, buffer=4)
    run = Engine(MODEL, plan=plan, on_hook_error="answer").generate([[1] * 12, [2] * 30])
    results, failures = stepped(run)
    assert [result.finish_reason for result in results] == ["error", "error"]
    assert fails.calls == 1, "expected one call for both sequences, in the first layer"
    (failure,) = failures
    assert failure.requests == (0, 1)
    assert failure.error == "LookupError"
    assert failure.at[-1].startswith(f"{__file__}:")
    assert failure.at[-1].endswith(" score")
    assert run.report.compactions == 0


def test_stream_ends_with_the_hook_error() -> None:
    plan = Plan.uniform("h2o", Fails("select"), budget=8, buffer=4)
    stream = Engine(MODEL, plan=plan, on_hook_error="answer").stream([MARK], max_new_tokens=30)
    tokens = list(stream)
    assert stream.result is not None
    assert stream.result.finish_reason == "error"
    assert tuple(tokens) == stream.result.tokens


@attrs.define(eq=False)
class FailsToSchedule:
    calls: int = 0

    @hookimpl
    def schedule(self, waiting: Any, num_free: int) -> list[list[int]]:
        self.calls += 1
        if self.calls == 2:
            raise ZeroDivisionError
        return [[request.id for request in waiting[:num_free]]]


def test_failing_schedule_ends_only_waiting_requests() -> None:
    plan = Plan.uniform("full", schedule=[FailsToSchedule()])
    engine = Engine(MODEL, plan=plan, slots=2, on_hook_error="answer")
    requests = [Request([number + 1], 3 + 5 * number) for number in range(5)]
    results = engine.generate(requests).results()
    assert [result.finish_reason for result in results] == ["length"] * 2 + ["error"] * 3
    assert len(results[1].tokens) == 8
    assert "'fails_to_schedule' raised ZeroDivisionError in schedule()" in results[4].error


def error_of_cpu_memory() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


FATAL = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("x"),
    error_of_cpu_memory(),
]


@pytest.mark.parametrize("error", FATAL, ids=lambda error: type(error).__name__)
def test_out_of_memory_is_always_raised(error: BaseException) -> None:
    plan = Plan.uniform("h2o", Fails("score", error=error), budget=8, buffer=4)
    engine = Engine(MODEL, plan=plan, on_hook_error="answer")
    with pytest.raises(HookError, match=type(error).__name__):
        engine.generate([[MARK, 3]], max_new_tokens=30).results()


@pytest.mark.parametrize("value", ["ignore", None, True])
def test_invalid_on_hook_error_raises(value: object) -> None:
    with pytest.raises(KVPolicyError, match=r"on_hook_error"):
        Engine(MODEL, plan=Plan.uniform("full"), on_hook_error=value)


# --- no effect on later sequences -----------------------------------------------------------


@attrs.define(eq=False)
class Poisons:
    """Replaces the kept rows of marked sequences by NaN or infinity."""

    poison_value: float

    @hookimpl
    def observe(self, token_ids: Tensor, start: int, memory: Memory) -> None:
        (notes,) = memory.of(self)
        if start == 0:
            notes["marked"] = int(token_ids[0]) == MARK

    @hookimpl
    def evict(self, rows: Any, keep: Tensor, memory: Memory) -> bool | None:
        if not any(notes["marked"] for notes in memory.of(self)):
            return None
        poison = torch.full(
            (*keep.shape, rows.keys.shape[-1]), self.poison_value, dtype=torch.float64
        )
        rows.keep(keep, keys=poison, values=poison)
        return True


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_non_finite_rows_do_not_affect_the_next_sequence_in_the_slot(
    what: float, policy: str
) -> None:
    """Masked rows have weight 0 and 0 * NaN is NaN, so a freed slot must be cleared."""
    requests = [
        Request([MARK, 2, 3, 4], 20),  # the longest, so that it gets the last slot
        Request([4] * 3, 40),
        *(Request([5, 6, number], 12) for number in range(4)),
    ]
    plain = Engine(MODEL, plan=Plan.uniform(policy, budget=8, buffer=4), slots=2)
    poisoned = Engine(
        MODEL,
        plan=Plan.uniform(policy, Poisons(what), budget=8, buffer=4),
        slots=2,
        on_hook_error="answer",
    )
    expected = plain.generate(requests).results()[1:]
    results = poisoned.generate(requests).results()[1:]
    assert [result_values(result) for result in results] == [result_values(one) for one in expected]


# --- who is named ---------------------------------------------------------------------------


class Scores:
    """Answers `score` with what a function makes of the positions."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        self.answer = answer

    @hookimpl
    def score(self, layer_idx: int, positions: Tensor) -> Any:
        return self.answer(positions)


class Invalid(Scores):
    def __init__(self) -> None:
        super().__init__(lambda positions: positions)


class Valid(Scores):
    def __init__(self) -> None:
        super().__init__(lambda positions: positions.double())


class Exhausted(Scores):
    def __init__(self) -> None:
        super().__init__(lambda positions: next(iter(())))


class Wraps:
    """A wrapper of `score`, which passes on what it gets."""

    @hookimpl(wrapper=True)
    def score(self, keys: Tensor) -> Any:
        return (yield)


class Spoils:
    @hookimpl(wrapper=True)
    def score(self) -> Any:
        return (yield).long()


class Raises:
    @hookimpl(wrapper=True)
    def score(self) -> Any:
        yield
        raise LookupError


class RaisesAnew:
    @hookimpl(wrapper=True)
    def score(self) -> Any:
        try:
            return (yield)
        except Exception as error:
            raise LookupError from error


class YieldsTwice:
    @hookimpl(wrapper=True)
    def score(self) -> Any:
        yield
        yield


class NeverYields:
    @hookimpl(wrapper=True)
    def score(self, budget: int) -> Any:
        if budget < 0:
            yield


class ChangesKeys:
    @hookimpl(wrapper=True)
    def score(self, keys: Tensor) -> Any:
        keys.zero_()
        return (yield)


@pytest.mark.parametrize(
    ("stack", "name", "problem"),
    [
        ((Invalid, Wraps), "invalid", "int64"),
        ((Valid, Spoils, Wraps), "spoils", "int64"),
        # The first is never asked, as the second answers.
        ((Invalid, Valid, Spoils), "spoils", "int64"),
        ((Valid, ChangesKeys, Wraps), "changes_keys", "'keys' in place"),
        ((Exhausted,), "exhausted", "raised StopIteration"),
        ((Exhausted, Wraps, Wraps), "exhausted", "raised StopIteration"),
        ((Valid, Raises, Wraps), "raises", "raised LookupError"),
        ((Exhausted, Wraps, RaisesAnew, Wraps), "raises_anew", "raised LookupError"),
        ((Valid, Wraps, YieldsTwice, Wraps), "yields_twice", "yielded twice"),
        ((Valid, Wraps, NeverYields, Wraps), "never_yields", "has not yielded"),
    ],
)
def test_the_policy_whose_code_is_wrong_is_named(
    stack: tuple[type, ...], name: str, problem: str
) -> None:
    plan = Plan.uniform(*(one() for one in stack), budget=8, buffer=4)
    with pytest.raises(HookError, match=problem) as error:
        Engine(MODEL, plan=plan).generate([[1]], max_new_tokens=20).results()
    assert error.value.policy.partition("#")[0] == name


def test_a_wrapper_may_answer_for_a_policy_that_fails() -> None:
    class Answers:
        @hookimpl(wrapper=True)
        def score(self, positions: Tensor) -> Any:
            try:
                return (yield)
            except StopIteration:
                return positions.double()

    def tokens(*stack: object) -> tuple[int, ...]:
        plan = Plan.uniform(*stack, budget=8, buffer=4)
        (result,) = Engine(MODEL, plan=plan).generate([[1]], max_new_tokens=20).results()
        return result.tokens

    assert tokens(Exhausted(), Answers()) == tokens(Valid())


def test_a_policy_is_not_called_again_to_see_whose_answer_is_wrong() -> None:
    calls = []
    policy = Scores(lambda positions: calls.append(1) or positions)
    plan = Plan.uniform("h2o", policy, budget=8, buffer=4)
    with pytest.raises(HookResultError, match=r"'scores'.*int64"):
        Engine(MODEL, plan=plan).generate([[1]], max_new_tokens=20).results()
    assert len(calls) == 1


# --- what is not a policy's fault, and what is ----------------------------------------------


def model_that_overflows(token: int) -> Any:
    """A model whose numbers are infinite once it has seen a token."""
    model = tiny_model(num_layers=NUM_LAYERS, dtype=torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.inf
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("policy", ["h2o", "snapkv", "merge"])
def test_nan_of_the_model_ends_its_sequence_and_no_policy_is_blamed(
    policy: str, chunk: int
) -> None:
    plan = Plan.uniform("knorm", policy, budget=12, buffer=4) if policy == "merge" else None
    plan = plan or Plan.uniform(policy, budget=12, buffer=4)
    engine = Engine(model_that_overflows(MARK), plan=plan, slots=3, chunk=chunk)
    prompts = [[5, 6, MARK] + [8, 9] * 20, [5, 6] * 20, [1, 2, 3] * 10]
    lost, *others = engine.generate(prompts, max_new_tokens=8).results()
    assert lost.finish_reason == "error"
    assert "policy '" not in str(lost.error)
    alone = [engine.generate([prompt], max_new_tokens=8).results()[0] for prompt in prompts[1:]]
    assert [one.tokens for one in others] == [one.tokens for one in alone]


def test_nan_of_the_model_in_a_cache_of_generate_is_an_error_of_the_model() -> None:
    model = model_that_overflows(MARK)
    cache = PolicyCache(model, Plan.uniform("h2o", budget=12, buffer=4))
    ids = torch.tensor([[5, 6, MARK] + [8, 9] * 20])
    with pytest.raises(ModelError, match="NaN"):
        model.generate(ids, **cache_argument(cache), max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_what_evict_stores_instead_of_numbers_is_blamed_on_it(what: float) -> None:
    engine = Engine(MODEL, plan=Plan.uniform("h2o", Poisons(what), budget=8, buffer=4))
    with pytest.raises(HookResultError) as caught:
        engine.generate([[MARK, 2, 3, 4]], max_new_tokens=20).results()
    assert (caught.value.policy, caught.value.hook) == ("poisons", "evict")


@attrs.define(eq=False)
class Stores:
    """Stores what a function makes of the rows that stay, or assigns it to a track."""

    make: Callable[[Tensor], object]
    to_track: bool = False
    tracks: ClassVar[tuple[str, ...]] = ("mine",)
    ragged: ClassVar[bool] = True

    @hookimpl
    def score(self, keys: Tensor, tracks: Any) -> Tensor:
        if self.to_track:
            tracks["mine"] = self.make(keys[..., 0])
        return keys.double().norm(dim=-1)

    @hookimpl
    def evict(self, rows: Any, keep: Tensor) -> bool:
        size = (*keep.shape, rows.keys.shape[3])
        made = None if self.to_track else self.make(torch.ones(size, dtype=rows.keys.dtype))
        rows.keep(keep, values=made)
        return True


WRONG: dict[str, Callable[[Tensor], object]] = {
    "too many rows": lambda x: torch.cat([x, x[:, :, :2]], dim=2),
    "too few rows": lambda x: x[:, :, 1:],
    "one sequence for all": lambda x: x[:1] if len(x) > 1 else x[0],
    "one head for all": lambda x: x[:, :1],
    "whole numbers": lambda x: x.long(),
    "truths": lambda x: x > 0,
    "a number": lambda _: 1.0,
    "complex numbers": lambda x: x.to(torch.complex128),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("to_track", [False, True])
@pytest.mark.parametrize("heads", ["own", "shared"])
@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_only_numbers_of_the_right_size_are_stored(
    make: Callable[[Tensor], object], heads: Any, to_track: bool
) -> None:
    plan = Plan.uniform(Stores(make, to_track), budget=8, buffer=4, heads=heads)
    engine = Engine(MODEL, plan=plan, slots=2)
    with pytest.raises(HookError) as caught:
        engine.generate([[1, 2, 3] * 5, [4, 5, 6] * 5], max_new_tokens=9).results()
    assert caught.value.policy == "stores"
    assert caught.value.hook == ("score" if to_track else "evict")
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("heads", ["own", "shared"])
def test_replacements_in_another_precision_are_stored(heads: Any) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        plan = Plan.uniform(Stores(lambda x, d=dtype: x.to(d)), budget=8, buffer=4, heads=heads)  # type: ignore[misc]
        found += Engine(MODEL, plan=plan).generate([[1, 2, 3] * 5], max_new_tokens=9).results()
    assert found[0].tokens == found[1].tokens
