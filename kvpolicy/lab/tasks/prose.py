"""Passages of a text: what any language model can be measured on, without training it for a task.

The default text is on every machine that has Python: `pydoc_data.topics` of the standard library,
the chapters of the language reference that ``help()`` prints, some 450,000 characters of English
technical prose. It is the same in every installation of one version of Python, and differs a little
between versions; so passages say which text they are of, by version and hash.
"""

import hashlib
import platform
import random
import re
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.files import read_text
from kvpolicy.lab.tasks.task import Split

# Name of the default text, as a user types it.
PROSE = "pydoc_data.topics"

# Where a split of the default text begins and ends. Passages do not go over an end, so no letter is
# in two splits.
_SHARES: Mapping[Split, tuple[float, float]] = {
    "train": (0, 0.25),
    "tune": (0.25, 0.5),
    "test": (0.5, 1),
}

_PARAGRAPH = re.compile(r"\n[^\S\n]*\n(?=\S)")
# Where passages begin; the next where a text has none of these.
_BEGINNINGS = (
    _PARAGRAPH,
    re.compile(r"\n[^\S\n]*\n(?=[^\S\n]+\S)"),  # an indented paragraph
    re.compile(r"\n(?=[^\S\n]*\S)"),  # a line
)
# A word with the space before it: texts are cut between words. What is written without spaces is
# cut anywhere.
_WORD = re.compile(r"\s*\S{1,16}")
# Share of a passage's letters that are left when its tokens are decoded.
_LEAST_KNOWN = 0.9


@attrs.frozen
class Passage:
    """A part of a text.

    Attributes:
        start: Index of its first character in the text.
        parts: Consecutive texts, one for each length that was asked for. Joined they are the
            passage; each but the first begins with white space.
        facets: Name and hash of the text, as a facet of an `Example`.
    """

    start: int
    parts: tuple[str, ...]
    facets: Mapping[str, int | str]


@attrs.frozen
class Prose:
    """A text that passages are drawn from.

    Attributes:
        name: What it is, for facets and messages.
        content: The text, with line feeds only.
        splits: First character of each split, and the one behind its last.
    """

    name: str
    content: str = attrs.field(repr=False)
    splits: Mapping[Split, tuple[int, int]]

    @property
    def digest(self) -> str:
        """Twelve digits of the SHA-256 of the text in UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()[:12]

    def passages(
        self,
        n: int,
        lengths: Sequence[int],
        tokenizer: Any,
        *,
        seed: int,
        split: Split = "test",
    ) -> list[Passage]:
        """Draw passages that do not overlap, at paragraphs that the seed chooses.

        The same arguments give the same passages, and the first ``k`` of them are those of
        ``n=k``. A passage begins with a paragraph (one that is not indented, if there are any; a
        line, in a text without blank lines) and is cut between words.

        Args:
            n: Number of passages; fewer are returned if no more are found.
            lengths: Tokens of each part, by the tokenizer. The first counts what the tokenizer puts
                before a text. A part is shorter by less than the word that would not fit.
            tokenizer: The tokenizer of the model that reads them.
            seed: Seed of the choice.
            split: Which part of the text they are from.

        Raises:
            TaskError: There is no such split, it is shorter than one passage, or the tokenizer
                does not know the text.
        """
        if split not in self.splits:
            msg = f"{self.name} has no {split} split; it has {' and '.join(self.splits)}"
            raise TaskError(msg)
        begin, end = self.splits[split]
        found: list[Passage] = []
        taken: list[tuple[int, int]] = [(end, end)]
        too_short = 0  # longest text, in characters, that was found to have too few tokens
        facets = {"text": f"{self.name}, sha256 {self.digest}"}
        for start in self._starts(begin, end, seed):
            if len(found) == n:
                break
            after = bisect_right(taken, (start, end))
            limit = taken[after][0]
            if (after and start < taken[after - 1][1]) or limit - start <= too_short:
                continue
            parts = _cut(self.content, (start, limit), lengths, tokenizer)
            if parts is None:
                too_short = limit - start
                continue
            if not found:
                self._check_known("".join(parts), tokenizer)
            insort(taken, (start, start + sum(map(len, parts))))
            found.append(Passage(start, parts, facets))
        if n and not found:
            msg = (
                f"the {split} split of {self.name}, {end - begin:,} characters, does not have the "
                f"{sum(lengths):,} tokens of one passage; ask for fewer tokens, or give a longer "
                "text: of=FILE.txt"
            )
            raise TaskError(msg)
        return found

    def _starts(self, begin: int, end: int, seed: int) -> list[int]:
        """Where passages may begin, in the order of the seed."""
        starts: list[int] = []
        for pattern in _BEGINNINGS:
            if len(starts) < 2:
                starts = [m.end() for m in pattern.finditer(self.content, begin, end)]
                starts = [begin, *(start for start in starts if start > begin)]
        random.Random(f"passages {seed}").shuffle(starts)
        return starts

    def _check_known(self, passage: str, tokenizer: Any) -> None:
        ids = tokenizer(passage, add_special_tokens=False)["input_ids"]
        left = "".join(tokenizer.decode(ids, skip_special_tokens=True).split())
        share = len(left) / len("".join(passage.split()))
        if share < _LEAST_KNOWN:
            msg = (
                f"the tokenizer of this model knows {share:.0%} of the letters of {self.name}; "
                "give a text in the language of the model, of=FILE.txt, or a task made for it"
            )
            raise TaskError(msg)


def open_prose(of: str = PROSE) -> Prose:
    """Open a text.

    Args:
        of: A text file in UTF-8, which has the split ``"test"`` only; or the name of the default
            text, which has all three.

    Raises:
        TaskError: It cannot be read, or holds no text.
    """
    if of == PROSE:
        return _standard_library()
    text = read_text(Path(of), f"text file {of}", error=TaskError).replace("\r\n", "\n")
    content = text.strip("\n")
    if not content.strip():
        msg = f"text file {of} holds no text"
        raise TaskError(msg)
    return Prose(Path(of).name, content, {"test": (0, len(content))})


def _standard_library() -> Prose:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        msg = (
            f"this Python has no module {PROSE}, which is part of the standard library (some Linux "
            "distributions have it in a package of its own); give a text: of=FILE.txt"
        )
        raise TaskError(msg) from error
    content = "\n\n".join(topics[name].strip("\n") for name in sorted(topics))
    starts = [0, *(match.end() for match in _PARAGRAPH.finditer(content)), len(content)]

    def paragraph_at(share: float) -> int:
        return starts[bisect_right(starts, share * len(content)) - 1]

    splits = {name: (paragraph_at(a), paragraph_at(b)) for name, (a, b) in _SHARES.items()}
    return Prose(f"{PROSE} of Python {platform.python_version()}", content, splits)


def _cut(
    content: str, within: tuple[int, int], lengths: Sequence[int], tokenizer: Any
) -> tuple[str, ...] | None:
    """Cut parts of given numbers of tokens from the beginning; ``None`` if the text is too short.

    The parts together have as many tokens as lengths sum up to, so parts after the first are
    counted in their place.
    """
    start, limit = within
    ends = [start]  # of so many words

    @cache
    def count(num_words: int) -> int:
        text = content[start : ends[num_words]]
        # What is counted may be longer than the passage: no warning of transformers about that.
        return len(tokenizer(text, verbose=False)["input_ids"]) if num_words else 0

    # Twice as many words, until they have more tokens: mostly a word has at least one.
    num_words, length = sum(lengths), 0
    while length <= sum(lengths):
        words = islice(_WORD.finditer(content, start, limit), num_words)
        before, ends[1:] = len(ends), (word.end() for word in words)
        if len(ends) == before:
            return None
        num_words, length = 2 * num_words, count(len(ends) - 1)
    cuts = [0, *(_most(count, len(ends) - 1, length) for length in accumulate(lengths))]
    if (short := next((i for i, (a, b) in enumerate(pairwise(cuts)) if a == b), None)) is not None:
        msg = f"the first word of a passage has more than {lengths[short]} tokens; ask for more"
        raise TaskError(msg)
    return tuple(content[ends[a] : ends[b]] for a, b in pairwise(cuts))


def _most(count: Callable[[int], int], num: int, most: int) -> int:
    """How many of ``num`` words have at most so many tokens; all have more.

    Tokens are nearly proportional to words, so guesses in proportion find it soon; every other
    guess halves what is left, in case that they are not.
    """
    low, high, halves = 0, num, False
    while high - low > 1:
        share = 0.5 if halves else (most - count(low)) / (count(high) - count(low))
        guess = min(max(low + round(share * (high - low)), low + 1), high - 1)
        low, high = (guess, high) if count(guess) <= most else (low, guess)
        halves = not halves
    return low
