"""Prompts enter in forwards of a bounded number of tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import generated_tokens
from compare import result_values
from hypothesis import given
from hypothesis import strategies as st
from strategies import costly, plans, prompts
from tiny import FAMILIES, shared_model

from kvpolicy import Engine, Plan, PolicyCache, Request
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.engine import scheduler
from kvpolicy.engine.bound_plan import DEFAULT_MAX_TOKENS, default_chunk
from kvpolicy.model.forward_input import ForwardInput

NUM_LAYERS = 2
# As in test_open_run.py: in double precision the order of additions does not matter.
models = st.builds(
    shared_model,
    st.sampled_from(FAMILIES),
    seed=st.integers(0, 3),
    num_layers=st.just(NUM_LAYERS),
    dtype=st.just(torch.float64),
)
long_prompts = prompts(count=5, max_len=48)
most_tokens = st.integers(1, 60)
chunks = st.sampled_from([3, 7, 512])


def forwards_of(engine: Engine) -> list[ForwardInput]:
    """The list to which the forwards of an engine will be added."""
    forwards: list[ForwardInput] = []
    forward: Callable[[ForwardInput], Any] = engine.adapter.forward

    def note(given: ForwardInput) -> Any:
        forwards.append(given)
        return forward(given)

    engine.adapter.forward = note  # type: ignore[method-assign]
    return forwards


@pytest.mark.slow
@costly
@given(models, long_prompts, plans(num_layers=NUM_LAYERS), chunks, most_tokens, st.integers(1, 5))
def test_no_prefill_exceeds_the_most_tokens_and_results_do_not_depend_on_them(
    model: torch.nn.Module,
    prompts: list[list[int]],
    plan: Plan,
    chunk: int,
    most: int,
    slots: int,
) -> None:
    engine = Engine(model, plan=plan, slots=slots, chunk=chunk, max_tokens_per_forward=most)
    forwards = forwards_of(engine)
    results = engine.generate(prompts, max_new_tokens=8).results()
    # A decode step has one token of each sequence, whatever their number.
    sizes = [one.token_ids.numel() for one in forwards if one.token_ids.shape[1] > 1]
    assert all(size <= most for size in sizes)
    expected = Engine(model, plan=plan, slots=3).generate(prompts, max_new_tokens=8).results()
    assert [result_values(one) for one in results] == [result_values(one) for one in expected]


def prefill_shapes(lengths: list[int], **options: Any) -> list[list[int]]:
    """New tokens of each sequence in each prefill of a group of prompts."""
    plan = Plan.uniform("streaming", budget=16, buffer=4)
    engine = Engine(shared_model(), plan=plan, slots=len(lengths), **options)
    forwards = forwards_of(engine)
    engine.generate([[3] * length for length in lengths], max_new_tokens=1).results()
    return [one.step.tokens.lengths.tolist() for one in forwards]


def test_as_many_sequences_as_fit_are_prefilled_together_the_shortest_first() -> None:
    assert prefill_shapes([5, 5, 5, 5, 5], max_tokens_per_forward=12) == [[5, 5], [5, 5], [5]]
    # Pads are computed, too: three sequences of up to 6 tokens would be 18.
    assert prefill_shapes([6, 2, 3], max_tokens_per_forward=17) == [[2, 3], [6]]
    assert prefill_shapes([6, 2, 3], max_tokens_per_forward=18) == [[6, 2, 3]]
    assert prefill_shapes([9, 2], max_tokens_per_forward=4) == [[2], [4], [3], [2]]
    assert prefill_shapes([9, 2], chunk=3, max_tokens_per_forward=6) == [[3, 2], [3], [3]]


def test_one_prompt_may_fill_a_forward_on_a_gpu_and_an_eighth_of_it_on_a_cpu() -> None:
    assert default_chunk(torch.device("cuda")) == DEFAULT_MAX_TOKENS == 8192
    assert default_chunk(torch.device("cpu")) == 1024
    plan = Plan.uniform("full")
    assert Engine(shared_model(), plan=plan).chunk == 1024
    assert Engine(shared_model(), plan=plan, chunk=7).chunk == 7


def test_forwards_have_few_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "FEW_PADS", 4)
    # A quarter of the columns, or four, may be pads.
    assert prefill_shapes([12, 3, 10, 4, 12]) == [[3, 4], [12, 10, 12]]
    assert prefill_shapes([2, 6]) == [[2, 6]]
    assert prefill_shapes([2, 7]) == [[2], [7]]


@pytest.mark.parametrize(("most", "num_prompts"), [(4, 1), (6, 3), (20, 3), (8192, 3)])
def test_a_bounded_number_of_prompt_tokens_enters_between_two_decode_steps(
    most: int, num_prompts: int
) -> None:
    plan = Plan.uniform("h2o", budget=16, buffer=4, prefill_buffer=12)
    engine = Engine(
        shared_model(), plan=plan, slots=5, max_tokens_per_forward=most, steps_per_read=2
    )
    forwards, run = forwards_of(engine), engine.open_run(max_len=200)
    running = [run.submit(Request([7] * 5, 150, stop_ids=())) for _ in range(2)]
    while len(forwards) < 5:
        run.step()
    first, between, waited = len(forwards), 0, []
    lengths = range(60, 60 + num_prompts)
    arriving = {run.submit(Request([3] * length, 4, stop_ids=())) for length in lengths}
    while arriving:
        arriving -= {number for number, _ in run.step().tokens}
    for one in forwards[first:]:
        width, num = one.token_ids.shape[1], one.token_ids.numel()
        if width == 1 and isinstance(one.step, StaticStep):
            waited.append(between)
            between = 0
        else:
            between += num
    assert {seq.id for seq in run.active} >= set(running)
    waited.append(between)
    assert max(waited) <= most
    assert sum(waited) >= sum(lengths)


def test_a_full_slab_does_not_shorten_the_chunks_of_other_sequences() -> None:
    # 20 rows, and 4 more after each compaction.
    assert prefill_shapes([30, 22, 7]) == [[20, 20, 7], [4, 2], [4], [2]]


def test_eight_thousand_tokens_are_prefilled_together_by_default() -> None:
    assert prefill_shapes([16] * 513) == [[16] * 512, [16]]


@costly
@given(models, long_prompts, most_tokens)
def test_policy_cache_has_the_same_bound(
    model: torch.nn.Module, prompts: list[list[int]], most: int
) -> None:
    plan = Plan.uniform("h2o", budget=12, buffer=4, knobs={"h2o": {"n_recent": 4}})
    cache = PolicyCache(model, plan, max_tokens_per_forward=most)
    forwards = forwards_of(cache._bound)
    tokens = generated_tokens(model, prompts, 6, past_key_values=cache)
    sizes = [one.token_ids.numel() for one in forwards if one.token_ids.shape[1] > 1]
    assert all(size <= most for size in sizes)
    expected = Engine(model, plan=plan).generate(prompts, max_new_tokens=6).results()
    assert tokens == [list(result.tokens) for result in expected]
