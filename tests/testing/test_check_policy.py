"""`check_policy` finds and names every broken clause, and correct policies pass."""

import builtins
import json
import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from broken_policies import BROKEN, Budget, Chunks, Nan, PacksTooLittle
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.cache.arena import SlabArena
from kvpolicy.cache.layouts.even import EvenSpan
from kvpolicy.cache.layouts.span import Kept
from kvpolicy.compat import has_states
from kvpolicy.engine.eviction.images import ImageRows
from kvpolicy.engine.extensions.embedded import Embedded
from kvpolicy.engine.step import Step
from kvpolicy.errors import KVPolicyError
from kvpolicy.testing import CLAUSES, ConformanceError, Trial, check_policy, state_machine

CASES = [(clause, policy) for clause, policies in BROKEN.items() for policy in policies]


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for no smaller example: the one that is found must fail, but need not be minimal."""
    monkeypatch.setattr(state_machine, "MAX_SHRINKS", 1)


def error_of(policy: Callable[[], object], **options: Any) -> ConformanceError:
    with pytest.raises(AssertionError) as caught:
        check_policy(policy, **options)
    assert isinstance(caught.value, ConformanceError)
    return caught.value


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(("clause", "policy"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_a_broken_clause_is_named_with_an_example(clause: str, policy: type) -> None:
    # Knobs are checked after all cases.
    error = error_of(policy, **({"max_examples": 3} if clause == "knobs" else {}))
    if policy is PacksTooLittle and error.clause == "prefixes":  # a store packs memory, too
        clause = "prefixes"
    assert error.clause == clause
    message = str(error)
    assert all(part in message for part in (CLAUSES[clause], error.expected, error.came))
    assert f"Trial({policy.__name__}, " in message
    assert error.example is not None


@pytest.mark.few(1)
@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("policy", [Chunks, Budget, Nan])
def test_the_lines_of_an_example_fail_again(policy: type) -> None:
    example = error_of(policy).example
    assert example is not None
    with pytest.raises(ConformanceError):
        exec(example.code, {policy.__name__: policy})


class Scores:
    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return keys.float().norm(dim=-1)


class Evil(BaseException):
    def __str__(self) -> str:
        raise ValueError


def raising(error: BaseException, *, after: int = 0) -> type:
    """A policy whose constructor raises, from a number of objects on."""

    class Mine(Scores):
        built = 0

        def __init__(self) -> None:
            type(self).built += 1
            if self.built > after:
                raise error

    return Mine


def answering(error: BaseException) -> type:
    """A policy whose hook raises."""

    class Mine:
        @hookimpl
        def score(self, keys: Tensor) -> Tensor:
            raise error

    return Mine


class Odd:
    __class__ = property(lambda _: 1 / 0)  # type: ignore[assignment]


class AnswersOddly:
    @hookimpl
    def score(self, keys: Tensor) -> object:
        return Odd()


def with_knob(value: object) -> type:
    @attrs.define(eq=False)
    class Mine(Scores):
        weight: object = attrs.field(factory=lambda: value)

    return Mine


class Unwritable:
    def __repr__(self) -> str:
        raise SystemExit


def declaring(**attributes: object) -> type:
    return type("Mine", (Scores,), attributes)


circle: list[object] = []
circle.append(circle)

#: Policies that misbehave, and what the message says.
MISBEHAVING = {
    "exits when built": (raising(SystemExit(3)), "building", "SystemExit: 3"),
    "raises when built": (raising(RuntimeError("no")), "building", "RuntimeError: no"),
    "a message that raises": (raising(Evil()), "building", "Evil: (its message cannot be read)"),
    "fails once cases run": (raising(OSError("full"), after=5), "building", "OSError: full"),
    "exits in a hook": (answering(SystemExit(4)), "answers", "raised SystemExit in score()"),
    "a BaseException": (answering(Evil()), "answers", "raised Evil in score()"),
    "GeneratorExit": (answering(GeneratorExit()), "answers", "raised GeneratorExit"),
    "an answer that raises": (AnswersOddly, "answers", "which cannot be checked: ZeroDivision"),
    "a text as tracks": (declaring(tracks="abc"), "building", "declares tracks = 'abc'"),
    "an endless window": (declaring(window_size=10**9), "building", "window_size = 1000000000"),
    "a part of itself": (
        declaring(parts=property(lambda self: [("self", self)])),
        "building",
        "a part of itself",
    ),
    "returns nothing": (lambda: None, "building", "implements no hook"),
    "protects too much": (declaring(protects=(10**8, 0)), None, "protects 100,000,002 rows"),
    "steers too far": (
        declaring(steers=(99,), steer=hookimpl(lambda self, hidden_states: hidden_states * 0)),
        None,
        "give num_layers=100",
    ),
    "a knob without text": (with_knob(Unwritable()), None, "knobs of policy 'mine' cannot be read"),
    "a knob in a circle": (with_knob(circle), None, "knobs of policy 'mine' cannot be read"),
    "a factory that raises": (lambda: 1 / 0, None, "builds no policy: ZeroDivisionError"),
}


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(
    ("policy", "clause", "expected"), MISBEHAVING.values(), ids=list(MISBEHAVING)
)
def test_a_policy_that_misbehaves_is_named(
    policy: Callable[[], object], clause: str | None, expected: str
) -> None:
    with pytest.raises(KVPolicyError) as caught:
        check_policy(policy, max_examples=2)
    assert getattr(caught.value, "clause", None) == clause
    assert expected in str(caught.value)
    if clause is not None:
        assert caught.value.example is not None  # type: ignore[attr-defined]


def test_every_clause_has_a_policy_that_breaks_it() -> None:
    assert set(BROKEN) == set(CLAUSES)


@pytest.mark.slow
def test_the_search_for_a_smaller_example_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    for limit in (2, 12):
        monkeypatch.setattr(state_machine, "MAX_SHRINKS", limit)
        count = 0

        def factory() -> object:
            nonlocal count
            count += 1
            return Budget()

        assert error_of(factory).clause == "budget"
        built.append(count)
    assert built[0] < built[1]


@pytest.mark.nightly
def test_an_example_is_minimal() -> None:
    example = error_of(Budget).example
    assert example is not None
    # A row more than the budget has to leave, and that is all it takes.
    assert example.setup == "budget=3"
    assert example.code.count("trial.arrive") == 1


@attrs.define(eq=False)
class Observing:
    """A correct policy that scores by what `observe` has stored."""

    tracks = ("seen",)
    registers = ("tokens",)

    @hookimpl
    def observe(self, token_ids: Tensor, registers: Any, memory: Any) -> None:
        registers.of(self)["tokens"].add_(len(token_ids))
        notes = memory.of(self)[0]
        notes["sum"] = notes.get("sum", 0) + int(token_ids.sum())

    @hookimpl
    def score(self, positions: Tensor, tracks: Any, memory: Any) -> Tensor:
        tracks["seen"] = tracks["seen"] + 1
        sums = torch.tensor([notes["sum"] for notes in memory.of(self)])
        return (positions * 7919 + sums[:, None, None]) % 101 + tracks["seen"]


@attrs.define(eq=False)
class Steering:
    """A correct policy that only steers."""

    @hookimpl
    def steer(self, hidden_states: Tensor, token_ids: Tensor) -> Tensor:
        return hidden_states * (token_ids % 3)[:, None].to(hidden_states.dtype) * 0.1


@attrs.define(eq=False)
class Annotating:
    """A correct policy that scores by what its annotations say."""

    tracks = ("gate",)
    annotates_in_step: bool = False

    @hookimpl
    def annotate(self, states: Tensor, keys: Tensor, positions: Tensor) -> dict[str, Tensor]:
        gate = states.double().square().mean(dim=1, keepdim=True) + positions[:, None] % 7
        return {"gate": gate.expand(keys.shape[:2])}

    @hookimpl
    def score(self, tracks: Any) -> Tensor:
        return tracks["gate"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("in_step", [True, False])
def test_policies_that_annotate_pass(in_step: bool) -> None:
    report = check_policy(lambda: Annotating(in_step), max_examples=3)
    assert report.checked["annotations"] > 0
    assert ("in_step" in report.clauses) is in_step
    assert {"tracks", "chunks", "slots", "neighbours"} <= set(report.clauses)


@pytest.mark.nightly
def test_layers_that_are_asked_together_are_compared_with_layers_one_by_one() -> None:
    assert check_policy("streaming", knobs={"n_sink": 1}, max_examples=10).checked["layers"] > 0
    report = check_policy("random", max_examples=10)
    assert "tell layers apart" in report.skipped["layers"]


def of_keys_only(keep: Callable[..., Kept]) -> Callable[..., Kept]:
    """A compaction that leaves values of latents where they were."""

    def keeps(self: EvenSpan, arena: SlabArena, *args: Any) -> Kept:
        before = arena.values.clone()
        kept = keep(self, arena, *args)
        if arena.shape.value_dim < arena.shape.head_dim:
            arena.values.copy_(before)
        return kept

    return keeps


def no_rows(self: ImageRows, sequences: Any, positions: Tensor) -> Tensor:
    """Which rows belong to images: none."""
    return torch.zeros_like(positions, dtype=torch.bool)


def of_single_steps(before: Callable[..., None]) -> Callable[..., None]:
    """What enters the layers for images, unless sequences enter together."""

    def gives(self: Embedded, step: Step) -> None:
        before(self, step)
        if len(step.sequences) > 1:
            step.embedded = None

    return gives


#: Defects of what is special in a kind of models, which no policy has made.
DEFECTS: dict[str, tuple[str, type, str, Callable[..., Any]]] = {
    "values stay behind": ("latent", EvenSpan, "keep", of_keys_only(EvenSpan.keep)),
    "rows of images are not known": ("images", ImageRows, "__call__", no_rows),
    "images in batches are lost": ("images", Embedded, "before", of_single_steps(Embedded.before)),
}

if has_states():
    from kvpolicy.cache.layouts.states import OpenStates, StateLayer

    def of_other_slots(self: OpenStates) -> None:
        for name, kind, number in self._places:
            state = self._of(kind)[number]
            assert state is not None
            self.layer.states[name][self.tokens.served] = state.flip(0)

    DEFECTS["states of other slots"] = ("hybrid", OpenStates, "commit", of_other_slots)
    DEFECTS["no states in snapshots"] = ("hybrid", StateLayer, "fill", lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_in_a_kind_of_models_is_named(
    defect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, owner, name, function = DEFECTS[defect]
    monkeypatch.setattr(owner, name, function)
    error = error_of(Scores, max_examples=1)  # each kind is run once in any case
    assert error.clause == kind
    assert error.example is not None
    assert f"model='{kind}'" in error.example.setup


class SteersFirst(Steering):
    """Steers the first layer, which a plan refuses where that has no attention."""

    steers = (0,)


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("rerotate", "latent"),
        ("expected_attention", "latent"),
        pytest.param(
            *(SteersFirst, "hybrid"),
            marks=pytest.mark.skipif(not has_states(), reason="no hybrid model is drawn"),
        ),
    ],
)
def test_a_model_that_refuses_a_policy_is_left_out(policy: Any, kind: str) -> None:
    report = check_policy(policy, max_examples=1)  # each kind is run once in any case
    assert kind not in report.clauses
    sentence = report.skipped[kind]
    assert sentence == report.refused[kind]
    assert sentence.startswith("refused: ")
    assert sentence in str(report)


@pytest.mark.nightly
def test_a_correct_policy_passes_and_the_report_counts_its_checks() -> None:
    report = check_policy(Observing, max_examples=30)
    assert (report.policy, report.cases) == ("observing", 30)
    assert {"tracks", "memory", "budget", "order"} <= set(report.clauses)
    unused = {
        "eviction",
        "schedule",
        "annotations",
        "in_step",
        "weights",
        "lookahead",
        "shared",
    }
    unused |= set() if has_states() else {"hybrid"}
    assert set(report.skipped) == unused
    num_kept = len(CLAUSES) - len(unused)
    assert f"{num_kept} clauses, 30 cases" in str(report)
    assert set(json.loads(json.dumps(report.to_dict()))["checked"]) == set(report.clauses)


@pytest.mark.nightly
def test_the_report_says_why_clauses_are_skipped() -> None:
    report = check_policy(Steering, max_examples=10)
    assert {"budget", "order", "protected", "tracks", "schedule"} <= set(report.skipped)
    assert report.skipped["budget"] in str(report)
    assert {"answers", "nan", "read_only", "neighbours"} <= set(report.clauses)


@pytest.mark.usefixtures("short_search")
def test_equal_seeds_find_equal_examples() -> None:
    assert str(error_of(Budget, seed=3)) == str(error_of(Budget, seed=3))


def test_progress_is_reported() -> None:
    calls: list[tuple[int, int]] = []
    check_policy(Steering, max_examples=1, progress=lambda *now: calls.append(now))
    assert calls == [(1, 1)]


@pytest.mark.nightly
def test_the_global_random_state_is_restored() -> None:
    before = torch.random.get_rng_state()
    check_policy(Steering, max_examples=3)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (Steering(), {}, "class"),
        (Steering, {"knobs": {"a": 1}}, "lambda"),
        (Steering, {"profile": "slow"}, "quick, ci, thorough"),
        (Steering, {"max_examples": 0}, "max_examples=0"),
        ("nonesuch", {}, "nonesuch"),
        ("streaming", {"knobs": {"n_snik": 1}}, "n_sink"),
    ],
)
def test_wrong_arguments_are_refused(factory: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message) as caught:
        check_policy(factory, **options)
    assert not isinstance(caught.value, ConformanceError)


def test_without_hypothesis_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import_module = builtins.__import__

    def without_hypothesis(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "hypothesis":
            raise ModuleNotFoundError(name=name)
        return import_module(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "kvpolicy.testing.state_machine", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_hypothesis)
    with pytest.raises(KVPolicyError, match=r"\[testing\]"):
        check_policy(Steering)


def test_without_the_file_for_images_no_case_has_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.testing.conformance.is_there", lambda _: False)
    report = check_policy("streaming", max_examples=3)
    assert (report.checked["images"], "file is missing" in report.refused["images"]) == (0, True)


def test_a_factory_that_returns_the_same_policy_is_refused() -> None:
    one = Steering()
    with pytest.raises(ConformanceError, match="building"):
        check_policy(lambda: one)


def test_a_trial_runs_step_by_step() -> None:
    trial = Trial("streaming", {"n_sink": 1}, budget=4, buffer=2, slots=2, kv_heads=2)
    trial.arrive(prompt=9, new=5)
    trial.arrive(prompt=1, new=4)
    trial.go(2)
    assert trial.unanswered == [0, 1]
    trial.cancel(0)
    trial.finish()
    assert trial.unanswered == []


@attrs.define(eq=False)
class CountsHeads:
    """Notes how many query heads it is shown, by layer."""

    heads: dict[int, set[int]] = attrs.field(factory=dict)
    window_size: int = 2

    @hookimpl
    def score(self, layer_idx: int, attn_weights: Tensor, positions: Tensor) -> Tensor:
        self.heads.setdefault(layer_idx, set()).add(attn_weights.shape[1])
        return positions.float()


def test_several_layers_may_attend_to_the_rows_of_a_layer() -> None:
    policies: list[CountsHeads] = []

    def built() -> CountsHeads:
        policies.append(CountsHeads())
        return policies[-1]

    for readers in (1, 2):
        trial = Trial(built, budget=4, buffer=2, kv_heads=2, group=3, readers=readers)
        trial.arrive(prompt=9, new=5)
        trial.finish()
        assert trial.checked["grouped_queries"] == 1
        seen = [policy.heads for policy in policies if policy.heads]
        assert {layer for heads in seen for layer in heads} == {0, 1}
        assert {num for heads in seen for of in heads.values() for num in of} == {6 * readers}
        policies.clear()


@attrs.define(eq=False)
class NotesImages:
    """Notes which of the rows that it is shown are of images, by prompt."""

    seen: list[tuple[int, list[int]]] = attrs.field(factory=list)

    @hookimpl
    def score(self, positions: Tensor, is_image: Tensor, prompt_len: Tensor) -> Tensor:
        for b, length in enumerate(prompt_len.tolist()):
            self.seen.append((length, positions[b][is_image[b]].unique().tolist()))
        return positions.float()


@pytest.mark.parametrize("seed", [0, 1])
def test_prompts_with_and_without_images_are_in_one_batch(seed: int) -> None:
    policy = NotesImages()
    sizes = {"budget": 4, "buffer": 3, "slots": 3, "chunk": 4}
    trial = Trial(lambda: attrs.evolve(policy), model="images", seed=seed, **sizes)
    for prompt in (9, 8, 7):
        trial.arrive(prompt=prompt, new=4)
    trial.finish()
    for length, images in ((9, {0, 1}), (8, set()), (7, {2, 3})):
        seen = [set(found) for num, found in policy.seen if num == length]
        assert seen
        assert set.union(*seen) == images
    assert trial.checked["images"] == 1
