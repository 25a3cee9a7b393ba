"""What tests of prefix stores have in common: models, plans and comparisons."""

from typing import Any

import attrs
import torch
from families import family_model
from hypothesis import strategies as st

from kvpolicy import Plan
from kvpolicy.engine.results import Result

NUM_LAYERS = 2
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss")  # windows, soft caps, sinks

# In double precision the order of additions does not matter, but for a softmax in fp32.
models = st.builds(family_model, st.sampled_from(FAMILIES), dtype=st.just(torch.float64))


def with_prompt(plan: Plan, prompt: Any) -> Plan:
    """The plan with rows of prompts that stay, or do not."""
    return attrs.evolve(plan, layers=[attrs.evolve(one, prompt=prompt) for one in plan.layers])


def assert_same(ours: Result, theirs: Result) -> None:
    """The same tokens, rows, tracks and queries; both have a snapshot."""
    assert (ours.error, theirs.error) == (None, None)
    assert (ours.tokens, ours.finish_reason) == (theirs.tokens, theirs.finish_reason)
    assert ours.snapshot is not None
    assert theirs.snapshot is not None
    assert ours.snapshot.registers == theirs.snapshot.registers
    assert ours.snapshot.num_observed == theirs.snapshot.num_observed
    layers = (ours.snapshot.contents.layers, theirs.snapshot.contents.layers)
    for own, other in zip(*layers, strict=True):
        assert own.compacted_at == other.compacted_at
        assert (own.rows, own.prompt_rows) == (other.rows, other.prompt_rows)
        assert torch.equal(own.positions, other.positions)
        for mine, yours in zip(own.tensors, other.tensors, strict=True):
            torch.testing.assert_close(mine, yours, rtol=1e-3, atol=1e-4)
