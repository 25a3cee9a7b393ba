"""Write the reasoning trace of the second task: a plan, steps, re-checks, a second look at it all.

The re-checks never change what is derived; only the correction of a wrong result does, and the
statement after it is the one that counts.
"""

import random
from collections.abc import Sequence

from kvpolicy_reasoner.facts import MAX_VALUE, Fact, FactSheet
from kvpolicy_reasoner.trace import END, EOS
from kvpolicy_reasoner.verbose import wording
from kvpolicy_reasoner.verbose.pieces import DRAWN, Piece, marked
from kvpolicy_reasoner.verbose.verbosity import Mood, Verbosity
from kvpolicy_reasoner.verbose.wording import Cycle

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
        self._next_form = Cycle(rng, wording.NUM_FORMS)
        self._next_opener = Cycle(rng, len(wording.STEP_OPENERS))
        self._next_recheck = Cycle(rng, len(wording.RECHECKS))

    def write(self) -> None:
        """Write everything."""
        answer = self._sheet.chain[-1].value
        order = order_steps(self._rng, self._sheet)
        self._say(wording.opening(self._verbosity))
        self._say(wording.plan(self._sheet.chain, self._sides))
        self._say(wording.order(order))
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
        opener = wording.STEP_OPENERS[self._next_opener.draw()]
        slip = _near(self._rng, fact.value) if self._rng.random() < SLIP_CHANCE else None
        statement = wording.body(fact, self._values, form, shown=slip, form_is_known=False)
        self._say([*marked(f"~{opener}"), *statement])
        if slip is not None:
            self._repeat(wording.CORRECTION, fact)

    def _recheck(self, fact: Fact, previous: Fact | None) -> bool:
        """Draw the re-checks that follow a step, and tell whether there were any."""
        carried = self._values[str(fact.first)] // 10 != fact.value // 10
        if not self._mood.wants(1.5 if carried else -0.3):
            return False
        # Before the re-check, so that the last value stated is always that of the last step.
        side = self._sides.get(str(fact.second))
        if side is not None and side is not previous and self._mood.wants(0.5):
            self._repeat(wording.LOOK_BACK, side)
        self._repeat(wording.RECHECKS[self._next_recheck.draw()], fact)
        if self._mood.wants(-1.3 if carried else -3.5):
            self._repeat(wording.ONCE_MORE, fact)
        if self._mood.wants(-0.5 if isinstance(fact.second, str) else -3.0):
            self._paraphrase(fact)
        if self._mood.wants(0.3 if fact.value < 10 else -2.5):
            self._confirm(fact)
        return True

    def _validate(self, order: Sequence[Fact]) -> None:
        """Go over every step once more although the answer has been found."""
        answer = self._sheet.chain[-1]
        self._say(marked(wording.VALIDATION))
        for number, fact in enumerate(order):
            self._repeat(wording.VALIDATION_STEPS[number % 2], fact, form_is_known=False)
        if self._mood.wants(0.0 if len(order) >= _LONG_CHAIN else -2.5):
            self._paraphrase(answer)
        self._confirm(answer)
        self._say([Piece(f"So the answer is {answer.value}")])

    def _repeat(self, opener: str, fact: Fact, *, form_is_known: bool = True) -> None:
        """Say a step again, word for word."""
        form = self._forms[fact.name]
        statement = wording.body(fact, self._values, form, form_is_known=form_is_known)
        self._say([*marked(opener), *statement])

    def _paraphrase(self, fact: Fact) -> None:
        """Say a step again, in the form after its own."""
        form = (self._forms[fact.name] + 1) % wording.NUM_FORMS
        self._say([*marked(wording.OTHER_WORDS), *wording.body(fact, self._values, form)])

    def _confirm(self, fact: Fact) -> None:
        self._say(marked(f"~Yes, that's correct again, {fact.name} is {fact.value}"))


def _near(rng: random.Random, value: int) -> int:
    """A wrong result that could pass for a slip."""
    near = [value + off for off in (-10, -2, -1, 1, 2, 10) if 0 <= value + off <= MAX_VALUE]
    return rng.choice(near)
