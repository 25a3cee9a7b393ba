"""Repetition: loops against a search over all periods and starts, and outputs of a model."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lab_samples import CELLS, sample
from tiny import shared_model, tiny_model, tiny_tokenizer

from kvpolicy import Engine, Plan
from kvpolicy.engine.requests.request import Request, Sampling
from kvpolicy.lab.analysis.compare import paired_difference
from kvpolicy.lab.shared import Shared
from kvpolicy.lab.statistics import paired_proportions, pass_at_1
from kvpolicy.lab.tasks.repetition import (
    LOOPS,
    PERIOD,
    REPEATED,
    START,
    Loop,
    Repetition,
    find_loop,
    share_repeated,
)
from kvpolicy.lab.tasks.task import EvalOutcome, EvalRequest, Example, load_task

TOKENIZER = tiny_tokenizer()


def all_loops(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Period and start of every end of a sequence that is a loop, by its definition."""
    found = []
    for period in range(1, len(tokens) + 1):
        for start in range(len(tokens)):
            end = tokens[start:]
            is_long = len(end) >= 16 and len(end) >= 3 * period
            if is_long and all(a == b for a, b in zip(end[period:], end, strict=False)):
                found.append((period, start))
    return found


tokens = st.lists(st.integers(0, 2), max_size=40)
looping = st.builds(
    lambda head, unit, rounds, part: head + unit * rounds + unit[:part],
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
    st.integers(2, 9),
    st.integers(0, 8),
)


@given(st.one_of(tokens, looping))
@example([7] * 16)
@example([7] * 15)
@example([1, 2, 3, 4, 5, 6] * 2 + [1, 2, 3, 4, 5])
@example([1, 2, 3, 4, 5, 6] * 3)
def test_a_loop_has_the_smallest_period_and_the_earliest_start(output: list[int]) -> None:
    loops = all_loops(output)
    assert find_loop(output) == (Loop(*min(loops)) if loops else None)


def test_loops_of_text() -> None:
    assert find_loop([9, 8, *([1, 2, 3, 4, 5, 6] * 3), 1, 2]) == Loop(period=6, start=2)
    assert find_loop([1, 2, 3, 4, 5, 6] * 2 + [1, 2, 3, 4]) is None, "not three rounds"
    assert find_loop([5] * 15) is None, "a short run is no loop"
    assert find_loop([5] * 30 + [1]) is None, "it has come out of it"
    assert find_loop([1, 1, 2] * 20) == Loop(period=3, start=0)


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 5))
def test_repeated_n_grams_are_those_beyond_the_first_of_their_kind(
    output: list[int], size: int
) -> None:
    grams = Counter(str(output[i : i + size]) for i in range(len(output) - size + 1))
    expected = sum(n - 1 for n in grams.values()) / grams.total() if grams else None
    found = share_repeated(output, size)
    assert found == (expected if expected is None else pytest.approx(expected))


def measured(prompts: Sequence[str], plan: Plan, model: object, num: int) -> list[EvalOutcome]:
    engine = Engine(model, TOKENIZER, plan, slots=2)
    asked = [
        EvalRequest(Example(i, prompt, ""), Request(prompt, num, Sampling(2.0, seed=i)))
        for i, prompt in enumerate(prompts)
    ]
    trial = Repetition().begin(engine, asked, Shared())
    found = {result.id: trial.outcome(result) for result in trial.run}
    return [found[number] for number in range(len(prompts))]


def test_outputs_are_the_greedy_ones_under_the_plan() -> None:
    prompts = ["abcdefgh", "hello there", "dcba abcd abcd"]
    plan = Plan.uniform("streaming", budget=10, buffer=6)
    found = measured(prompts, plan, shared_model(), 40)
    written = Engine(shared_model(), TOKENIZER, plan).generate(prompts, max_new_tokens=40).results()
    for outcome, result in zip(found, written, strict=True):
        assert outcome.result.tokens == result.tokens
        loops = all_loops(result.tokens)
        assert outcome.values[LOOPS] == bool(loops)
        assert (outcome.values.get(PERIOD), outcome.values.get(START)) == (
            min(loops) if loops else (None, None)
        )
        assert outcome.values[REPEATED] == share_repeated(result.tokens)
        assert outcome.correct is None


def test_a_stop_token_is_not_part_of_a_loop() -> None:
    model = tiny_model()
    with_head = model.get_output_embeddings().weight.data
    with_head[:] = 0.0  # all tokens are equal, the first that may be drawn is
    (found,) = measured(["abc"], Plan.uniform("full"), model, 40)
    assert set(found.result.tokens) == {0}
    assert found.values == {LOOPS: 1, PERIOD: 1, START: 0, REPEATED: pytest.approx(36 / 37)}
    asked = EvalRequest(Example(0, "abc", ""), Request("abc", 40, stop_ids=0, min_new_tokens=20))
    trial = Repetition().begin(Engine(model, TOKENIZER, Plan.uniform("full")), [asked], Shared())
    (stopped,) = (trial.outcome(result) for result in trial.run)
    assert stopped.result.tokens == (*[1] * 20, 0)
    assert stopped.values == {LOOPS: 1, PERIOD: 1, START: 0, REPEATED: pytest.approx(16 / 17)}


def test_a_request_that_fails_has_no_values() -> None:
    failed, fine = measured(["a" * 600, "ab"], Plan.uniform("full"), shared_model(), 9)
    assert failed.result.finish_reason == "error"
    assert not failed.values
    assert fine.values


def test_shares_have_the_interval_of_shares_and_only_loops_have_periods() -> None:
    values = [{LOOPS: 1.0, PERIOD: 4.0, START: 10.0}, {LOOPS: 0.0}, {LOOPS: 0.0}]
    first = [sample(CELLS[0], i, values=one) for i, one in enumerate(values)]
    second = [sample(CELLS[0], i, values={LOOPS: 0.0}) for i in range(3)]
    loops, _, period, _ = Repetition().columns
    assert loops.estimate(first) == pass_at_1([[True], [False], [False]])
    assert loops.estimate([sample(CELLS[0], 0)]) is None
    assert period.value(first[0]) == 4
    (of_one,) = [period.estimate(first)]
    assert of_one is not None
    assert of_one.value == 4
    assert paired_difference(loops, first, second) == paired_proportions(0, 1, 0, 2)


def test_the_task_takes_passages_or_the_prompts_of_another_task() -> None:
    assert load_task("repetition").name == "repetition"
    assert load_task("repetition:of=gsm8k").name == "repetition:of=gsm8k"
    assert isinstance(load_task("repetition:prompt_tokens=9").metric, Repetition)
