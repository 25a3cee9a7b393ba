"""Stop strings: found in the text of a generation, whatever tokens they are made of."""

from collections import abc
from typing import NamedTuple, Protocol


class SpelledText(Protocol):
    """A text that grows; see `kvpolicy.engine.requests.detokenize.TextDecoder`."""

    final: str
    tail: str
    special: list[tuple[int, str]]


class Judged(NamedTuple):
    """How far a text has been searched: to a place in it, and its first special tokens."""

    length: int = 0
    num_special: int = 0


class Stop(NamedTuple):
    """A stop string in a text, and the place in the text where it begins."""

    place: int
    string: str


class StopStrings:
    """Finds stop strings.

    They are looked for in the text, and also in the text with its special tokens written out, so
    that a stop string may be a special token, or have some. The first is the one that ends first;
    of several that end at one place, the longest. This does not depend on where tokens begin.
    """

    def __init__(self, strings: abc.Sequence[str]) -> None:
        """Remember them.

        Args:
            strings: The stop strings, none of them empty; there may be none.
        """
        self._strings = strings
        self._longest = max(map(len, strings), default=0)

    def first_in(self, text: SpelledText, judged: Judged) -> Stop | None:
        """The first stop string in a text; ``None``: there is none.

        Args:
            text: The text.
            judged: One that ends within this part does not count.
        """
        start = self._start(judged.length)
        shown = _View.plain(text.final[start:] + text.tail, start)
        found = self._ends(shown, judged.length - start)
        if text.special:
            before = [one for one in text.special[: judged.num_special] if one[0] >= start]
            num_old = judged.length - start + sum(len(content) for _, content in before)
            found += self._ends(shown.spelled(text.special), num_old)
        return min(found)[-1] if found else None

    def held_from(self, text: SpelledText) -> int:
        """The place from which the final part of a text may belong to a stop string.

        Args:
            text: The text.
        """
        end = len(text.final)
        start = self._start(end)
        shown = _View.plain(text.final[start:], start)
        views = [shown]
        if text.special:
            views.append(shown.spelled([one for one in text.special if one[0] <= end]))
        return min(view.places[len(view.text) - self._num_begun(view)] for view in views)

    def _start(self, end: int) -> int:
        """The first place at which a stop string can begin that goes on after some place."""
        return max(end - max(self._longest - 1, 0), 0)

    def _ends(self, view: "_View", num_old: int) -> list[tuple[int, int, Stop]]:
        """Where each stop string first ends after some characters, and where it begins."""
        found = []
        for string in self._strings:
            begin = view.find(string, max(num_old - len(string) + 1, 0))
            if begin >= 0:
                place, end = view.places[begin], view.places[begin + len(string)]
                found.append((end, place, Stop(place, string)))
        return found

    def _num_begun(self, view: "_View") -> int:
        """Length of the longest suffix that a stop string begins with."""
        size = len(view.text)
        for begin in range(max(size - self._longest + 1, 0), size):
            suffix = view.text[begin:]
            if begin not in view.inside and any(one.startswith(suffix) for one in self._strings):
                return size - begin
        return 0


class _View(NamedTuple):
    """A part of a text.

    Attributes:
        text: The part, in which special tokens may be written out.
        places: The place in the whole text of each character, and of its end.
        inside: Characters at which no stop string may begin or end: they are within a special
            token, which is one or is not.
    """

    text: str
    places: abc.Sequence[int]
    inside: abc.Set[int] = frozenset()

    @classmethod
    def plain(cls, text: str, start: int) -> "_View":
        return cls(text, range(start, start + len(text) + 1))

    def spelled(self, special: abc.Iterable[tuple[int, str]]) -> "_View":
        """With special tokens written out."""
        text, places, inside, done = "", [*self.places[:0]], set(), 0
        for place, content in special:
            if place < self.places[0]:
                continue
            until = min(place - self.places[0], len(self.text))
            text += self.text[done:until]
            inside |= {*range(len(text) + 1, len(text) + len(content))}
            text += content
            places += [*self.places[done:until], *[self.places[until]] * len(content)]
            done = until
        return _View(text + self.text[done:], [*places, *self.places[done:]], inside)

    def find(self, string: str, start: int) -> int:
        """Where a string first begins from some character on; -1: nowhere."""
        begin = self.text.find(string, start)
        while begin >= 0 and not self.inside.isdisjoint((begin, begin + len(string))):
            begin = self.text.find(string, begin + 1)
        return begin
