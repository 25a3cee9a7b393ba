"""What tests of prefix stores have in common: models, plans and comparisons."""

from random import Random
from typing import Any, ClassVar

import attrs
import torch
from families import family_model
from hypothesis import strategies as st
from tiny import shared_model

from kvpolicy import Engine, Plan, PrefixStore, Request, hookimpl
from kvpolicy.engine.requests.results import Result
from kvpolicy.state import Memory

NUM_LAYERS = 2
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss")  # windows, soft caps, sinks

# In double precision the order of additions does not matter, but for a softmax in fp32.
models = st.builds(family_model, st.sampled_from(FAMILIES), dtype=st.just(torch.float64))


PLANS = {
    "compacts": Plan.uniform("h2o", budget=12, buffer=4),
    "keeps prompts": Plan.uniform("rkv", budget=12, buffer=4, prompt="keep"),
    "full": Plan.uniform("full"),
}

BLOCK_BYTES = NUM_LAYERS * 2 * 4 * (8 * 8 * 2 + 8)  # of rows of 4 tokens


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


def llama() -> Any:
    return shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)


def asked(prompts: list[list[int]], num_new: int = 6) -> list[Request]:
    return [Request(one, num_new, stop_ids=(), snapshot=True) for one in prompts]


def random_prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts with equal beginnings of which some are popular."""
    rng = Random(seed)
    starts = [[rng.randrange(61) for _ in range(rng.randint(4, 30))] for _ in range(4)]
    return [
        rng.choice(starts)[: rng.randint(1, 30)]
        + [rng.randrange(61) for _ in range(rng.randint(1, 9))]
        for _ in range(count)
    ]


def results_of(store: PrefixStore, plan: Plan, prompts: list[list[int]]) -> list[Result]:
    """What an engine with a store answers."""
    engine = Engine(llama(), plan=plan, slots=2, prefix_store=store)
    return engine.generate(asked(prompts)).results()


def with_prompt(plan: Plan, prompt: Any) -> Plan:
    """The plan with rows of prompts that stay, or do not."""
    return attrs.evolve(plan, layers=[attrs.evolve(one, prompt=prompt) for one in plan.layers])


def assert_same(ours: Result, theirs: Result) -> None:
    """The same tokens, rows, tracks and queries; both have a snapshot."""
    assert (ours.error, theirs.error) == (None, None)
    assert (ours.tokens, ours.finish_reason) == (theirs.tokens, theirs.finish_reason)
    for figure in ("compactions", "rows_evicted", "peak_rows", "peak_bytes", "full_bytes"):
        assert getattr(ours, figure) == getattr(theirs, figure)
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
