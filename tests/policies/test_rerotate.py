"""Rerotate against a plain-loop Llama that rotates by cache index at every step."""

from collections.abc import Generator, Sequence

import attrs
import reference
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches, rounds
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.model.rope import rotate_halves
from kvpolicy.testing import keep_rows, replay

N_SINK, BUDGET, BUFFER = 3, 12, 5


def streaming_llama(model: torch.nn.Module) -> reference.StreamingLlama:
    config = model.config
    return reference.StreamingLlama(
        {name: weight.double().tolist() for name, weight in model.state_dict().items()},
        head_dim=config.head_dim,
        theta=config.rope_parameters["rope_theta"],
        eps=config.rms_norm_eps,
        n_sink=N_SINK,
        budget=BUDGET,
        buffer=BUFFER,
    )


def generated_tokens(prompts: Sequence[list[int]], num_tokens: int, *stack: str) -> list[list[int]]:
    knobs = {"streaming": {"n_sink": N_SINK}}
    plan = Plan.uniform(*stack, budget=BUDGET, buffer=BUFFER, knobs=knobs)
    engine = Engine(tiny.shared_model(), None, plan, slots=2)
    results = engine.generate(prompts, max_new_tokens=num_tokens).results()
    assert all(result.compactions for result in results)
    return [list(one.tokens) for one in sorted(results, key=lambda one: one.id)]


def test_tokens_with_streaming_equal_the_streaming_llm_reference() -> None:
    rng = torch.Generator().manual_seed(5)
    lengths = (4, 17, 29, 1)  # shorter than the slab, equal, longer, and a single token
    prompts = [torch.randint(61, (length,), generator=rng).tolist() for length in lengths]
    expected = [streaming_llama(tiny.shared_model()).greedy(prompt, 20) for prompt in prompts]
    assert generated_tokens(prompts, 20, "streaming", "rerotate") == expected
    assert generated_tokens(prompts, 20, "streaming") != expected, (
        "the reference must differ without rerotate"
    )


def test_rerotate_alone_equals_streaming_without_sinks() -> None:
    prompts = [[1, 2, 3, 4], [5] * 20]
    plans = [Plan.uniform(*stack, budget=8, buffer=3) for stack in (("random",), ("rerotate",))]
    engines = [Engine(tiny.shared_model(), None, plan, slots=2) for plan in plans]
    window = Plan.uniform("streaming", budget=8, buffer=3, knobs={"streaming": {"n_sink": 0}})
    engines.append(Engine(tiny.shared_model(), None, window, slots=2))
    random_tokens, alone, sliding = (
        {one.id: one.tokens for one in engine.generate(prompts, max_new_tokens=30).results()}
        for engine in engines
    )
    assert alone == sliding
    assert alone != random_tokens


@attrs.define(eq=False)
class RecordsKeys:
    """Records the keys and positions of every compaction."""

    seen: list[tuple[Tensor, Tensor]] = attrs.field(factory=list)

    @hookimpl(wrapper=True)
    def score(
        self, layer_idx: int, keys: Tensor, positions: Tensor
    ) -> Generator[None, Tensor, Tensor]:
        self.seen.append((keys.clone(), positions.clone()))
        return (yield)


@given(
    st.data(),
    caches(min_rows=3, max_rows=20, batch=2),
    st.sampled_from(["streaming", "h2o", "tova", "random", "knorm"]),
)
def test_kept_keys_are_rotated_to_contiguous_positions(
    data: st.DataObject, drawn: Drawn, name: str
) -> None:
    least = {"streaming": 5, "knorm": 8}.get(name, 1)
    budget = data.draw(st.integers(least, max(least, drawn.num_rows - 1)))
    plan = data.draw(rounds(drawn.num_rows))
    plan["compact_at"] = sorted({*plan["compact_at"], drawn.num_rows})
    recorder = RecordsKeys()
    kept = replay(
        [name, "rerotate", recorder], drawn.keys, drawn.values, drawn.queries, budget=budget, **plan
    )
    counts = [count for count in plan["compact_at"] if count > budget]
    assert len(recorder.seen) == len(counts)
    stayed, at = None, 0
    for (keys, positions), count in zip(recorder.seen, counts, strict=True):
        for b, h in ((b, h) for b in range(2) for h in range(drawn.keys.shape[1])):
            for row, position in enumerate(positions[b, h].tolist()):
                index = position
                if stayed is not None and row < budget:
                    assert stayed[b, h, row] == position
                    index = at - budget + row
                expected = reference.rotated(drawn.keys[b, h, position], index - position)
                torch.testing.assert_close(
                    keys[b, h, row].double(), torch.tensor(expected).double(), atol=1e-4, rtol=1e-4
                )
        stayed, at = kept[plan["compact_at"].index(count)], count


@given(st.data(), caches())
def test_kept_rows_are_those_of_the_previous_policy(data: st.DataObject, drawn: Drawn) -> None:
    budget = data.draw(budgets(drawn.num_rows, min_budget=5))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    kept = keep_rows(["streaming", "rerotate"], *inputs, budget=budget)
    assert (kept == keep_rows("streaming", *inputs, budget=budget)).all()


def test_rounding_of_repeated_rotations_in_bfloat16_is_small() -> None:
    # Sinks of a sequence of 10,000 tokens are rotated 78 times and rounded each time.
    keys = torch.randn(1, 8, 4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    by = torch.full(keys.shape[:3], 128)
    moved = keys
    for _ in range(78):
        moved = rotate_halves(0, moved, by)
    at_once = rotate_halves(0, keys.double().float(), 78 * by)
    error = (moved.float() - at_once).norm() / at_once.norm()
    assert error < 0.03
