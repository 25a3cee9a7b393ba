"""The sentences of the second task, without their ends: what is said, and in which words.

Execution sentences never match the keyword rules by which the papers tell thoughts apart; the
others always do (``tests/lab/test_reasoner_verbose.py`` holds both).
"""

import random
from collections.abc import Mapping, Sequence

from kvpolicy_reasoner.facts import Fact
from kvpolicy_reasoner.verbose.pieces import WRONG, Piece, marked
from kvpolicy_reasoner.verbose.verbosity import Verbosity

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


def opening(verbosity: Verbosity) -> list[Piece]:
    """Say how the list of facts looks; this is where the verbosity becomes visible."""
    return marked(f"OK, the list is~ {_OPENINGS[verbosity]}")


def plan(chain: Sequence[Fact], derived_sides: Mapping[str, Fact]) -> list[Piece]:
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


def order(steps: Sequence[tuple[Fact, bool]]) -> list[Piece]:
    """List what is going to be worked out; where there was a choice, the name is marked."""
    names = [f"{'~' if chosen else ''} {fact.name}" for fact, chosen in steps]
    return marked("So the order is" + ",".join(names))


def body(
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
