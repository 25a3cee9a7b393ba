"""A prefix store where the policies of layers differ: all of them agree to what is shared."""

from typing import Any, ClassVar

import attrs
import torch
from reuse_cases import asked, assert_same, llama

from kvpolicy import Engine, Plan, PrefixStore, hookimpl
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.state import Memory


@attrs.define(eq=False)
class CountsBack:
    """Rows stay by how far they are from the end of their prompt."""

    cuts_prompts: ClassVar[bool] = False

    @hookimpl
    def observe(self, token_ids: Any, start: int, prompt_len: int, memory: Memory) -> None:
        (own,) = memory.of(self)
        own.setdefault("left", []).extend(
            (prompt_len - start - index) ** 2 % 7 for index in range(len(token_ids))
        )

    @hookimpl
    def score(self, positions: Any, memory: Memory) -> Any:
        left = [positions.new_tensor(own["left"]) for own in memory.of(self)]
        return torch.stack([one[at] for one, at in zip(left, positions, strict=True)]).float()


def test_one_policy_that_forbids_it_keeps_prompts_from_being_cut() -> None:
    stacks: list[Any] = ["h2o", PolicySpec.of(CountsBack())]
    plan = Plan(layers=[LayerGroup([i], [stack], 9, 3) for i, stack in enumerate(stacks)])
    store = PrefixStore(2**30, block_tokens=4, conversations=False)
    engine = Engine(llama(), plan=plan, prefix_store=store)
    reused = []
    for prompt in [list(range(30)), list(range(25)), [*range(29), 7], list(range(30))]:
        (ours,) = engine.generate(asked([prompt], 3)).results()
        (theirs,) = Engine(llama(), plan=plan).generate(asked([prompt], 3)).results()
        assert_same(ours, theirs)
        reused.append(ours.reused_tokens)
    assert reused == [0, 0, 0, 29]
