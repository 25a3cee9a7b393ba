"""Sentences: where they begin and end, found token by token on the ids.

A sentence ends with a delimiter token and holds it. Delimiters that follow each other end one
sentence. What stands after the last delimiter is open: it is no sentence yet.
"""

from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.errors import KVPolicyError
from kvpolicy.toolkit.token_text import token_texts

#: What introduces something, as a code block, belongs to it (SkipKV, appendix).
NOT_DELIMITERS = (":\n", ":\n\n")


@attrs.frozen
class Delimiters:
    """What ends a sentence, for one tokenizer.

    A delimiter that is a single token is looked for as that token. One that is not is looked
    for in the text of the last tokens; the authors take the last token of its encoding, which
    may mean something else.

    Attributes:
        ids: Tokens that are delimiters by themselves.
        texts: Delimiters that no single token is.
        token_texts: Text of every token id; ``None`` if delimiters are given as ids only.
    """

    ids: frozenset[int]
    texts: tuple[str, ...] = ()
    token_texts: Sequence[str] | None = None

    @classmethod
    def of(cls, delimiters: Sequence[str | int], tokenizer: Any) -> "Delimiters":
        """Look delimiters up.

        Args:
            delimiters: Texts, or token ids, which need no tokenizer.
            tokenizer: The engine's tokenizer.

        Raises:
            KVPolicyError: If there are texts and no tokenizer.
        """
        ids = {one for one in delimiters if isinstance(one, int)}
        texts = [one for one in delimiters if isinstance(one, str)]
        if not texts:
            return cls(frozenset(ids))
        if tokenizer is None:
            msg = (
                "skipkv finds sentences by their text and the engine has no tokenizer; give it "
                "one, or name token ids: delimiters = [198, 271]"
            )
            raise KVPolicyError(msg)
        known = token_texts(tokenizer)
        split = []
        for text in texts:
            encoded = tokenizer.encode(text, add_special_tokens=False)
            if len(encoded) == 1 and known[encoded[0]] == text:
                ids.add(encoded[0])
            else:
                split.append(text)
        return cls(frozenset(ids), tuple(split), known)

    def end_at(self, recent: Sequence[int]) -> bool:
        """Whether the last of some tokens ends a sentence.

        Args:
            recent: Tokens up to the one in question, at least `reach` of them if there are.
        """
        if self.token_texts is None:
            return recent[-1] in self.ids
        if recent[-1] not in self.ids and not self.texts:
            return False
        text = "".join(self._text(token) for token in recent[-self.reach :])
        if text.endswith(NOT_DELIMITERS):
            return False
        return recent[-1] in self.ids or text.endswith(self.texts)

    @property
    def reach(self) -> int:
        """Tokens that the longest delimiter, or what only looks like one, may be made of."""
        return max(map(len, (*self.texts, *NOT_DELIMITERS)))

    def _text(self, token: int) -> str:
        """Text of a token; models have a few ids more than their tokenizers."""
        assert self.token_texts is not None
        return self.token_texts[token] if token < len(self.token_texts) else ""


@attrs.define
class Sentence:
    """A finished sentence: the tokens at places ``[begin, end)``.

    Attributes:
        begin: Place of its first token.
        end: Place behind its last token.
        body_end: Place behind its first delimiter; those that follow it are no part of what
            the sentence says.
    """

    begin: int
    end: int
    body_end: int


@attrs.define
class Segmenter:
    """Cuts one sequence into sentences, as its tokens come in.

    Attributes:
        delimiters: What ends a sentence.
        merge: Whether delimiters that follow each other end one sentence (the paper), or make
            sentences of one token each (what the code does).
        sentences: The finished sentences, in order.
        begin: Place at which the open sentence begins.
        open_ids: Tokens of the open sentence so far.
    """

    delimiters: Delimiters
    merge: bool = True
    sentences: list[Sentence] = attrs.field(factory=list)
    begin: int = 0
    open_ids: list[int] = attrs.field(factory=list)
    _recent: list[int] = attrs.field(factory=list)
    _place: int = 0
    _has_words: bool = False  # in the open sentence

    def feed(self, token_ids: Sequence[int]) -> list[tuple[Sentence, list[int]]]:
        """Go on with the next tokens.

        Returns:
            The sentences that they finish, each with all its tokens.
        """
        finished = []
        for token in token_ids:
            self._recent = [*self._recent[-self.delimiters.reach :], token]
            self._place += 1
            self.open_ids.append(token)
            if not self.delimiters.end_at(self._recent):
                self._has_words = True
            elif self.merge and not self._has_words:
                self._join()
            else:
                sentence = Sentence(self.begin, self._place, self._place)
                self.sentences.append(sentence)
                finished.append((sentence, self.open_ids))
                self._open()
        return finished

    def _join(self) -> None:
        """Give a delimiter that follows another to the sentence before; the first has none."""
        if self.sentences:
            self.sentences[-1].end = self._place
            self._open()

    def _open(self) -> None:
        self.begin, self.open_ids, self._has_words = self._place, [], False
