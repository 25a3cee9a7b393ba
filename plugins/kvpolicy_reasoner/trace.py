"""Write the reasoning trace of a problem: a plan, the steps, re-checks, a recap, the answer.

The re-checks never change the answer: they are the redundant sentences that eviction policies for
reasoning models want to find. Their probabilities hang on features that the model can see,
because greedy decoding takes the likelier branch: a flat 30 % would yield no re-check at all.
"""

import random

from kvpolicy_reasoner.facts import Fact, FactSheet

EOS = "<|eos|>"
END = ".\n\n"
RECHECK_OPENERS = ("Wait", "Alternatively", "Hmm", "Just", "Again")

_LONG_CHAIN = 6


def write_trace(rng: random.Random, sheet: FactSheet) -> str:
    r"""Write one reasoning trace.

    Args:
        rng: Decides which re-checks are made.
        sheet: The facts; the last member of the chain is what is asked for.

    Returns:
        The text after ``<think>\\n\\n``, up to and with the end-of-sequence token.
    """
    values = {fact.name: fact.value for fact in sheet.facts}
    derived = {fact.name: fact for fact in sheet.chain[1:]}
    sentences = _plan(sheet.chain)
    for fact in sheet.chain[1:]:
        sentences.append("Now" + _body(fact, values))
        sentences += _rechecks(rng, fact, values, derived)
    sentences += _recap(rng, sheet.chain, values)
    answer = sheet.chain[-1].value
    sentences.append(f"So the answer is {answer}")
    text = "".join(sentence + END for sentence in sentences)
    return f"{text}</think>\n\n\\boxed{{{answer}}}{EOS}"


def _plan(chain: tuple[Fact, ...]) -> list[str]:
    """Walk from the question back to the leaf."""
    needs = [f"And {fact.name} needs {fact.first}" for fact in reversed(chain[1:])]
    needs[0] = needs[0].replace("And", "First", 1)
    return [*needs, f"And {chain[0].name} is {chain[0].value}"]


def _body(fact: Fact, values: dict[str, int]) -> str:
    """State a definition, its operands' values and its result, without the final period."""
    first = f" {fact.name} = {fact.first} {fact.sign} {fact.second}"
    parts = [first, f" {fact.first} is {values[str(fact.first)]}"]
    if isinstance(fact.second, str):
        parts.append(f" {fact.second} is {values[fact.second]}")
    parts.append(f" so {fact.name} is {fact.value}")
    return ",".join(parts)


def _rechecks(
    rng: random.Random, fact: Fact, values: dict[str, int], derived: dict[str, Fact]
) -> list[str]:
    """Draw the redundant sentences that follow one step."""
    body = _body(fact, values)
    sentences = []
    carried = values[str(fact.first)] // 10 != fact.value // 10
    if rng.random() < (0.8 if carried else 0.1):
        sentences.append("Wait, let me double-check:" + body)
        if rng.random() < (0.75 if isinstance(fact.second, str) else 0.1):
            sentences.append("Alternatively, redo it:" + body)
    if fact.second in derived and rng.random() < 0.75:
        sentences.append("Hmm, look back:" + _body(derived[str(fact.second)], values))
    return sentences


def _recap(rng: random.Random, chain: tuple[Fact, ...], values: dict[str, int]) -> list[str]:
    depth = len(chain) - 1
    if rng.random() >= (0.8 if depth >= _LONG_CHAIN else 0.15):
        return []
    steps = ["Again" + _body(fact, values) for fact in chain[1:]]
    return ["Just to be thorough, let me go over it again", *steps]
