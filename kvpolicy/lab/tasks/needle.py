"""Needles in a haystack of real text, for any language model.

A needle is a sentence that gives a key a number. Needles stand between the sentences of a passage
of prose, and the question asks for the number of one key. With one key this is the single needle of
RULER (2404.06654, section 3.1), with several its multi-key test: the other needles differ from the
asked one in key and number only. Sentences and question are RULER's.

The asked needle stands at a depth: the share of the passage that is before it. Depths are taken
from a grid in turn, so that a table by depth has equally many examples of each.
"""

import random
import re
from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.answers import without_thought
from kvpolicy.lab.tasks.prose import PROSE, Prose, open_prose
from kvpolicy.lab.tasks.task import Example, Graded, Split, require_tokenizer, spell_fields
from kvpolicy.model.chat import has_chat_template

PROMPT_TOKENS = 1024
KEYS = 4
DEPTHS = 5

_OPENING = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the numbers afterwards.\n"
)
_NEEDLE = "One of the special magic numbers for {key} is: {value}."
_QUESTION = "\nWhat is the special magic number for {key} mentioned in the provided text?"
# A model without a chat template continues a sentence, as in RULER.
_ANSWER = " The special magic number for {key} mentioned in the provided text is"

# A key is two of these words, as RULER's are; there are more keys than any haystack needs.
_ADJECTIVES = (
    "amber", "ancient", "bitter", "brave", "calm", "clever", "crooked", "distant", "eager", "faded",
    "gentle", "golden", "hidden", "hollow", "humble", "icy", "jolly", "lonely", "mellow", "noisy",
    "pale", "proud", "quiet", "rusty", "silent", "steep", "sunny", "tender", "velvet", "wild",
)  # fmt: skip
_NOUNS = (
    "anchor", "basket", "candle", "canyon", "cradle", "dragon", "falcon", "forest", "garden",
    "hammer", "harbor", "island", "kettle", "ladder", "lantern", "marble", "meadow", "mirror",
    "orchard", "pepper", "piano", "pillow", "river", "saddle", "spider", "timber", "turtle",
    "violin", "walnut", "window",
)  # fmt: skip
MAX_KEYS = len(_ADJECTIVES) * len(_NOUNS)
_VALUES = range(10**6, 10**7)
_NUMBER = re.compile(r"(?<!\d)\d{7}(?!\d)")

_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+(?=\S)|\n\s*\n(?=\S)")


@attrs.frozen
class NeedleTask:
    """Needles in passages of a text; correct if the answer's first such number is the asked one.

    Attributes:
        of: The text: `PROSE` or a file.
        prompt_tokens: Tokens of a prompt without the chat template, by the model's tokenizer;
            a few fewer, because passages are cut between words.
        keys: Needles in the passage; the question is about one of them.
        depths: Number of depths of the asked needle, evenly spaced from 0 to 100 %; 1 is 50 %.
        chat: Whether a model that has a chat template is asked in a chat. Others, and all with
            ``False``, continue the beginning of an answer.
        tokenizer: The tokenizer of the model, where it is known.
    """

    of: str = PROSE
    prompt_tokens: int = PROMPT_TOKENS
    keys: int = KEYS
    depths: int = DEPTHS
    chat: bool = True
    tokenizer: Any = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        for name, most in (("keys", MAX_KEYS), ("depths", 101)):
            if not 1 <= (number := getattr(self, name)) <= most:
                msg = f"task 'needle' got {name}={number}; expected 1 to {most}"
                raise TaskError(msg)

    @property
    def name(self) -> str:
        """What the user types."""
        return spell_fields("needle", self)

    @property
    def metric(self) -> Graded:
        """Accuracy."""
        return Graded(self.grade)

    def for_tokenizer(self, tokenizer: Any) -> "NeedleTask":
        """The task for a model."""
        return attrs.evolve(self, tokenizer=tokenizer)

    def examples(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Example]:
        """Draw ``n`` haystacks of a split, whose passages may overlap.

        Raises:
            TaskError: The tokenizer is not known or does not know the text, the text has no such
                split or is too short, or the needles leave no room for it.
        """
        require_tokenizer(self)
        text = open_prose(self.of)
        return [self._draw(text, index, seed, split) for index in range(n)]

    def grade(self, text: str, example: Example) -> bool:
        """Whether the first number of seven digits, behind a thought if there is one, is asked."""
        found = _NUMBER.search(without_thought(text))
        return found is not None and found[0] == example.answer

    def _draw(self, text: Prose, index: int, seed: int, split: Split) -> Example:
        # Not of the other options: a longer passage has the same needles.
        rng = random.Random(f"needle {split} {seed} {index}")
        passage_seed = rng.getrandbits(32)
        pairs = rng.sample(range(MAX_KEYS), self.keys)
        keys = [
            f"{_ADJECTIVES[p % len(_ADJECTIVES)]}-{_NOUNS[p // len(_ADJECTIVES)]}" for p in pairs
        ]
        values = [str(value) for value in rng.sample(_VALUES, self.keys)]
        needles = [
            _NEEDLE.format(key=key, value=value) for key, value in zip(keys, values, strict=True)
        ]
        depth = index % self.depths / (self.depths - 1) if self.depths > 1 else 0.5
        shares = [depth, *(rng.random() for _ in needles[1:])]
        is_chat = self.chat and has_chat_template(self.tokenizer)
        closing = (_QUESTION if is_chat else _QUESTION + _ANSWER).format(key=keys[0])

        around = _OPENING + " ".join(needles) + closing
        num_around = len(self.tokenizer(around)["input_ids"])
        if num_around >= self.prompt_tokens:
            msg = (
                f"task '{self.name}' has no room for a text: question and needles are "
                f"{num_around:,} tokens; ask for more prompt_tokens or fewer keys"
            )
            raise TaskError(msg)
        (passage,) = text.passages(
            1, [self.prompt_tokens - num_around], self.tokenizer, seed=passage_seed, split=split
        )
        return Example(
            index=index,
            prompt=_OPENING + _with_needles(passage.parts[0], needles, shares) + closing,
            answer=values[0],
            facets={"depth": round(100 * depth), **passage.facets},
            chat=is_chat,
        )


def needle(
    of: str = PROSE,
    prompt_tokens: int = PROMPT_TOKENS,
    keys: int = KEYS,
    depths: int = DEPTHS,
    chat: bool = True,
) -> NeedleTask:
    """Find one of several needles in real text: RULER's multi-key test, for any model."""
    return NeedleTask(of, prompt_tokens, keys, depths, chat)


def _with_needles(text: str, needles: Sequence[str], shares: Sequence[float]) -> str:
    """Put each needle between the two sentences that are nearest to its share of the text."""
    ends = [0, *(found.end() for found in _BETWEEN_SENTENCES.finditer(text)), len(text)]
    places = [min(ends, key=lambda end: abs(end - share * len(text))) for share in shares]
    parts, begin = [], 0
    # Needles at one place stand in the order in which they were drawn.
    for place, sentence in sorted(zip(places, needles, strict=True), key=lambda one: one[0]):
        parts += [text[begin:place], f" {sentence}" if place == len(text) else f"{sentence} "]
        begin = place
    return "".join([*parts, text[begin:]])
