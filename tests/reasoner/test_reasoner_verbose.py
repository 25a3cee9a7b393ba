"""The second reasoner's data against a solver and the published keyword rules."""

import itertools
import random
import re
from collections import Counter
from functools import cache

import pytest
from kvpolicy_reasoner.problems import problems_of
from kvpolicy_reasoner.task import grade, split_of
from kvpolicy_reasoner.tokenizer import build_tokenizer
from kvpolicy_reasoner.train.data import DataPlan, collate, examples_of_step
from kvpolicy_reasoner.train.recipes import recipe_of
from kvpolicy_reasoner.verbose import (
    DRAWN,
    VERBOSITIES,
    WRONG,
    Cycle,
    Mood,
    Piece,
    marked,
    weigh_tokens,
)

NAME = "reasoner-verbose"
SET = problems_of(NAME)
TOKENIZER = recipe_of(NAME).build_tokenizer()

# The keyword rules of SEAL's and SkipKV's calibration, and of SkipKV's online counter.
REFLECTION = re.compile(
    r"^Wait|verify|make sure|hold on|think again|'s correct|'s incorrect|let me check|seems right",
    re.IGNORECASE,
)
TRANSITION = re.compile(
    r"^Alternatively|another (way|approach|method|solution|strategy|technique)", re.IGNORECASE
)
ONLINE = re.compile(r"Wait|Alternatively|again")
DOUBTING = ("Wait,", "Let me think again:", "Alternatively,", "Yes,")
STATEMENT = re.compile(
    r"([a-z]+) = ([a-z]+) ([+-]) ([a-z]+|\d+)|to find ([a-z]+) take ([a-z]+) ([+-]) ([a-z]+|\d+)"
)
RESULT = re.compile(r" so ([a-z]+) is (\d+)$")


@cache
def problems():
    return SET.draw(300, seed=3, split="tune")


def facts_of(prompt: str) -> dict[str, list[str]]:
    """Name -> words of its definition."""
    body = prompt.split("<|user|> ")[1].split(". What is ")[0]
    return {words[0]: words[2:] for words in map(str.split, body.split(". "))}


def solve(facts: dict[str, list[str]], word: str) -> int:
    """Compute the value of a name or a number."""
    if word.isdigit():
        return int(word)
    first, *rest = facts[word]
    if not rest:
        return int(first)
    sign = 1 if rest[0] == "+" else -1
    return solve(facts, first) + sign * solve(facts, rest[1])


def sentences_of(trace: str) -> list[str]:
    thoughts = trace.split("</think>")[0]
    assert thoughts.endswith(".\n\n")
    return thoughts.removesuffix(".\n\n").split(".\n\n")


def is_execution(sentence: str) -> bool:
    return not REFLECTION.search(sentence) and not TRANSITION.search(sentence)


def body_of(sentence: str) -> str | None:
    """The text of a step after its opener."""
    found = re.search(r"( [a-z]+ = | find | to find )", sentence)
    return sentence[found.start() :] if found else None


@pytest.mark.slow
def test_tokens_of_the_pieces_equal_tokens_of_the_text():
    for problem in problems()[:6]:
        whole = TOKENIZER(problem.trace)["input_ids"]
        parts = [TOKENIZER(piece.text)["input_ids"] for piece in problem.pieces]
        assert list(itertools.chain(*parts)) == whole
        assert TOKENIZER.unk_token_id not in whole + TOKENIZER(problem.prompt)["input_ids"]
        assert TOKENIZER.decode(whole) == problem.trace


def test_vocabulary_starts_with_that_of_the_first_reasoner():
    first = build_tokenizer().get_vocab()
    assert {token: TOKENIZER.get_vocab()[token] for token in first} == first
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(len(TOKENIZER)))


def test_answer_equals_the_solver_and_is_graded_correct():
    for problem in problems():
        facts = facts_of(problem.prompt)
        asked = re.search(r"What is ([a-z]+)\?", problem.prompt).group(1)
        assert int(problem.answer) == solve(facts, asked)
        assert all(0 <= solve(facts, name) <= 20 for name in facts)
        assert problem.trace.endswith(f"</think>\n\n\\boxed{{{problem.answer}}}<|eos|>")
        assert grade(problem.trace, problem)
        assert not grade(problem.trace.replace("\\boxed{", "\\boxed{2"), problem)


def test_every_statement_is_true_or_an_immediately_corrected_slip():
    slips = steps = 0
    for problem in problems():
        facts = facts_of(problem.prompt)
        sentences = sentences_of(problem.trace)
        for sentence, after in zip(sentences, [*sentences[1:], ""], strict=True):
            for found in STATEMENT.finditer(sentence):
                name, *rule = [group for group in found.groups() if group]
                assert facts[name] == rule, sentence
            for name, value in re.findall(r"([a-z]+) is (\d+)(?=,| and)", sentence):
                assert solve(facts, name) == int(value), sentence
            result = RESULT.search(sentence)
            if result is None:
                continue
            steps += is_execution(sentence)
            if solve(facts, result[1]) != int(result[2]):
                slips += 1
                assert is_execution(sentence)
                assert after.startswith("Wait, that is not right:")
                right = RESULT.sub(f" so {result[1]} is {solve(facts, result[1])}", sentence)
                assert body_of(after) == body_of(right)
            else:
                assert not after.startswith("Wait, that is not right:")
    assert 0.10 < slips / steps < 0.20


def test_every_value_is_derived_before_it_is_used():
    for problem in problems():
        facts = facts_of(problem.prompt)
        known = {name for name, words in facts.items() if len(words) == 1}
        for sentence in filter(is_execution, sentences_of(problem.trace)):
            result = RESULT.search(sentence)
            if result:
                first, _, second = facts[result[1]]
                assert {first, second} - {second if second.isdigit() else ""} <= known
                assert result[1] not in known, "derived twice"
                known.add(result[1])


def test_steps_follow_the_announced_order_with_side_values_early_and_late():
    late = early = 0
    for problem in problems():
        facts = facts_of(problem.prompt)
        announced = re.search(r"So the order is ([a-z, ]+)\.", problem.trace).group(1).split(", ")
        done = [
            RESULT.search(sentence)[1]
            for sentence in sentences_of(problem.trace)
            if is_execution(sentence) and RESULT.search(sentence)
        ]
        assert done == announced
        for name, after in itertools.pairwise(done):
            late += facts[after][0] != name and facts[after][2] == name
        waits = [done.index(x) - done.index(facts[x][2]) for x in done if facts[x][2] in done]
        early += sum(wait > 1 for wait in waits)
    assert late > 20
    assert early > 20


def test_published_keywords_separate_execution_from_other_sentences():
    for problem in problems():
        for sentence in sentences_of(problem.trace):
            doubts = sentence.startswith(DOUBTING)
            assert doubts == (not is_execution(sentence)), sentence
            assert doubts == bool(ONLINE.search(sentence)), sentence


def test_half_of_the_sentences_are_non_execution_and_many_repeat_a_step():
    doubting = total = repeated = 0
    for problem in problems():
        seen = set()
        for sentence in sentences_of(problem.trace):
            body = body_of(sentence)
            total += 1
            doubting += not is_execution(sentence)
            repeated += not is_execution(sentence) and body in seen
            if body:
                seen.add(body)
    assert 0.4 < doubting / total < 0.6
    assert repeated / doubting > 0.5


def test_traces_get_longer_with_verbosity():
    lengths = {verbosity: [] for verbosity in VERBOSITIES}
    for problem in problems():
        lengths[problem.verbosity].append(len(TOKENIZER(problem.trace)["input_ids"]))
    terse, normal, verbose = (sum(found) / len(found) for found in lengths.values())
    assert terse < 0.7 * normal < normal < 0.8 * verbose
    assert max(map(max, lengths.values())) < problems_of(NAME).max_new_tokens


def test_recheck_makes_further_rechecks_more_likely():
    def wanted(checked: bool) -> int:
        mood = Mood(random.Random(0), "normal")
        mood.note(checked=checked)
        return sum(mood.wants(0.0) for _ in range(400))

    assert wanted(checked=False) < 0.4 * 400 < 0.6 * 400 < wanted(checked=True)


def test_cycle_mostly_alternates_between_options():
    cycle = Cycle(random.Random(0), 3)
    drawn = [cycle.draw() for _ in range(600)]
    steps = Counter((after - before) % 3 for before, after in itertools.pairwise(drawn))
    assert 0.6 < steps[1] / 600 < 0.8
    assert min(steps[0], steps[2]) > 40


def test_loss_weights_are_low_for_drawn_words_and_zero_for_wrong_numbers():
    plan = DataPlan(seed=0, num_steps=200, tokens_per_step=4096, name=NAME)
    wrong = drawn = 0
    examples = examples_of_step(plan, 190)
    for example in examples:
        text = [TOKENIZER.decode([token]) for token in example.tokens[example.prompt_len :]]
        for place, weight in enumerate(example.weights):
            drawn += weight == DRAWN
            if text[place + 1 : place + 4] == [".", "\n\n", "Wait"] and text[place + 5] == " that":
                assert weight == WRONG
                wrong += 1
            else:
                assert weight in (DRAWN, 1.0)
    assert min(wrong, drawn) > 0
    assert collate(examples).weights.sum() == sum(sum(example.weights) for example in examples)


def test_piece_that_starts_inside_a_token_raises():
    with pytest.raises(AssertionError):
        weigh_tokens([Piece("Wa"), Piece("it")], [0])


def test_marked_splits_a_text_at_drawn_words():
    assert marked("~Wait,~ let me") == [
        Piece("Wait", DRAWN),
        Piece(","),
        Piece(" let", DRAWN),
        Piece(" me"),
    ]
    assert marked("plain") == [Piece("plain")]


@pytest.mark.slow
def test_equal_arguments_give_equal_problems_of_the_split():
    assert SET.draw(20, seed=5) == SET.draw(20, seed=5)
    assert SET.draw(20, seed=5)[:7] == SET.draw(7, seed=5)
    prompts = {}
    for split in ("train", "tune", "test"):
        prompts[split] = {problem.prompt for problem in SET.draw(60, seed=1, split=split)}
        assert {split_of(prompt) for prompt in prompts[split]} == {split}
        assert len(prompts[split]) == 60
    assert not prompts["train"] & prompts["tune"] | prompts["tune"] & prompts["test"]


def test_problem_facets_include_verbosity():
    assert problems()[0].facets.keys() == {"depth", "num_facts", "verbosity"}
