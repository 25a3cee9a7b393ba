"""A model under a plan as a model of lm-evaluation-harness, compared with the harness's own."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import r1_tokenizer, tiny_model

pytest.importorskip("lm_eval", reason="the extra 'lm-eval' is not installed")

from kvpolicy_reasoner import bundled_path
from kvpolicy_reasoner.tokenizer import build_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from kvpolicy import Engine, Plan
from kvpolicy.engine.requests.request import Request
from kvpolicy.errors import KVPolicyError, ModelError, RequestError, TaskError
from kvpolicy.lab.lm_eval.evaluate import AnswerCache
from kvpolicy.lab.lm_eval.loglikelihood import Continuation, branches_of
from kvpolicy.lab.lm_eval.model import PolicyLM, read_settings
from kvpolicy.lab.shared import Shared
from kvpolicy.lab.tasks.likelihood import LOSS, Perplexity
from kvpolicy.lab.tasks.task import EvalRequest, Example, load_task
from kvpolicy.model.loading import load_model

# fp32, 500 tokens summed, two orders of adding: rounding only.
CLOSE = 2e-3

FULL = Plan.uniform("full")
SMALL = Plan.uniform("streaming", budget=12, buffer=4)

TOKENIZER = build_tokenizer()
MODEL = tiny_model(
    "qwen2",
    vocab=len(TOKENIZER),
    eos_token_id=TOKENIZER.eos_token_id,
    pad_token_id=TOKENIZER.pad_token_id,
)
POSITIONS = MODEL.config.max_position_embeddings


def lm(plan: Plan = FULL, *, slots: int = 3, **options: Any) -> PolicyLM:
    return PolicyLM(Engine(MODEL, TOKENIZER, plan, slots=slots), **options)


def hf_lm() -> Any:
    pytest.importorskip("accelerate", reason="the harness's own model needs accelerate")
    from lm_eval.models.huggingface import HFLM

    # One fewer than the positions: the engine counts the token that it samples last.
    return HFLM(MODEL, tokenizer=build_tokenizer(), batch_size=3, max_length=POSITIONS - 1)


def instances(kind: str, all_arguments: Sequence[tuple[Any, ...]], task: str = "t") -> list[Any]:
    return [
        Instance(kind, {}, arguments, idx=0, metadata=(task, number, 1))
        for number, arguments in enumerate(all_arguments)
    ]


def text(num_tokens: int, seed: int) -> str:
    """A random text of about this many tokens."""
    rng = random.Random(seed)
    words = ["rent", "tea", "oak", " is ", " = ", " + ", "3", "7", "12", ". ", "What", "\n"]
    return "".join(rng.choice(words) for _ in range(num_tokens))


def generation(*contexts: str, **settings: Any) -> list[Any]:
    return instances("generate_until", [(context, settings) for context in contexts])


# Generation


def test_texts_equal_the_harness_if_nothing_is_evicted() -> None:
    free = lm().generate_until(generation(text(9, 0), max_gen_toks=30))[0]
    common = max(set(free), key=free.count)
    (end,) = TOKENIZER(common)["input_ids"]
    asked = [
        (text(5 + 7 * number, number), settings)
        for number in range(6)
        for settings in (
            {"max_gen_toks": 30},
            {"max_gen_toks": 12, "until": []},
            {"max_new_tokens": 40, "until": [common, "7"], "do_sample": False},
            {"max_gen_toks": 25, "until": "tea", "temperature": 0.0},
            {"max_gen_toks": 25, "repetition_penalty": 1.5},
            {"max_gen_toks": 25, "eos_token_id": end},
            {"max_gen_toks": 25, "eos_token_id": [end], "min_new_tokens": 9},
        )
    ]
    requests = instances("generate_until", asked)
    ours, theirs = lm().generate_until(requests), hf_lm().generate_until(requests)
    assert ours == theirs
    assert len(set(ours)) > len(asked) / 3, "texts differ, so that their order matters"
    assert any(len(one) < len(other) for one, other in zip(ours[2::7], ours[0::7], strict=True))


@pytest.mark.few(1)
@pytest.mark.needs_reasoner
@pytest.mark.parametrize("name", ["reasoner", "reasoner-verbose"])
def test_texts_of_bundled_models_equal_the_harness_if_nothing_is_evicted(name: str) -> None:
    """Loaded by the harness itself, from the folder and with its generation config."""
    pytest.importorskip("accelerate", reason="the harness's own model needs accelerate")
    model, tokenizer = load_model(name)
    prompts = [item.prompt for item in load_task(name).examples(12, seed=0)]
    settings = {"until": [], "max_gen_toks": 60}
    requests = instances("generate_until", [(prompt, settings) for prompt in prompts])
    theirs = get_model("hf")(str(bundled_path(name)), dtype="float32", device="cpu", batch_size=12)
    texts = theirs.generate_until(requests, disable_tqdm=True)
    assert PolicyLM(Engine(model, tokenizer, FULL, slots=12)).generate_until(requests) == texts
    assert {len(tokenizer(text)["input_ids"]) for text in texts} == {60}


def test_answers_do_not_depend_on_slots_or_on_each_other() -> None:
    asked = generation(*(text(3 + 11 * number, number) for number in range(7)), max_gen_toks=20)
    for plan in (FULL, SMALL):
        alone = [lm(plan, slots=1).generate_until([one])[0] for one in asked]
        assert lm(plan, slots=4).generate_until(asked) == alone
        assert len(set(alone)) == len(alone)


@pytest.mark.few(1)
@pytest.mark.parametrize("until", [[], [""], "", None])
def test_empty_stop_strings_are_ignored(until: Any) -> None:
    model = lm()
    (answer,) = model.generate_until(generation(text(9, 0), max_gen_toks=30, until=until))
    assert (answer,) == tuple(lm().generate_until(generation(text(9, 0), max_gen_toks=30)))
    assert model.costs["t"].num_cut_off == 1


def test_an_empty_context_becomes_the_first_token_of_a_text() -> None:
    (answer,) = lm().generate_until(generation("", max_gen_toks=15))
    engine = Engine(MODEL, TOKENIZER, FULL)
    prompt = [TOKENIZER.eos_token_id]  # this tokenizer has no token for beginnings
    (result,) = engine.generate([prompt], max_new_tokens=15).results()
    assert answer == result.text


def test_a_stop_string_that_is_a_special_token_stops() -> None:
    tokenizer = r1_tokenizer()
    model = tiny_model("llama", vocab=len(tokenizer), max_position_embeddings=512)
    engine = Engine(model, tokenizer, FULL)
    special = "<｜User｜>"
    mark = tokenizer.convert_tokens_to_ids(special)
    # Make the model generate it sooner or later.
    model.lm_head.weight.data[mark] = 3 * model.lm_head.weight.data.abs().max()
    free = engine.generate(["ab"], max_new_tokens=200, stop_ids=()).results()[0].tokens
    stopped = PolicyLM(engine)
    stopped.generate_until(generation("ab", max_gen_toks=200, until=[special]))
    assert stopped.costs["t"].new_tokens == free.index(mark) + 1
    assert stopped.costs["t"].num_cut_off == 0


def test_a_long_context_is_shortened_at_its_beginning_and_counted() -> None:
    model = lm()
    long = text(2 * POSITIONS, 1)
    ids = TOKENIZER(long)["input_ids"]
    assert len(ids) > POSITIONS
    (answer,) = model.generate_until(generation(long, max_gen_toks=20))
    engine = Engine(MODEL, TOKENIZER, FULL)
    (result,) = engine.generate([ids[20 - POSITIONS :]], max_new_tokens=20).results()
    assert answer == result.text
    assert (model.costs["t"].num_shortened, model.costs["t"].prompt_tokens) == (1, POSITIONS - 20)


def test_more_new_tokens_than_positions_are_refused() -> None:
    with pytest.raises(RequestError, match=f"positions for {POSITIONS}"):
        lm().generate_until(generation("tea", max_gen_toks=POSITIONS))


def test_repeated_attempts_differ_and_are_reproducible() -> None:
    (one,) = generation(text(9, 3), max_gen_toks=30, do_sample=True, temperature=2.0)
    (other,) = generation(text(9, 3), max_gen_toks=30, do_sample=True, temperature=2.0)
    first = lm().generate_until([one, one, one])
    assert len(set(first)) == 3
    assert lm(slots=1).generate_until([other, other, other]) == first
    assert lm(seed=1).generate_until([one, one, one]) != first


def test_the_answer_follows_the_end_of_thinking() -> None:
    (whole,) = lm().generate_until(generation(text(9, 0), max_gen_toks=60))
    mark = whole[len(whole) // 2]
    stop = whole[0]
    thinking = lm(think_end_token=mark)
    (answer,) = thinking.generate_until(generation(text(9, 0), max_gen_toks=60, until=[stop]))
    assert answer == whole.rpartition(mark)[2].lstrip().partition(stop)[0]
    assert thinking.costs["t"].new_tokens == 60, "a stop string in a thought ends nothing"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.7}, {}),
        (
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
        ),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "seed": 3}, {"temperature": 1.0, "seed": 3}),
        ({"max_tokens": 9, "until": "a", "num_beams": 1}, {"max_gen_toks": 9, "until": ["a"]}),
        ({"repetition_penalty": 1.2, "min_p": 0.1}, {"repetition_penalty": 1.2, "min_p": 0.1}),
        (
            {"frequency_penalty": 0.5, "presence_penalty": -1},
            {"frequency_penalty": 0.5, "presence_penalty": -1},
        ),
        ({"min_tokens": 3}, {"min_new_tokens": 3}),
        ({"min_new_tokens": 3}, {"min_new_tokens": 3}),
        (
            {"eos_token_id": 5, "stop_token_ids": [7, 8]},
            {"eos_token_id": [5], "stop_token_ids": [7, 8]},
        ),
    ],
)
def test_settings_of_tasks_are_read(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    greedy = {"until": [], "max_gen_toks": 256, "temperature": 0.0, "top_k": 0, "top_p": 1.0}
    found = read_settings(settings, "t")
    assert found == greedy | expected
    assert read_settings(found, "t") == found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 2}, "min_p"),
        ({"min_tokens": -1}, "min_new_tokens"),
        ({"eos_token_id": ["a"]}, "stop_ids"),
        ({"do_sample": True, "temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "warm"),
        ({"max_gen_toks": "many"}, "many"),
    ],
)
def test_settings_that_the_engine_does_not_have_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        read_settings(settings, "mine")
    assert "'mine'" in str(caught.value)


# Likelihood


def continuations() -> list[tuple[str, str]]:
    """Pairs of every kind: empty contexts, spaces at the border, greedy and one-token answers."""
    greedy = lm().generate_until(generation("rent is 3. ", "tea = 7", max_gen_toks=6))
    pairs = [("rent is 3. ", greedy[0]), ("tea = 7", greedy[1])]
    pairs += [(text(4 + 9 * n, n), text(1 + 5 * n, 50 + n)) for n in range(6)]
    pairs += [("oak is 7. What is oak?", f" {digit}") for digit in "1234"]
    pairs += [("", text(7, 8)), ("tea  ", "is 3"), ("tea ", "  is 3")]
    # More than fits: the context loses its beginning.
    return [*pairs, (text(2 * POSITIONS, 4), text(30, 5))]


def test_likelihoods_equal_the_harness_if_nothing_is_evicted() -> None:
    requests = instances("loglikelihood", continuations())
    ours, theirs = lm().loglikelihood(requests), hf_lm().loglikelihood(requests)
    assert [score.log_likelihood for score in ours] == pytest.approx(
        [likelihood for likelihood, _ in theirs], abs=CLOSE
    )
    assert [score.is_greedy for score in ours] == [is_greedy for _, is_greedy in theirs]
    assert {score.is_greedy for score in ours} == {True, False}


def test_rolling_likelihoods_equal_the_harness() -> None:
    texts = [(text(30, 1),), (text(3, 2),), (text(3 * POSITIONS, 3),)]
    requests = instances("loglikelihood_rolling", texts)
    ours, theirs = lm().loglikelihood_rolling(requests), hf_lm().loglikelihood_rolling(requests)
    assert ours == pytest.approx(theirs, abs=CLOSE)


def test_one_sequence_scores_all_answers_of_one_token() -> None:
    pairs = [("oak is 7. What is oak?", f" {digit}") for digit in "1234567"]
    together, model = instances("loglikelihood", pairs), lm(SMALL)
    scores = model.loglikelihood(together)
    assert scores == [lm(SMALL).loglikelihood([one])[0] for one in together]
    assert len({score.log_likelihood for score in scores}) == len(scores)
    assert model.costs["t"].num_sequences == 1


def test_branches_hold_every_continuation_once() -> None:
    asked = [
        Continuation(given, scored, task)
        for given in ((1,), (1, 2))
        for scored in ((), (3,), (4,), (3, 4), (3, 5), (4, 4))
        for task in "ab"
    ]
    branches = branches_of(asked)
    found = {
        number: Continuation(branch.given, (*branch.shared, token), branch.task)
        for branch in branches
        for number, token in branch.ends
    }
    assert found == {i: one for i, one in enumerate(asked) if one.scored}
    assert len(branches) == 2 * 2 * 3


def test_a_context_of_spaces_is_scored_with_the_continuation() -> None:
    spaced, together = instances("loglikelihood", [("  ", "tea"), ("", "  tea")])
    assert lm().loglikelihood([spaced]) == lm().loglikelihood([together])


def test_an_empty_continuation_has_log_likelihood_0() -> None:
    assert lm().loglikelihood(instances("loglikelihood", [("tea", "")])) == [(0.0, True)]


@pytest.mark.parametrize("plan", [FULL, SMALL], ids=["full", "small"])
def test_a_greedy_text_is_greedy_under_its_own_plan_only(plan: Plan) -> None:
    contexts = [text(20 + 9 * number, number) for number in range(4)]
    engine = Engine(MODEL, TOKENIZER, plan, slots=3)
    results = engine.generate(contexts, max_new_tokens=30, stop_ids=()).results()
    tokens = [
        ("", TOKENIZER(context)["input_ids"], list(result.tokens))
        for context, result in zip(contexts, results, strict=True)
    ]
    assert all(score.is_greedy for score in lm(plan)._loglikelihood_tokens(tokens))
    other = FULL if plan is SMALL else SMALL
    assert not all(score.is_greedy for score in lm(other)._loglikelihood_tokens(tokens))


def test_likelihoods_under_a_plan_equal_perplexity() -> None:
    pairs = [(text(25, number), text(40, 90 + number)) for number in range(3)]
    model = lm(SMALL)
    encoded = [("", TOKENIZER(a)["input_ids"], TOKENIZER(b)["input_ids"]) for a, b in pairs]
    ours = [score.log_likelihood for score in model._loglikelihood_tokens(encoded)]
    asked = [
        EvalRequest(Example(i, a, "", {}, reference=b), Request(a, max_new_tokens=500))
        for i, (a, b) in enumerate(pairs)
    ]
    trial = Perplexity().begin(Engine(MODEL, TOKENIZER, SMALL), asked, Shared())
    losses = [trial.outcome(result).values[LOSS] for result in trial.run.results()]
    assert ours == pytest.approx([-loss for loss in losses], abs=CLOSE)
    assert model.costs[""].compactions > 0
    full = [score.log_likelihood for score in lm()._loglikelihood_tokens(encoded)]
    assert not any(math.isclose(a, b, abs_tol=CLOSE) for a, b in zip(ours, full, strict=True))


def test_memory_stays_within_budget_and_buffer_for_all_requests() -> None:
    model = lm(SMALL)
    model.generate_until(generation(text(60, 1), text(5, 2), max_gen_toks=50))
    generated = model.costs["t"].compactions
    model.loglikelihood(instances("loglikelihood", [(text(60, 3), text(40, 4))]))
    model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text(60, 5),)]))
    cost = model.costs["t"]
    assert cost.peak_rows == 12 + 4
    assert 0 < generated < cost.compactions
    assert cost.num_sequences == 4
    assert set(model.reports) == {"generate_until", "loglikelihood", "loglikelihood_rolling"}


def test_a_tokenizer_without_a_first_and_a_last_token_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="context"):
        PolicyLM(Engine(MODEL, tokenizer, FULL))


# The cache


def ask(model: Any, path: Path, kind: str, requests: list[Any]) -> tuple[list[Any], int]:
    """Answers with a cache, and how many of them it held before."""
    cache = AnswerCache(model, path)
    found = cache.num_found
    answers = getattr(cache, kind)(requests)
    cache.close()
    return answers, found


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 2.0}, {"do_sample": True}])
def test_generations_are_cached_with_their_seeds(tmp_path: Path, sampling: dict[str, Any]) -> None:
    first, second = generation(text(9, 3), text(5, 4), max_gen_toks=30, **sampling)
    requests = [first, first, second]
    expected, path = lm().generate_until(requests), tmp_path / "a.db"
    assert len(set(expected)) == (3 if sampling else 2)
    assert ask(lm(), path, "generate_until", requests) == (expected, 0)
    model = lm()
    assert ask(model, path, "generate_until", requests) == (expected, len(set(expected)))
    assert not model.costs, "nothing was computed again"
    if sampling:
        other = lm(seed=1).generate_until(requests)
        answers, _ = ask(lm(seed=1), path, "generate_until", requests)
        assert answers == other != expected


def test_answers_of_another_plan_are_not_used(tmp_path: Path) -> None:
    requests = instances("loglikelihood", [(text(60, 3), text(40, 4))])
    for plan, expected_found in ((FULL, 0), (SMALL, 0), (FULL, 1), (SMALL, 1)):
        answers, found = ask(lm(plan), tmp_path / "a.db", "loglikelihood", requests)
        assert found == expected_found
        assert answers == lm(plan).loglikelihood(requests)


# The harness's own command line


def test_the_model_is_built_from_model_args(tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    asked = generation(text(30, 1), max_gen_toks=20)
    model_args = (
        f"pretrained={tmp_path},policy=streaming,budget=12,buffer=4,dtype=float32,device=cpu"
    )
    made = get_model("kvpolicy").create_from_arg_string(
        model_args, {"batch_size": 3, "max_batch_size": None, "device": None}
    )
    assert made.engine.num_slots == 3
    assert made.identity["plan_digest"] == lm(SMALL).identity["plan_digest"]
    same = PolicyLM(Engine(MODEL, made.tokenizer, SMALL))
    assert made.generate_until(asked) == same.generate_until(asked)


def test_model_args_may_ask_for_compiled_steps(tmp_path: Path, no_compiler: None) -> None:
    MODEL.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    plain, compiled = (
        get_model("kvpolicy").create_from_arg_string(f"pretrained={tmp_path},policy=full{more}")
        for more in ("", ",compile=True")
    )
    assert (plain.engine.compiled, compiled.engine.compiled is None) == (None, False)
    assert compiled.identity["model_fingerprint"] != plain.identity["model_fingerprint"]


@pytest.mark.parametrize(
    ("model_args", "message"),
    [("pretrained=a", "policy=NAME or plan=FILE"), ("policy=full", "pretrained=FOLDER")],
)
def test_incomplete_model_args_are_refused(model_args: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        get_model("kvpolicy").create_from_arg_string(model_args)


# Chats


def test_a_chat_begins_with_one_first_token() -> None:
    tokenizer = r1_tokenizer()
    model = tiny_model("llama", vocab=len(tokenizer))
    ours = PolicyLM(Engine(model, tokenizer, FULL))
    written = ours.apply_chat_template([{"role": "user", "content": "tea?"}])
    assert written.endswith("<think>\n")
    ids = ours.tok_encode(written)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ours.tok_encode("tea?")[0] == tokenizer.bos_token_id
