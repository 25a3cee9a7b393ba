"""Segmentation of a sequence into sentences, token by token.

A sentence ends with a delimiter token and contains it. Consecutive delimiters end one sentence.
Tokens after the last delimiter belong to an open sentence, which does not count yet.
"""

from collections.abc import Sequence
from typing import Any, Literal

import attrs

from kvpolicy import KVPolicyError
from kvpolicy.toolkit import token_texts

Match = Literal["text", "ids"]

# Text that introduces something, such as a code block, is not a sentence (SkipKV, appendix).
NOT_DELIMITERS = (":\n", ":\n\n")


def last_tokens(texts: Sequence[str], tokenizer: Any) -> set[int]:
    """The last token of the encoding of each text that the tokenizer knows, if there is one."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    encodings = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    known = [[token for token in encoded if token != unknown] for encoded in encodings]
    return {encoded[-1] for encoded in known if encoded}


@attrs.frozen
class Delimiters:
    """The delimiters of sentences for one tokenizer.

    A delimiter that is a single token is matched by id. Others are matched in the text of the
    last tokens, unless ids only are compared.

    Attributes:
        ids: Tokens that are delimiters by themselves.
        texts: Delimiters that are not a single token.
        token_texts: Text of every token id; ``None`` if ids only are compared.
    """

    ids: frozenset[int]
    texts: tuple[str, ...] = ()
    token_texts: Sequence[str] | None = None

    @classmethod
    def of(
        cls, delimiters: Sequence[str | int], tokenizer: Any, match: Match = "text"
    ) -> "Delimiters":
        """Look up delimiters.

        Args:
            delimiters: Texts, or token ids, which need no tokenizer.
            tokenizer: The engine's tokenizer.
            match: ``"text"``, or ``"ids"``: the last token of the encoding of each text, as in
                the authors' code, whatever the text before it.

        Raises:
            KVPolicyError: There are texts and no tokenizer.
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
        if match == "ids":
            return cls(frozenset(ids | last_tokens(texts, tokenizer)))
        encodings = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        known = token_texts(tokenizer)
        multi_token = []
        for text, encoded in zip(texts, encodings, strict=True):
            if len(encoded) == 1 and known[encoded[0]] == text:
                ids.add(encoded[0])
            else:
                multi_token.append(text)
        return cls(frozenset(ids), tuple(multi_token), known)

    def end_at(self, recent: Sequence[int]) -> bool:
        """Whether the last of some tokens ends a sentence.

        Args:
            recent: The last tokens, at least `reach` of them if there are that many.
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
        """The most tokens that a delimiter, or an exception to one, can consist of."""
        return max(map(len, (*self.texts, *NOT_DELIMITERS)))

    def _text(self, token: int) -> str:
        """Text of a token; models have a few more ids than their tokenizers."""
        assert self.token_texts is not None
        return self.token_texts[token] if token < len(self.token_texts) else ""


@attrs.define
class Sentence:
    """A finished sentence: the tokens at positions ``[begin, end)``.

    Attributes:
        begin: Position of its first token.
        end: Position after its last token.
        body_end: Position after its first delimiter; further delimiters do not count towards
            its vector.
    """

    begin: int
    end: int
    body_end: int


# Fields of a segmenter besides its sentences that are no knobs.
_READ = ("begin", "open_ids", "_recent", "_position", "_has_words")


@attrs.define
class Segmenter:
    """Divides one sequence into sentences, token by token.

    Attributes:
        delimiters: The delimiters.
        merge: Whether consecutive delimiters end one sentence (the paper) or are sentences of
            one token each (the code).
        sentences: The finished sentences, in order.
        begin: Position at which the open sentence begins.
        open_ids: Tokens of the open sentence so far.
    """

    delimiters: Delimiters
    merge: bool = True
    sentences: list[Sentence] = attrs.field(factory=list)
    begin: int = 0
    open_ids: list[int] = attrs.field(factory=list)
    _recent: list[int] = attrs.field(factory=list)
    _position: int = 0
    _has_words: bool = False  # in the open sentence

    def pack(self) -> dict[str, Any]:
        """What it has read so far, as plain data."""
        sentences = [attrs.astuple(sentence) for sentence in self.sentences]
        return {name: getattr(self, name) for name in _READ} | {"sentences": sentences}

    def unpack(self, packed: dict[str, Any]) -> None:
        """Go on from what `pack` returned."""
        for name in _READ:
            setattr(self, name, packed[name])
        self.sentences = [Sentence(*sentence) for sentence in packed["sentences"]]

    def feed(self, token_ids: Sequence[int]) -> list[tuple[Sentence, list[int]]]:
        """Process the next tokens.

        Returns:
            The sentences that they complete, each with all its tokens.
        """
        finished = []
        for token in token_ids:
            self._recent = [*self._recent[-self.delimiters.reach :], token]
            self._position += 1
            self.open_ids.append(token)
            if not self.delimiters.end_at(self._recent):
                self._has_words = True
            elif self.merge and not self._has_words:
                self._join()
            else:
                sentence = Sentence(self.begin, self._position, self._position)
                self.sentences.append(sentence)
                finished.append((sentence, self.open_ids))
                self._open()
        return finished

    def _join(self) -> None:
        """Append a delimiter to the previous sentence, if there is one."""
        if self.sentences:
            self.sentences[-1].end = self._position
            self._open()

    def _open(self) -> None:
        """Begin a new sentence."""
        self.begin, self.open_ids, self._has_words = self._position, [], False
