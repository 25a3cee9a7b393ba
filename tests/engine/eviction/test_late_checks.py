"""Answers that are checked later fail the same requests, with the same words, as at once."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Plan, Request, hookimpl
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.engine.engine import Run
from kvpolicy.engine.requests.results import Result
from kvpolicy.errors import HookResultError
from kvpolicy.state import Memory, Parts

NUM_LAYERS, BUDGET, BUFFER = 3, 12, 5
PROMPTS = [9, 12, 20]  # never due together


@attrs.define(eq=False)
class Wrong:
    """Answers correctly, but wrongly for one prompt at its n-th compaction in one layer.

    A call covers all layers, and one layer after the other if it failed: the n-th compaction is
    known by the tokens that the sequence has seen.
    """

    hook: str
    make: Callable[[Tensor], Tensor]
    prompt_len: int = 12
    seen: int = 27

    def _wrong(self, answer: Tensor, positions: Tensor, prompt_len: Tensor) -> Tensor:
        newest = positions[:, 0, -1] + 1
        for b, (length, tokens) in enumerate(
            zip(prompt_len.tolist(), newest.tolist(), strict=True)
        ):
            is_layer = b % NUM_LAYERS == 1 if len(positions) > 1 else False
            if length == self.prompt_len and tokens == self.seen and (is_layer or self._is_alone):
                answer[b] = self.make(answer[b])
        return answer

    _is_alone: bool = attrs.field(default=False, init=False)

    @hookimpl
    def score(self, layer_idx: int, positions: Tensor, prompt_len: Tensor) -> Tensor:
        scores = (positions * 7 % 11).float()
        self._is_alone = len(positions) == 1 and layer_idx == 1
        return self._wrong(scores, positions, prompt_len) if self.hook == "score" else scores

    @hookimpl
    def select(
        self, layer_idx: int, scores: Tensor, positions: Tensor, prompt_len: Tensor, budget: int
    ) -> Tensor:
        keep = scores.sort(dim=2, stable=True).indices[:, :, -budget:].sort(dim=2).values
        self._is_alone = len(positions) == 1 and layer_idx == 1
        return self._wrong(keep, positions, prompt_len) if self.hook == "select" else keep


@attrs.define(eq=False)
class KeepsOthers:
    """Stores other rows than the chosen ones, for one prompt in one layer."""

    @hookimpl
    def observe(self, prompt_len: int, memory: Memory) -> None:
        memory.of(self)[0]["prompt_len"] = prompt_len

    @hookimpl
    def evict(self, layer_idx: int, rows: LayerRows, keep: Tensor, memory: Memory) -> bool:
        (notes,) = memory.of(self)
        if layer_idx == 1 and int(rows.seq_len[0]) == 27 and notes["prompt_len"] == 12:
            keep = keep - 1  # leads outside of the rows
        rows.keep(keep)
        return True


WRONG = {
    "nan": lambda: Wrong("score", lambda own: own.index_fill(-1, torch.tensor([7]), torch.nan)),
    "too large": lambda: Wrong("select", lambda own: own + 99),
    "negative": lambda: Wrong("select", lambda own: own - 99),
    "falling": lambda: Wrong("select", lambda own: own.flip(-1)),
    "twice": lambda: Wrong("select", lambda own: own.clamp(min=4)),
    "other rows": KeepsOthers,
}


def start(stack: Any, *, defers: bool, alike: bool = True, **options: Any) -> Run:
    plan = Plan.uniform(*stack, budget=BUDGET, buffer=BUFFER)
    engine = Engine(shared_model(num_layers=NUM_LAYERS), plan=plan, slots=3, **options)
    for one in engine.stacks:
        one.layers_alike &= alike
    run = engine.generate(
        [
            Request([(7 * i + j * j) % 61 for j in range(length)], max_new_tokens=20, stop_ids=())
            for i, length in enumerate(PROMPTS)
        ]
    )
    run.evictor.defers = defers
    return run


def outcome(results: list[Result]) -> list[Any]:
    return [(one.tokens, one.error, one.finish_reason) for one in results]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_the_same_requests_end_with_the_same_error(make: Callable[[], object]) -> None:
    for stack in ([make(), "protect"], ["streaming", make()]):
        at_once = start(stack, defers=False, on_hook_error="answer").results()
        assert [one.error is None for one in at_once] == [True, False, True]
        name = type(stack[0] if "streaming" not in stack else stack[1]).__name__
        assert name.lower().startswith(str(at_once[1].error).split("'")[1].replace("_", "")[:5])
        assert "at layer 1" in str(at_once[1].error)
        for alike, steps in ((True, 2), (False, 1)):
            run = start(
                stack, defers=True, alike=alike, steps_per_read=steps, on_hook_error="answer"
            )
            assert outcome(run.results()) == outcome(at_once), (alike, steps)


@pytest.mark.few(3)
@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_the_run_ends_if_errors_are_raised(make: Callable[[], object]) -> None:
    with pytest.raises(HookResultError, match="at layer 1"):
        start([make()], defers=True).results()


class IsWrongAndFails:
    """Scores of one sequence are NaN, and its rows cannot be selected."""

    @hookimpl
    def score(self, positions: Tensor, prompt_len: Tensor) -> Tensor:
        wrong = (prompt_len == PROMPTS[1])[:, None, None]
        return positions.float().masked_fill(wrong, torch.nan)

    @hookimpl
    def select(self, prompt_len: Tensor) -> None:
        if (prompt_len == PROMPTS[1]).any():
            msg = "no choice"
            raise LookupError(msg)


def test_a_call_that_has_failed_is_not_checked_later() -> None:
    run, failures = start([IsWrongAndFails()], defers=True, on_hook_error="answer"), []
    while run.num_open:
        failures += run.step().failures
    assert [(one.requests, one.hook) for one in failures] == [((1,), "select")]


def test_a_wrapper_that_spoils_an_answer_is_named() -> None:
    @attrs.define(eq=False)
    class Spoils:
        @hookimpl(wrapper=True)
        def score(self) -> Any:
            return (yield) * torch.nan

    for defers in (False, True):
        with pytest.raises(HookResultError, match="'spoils'"):
            start(["streaming", Spoils()], defers=defers).results()


@attrs.define(eq=False)
class NanInOneLayer:
    @hookimpl
    def score(self, layer_idx: int, positions: Tensor) -> Tensor:
        scores = positions.float()
        if len(positions) == NUM_LAYERS or layer_idx == 1:
            scores[len(positions) // 2] = torch.nan
        return scores


@attrs.define(eq=False)
class Combines:
    parts: Any

    @hookimpl
    def score(self, parts: Parts) -> Tensor:
        return parts.of(self)[0].nan_to_num()


def test_a_wrong_part_is_named() -> None:
    for defers in (False, True):
        stack = [Combines([("mine", NanInOneLayer())])]
        with pytest.raises(HookResultError, match=r"'mine' in 'combines' .*at layer 1"):
            start(stack, defers=defers).results()


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [WRONG["too large"], WRONG["negative"]])
def test_until_then_a_wrong_index_touches_no_other_slot(make: Callable[[], Any]) -> None:
    right = make()
    right.prompt_len = 0
    expected = start([right], defers=False).results()
    results = start([make()], defers=True, on_hook_error="answer").results()
    assert [results[i].tokens for i in (0, 2)] == [expected[i].tokens for i in (0, 2)]


@pytest.mark.parametrize("wrong", [-(10**6), 10**6])
def test_rows_that_do_not_exist_reach_no_other_slot(wrong: int) -> None:
    shape = LayerShape(2, 2, 4, torch.float32, torch.device("cpu"))
    cache = KVCache([shape], [Slab(6)], 3)
    for slot in range(3):
        cache.layers[0].keys[slot] = slot
    cache.rows[:] = 6
    keep = torch.tensor([0, 1, wrong]).expand(1, 2, 3)
    LayerRows(cache, 0, [1]).keep(keep)
    assert [set(keys.flatten().tolist()) for keys in cache.layers[0].keys] == [{0}, {1}, {2}]
