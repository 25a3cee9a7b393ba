"""A prompt that goes on with stored blocks gets what it gets without a store."""

from typing import Any

import attrs
import torch
from families import family_model
from hypothesis import given
from hypothesis import strategies as st
from strategies import plans
from tiny import tiny_tokenizer
from torch import nn

from kvpolicy import Engine, Plan, PrefixStore, Request
from kvpolicy.engine.results import Result

NUM_LAYERS = 2
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss")  # windows, soft caps, sinks

# In double precision the order of additions does not matter.
models = st.builds(family_model, st.sampled_from(FAMILIES), dtype=st.just(torch.float64))
token_ids = st.integers(0, 60)


@st.composite
def families_of_prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts of which many begin alike, and some are equal."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    common = torch.randint(61, (draw(st.integers(1, 70)),), generator=rng).tolist()
    prompts = []
    for _ in range(draw(st.integers(2, 5))):
        shared = common[: draw(st.integers(0, len(common)))]
        own = torch.randint(61, (draw(st.integers(0, 20)),), generator=rng).tolist()
        prompts.append((shared + own) or [1])
    return [*prompts, prompts[draw(st.integers(0, len(prompts) - 1))]]


def assert_same(ours: Result, theirs: Result) -> None:
    """The same tokens, rows, tracks and queries."""
    assert (ours.error, theirs.error) == (None, None)
    assert ours.tokens == theirs.tokens
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
            torch.testing.assert_close(mine, yours, rtol=1e-3, atol=1e-4)  # softmax is in fp32


def asked(prompts: list[list[int]], num_new: int) -> list[Request]:
    return [Request(one, num_new, stop_ids=(), snapshot=True) for one in prompts]


@given(
    models,
    plans(num_layers=NUM_LAYERS),
    st.sampled_from(["evict", "keep"]),
    families_of_prompts(),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(1, 3),
    st.data(),
)
def test_a_hit_equals_a_fresh_prefill(
    model: nn.Module,
    plan: Plan,
    prompt: Any,
    prompts: list[list[int]],
    block: int,
    chunk: int,
    slots: int,
    data: st.DataObject,
) -> None:
    plan = attrs.evolve(plan, layers=tuple(attrs.evolve(one, prompt=prompt) for one in plan.layers))
    tokenizer, requests = tiny_tokenizer(), asked(prompts, 12)
    options = {"slots": slots, "eager": data.draw(st.booleans())}
    fresh = Engine(model, tokenizer, plan, chunk=512, **options).generate(requests).results()
    store = PrefixStore(2**30, block_tokens=block, conversations=False)
    engine = Engine(model, tokenizer, plan, chunk=chunk, prefix_store=store, **options)
    for _ in range(2):
        run = engine.generate(requests)
        results = run.results()
        for ours, theirs in zip(results, fresh, strict=True):
            assert_same(ours, theirs)
        assert run.report.reused_tokens == sum(one.reused_tokens for one in results)
