"""A prefix store where the policies of layers differ: all of them agree to what is shared."""

from typing import Any

from reuse_cases import CountsBack, asked, assert_same, llama

from kvpolicy import Engine, Plan, PrefixStore
from kvpolicy.plan.spec import LayerGroup, PolicySpec


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
