"""The second reasoner's task: the first one's questions, with longer traces and more re-checks.

Facts: a chain ``c0 .. cD`` starts at a leaf fact; every later member is its predecessor plus or
minus a constant, a side leaf, or a side value that a step of its own derives. A derived name is
either in the chain or a side value, never both, so that its definition alone shows what a step
depends on.

Traces: a plan, steps, re-checks and a validation of all steps. The re-checks never change a value;
only the correction of a wrong result does. How often a trace re-checks depends on its verbosity,
on features of the step, and on the share of earlier steps that were re-checked. No probability is
constant: greedy decoding takes the likelier branch, and would always or never re-check.
"""

import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import attrs

from kvpolicy_reasoner.task import (
    CONSTANTS,
    END,
    EOS,
    MAX_VALUE,
    NAMES,
    Difficulty,
    Fact,
    FactSheet,
    Problem,
    derive,
    draw_distractor,
    draw_leaf,
    write_prompt,
)

# What no model can predict: which sentence comes next, which opener, which
DRAWN = 0.25
# What it should not learn to say: numbers that are wrong on purpose.
WRONG = 0.0


@attrs.frozen
class Piece:
    """Text between two token borders.

    Attributes:
        text: The text.
        weight: Weight of the loss of each of its tokens.
    """

    text: str
    weight: float = 1.0


def marked(text: str) -> list[Piece]:
    """Split a text at its drawn words.

    Args:
        text: The text, with ``~`` before every word that is drawn: ``"~Wait, let me~ verify:"``.

    Returns:
        The pieces, without the marks.
    """
    parts = re.split(r"~( ?[A-Za-z]+)", text)  # plain and drawn parts take turns
    weights = (DRAWN if number % 2 else 1.0 for number in range(len(parts)))
    return [Piece(part, weight) for part, weight in zip(parts, weights, strict=True) if part]


def join(pieces: Iterable[Piece]) -> str:
    """Put the text together.

    Args:
        pieces: The pieces in order.

    Returns:
        The whole text.
    """
    return "".join(piece.text for piece in pieces)


def weigh_tokens(pieces: Sequence[Piece], starts: Sequence[int]) -> list[float]:
    """Lay the weights of the pieces out on tokens of the whole text.

    Args:
        pieces: The pieces in order.
        starts: Where each token of the whole text starts; every piece starts at one of them.

    Returns:
        A weight for each token.
    """
    of_piece: dict[int, float] = {}
    position = 0
    for piece in pieces:
        of_piece[position] = piece.weight
        position += len(piece.text)
    weights: list[float] = []
    for start in starts:
        weights.append(of_piece.pop(start) if start in of_piece else weights[-1])
    assert not of_piece, "a piece starts inside a token"
    return weights


Verbosity = Literal["terse", "normal", "verbose"]

VERBOSITIES: tuple[Verbosity, ...] = ("terse", "normal", "verbose")

_BASE: dict[Verbosity, float] = {"terse": -1.2, "normal": 0.1, "verbose": 1.1}
_FEEDBACK = 2.0
_FEW_FACTS, _MANY_FACTS = 10, 13
_SHARES = {"few": (70, 25, 5), "some": (15, 70, 15), "many": (5, 25, 70)}


def draw_verbosity(rng: random.Random, num_facts: int) -> Verbosity:
    """Draw how verbose a document is; the number of its facts makes one level likely.

    Args:
        rng: Source of all randomness.
        num_facts: Facts in the prompt.

    Returns:
        The verbosity.
    """
    size = "few" if num_facts < _FEW_FACTS else "some" if num_facts < _MANY_FACTS else "many"
    (verbosity,) = rng.choices(VERBOSITIES, weights=_SHARES[size])
    return verbosity


class Mood:
    """What decides on the next re-check: the verbosity and the re-checks so far."""

    def __init__(self, rng: random.Random, verbosity: Verbosity) -> None:
        """Start a trace.

        Args:
            rng: Source of all randomness.
            verbosity: Where the document stands.
        """
        self._rng = rng
        self._base = _BASE[verbosity]
        self._steps = 0
        self._checked = 0

    def note(self, *, checked: bool) -> None:
        """Take note of a step that is over.

        Args:
            checked: Whether it was re-checked.
        """
        self._steps += 1
        self._checked += checked

    def wants(self, evidence: float) -> bool:
        """Draw whether to re-check.

        Args:
            evidence: What visible features add to the logit.

        Returns:
            True for a re-check.
        """
        share = self._checked / self._steps if self._steps else 0.5
        logit = self._base + evidence + _FEEDBACK * (share - 0.5)
        return self._rng.random() < 1 / (1 + math.exp(-logit))


MAX_SIDE_STEPS = 2

_KINDS = {"constant": 40, "leaf": 25, "derived": 25, "shared": 10}


def draw_sheet_with_side_steps(rng: random.Random, difficulty: Difficulty) -> FactSheet:
    """Draw the facts of one problem.

    Args:
        rng: Source of all randomness.
        difficulty: Ranges of depth and number of facts, both drawn uniformly.

    Returns:
        The chain, its sides (leaves and derived) and the distractors, all with distinct names.
    """
    names = rng.sample(NAMES, len(NAMES))
    depth = rng.randint(difficulty.min_depth, difficulty.max_depth)
    num_facts = rng.randint(difficulty.min_facts, difficulty.max_facts)

    chain = [draw_leaf(rng, names.pop())]
    sides: list[Fact] = []
    for _ in range(depth):
        chain.append(_chain_step(rng, names, chain[-1], sides))

    distractors: list[Fact] = []
    while len(chain) + len(sides) + len(distractors) < num_facts:
        needed = [*chain, *sides]
        distractors.append(draw_distractor(rng, names.pop(), needed, distractors))
    return FactSheet(tuple(chain), tuple(sides), tuple(distractors))


def _chain_step(rng: random.Random, names: list[str], previous: Fact, sides: list[Fact]) -> Fact:
    """Draw the next member of the chain; facts that it needs are added to ``sides``."""
    name = names.pop()
    worked_out = [(side.name, side.value) for side in sides if side.first is not None]
    possible = {
        "constant": True,
        "leaf": True,
        "derived": len(worked_out) < MAX_SIDE_STEPS,
        "shared": bool(worked_out),
    }
    kinds = {kind: weight for kind, weight in _KINDS.items() if possible[kind]}
    (kind,) = rng.choices(list(kinds), weights=list(kinds.values()))
    if kind == "shared":
        step = derive(rng, name, previous, worked_out)
        if step is not None:
            return step
    if kind in ("leaf", "derived"):
        side_name = names.pop()
        step = derive(rng, name, previous, [(side_name, n) for n in range(MAX_VALUE + 1)])
        assert step is not None  # the value 0 always fits
        value = abs(step.value - previous.value)
        sides += _side_step(rng, names, side_name, value) if kind == "derived" else []
        sides += [Fact(side_name, value)] if kind == "leaf" else []
        return step
    step = derive(rng, name, previous, [(n, n) for n in CONSTANTS])
    assert step is not None  # one of +1 and -1 always fits
    return step


def _side_step(rng: random.Random, names: list[str], name: str, value: int) -> list[Fact]:
    """Draw a definition for a side value, and the leaf that it builds on."""
    leaf = names.pop()
    fitting = [
        (Fact(name, value, leaf, sign, n), Fact(leaf, start))
        for n in CONSTANTS
        for sign, start in (("+", value - n), ("-", value + n))
        if 0 <= start <= MAX_VALUE
    ]
    return list(rng.choice(fitting))


NUM_FORMS = 3
STEP_OPENERS = ("Now", "So", "Next", "Then", "OK")
# A ~ stands before what cannot be known: which sentence comes, and by which word it parts from
# the others that could have come.
RECHECKS = ("~Wait,~ let me~ verify:", "~Wait,~ let me~ make sure:", "~Wait,~ hold on:")
LOOK_BACK = "~Wait,~ look back:"
ONCE_MORE = "~Let me think again:"
OTHER_WORDS = "~Alternatively, another way:"
# Nothing is marked here: a wrong result is always corrected at once.
CORRECTION = "Wait, that is not right:"
VALIDATION = "~Wait, let me verify all the steps again"
VALIDATION_STEPS = ("Let me think again:", "Wait, once again:")

_OPENINGS: dict[Verbosity, str] = {
    "terse": "short, so be quick",
    "normal": "fair, so go on",
    "verbose": "long, so be careful",
}


class Cycle:
    """Options that take turns: the one after the last is likely, any other possible."""

    def __init__(self, rng: random.Random, size: int) -> None:
        """Start before the first option.

        Args:
            rng: Source of all randomness.
            size: How many options there are.
        """
        self._rng = rng
        self._size = size
        self._last = size - 1

    def draw(self) -> int:
        """Return the number of the next option: the one whose turn it is in 7 of 10 cases."""
        turn = (self._last + 1) % self._size
        others = [option for option in range(self._size) if option != turn]
        self._last = turn if self._rng.random() < 0.7 else self._rng.choice(others)
        return self._last


def write_opening(verbosity: Verbosity) -> list[Piece]:
    """Say how the list of facts looks; this is where the verbosity becomes visible."""
    return marked(f"OK, the list is~ {_OPENINGS[verbosity]}")


def write_plan(chain: Sequence[Fact], derived_sides: Mapping[str, Fact]) -> list[Piece]:
    """Walk from the question back to the leaf, past every derived side on the way."""
    entries = []
    listed: set[str] = set()
    for fact in reversed(chain[1:]):
        entries.append(f" {fact.name} needs {fact.first} and {fact.second}")
        side = derived_sides.get(str(fact.second))
        if side is not None and side.name not in listed:
            listed.add(side.name)
            entries.append(f" {side.name} needs {side.first} and {side.second}")
    return [Piece("First" + ",".join(entries) + f", and {chain[0].name} is {chain[0].value}")]


def write_order(steps: Sequence[tuple[Fact, bool]]) -> list[Piece]:
    """List what is going to be worked out; where there was a choice, the name is marked."""
    names = [f"{'~' if chosen else ''} {fact.name}" for fact, chosen in steps]
    return marked("So the order is" + ",".join(names))


def write_body(
    fact: Fact,
    values: Mapping[str, int],
    form: int,
    *,
    shown: int | None = None,
    form_is_known: bool = True,
) -> list[Piece]:
    """State a definition, its operands' values and its result, in one of three forms.

    Args:
        fact: What is worked out.
        values: The value of every name.
        form: Which form, from 0.
        shown: A wrong result to state instead of the right one.
        form_is_known: Whether the form follows from the sentences before.

    Returns:
        The pieces, of which the result is the last.
    """
    formula = f" {fact.first} {fact.sign} {fact.second}"
    rule = f" {fact.name} ={formula}"
    value = values[str(fact.first)]
    named = isinstance(fact.second, str)
    second = values[str(fact.second)] if named else fact.second
    operand, other = f" {fact.first} is {value}", f" {fact.second} is {second}"
    texts = (
        f"{rule},{operand},{other},",
        f" find {fact.name} from{operand} and{other},{rule},",
        f" to find {fact.name} take{formula}, that is {value} {fact.sign} {second},",
    )
    plain = (f"{rule},{operand},", f" find {fact.name} from{operand},{rule},", texts[2])
    text = (texts if named else plain)[form]
    result = Piece(f" {fact.value}") if shown is None else Piece(f" {shown}", WRONG)
    return [*marked(("" if form_is_known else "~") + f"{text} so {fact.name} is"), result]


SLIP_CHANCE = 0.15

_EARLY_CHANCE = {"+": 0.7, "-": 0.15}
_LONG_CHAIN = 5


def write_pieces(rng: random.Random, sheet: FactSheet, verbosity: Verbosity) -> list[Piece]:
    r"""Write one reasoning trace.

    Args:
        rng: Decides on order, wording, slips and re-checks.
        sheet: The facts; the last member of the chain is what is asked for.
        verbosity: How much is re-checked.

    Returns:
        The text after ``<think>\\n\\n``, up to and with the end-of-sequence token.
    """
    writer = _Writer(rng, sheet, verbosity)
    writer.write()
    return writer.pieces


def order_steps(rng: random.Random, sheet: FactSheet) -> list[tuple[Fact, bool]]:
    """Draw an order to work things out in: the chain forwards, each side before it is needed.

    Args:
        rng: Source of all randomness.
        sheet: The facts.

    Returns:
        The facts to derive in order, each with whether there was a choice.
    """
    sides = {fact.name: fact for fact in sheet.sides if fact.first is not None}
    needs = [str(fact.second) for fact in sheet.chain[1:]]
    waiting = [sides[name] for name in dict.fromkeys(needs) if name in sides]
    order: list[tuple[Fact, bool]] = []
    for step in sheet.chain[1:]:
        while waiting:
            side = waiting[0]
            is_needed = side.name == step.second
            if not is_needed and rng.random() >= _EARLY_CHANCE[str(side.sign)]:
                break
            order.append((waiting.pop(0), not is_needed))
        order.append((step, bool(waiting)))
    return order


class _Writer:
    """The trace so far, and what later sentences have to know of it."""

    def __init__(self, rng: random.Random, sheet: FactSheet, verbosity: Verbosity) -> None:
        self.pieces: list[Piece] = []
        self._rng = rng
        self._sheet = sheet
        self._verbosity = verbosity
        self._mood = Mood(rng, verbosity)
        self._values = {fact.name: fact.value for fact in sheet.facts}
        self._sides = {fact.name: fact for fact in sheet.sides if fact.first is not None}
        self._forms: dict[str, int] = {}
        self._next_form = Cycle(rng, NUM_FORMS)
        self._next_opener = Cycle(rng, len(STEP_OPENERS))
        self._next_recheck = Cycle(rng, len(RECHECKS))

    def write(self) -> None:
        """Write everything."""
        answer = self._sheet.chain[-1].value
        order = order_steps(self._rng, self._sheet)
        self._say(write_opening(self._verbosity))
        self._say(write_plan(self._sheet.chain, self._sides))
        self._say(write_order(order))
        previous = None
        for fact, _ in order:
            self._work_out(fact)
            self._mood.note(checked=self._recheck(fact, previous))
            previous = fact
        self._say(marked(f"~So the answer should be {answer}"))
        if self._mood.wants(-0.9):
            self._validate([fact for fact, _ in order])
        self.pieces += [Piece("</think>", DRAWN), Piece(f"\n\n\\boxed{{{answer}}}{EOS}")]

    def _say(self, sentence: Sequence[Piece]) -> None:
        self.pieces += [*sentence, Piece(END)]

    def _work_out(self, fact: Fact) -> None:
        """Make a step; a slip is corrected in the very next sentence."""
        form = self._forms[fact.name] = self._next_form.draw()
        opener = STEP_OPENERS[self._next_opener.draw()]
        slip = _near(self._rng, fact.value) if self._rng.random() < SLIP_CHANCE else None
        statement = write_body(fact, self._values, form, shown=slip, form_is_known=False)
        self._say([*marked(f"~{opener}"), *statement])
        if slip is not None:
            self._repeat(CORRECTION, fact)

    def _recheck(self, fact: Fact, previous: Fact | None) -> bool:
        """Draw the re-checks that follow a step, and tell whether there were any."""
        carried = self._values[str(fact.first)] // 10 != fact.value // 10
        if not self._mood.wants(1.5 if carried else -0.3):
            return False
        # Before the re-check, so that the last value stated is always that of the last step.
        side = self._sides.get(str(fact.second))
        if side is not None and side is not previous and self._mood.wants(0.5):
            self._repeat(LOOK_BACK, side)
        self._repeat(RECHECKS[self._next_recheck.draw()], fact)
        if self._mood.wants(-1.3 if carried else -3.5):
            self._repeat(ONCE_MORE, fact)
        if self._mood.wants(-0.5 if isinstance(fact.second, str) else -3.0):
            self._paraphrase(fact)
        if self._mood.wants(0.3 if fact.value < 10 else -2.5):
            self._confirm(fact)
        return True

    def _validate(self, order: Sequence[Fact]) -> None:
        """Go over every step once more although the answer has been found."""
        answer = self._sheet.chain[-1]
        self._say(marked(VALIDATION))
        for number, fact in enumerate(order):
            self._repeat(VALIDATION_STEPS[number % 2], fact, form_is_known=False)
        if self._mood.wants(0.0 if len(order) >= _LONG_CHAIN else -2.5):
            self._paraphrase(answer)
        self._confirm(answer)
        self._say([Piece(f"So the answer is {answer.value}")])

    def _repeat(self, opener: str, fact: Fact, *, form_is_known: bool = True) -> None:
        """Say a step again, word for word."""
        form = self._forms[fact.name]
        statement = write_body(fact, self._values, form, form_is_known=form_is_known)
        self._say([*marked(opener), *statement])

    def _paraphrase(self, fact: Fact) -> None:
        """Say a step again, in the form after its own."""
        form = (self._forms[fact.name] + 1) % NUM_FORMS
        self._say([*marked(OTHER_WORDS), *write_body(fact, self._values, form)])

    def _confirm(self, fact: Fact) -> None:
        self._say(marked(f"~Yes, that's correct again, {fact.name} is {fact.value}"))


def _near(rng: random.Random, value: int) -> int:
    """A wrong result that could pass for a slip."""
    near = [value + off for off in (-10, -2, -1, 1, 2, 10) if 0 <= value + off <= MAX_VALUE]
    return rng.choice(near)


STANDARD = Difficulty(min_depth=3, max_depth=6, min_facts=6, max_facts=14)


@attrs.frozen
class VerboseProblem(Problem):
    """One question with its reference trace.

    Attributes:
        verbosity: How much the reference trace re-checks.
        pieces: The trace as it was written, with the weights of its tokens.
    """

    verbosity: Verbosity
    pieces: tuple[Piece, ...] = attrs.field(repr=False)

    @property
    def facets(self) -> dict[str, int | str]:
        """What a report may group by."""
        return {**super().facets, "verbosity": self.verbosity}


def make_verbose_problem(rng: random.Random, difficulty: Difficulty = STANDARD) -> VerboseProblem:
    """Draw one problem, whichever split it falls into.

    Args:
        rng: Source of all randomness.
        difficulty: Ranges of depth and number of facts.

    Returns:
        The problem.
    """
    sheet = draw_sheet_with_side_steps(rng, difficulty)
    prompt = write_prompt(rng, sheet)
    verbosity = draw_verbosity(rng, len(sheet.facts))
    pieces = write_pieces(rng, sheet, verbosity)
    return VerboseProblem(
        prompt=prompt,
        trace=join(pieces),
        answer=str(sheet.chain[-1].value),
        depth=len(sheet.chain) - 1,
        num_facts=len(sheet.facts),
        verbosity=verbosity,
        pieces=tuple(pieces),
    )
