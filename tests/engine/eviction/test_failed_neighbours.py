"""What a policy fails to store of one sequence changes nothing of its neighbours."""

from typing import Any, ClassVar

import attrs
import pytest
import torch
from compare import result_values
from families import family_model
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Lookahead, Plan, hookimpl
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
