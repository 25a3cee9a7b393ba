"""Running requests: order, stops, cancellation, errors, pieces of text, and the report."""

import time
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import prompts
from tiny import greedy_tokens, shared_model, tiny_model, tiny_tokenizer

from kvpolicy import Engine, Plan, Request, Sampling, hookimpl
from kvpolicy.cli.run import format_report
from kvpolicy.engine.engine import Run
from kvpolicy.engine.results import RunReport
from kvpolicy.errors import KVPolicyError
from kvpolicy.plan.spec import PolicySpec

FULL = Plan.uniform("full")
TOKENIZER = tiny_tokenizer()


def engine(**options: Any) -> Engine:
    return Engine(shared_model(), **({"plan": FULL, "slots": 2} | options))


# --- order ----------------------------------------------------------------------------------


def test_results_come_as_they_finish_and_are_numbered_as_the_prompts() -> None:
    lengths = [9, 3, 6, 2]
    run = engine(slots=4).generate([Request([7, 8], max_new_tokens=n) for n in lengths])
    assert [result.id for result in run] == [3, 1, 2, 0]


def test_collected_results_are_in_the_order_of_the_prompts() -> None:
    lengths = [9, 3, 6, 2]
    run = engine(slots=4).generate([Request([7, 8], max_new_tokens=n) for n in lengths])
    assert [len(result.tokens) for result in run.results()] == lengths


def test_results_taken_before_are_not_handed_out_twice() -> None:
    run = engine().generate([[1], [2], [3]], max_new_tokens=3)
    first = next(iter(run))
    rest = run.results()
    assert sorted([first.id, *(result.id for result in rest)]) == [0, 1, 2]
    assert run.results() == []


def test_no_prompts_give_no_results() -> None:
    run = engine().generate([])
    assert run.results() == []
    assert run.report.num_requests == 0


def test_nothing_is_computed_before_the_run_is_iterated_over() -> None:
    run = engine().generate([[1, 2, 3]], max_new_tokens=4)
    assert run.report.new_tokens == 0
    assert run.report.elapsed_s == 0


# --- schedule -------------------------------------------------------------------------------


@attrs.define(eq=False)
class ShortestFirst:
    """Admits the shortest prompt, alone or with its like."""

    admitted: list[list[int]] = attrs.field(factory=list)

    @hookimpl
    def schedule(self, waiting: Any, num_free: int) -> list[list[int]]:
        shortest = min(request.prompt_len for request in waiting)
        alike = [request.id for request in waiting if request.prompt_len == shortest]
        self.admitted.append(alike[:num_free])
        return [alike[:num_free]]


@given(prompts(count=5, max_len=6), st.integers(1, 3))
def test_a_schedule_changes_who_comes_first_and_no_token(
    prompts: list[list[int]], slots: int
) -> None:
    policy = ShortestFirst()
    plan = Plan(stack=(PolicySpec.of("rkv"),), budget=12, buffer=2)
    scheduled = attrs.evolve(plan, schedule=(PolicySpec.of(policy),))
    model = shared_model(dtype=torch.float64)
    answers = [
        Engine(model, plan=one, slots=slots).generate(prompts, max_new_tokens=8).results()
        for one in (plan, scheduled)
    ]
    assert [one.tokens for one in answers[0]] == [one.tokens for one in answers[1]]
    order = [number for group in policy.admitted for number in group]
    assert order == sorted(range(5), key=lambda number: len(prompts[number]))
    assert max(map(len, policy.admitted)) <= slots


def test_by_default_requests_are_admitted_in_order_of_arrival() -> None:
    run = engine(slots=1).generate([[5] * 9, [5], [5] * 4], max_new_tokens=2)
    assert [result.id for result in run] == [0, 1, 2]


# --- stops ----------------------------------------------------------------------------------


@given(prompts(count=3), st.sets(st.integers(0, 60), min_size=1, max_size=20))
def test_a_stop_id_ends_the_generation_and_is_its_last_token(
    prompts: list[list[int]], stop_ids: set[int]
) -> None:
    results = engine().generate(prompts, max_new_tokens=12, stop_ids=sorted(stop_ids)).results()
    for prompt, result in zip(prompts, results, strict=True):
        plain = greedy_tokens(shared_model(), prompt, 12)
        met = [place for place, token in enumerate(plain) if token in stop_ids]
        end = met[0] + 1 if met else 12
        assert list(result.tokens) == plain[:end]
        assert result.finish_reason == ("stop" if met else "length")


def test_the_models_own_stop_ids_are_the_default_and_none_can_be_asked_for() -> None:
    prompt = [4, 8, 15]
    plain = greedy_tokens(shared_model(), prompt, 8)
    model = tiny_model()
    model.generation_config.eos_token_id = [60, plain[2]]
    bound = Engine(model, plan=FULL)
    (result,) = bound.generate([prompt], max_new_tokens=8).results()
    assert list(result.tokens) == plain[: plain.index(plain[2]) + 1]
    (result,) = bound.generate([prompt], max_new_tokens=8, stop_ids=()).results()
    assert list(result.tokens) == plain


def test_text_ends_before_a_stop_string_and_tokens_with_the_one_that_completed_it() -> None:
    prompt = "what is 2+2?"
    (plain,) = engine(tokenizer=TOKENIZER).generate([prompt], max_new_tokens=16).results()
    assert plain.text == TOKENIZER.decode(plain.tokens)
    stop = plain.text[6:9]
    cut = plain.text.index(stop)
    (result,) = (
        engine(tokenizer=TOKENIZER)
        .generate([prompt], max_new_tokens=16, stop=["never said", stop])
        .results()
    )
    assert result.finish_reason == "stop"
    assert result.text == plain.text[:cut]
    assert plain.text.startswith(TOKENIZER.decode(result.tokens))
    assert TOKENIZER.decode(result.tokens).endswith(stop)


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    (result,) = (
        engine(tokenizer=TOKENIZER).generate(["stop"], max_new_tokens=5, stop=["stop"]).results()
    )
    assert len(result.tokens) == 5


def test_each_request_stops_by_its_own_rules() -> None:
    prompt = [4, 8, 15]
    plain = greedy_tokens(shared_model(), prompt, 8)
    requests = [
        Request(prompt, max_new_tokens=8, stop_ids=(plain[1],)),
        Request(prompt, max_new_tokens=4, stop_ids=()),
        Request(prompt, max_new_tokens=8, stop_ids=()),
    ]
    results = engine(slots=3).generate(requests).results()
    assert [r.finish_reason for r in results] == ["stop", "length", "length"]
    assert [len(r.tokens) for r in results] == [plain.index(plain[1]) + 1, 4, 8]


def test_the_models_positions_limit_a_generation() -> None:
    model = tiny_model(max_position_embeddings=16)
    (result,) = Engine(model, plan=FULL).generate([[1] * 10], max_new_tokens=50).results()
    assert result.finish_reason == "length"
    assert len(result.tokens) == 6


# --- cancellation ---------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 8))
def test_cancelling_one_request_leaves_the_others_as_they_are(
    slots: int, number: int, rounds: int
) -> None:
    prompts = [[1, 2, 3], [4] * 9, [5], [6, 7]]
    bound = engine(slots=slots)
    plain = bound.generate(prompts, max_new_tokens=6).results()
    run = bound.generate(prompts, max_new_tokens=6)
    done = [result for _ in range(rounds) for result in run.step().results]
    was_done = number in {result.id for result in done}
    run.cancel(number)
    results = sorted(done + run.results(), key=lambda result: result.id)
    assert [result.id for result in results] == [0, 1, 2, 3]
    for before, after in zip(plain, results, strict=True):
        if after.id == number and not was_done:
            assert after.finish_reason == "cancelled"
            assert after.tokens == before.tokens[: len(after.tokens)]
            assert len(after.tokens) < 6
        else:
            assert (after.tokens, after.finish_reason) == (before.tokens, "length")


def test_a_request_that_never_started_is_cancelled_without_tokens() -> None:
    run = engine(slots=1).generate([[1], [2]], max_new_tokens=5)
    run.cancel(1)
    assert [(r.finish_reason, r.tokens) for r in run.results()][1] == ("cancelled", ())


@pytest.mark.parametrize("number", [-1, 2, "0", None])
def test_cancelling_an_unknown_request_is_refused(number: object) -> None:
    run = engine().generate([[1], [2]])
    with pytest.raises(KVPolicyError, match="cancel"):
        run.cancel(number)


# --- errors of one request ------------------------------------------------------------------


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ([], "empty"),
    "empty text": ("", "empty"),
    "an id beyond the vocabulary": ([1, 61], "61"),
    "a negative id": ([-1, 3], "-1"),
    "a fraction": ([1.5], "1.5"),
    "too long": ([1] * 512, "512"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_becomes_its_own_result_and_stops_nobody_else(case: str) -> None:
    prompt, says = BAD_PROMPTS[case]
    run = engine(tokenizer=TOKENIZER).generate([[1, 2], prompt, [3]], max_new_tokens=4)
    first, bad, last = run.results()
    assert bad.finish_reason == "error"
    assert says in bad.error
    assert bad.tokens == ()
    assert list(first.tokens) == greedy_tokens(shared_model(), [1, 2], 4)
    assert list(last.tokens) == greedy_tokens(shared_model(), [3], 4)
    assert (first.error, last.error) == (None, None)


def test_text_without_a_tokenizer_is_an_error_of_that_request() -> None:
    bad, good = engine().generate(["hello", [1]], max_new_tokens=2).results()
    assert "tokenizer" in bad.error
    assert good.finish_reason == "length"


def test_stop_strings_without_a_tokenizer_are_an_error_of_that_request() -> None:
    bad, good = engine().generate([Request([1], stop=("x",)), Request([1], 2)]).results()
    assert "tokenizer" in bad.error
    assert good.finish_reason == "length"


def test_a_run_of_bad_prompts_only_ends() -> None:
    results = engine().generate([[], [99]]).results()
    assert [result.finish_reason for result in results] == ["error", "error"]


def test_token_ids_may_be_numpy_or_torch_integers() -> None:
    np = pytest.importorskip("numpy")
    expected = greedy_tokens(shared_model(), [1, 2], 3)
    prompts = [np.array([1, 2]), torch.tensor([1, 2]), (1, 2)]
    results = engine().generate(prompts, max_new_tokens=3).results()
    assert [list(result.tokens) for result in results] == [expected] * 3


@pytest.mark.parametrize(
    "options", [{"slots": 0}, {"slots": 2.0}, {"chunk": 0}, {"plan": None}], ids=str
)
def test_an_engine_refuses_what_it_cannot_run_with(options: dict) -> None:
    with pytest.raises(KVPolicyError, match=next(iter(options))):
        engine(**options)


@pytest.mark.parametrize("number", [0, -1, 2.5, "many", True])
def test_a_number_of_new_tokens_that_is_none_is_refused(number: object) -> None:
    with pytest.raises(KVPolicyError, match="max_new_tokens"):
        engine().generate([[1]], max_new_tokens=number)


def test_one_sampling_for_each_prompt_or_one_for_all() -> None:
    with pytest.raises(KVPolicyError, match="2 samplings"):
        engine().generate([[1], [2], [3]], sampling=[Sampling(), Sampling()])


# --- seeds ----------------------------------------------------------------------------------


def test_one_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    def drawn(seed: int) -> list[tuple[int, ...]]:
        how = Sampling(temperature=1.2, seed=seed)
        results = engine().generate([[1, 2], [3]], max_new_tokens=20, sampling=how).results()
        return [result.tokens for result in results]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


# --- the report -----------------------------------------------------------------------------


def test_the_report_counts_what_happened() -> None:
    plan = Plan.uniform("streaming", budget=6, buffer=2)
    run = Engine(shared_model(), plan=plan, slots=2).generate(
        [[1] * 7, [], [2] * 3], max_new_tokens=9
    )
    results = run.results()
    report = run.report
    assert report.num_requests == 3
    assert report.prompt_tokens == 7 + 3
    assert report.new_tokens == sum(len(result.tokens) for result in results) == 18
    assert report.compactions == 2 * sum(result.compactions for result in results)
    assert report.elapsed_s >= report.prefill_s + report.decode_s > 0
    assert report.decode_s + report.prefill_s >= report.policy_s > 0
    assert report.throughput_tok_s == pytest.approx(18 / report.elapsed_s)
    assert run.report == report, "the report of a run that is done no longer changes"


def test_the_share_of_policies_is_of_decode_time_and_of_their_work_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that goes on by a second when a policy scores, and by three when a token is drawn.

    A prompt of 40 tokens enters in chunks, with a compaction after each; few follow it.
    """
    now, scored_at = [0.0], list[int]()
    num_drawn = [0]

    @attrs.define(eq=False)
    class Slow:
        @hookimpl
        def score(self, keys: torch.Tensor) -> torch.Tensor:
            now[0] += 1
            scored_at.append(num_drawn[0])
            return keys.norm(dim=-1)

    def draw(sequences: Any, logits: Any) -> list[int]:
        now[0] += 3
        num_drawn[0] += 1
        return [1] * len(sequences)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    engine = Engine(shared_model(), plan=Plan.uniform(Slow(), budget=6, buffer=2), slots=1)
    run = Run(engine, [Request([1] * 40, max_new_tokens=10, stop_ids=())], draw)
    run.results()
    report = run.report
    # The first token is drawn in prefill; the chunk that it follows is compacted after it.
    in_decode = sum(drawn >= 2 for drawn in scored_at)
    assert report.policy_s == len(scored_at) > report.decode_s, "more than all of it"
    assert report.decode_policy_s == in_decode > 0
    assert report.decode_s == 9 * 3 + in_decode
    assert report.prefill_s == 3 + len(scored_at) - in_decode
    assert report.policy_share == in_decode / (27 + in_decode)
    assert report.to_dict()["policy_share"] == report.policy_share
    assert f"policies took {report.policy_share:.1%} of the decode time" in format_report(report)
    assert RunReport(score_s=1.0).policy_share == 0, "before the first step"


def test_records_are_plain_data() -> None:
    import json

    run = engine().generate([[1, 2]], max_new_tokens=3)
    (result,) = run.results()
    assert json.loads(json.dumps(result.to_dict()))["tokens"] == list(result.tokens)
    assert json.loads(json.dumps(run.report.to_dict()))["new_tokens"] == 3
