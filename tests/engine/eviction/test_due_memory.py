"""`due` has the memory of each sequence, which goes with it through snapshots."""

import attrs
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
