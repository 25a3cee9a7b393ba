"""Runs: result order, stops, cancellation, errors, and the report."""

import time
from collections import abc
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import costly, prompts
from tiny import greedy_tokens, shared_model, tiny_model, tiny_tokenizer

from kvpolicy import Engine, Extension, Plan, Request, Sampling, hookimpl
from kvpolicy.cli.run import format_report
from kvpolicy.engine.engine import Run
from kvpolicy.engine.requests.results import RunReport
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.errors import KVPolicyError
from kvpolicy.plan.spec import PolicySpec

FULL = Plan.uniform("full")
TOKENIZER = tiny_tokenizer()


def engine(**options: Any) -> Engine:
    return Engine(shared_model(), **({"plan": FULL, "slots": 2} | options))


# --- order ----------------------------------------------------------------------------------


def test_iteration_yields_results_in_order_of_completion() -> None:
    lengths = [9, 3, 6, 2]
    run = engine(slots=4).generate([Request([7, 8], max_new_tokens=n) for n in lengths])
    assert [result.id for result in run] == [3, 1, 2, 0]


def test_results_are_in_prompt_order() -> None:
    lengths = [9, 3, 6, 2]
    run = engine(slots=4).generate([Request([7, 8], max_new_tokens=n) for n in lengths])
    assert [len(result.tokens) for result in run.results()] == lengths


def test_results_are_returned_only_once() -> None:
    run = engine().generate([[1], [2], [3]], max_new_tokens=3)
    first = next(iter(run))
    rest = run.results()
    assert sorted([first.id, *(result.id for result in rest)]) == [0, 1, 2]
    assert run.results() == []


def test_empty_prompt_list_gives_no_results() -> None:
    run = engine().generate([])
    assert run.results() == []
    assert run.report.num_requests == 0


def test_run_is_lazy() -> None:
    run = engine().generate([[1, 2, 3]], max_new_tokens=4)
    assert run.report.new_tokens == 0
    assert run.report.elapsed_s == 0


# --- schedule -------------------------------------------------------------------------------


@attrs.define(eq=False)
class ShortestFirst:
    """Admits the shortest prompts first, those of equal length together."""

    admitted: list[list[int]] = attrs.field(factory=list)

    @hookimpl
    def schedule(self, waiting: Any, num_free: int) -> list[list[int]]:
        shortest = min(request.prompt_len for request in waiting)
        equally_short = [request.id for request in waiting if request.prompt_len == shortest]
        self.admitted.append(equally_short[:num_free])
        return [equally_short[:num_free]]


@costly
@given(prompts(count=5, max_len=6), st.integers(1, 3))
def test_schedule_changes_admission_order_but_no_token(
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


def test_default_schedule_admits_in_arrival_order() -> None:
    run = engine(slots=1).generate([[5] * 9, [5], [5] * 4], max_new_tokens=2)
    assert [result.id for result in run] == [0, 1, 2]


# --- stops ----------------------------------------------------------------------------------


@costly
@given(prompts(count=3), st.sets(st.integers(0, 60), min_size=1, max_size=20))
def test_generation_ends_with_the_stop_id(prompts: list[list[int]], stop_ids: set[int]) -> None:
    results = engine().generate(prompts, max_new_tokens=12, stop_ids=sorted(stop_ids)).results()
    for prompt, result in zip(prompts, results, strict=True):
        plain = greedy_tokens(shared_model(), prompt, 12)
        matches = [place for place, token in enumerate(plain) if token in stop_ids]
        end = matches[0] + 1 if matches else 12
        assert list(result.tokens) == plain[:end]
        assert result.finish_reason == ("stop" if matches else "length")


def test_model_stop_ids_are_the_default_and_can_be_disabled() -> None:
    prompt = [4, 8, 15]
    plain = greedy_tokens(shared_model(), prompt, 8)
    model = tiny_model()
    model.generation_config.eos_token_id = [60, plain[2]]
    the_engine = Engine(model, plan=FULL)
    (result,) = the_engine.generate([prompt], max_new_tokens=8).results()
    assert list(result.tokens) == plain[: plain.index(plain[2]) + 1]
    (result,) = the_engine.generate([prompt], max_new_tokens=8, stop_ids=()).results()
    assert list(result.tokens) == plain


def test_text_excludes_the_stop_string_and_tokens_include_it() -> None:
    prompt = "what is 2+2?"
    (plain,) = engine(tokenizer=TOKENIZER).generate([prompt], max_new_tokens=16).results()
    assert plain.text == TOKENIZER.decode(plain.tokens)
    stop = plain.text[6:9]
    cut = plain.text.index(stop)
    (result,) = (
        engine(tokenizer=TOKENIZER)
        .generate([prompt], max_new_tokens=16, stop=["absent", stop])
        .results()
    )
    assert result.finish_reason == "stop"
    assert result.text == plain.text[:cut]
    assert plain.text.startswith(TOKENIZER.decode(result.tokens))
    assert TOKENIZER.decode(result.tokens).endswith(stop)


def test_stop_string_in_the_prompt_is_ignored() -> None:
    (result,) = (
        engine(tokenizer=TOKENIZER).generate(["stop"], max_new_tokens=5, stop=["stop"]).results()
    )
    assert len(result.tokens) == 5


def test_each_request_has_its_own_stop_ids_and_length() -> None:
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


def test_max_positions_limit_the_generation() -> None:
    model = tiny_model(max_position_embeddings=16)
    (result,) = Engine(model, plan=FULL).generate([[1] * 10], max_new_tokens=50).results()
    assert result.finish_reason == "length"
    assert len(result.tokens) == 6


# --- cancellation ---------------------------------------------------------------------------


@costly
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 8))
def test_cancellation_does_not_change_other_requests(
    slots: int, number: int, num_steps: int
) -> None:
    prompts = [[1, 2, 3], [4] * 9, [5], [6, 7]]
    the_engine = engine(slots=slots)
    plain = the_engine.generate(prompts, max_new_tokens=6).results()
    run = the_engine.generate(prompts, max_new_tokens=6)
    done = [result for _ in range(num_steps) for result in run.step().results]
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


def test_cancelled_waiting_request_has_no_tokens() -> None:
    run = engine(slots=1).generate([[1], [2]], max_new_tokens=5)
    run.cancel(1)
    assert [(r.finish_reason, r.tokens) for r in run.results()][1] == ("cancelled", ())


def test_cancelling_an_unknown_request_raises() -> None:
    run = engine().generate([[1], [2]])
    for number in (-1, 2, "0", None):
        with pytest.raises(KVPolicyError, match="cancel"):
            run.cancel(number)


# --- errors of one request ------------------------------------------------------------------


def test_bad_prompt_becomes_an_error_result_and_others_finish() -> None:
    run = engine(tokenizer=TOKENIZER).generate([[1, 2], [1, 61], [3]], max_new_tokens=4)
    first, bad, last = run.results()
    assert (bad.finish_reason, bad.tokens) == ("error", ())
    assert "61" in bad.error
    assert list(first.tokens) == greedy_tokens(shared_model(), [1, 2], 4)
    assert list(last.tokens) == greedy_tokens(shared_model(), [3], 4)
    assert (first.error, last.error) == (None, None)


def test_run_of_only_bad_prompts_ends() -> None:
    results = engine().generate([[], [99]]).results()
    assert [result.finish_reason for result in results] == ["error", "error"]


def test_token_ids_accept_numpy_and_torch_integers() -> None:
    np = pytest.importorskip("numpy")
    expected = greedy_tokens(shared_model(), [1, 2], 3)
    prompts = [np.array([1, 2]), torch.tensor([1, 2]), (1, 2)]
    results = engine().generate(prompts, max_new_tokens=3).results()
    assert [list(result.tokens) for result in results] == [expected] * 3


# --- seeds ----------------------------------------------------------------------------------


def test_tokens_depend_on_the_seed_only() -> None:
    def sampled(seed: int) -> list[tuple[int, ...]]:
        sampling = Sampling(temperature=1.2, seed=seed)
        results = engine().generate([[1, 2], [3]], max_new_tokens=20, sampling=sampling).results()
        return [result.tokens for result in results]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


# --- the report -----------------------------------------------------------------------------


def test_report_counts_tokens_compactions_and_time() -> None:
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
    assert run.report == report, "the report of a finished run must not change"


def test_policy_share_is_policy_time_in_decode_over_decode_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock advances by 1 s per score() and by 3 s per sampling step.

    A prompt of 40 tokens is prefilled in chunks, with a compaction after each; decoding
    adds a few more.
    """
    now, scored_at = [0.0], list[int]()
    num_sampled = [0]

    @attrs.define(eq=False)
    class Slow:
        @hookimpl
        def score(self, layer_idx: int, keys: torch.Tensor) -> torch.Tensor:
            now[0] += 1
            scored_at.append(num_sampled[0])
            return keys.norm(dim=-1)

    def fake_sample(sequences: Any, logits: Any) -> torch.Tensor:
        now[0] += 3
        num_sampled[0] += 1
        return torch.ones(len(sequences), dtype=torch.int64)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    engine = Engine(shared_model(), plan=Plan.uniform(Slow(), budget=6, buffer=2), slots=1)
    run = Run(engine, [Request([1] * 40, max_new_tokens=10, stop_ids=())], fake_sample)
    run.results()
    report = run.report
    # The first token is sampled in prefill; the last chunk is compacted after it.
    in_decode = sum(sampled >= 2 for sampled in scored_at)
    assert report.policy_s == len(scored_at) > report.decode_s, "includes prefill"
    assert report.decode_policy_s == in_decode > 0
    assert report.decode_s == 9 * 3 + in_decode
    assert report.prefill_s == 3 + len(scored_at) - in_decode
    assert report.policy_share == in_decode / (27 + in_decode)
    assert report.to_dict()["policy_share"] == report.policy_share
    assert f"policies took {report.policy_share:.1%} of the decode time" in format_report(report)
    assert RunReport(score_s=1.0).policy_share == 0, "before the first step"


def test_what_fills_slots_while_others_are_decoded_is_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0]

    class Fills(Extension):
        def admit(self, group: abc.Sequence[Sequence]) -> None:
            now[0] += 10

        def advance(self, sequences: abc.Sequence[Sequence]) -> None:
            now[0] += 100

    def fake_sample(sequences: Any, logits: Any) -> torch.Tensor:
        now[0] += 1
        return torch.ones(len(sequences), dtype=torch.int64)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    run = Run(
        engine(slots=1, extensions=[Fills]),
        [Request([1], max_new_tokens=4, stop_ids=()) for _ in range(3)],
        fake_sample,
    )
    run.results()
    assert (run.report.prefill_s, run.report.decode_s) == (3 * 111, 3 * 3)


def test_records_are_plain_data() -> None:
    import json

    run = engine().generate([[1, 2]], max_new_tokens=3)
    (result,) = run.results()
    assert json.loads(json.dumps(result.to_dict()))["tokens"] == list(result.tokens)
    assert json.loads(json.dumps(run.report.to_dict()))["new_tokens"] == 3
