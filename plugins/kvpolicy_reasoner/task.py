"""The bundled reasoner's task: follow a chain of sums through shuffled facts and box the result."""

import hashlib
import random
from collections.abc import Callable

import attrs

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.tasks.answers import extract_answer
from kvpolicy.lab.tasks.task import Split
from kvpolicy_reasoner.facts import Difficulty, FactSheet, draw_fact_sheet
from kvpolicy_reasoner.trace import write_trace

STANDARD = Difficulty(min_depth=3, max_depth=7, min_facts=6, max_facts=14)

_NUM_BUCKETS = 8
_HELD_OUT: dict[int, Split] = {0: "test", 1: "tune"}


@attrs.frozen
class Problem:
    r"""One question with its reference trace.

    Attributes:
        prompt: The facts and the question, up to and with ``<think>\\n\\n``.
        trace: The reference reasoning, with the final box and the end-of-sequence token.
        answer: The number inside the box.
        depth: Derivation steps from the leaf to the answer.
        num_facts: Facts in the prompt.
    """

    prompt: str
    trace: str
    answer: str
    depth: int
    num_facts: int

    @property
    def facets(self) -> dict[str, int | str]:
        """What a report may group by."""
        return {"depth": self.depth, "num_facts": self.num_facts}


Maker = Callable[[random.Random, Difficulty], Problem]


def make_problem(rng: random.Random, difficulty: Difficulty = STANDARD) -> Problem:
    """Draw one problem, whichever split it falls into.

    Args:
        rng: Source of all randomness.
        difficulty: Ranges of depth and number of facts.

    Returns:
        The problem.
    """
    sheet = draw_fact_sheet(rng, difficulty)
    return Problem(
        prompt=write_prompt(rng, sheet),
        trace=write_trace(rng, sheet),
        answer=str(sheet.chain[-1].value),
        depth=len(sheet.chain) - 1,
        num_facts=len(sheet.facts),
    )


def write_prompt(rng: random.Random, sheet: FactSheet) -> str:
    r"""Shuffle the facts and ask for the last member of the chain.

    Args:
        rng: Source of all randomness.
        sheet: The facts.

    Returns:
        The text up to and with ``<think>\\n\\n``.
    """
    facts = sheet.facts
    rng.shuffle(facts)
    question = f" What is {sheet.chain[-1].name}?"
    prompt = "".join(["<|user|>", *(fact.text for fact in facts), question])
    return prompt + "<|assistant|><think>\n\n"


def make_split_problem(
    rng: random.Random,
    split: Split,
    difficulty: Difficulty = STANDARD,
    make: Maker = make_problem,
) -> Problem:
    """Draw one problem of a split.

    Args:
        rng: Source of all randomness.
        split: Which split the prompt has to fall into.
        difficulty: Ranges of depth and number of facts.
        make: Draws one problem of a task.

    Returns:
        The first problem drawn whose prompt belongs to the split.
    """
    while True:
        problem = make(rng, difficulty)
        if split_of(problem.prompt) == split:
            return problem


def make_problems(
    n: int,
    *,
    seed: int,
    split: Split = "test",
    difficulty: Difficulty = STANDARD,
    make: Maker = make_problem,
) -> list[Problem]:
    """Draw distinct problems of a split; the same arguments give the same problems.

    Args:
        n: How many problems.
        seed: Chooses the problems.
        split: ``"test"`` to report on, ``"tune"`` to choose settings on, ``"train"`` to learn from.
        difficulty: Ranges of depth and number of facts.
        make: Draws one problem of a task.

    Returns:
        ``n`` problems with ``n`` different prompts. The first ``k`` of them are the answer to
        ``n=k``.

    Raises:
        KVPolicyError: ``n`` is negative, or there is no such split.
    """
    if n < 0:
        msg = f"make_problems was asked for {n} problems; expected 0 or more."
        raise KVPolicyError(msg)
    if split not in ("train", "tune", "test"):
        msg = f"no split named {split!r}; choose 'train', 'tune' or 'test'."
        raise KVPolicyError(msg)
    rng = random.Random(f"{split} {seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < n:
        problem = make_split_problem(rng, split, difficulty, make)
        problems.setdefault(problem.prompt, problem)
    return list(problems.values())


def split_of(prompt: str) -> Split:
    """Tell which split a prompt belongs to.

    All facts but the first are sorted before they are hashed, so that a prompt and the same
    prompt with those facts in another order belong to one split.

    Args:
        prompt: A prompt of this task.

    Returns:
        The split: an eighth of all prompts each for ``"test"`` and ``"tune"``, else ``"train"``.
    """
    facts = ".".join(sorted(prompt.split(".")))
    digest = hashlib.blake2b(facts.encode(), digest_size=8).digest()
    return _HELD_OUT.get(int.from_bytes(digest) % _NUM_BUCKETS, "train")


def grade(text: str, problem: Problem) -> bool:
    """Tell whether a generated trace boxes the right answer.

    Args:
        text: What the model generated after the prompt.
        problem: The problem it was asked.

    Returns:
        True if the last balanced box holds the answer.
    """
    return extract_answer(text) == problem.answer
