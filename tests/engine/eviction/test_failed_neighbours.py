"""What a policy fails to store of one sequence changes nothing of its neighbours."""

from functools import cache
from typing import Any, ClassVar

import attrs
import pytest
import torch
from compare import result_values
from families import family_model
from tiny import shared_model, tiny_model
from torch import Tensor

from kvpolicy import Engine, LayerRows, Lookahead, Plan, Request, Result, hookimpl
from kvpolicy.errors import HookError
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.state import Memory

NUM_LAYERS = 2
MARK = 60  # a policy fails for prompts that begin with this token


@attrs.define(eq=False)
class LongKeys:
    """Long keys stay, other ones in each layer.

    From the second compaction on, storing them fails for marked sequences.
    """

    fails: bool

    @hookimpl
    def observe(self, token_ids: Tensor, start: int, memory: Memory) -> None:
        (own,) = memory.of(self)
        if start == 0:
            own["marked"], own["stored"] = int(token_ids[0]) == MARK, 0

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return keys.float().norm(dim=-1)

    @hookimpl
    def evict(self, memory: Memory) -> None:
        for own in memory.of(self):
            own["stored"] += 1
            if self.fails and own["marked"] and own["stored"] > NUM_LAYERS:
                msg = "no room"
                raise LookupError(msg)


def test_rows_of_the_others_stay_where_layers_are_evicted_together() -> None:
    # Windows, from which rows fall: sequences hold equally many in one layer, and not in another.
    model = family_model("mistral", window=14, dtype=torch.float64)
    rng = torch.Generator().manual_seed(1)
    prompts = torch.randint(MARK, (8, 5), generator=rng).tolist()
    for number in (0, 2, 5):
        prompts[number][0] = MARK
    failing, healthy = (
        Engine(
            model, plan=Plan.uniform(LongKeys(fails), budget=6, buffer=4), on_hook_error="answer"
        )
        .generate(prompts, max_new_tokens=40, stop_ids=())
        .results()
        for fails in (True, False)
    )
    failed = {one.id for one in failing if one.error}
    assert {0, 2, 5} <= failed < set(range(8))
    for ours, theirs in zip(failing, healthy, strict=True):
        if not ours.error:
            assert result_values(ours) == result_values(theirs)


# The model's own NaN, within prompts


@attrs.define(eq=False)
class Changes:
    """Changes a track and values at every compaction, and raises where keys are NaN, if at all."""

    tracks: ClassVar[tuple[str, ...]] = ("seen",)
    raises: bool

    @hookimpl
    def score(self, keys: Tensor, tracks: Any) -> Tensor:
        tracks["seen"] = tracks["seen"] + 1
        return tracks["seen"] + keys.float().norm(dim=-1).nan_to_num(1e3)

    @hookimpl
    def evict(self, rows: LayerRows, keep: Tensor) -> bool:
        rows.set_track("seen", rows.track("seen") * 2)
        share = 1 / (1 + rows.track("seen").gather(2, keep))[..., None]
        if self.raises and bool(rows.keys.isnan().any()):
            msg = "no number"
            raise ArithmeticError(msg)
        values = rows.values.gather(2, keep[..., None].expand(*keep.shape, rows.values.shape[3]))
        rows.keep(keep, values=values * share)
        return True


NAN_PROMPTS = [[5, 6] * 16, [1, 2, 3] * 4 + [MARK] * 20, [7, 8, 9, 3] * 8]
NAN_STACKS: dict[str, tuple[object, ...]] = {
    "rerotate": ("streaming", "rerotate"),
    "merge": ("streaming", "merge"),
    "h2o": ("h2o", "merge"),
    "before its rows are stored": (Changes(raises=True),),
    "as its rows are stored": (Changes(raises=False),),
}


@cache
def model_with_nan() -> Any:
    model = tiny_model(num_layers=NUM_LAYERS, dtype=torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[MARK] = torch.nan
    return model


def results_beside(
    stack: tuple[object, ...], prompts: list[list[int]], *, together: bool, defers: bool = False
) -> list[Result]:
    engine = Engine(
        model_with_nan(), plan=Plan.uniform(*stack, budget=8, buffer=4), slots=3, chunk=4
    )
    run = engine.generate([Request(one, 12, stop_ids=(), logprobs=0) for one in prompts])
    run.evictor.defers = defers
    if not together:
        run.evictor.call_bytes = 1
    return run.results()


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("stack", NAN_STACKS.values(), ids=NAN_STACKS)
def test_rows_beside_nan_of_the_model_are_evicted_once(
    stack: tuple[object, ...], together: bool, defers: bool
) -> None:
    first, lost, last = results_beside(stack, NAN_PROMPTS, together=together, defers=defers)
    assert lost.error is not None
    assert "policy" not in lost.error.split("NaN")[0]
    for ours, prompt in ((first, NAN_PROMPTS[0]), (last, NAN_PROMPTS[2])):
        (alone,) = results_beside(stack, [prompt], together=together, defers=defers)
        assert ours.error is None
        assert ours.tokens == alone.tokens
        logprobs = [[one.logprob for one in result.logprobs or ()] for result in (ours, alone)]
        torch.testing.assert_close(*map(torch.tensor, logprobs), rtol=1e-9, atol=0)


@attrs.define(eq=False)
class SpoilsOthers:
    """Where keys are NaN, stores other rows than the chosen ones of all, or fails after it."""

    raises: bool

    @hookimpl
    def evict(self, rows: LayerRows, keep: Tensor) -> bool:
        if not rows.keys.isnan().any():
            rows.keep(keep)
        elif self.raises:
            rows.keep(keep)
            msg = "no number"
            raise ArithmeticError(msg)
        else:
            rows.keep(torch.arange(keep.shape[2]).expand_as(keep))
        return True


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_a_policy_that_spoils_rows_beside_nan_of_the_model_has_failed(
    raises: bool, together: bool
) -> None:
    with pytest.raises(HookError) as caught:
        results_beside(("streaming", SpoilsOthers(raises)), NAN_PROMPTS, together=together)
    assert (caught.value.policy, caught.value.hook) == ("spoils_others", "evict")


# Lookaheads


class LooksAt:
    """Asks for the queries of a token that no prompt holds."""

    lookahead_size: ClassVar[int] = 1

    @hookimpl
    def lookahead(self) -> Lookahead:
        return Lookahead(token_ids=(MARK,))

    @hookimpl
    def score(self, positions: Tensor, lookahead_queries: Tensor | None) -> Tensor:
        return positions.float()


class FailsToLookahead(LooksAt):
    """Fails for sequences of a length."""

    @hookimpl
    def lookahead(self, prompt_len: int) -> Lookahead:
        if prompt_len == 3:
            msg = "no text"
            raise LookupError(msg)
        return Lookahead(token_ids=(MARK,))


@pytest.mark.parametrize("prompt_len", [2, 3])
def test_nothing_is_looked_ahead_for_a_sequence_that_has_failed(prompt_len: int) -> None:
    layers = [
        LayerGroup([number], [PolicySpec.of(policy)], budget=6, buffer=4)
        for number, policy in enumerate([LooksAt(), FailsToLookahead()])
    ]
    model = shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)
    engine = Engine(model, plan=Plan(layers=layers), on_hook_error="answer")
    seen: list[int] = []

    def note(_: Any, given: tuple[Tensor, ...]) -> None:
        seen.extend(given[0].flatten().tolist())

    handle = model.get_input_embeddings().register_forward_pre_hook(note)
    try:
        (result,) = engine.generate([[7] * prompt_len], max_new_tokens=12, stop_ids=()).results()
    finally:
        handle.remove()
    assert MARK not in result.tokens
    assert (result.error is None) is (MARK in seen) is (prompt_len == 2)
