"""Problems of the reasoner's task against an independent solver."""

import random
import re
from functools import cache

import pytest
from kvpolicy_reasoner.task import grade, make_problems, split_of

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.tasks.answers import extract_answer


@cache
def problems():
    return make_problems(300, seed=3, split="tune")


def read_facts(prompt: str) -> dict[str, list[str]]:
    """Name -> words of its definition, from the sentences of a prompt."""
    body = prompt.split("<|user|>")[1].split(" What is ")[0]
    facts: dict[str, list[str]] = {}
    for sentence in body.strip().rstrip(".").split(". "):
        name, verb, *rest = sentence.split()
        assert verb in ("is", "="), sentence
        assert name not in facts, f"{name} is defined twice"
        facts[name] = rest
    return facts


def solve(facts: dict[str, list[str]], name: str) -> int:
    """Compute the value of a name from the facts."""
    words = facts[name]
    if len(words) == 1:
        return int(words[0])
    first, sign, second = words
    operand = int(second) if second.isdigit() else solve(facts, second)
    return solve(facts, first) + (operand if sign == "+" else -operand)


def question_of(prompt: str) -> str:
    return re.search(r"What is ([a-z]+)\?", prompt).group(1)


def test_answer_equals_the_solver():
    for problem in problems():
        assert int(problem.answer) == solve(read_facts(problem.prompt), question_of(problem.prompt))


def test_every_statement_of_a_trace_is_true():
    for problem in problems():
        facts = read_facts(problem.prompt)
        for name, value in re.findall(r"([a-z]+) is (\d+)", problem.trace.replace("answer is", "")):
            assert solve(facts, name) == int(value), problem.trace
        for name, first, sign, second in re.findall(
            r"([a-z]+) = ([a-z]+) ([+-]) ([a-z]+|\d+)", problem.trace
        ):
            assert facts[name] == [first, sign, second], problem.trace


def test_every_value_stays_in_range():
    for problem in problems():
        facts = read_facts(problem.prompt)
        assert all(0 <= solve(facts, name) <= 20 for name in facts)


def test_trace_has_one_step_per_depth_and_ends_with_the_boxed_answer():
    for problem in problems():
        assert problem.trace.endswith(f"</think>\n\n\\boxed{{{problem.answer}}}<|eos|>")
        steps = re.findall(r"^Now", problem.trace, flags=re.MULTILINE)
        assert len(steps) == problem.depth


def test_chain_names_are_first_operands_only_in_the_chain():
    for problem in problems():
        facts = read_facts(problem.prompt)
        chain = [question_of(problem.prompt)]
        while len(facts[chain[-1]]) == 3:
            chain.append(facts[chain[-1]][0])
        firsts = [words[0] for words in facts.values() if len(words) == 3]
        assert all(firsts.count(name) == 1 for name in chain[1:])


def test_traces_contain_redundant_sentences():
    openers = ("Wait", "Alternatively", "Hmm", "Just", "Again")
    redundant = [
        sum(line.startswith(openers) for line in problem.trace.splitlines())
        for problem in problems()
    ]
    assert 3 < sum(redundant) / len(redundant) < 10


def test_equal_seeds_give_equal_problems_and_prefixes():
    assert make_problems(20, seed=5) == make_problems(20, seed=5)
    assert make_problems(20, seed=5)[:7] == make_problems(7, seed=5)
    assert make_problems(20, seed=5) != make_problems(20, seed=6)


def test_prompts_with_reordered_facts_belong_to_the_same_split():
    rng = random.Random(0)
    for split in ("train", "tune", "test"):
        for problem in make_problems(40, seed=1, split=split):
            assert split_of(problem.prompt) == split
            body, question = problem.prompt.removeprefix("<|user|> ").split(" What")
            first, *others = body.rstrip(".").split(". ")
            rng.shuffle(others)
            reordered = "<|user|> " + ". ".join([first, *others]) + ". What" + question
            assert split_of(reordered) == split


def test_problems_are_distinct():
    assert len({problem.prompt for problem in problems()}) == len(problems())


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{7}", "7"),
        ("\\boxed{3} no, \\boxed{12}<|eos|>", "12"),
        ("\\boxed{3} and \\boxed{4", "3"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{ 5 }", "5"),
        ("the answer is 5", None),
        ("", None),
    ],
)
def test_answer_is_in_the_last_closed_box(text, answer):
    assert extract_answer(text) == answer


def test_trace_is_graded_correct_and_a_wrong_box_incorrect():
    problem = problems()[0]
    assert grade(problem.trace, problem)
    wrong = (int(problem.answer) + 1) % 21
    assert not grade(problem.trace.replace(f"{{{problem.answer}}}", f"{{{wrong}}}"), problem)
    assert not grade("", problem)


@pytest.mark.parametrize("arguments", [{"n": -1, "seed": 0}, {"n": 1, "seed": 0, "split": "dev"}])
def test_invalid_arguments_raise(arguments):
    with pytest.raises(KVPolicyError):
        make_problems(**arguments)
