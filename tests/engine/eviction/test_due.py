"""`due` is asked about sequences whose prompt is in, with the memory of each."""

from typing import Any

import attrs
import pytest
import torch
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Memory, Plan, Request, hookimpl


@attrs.define(eq=False)
class DueOnce:
    """The first call for a sequence says that it is due, and no later one."""

    @hookimpl
    def due(self, memory: Memory) -> Tensor:
        answers = [not notes.get("asked", False) for notes in memory.of(self)]
        for notes in memory.of(self):
            notes["asked"] = True
        return torch.tensor(answers)


def test_what_due_remembers_belongs_to_a_sequence_and_goes_on_with_it() -> None:
    # One layer: each forward is one call.
    model = shared_model(num_layers=1)
    engine = Engine(model, plan=Plan.uniform("streaming", DueOnce(), budget=6, buffer=20), slots=2)
    first = Request([3] * 12, 3, stop_ids=(), snapshot=True)
    results = engine.generate([first, first]).results()
    assert [one.compactions for one in results] == [1, 1], "each has a memory of its own"
    again = Request([3] * 4, 3, stop_ids=(), resume=results[0].snapshot)
    assert engine.generate([again]).results()[0].compactions == 0


@attrs.define(eq=False)
class DueInDecode:
    """Compacts whatever is over the budget; fails where it is asked about a prompt's beginning."""

    num_asked: list[int] = attrs.field(factory=list)

    @hookimpl
    def due(self, num_rows: Tensor, seq_len: Tensor, prompt_len: Tensor, budget: int) -> Tensor:
        if (seq_len < prompt_len).any():
            raise ValueError
        self.num_asked.append(len(num_rows))
        return num_rows > budget


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"chunk": 4}, {"slots": 3, "chunk": 4}, {"slots": 2}])
def test_due_is_not_asked_about_a_sequence_within_its_prompt(options: dict[str, Any]) -> None:
    """Nor do those that it is asked about mind neighbours whose prompts are longer."""
    prompts = [[5, 7] * 20, [3, 1, 4], [2, 9] * 9]
    policy = DueInDecode()
    plan = Plan.uniform("streaming", policy, budget=6, buffer=20)
    engine = Engine(shared_model(), plan=plan, on_hook_error="answer", **options)
    results = engine.generate(prompts, max_new_tokens=9).results()
    assert [one.error for one in results] == [None] * 3
    assert 0 not in policy.num_asked
    alone = [engine.generate([prompt], max_new_tokens=9).results()[0] for prompt in prompts]
    assert [one.tokens for one in results] == [one.tokens for one in alone]
    assert [one.compactions for one in results] == [one.compactions for one in alone]
    # 3 rows of the prompt, and one for each of 8 tokens: 7 are there before each of the last 4.
    assert results[1].compactions == 4
