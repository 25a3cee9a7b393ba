r"""Token texts, and the tokens at which paragraphs end and thinking begins and ends.

Steering adds a vector where the token just read ends a paragraph (its text contains ``"\n\n"``)
inside the thinking part: ``h <- h + strength * vector``, as in SEAL (Chen et al., 2025, arXiv
2504.07986) and SkipKV (2026, arXiv 2512.07993, section 4.2).

Each tokenizer is decoded once; the tables live as long as the tokenizer, one per device.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import KVPolicyError

PARAGRAPH = "\n\n"
THINK_TAGS = ("<think>", "</think>")

# Decoders return this for the bytes of an incomplete character.
_INCOMPLETE = "\ufffd"
# A character has up to four bytes, so up to four tokens.
_MAX_TOKENS_PER_CHARACTER = 4

_texts: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
_tables: WeakKeyDictionary[Any, dict[tuple[str, ...], Tensor]] = WeakKeyDictionary()


@attrs.frozen(eq=False)
class Paragraphs:
    r"""Token ids of one tokenizer that end paragraphs and that open and close thinking.

    Attributes:
        delimiters: Ids whose text contains the delimiter, bool ``[V]``.
        opens: Ids that open the thinking part, bool ``[V]``; ``None`` if all text is thinking.
        closes: Ids that close it, likewise.
    """

    delimiters: Tensor
    opens: Tensor | None
    closes: Tensor | None

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        *,
        delimiter: str = PARAGRAPH,
        think: tuple[str, str] | None = THINK_TAGS,
        device: torch.device | None = None,
    ) -> "Paragraphs":
        """Build the tables of a tokenizer; they are cached.

        Args:
            tokenizer: A Hugging Face tokenizer.
            delimiter: Text inside the tokens that end a paragraph.
            think: Tokens that open and close the thinking part; ``None`` if all text is
                thinking.
            device: Device of the tables; the CPU by default.

        Raises:
            KVPolicyError: There is no tokenizer, or it has no such tokens.
        """
        try:
            delimiters = tokens_containing(tokenizer, delimiter, device)
            if think is None:
                return cls(delimiters, None, None)
            opens, closes = (tokens_equal(tokenizer, tag, device) for tag in think)
        except KVPolicyError as error:
            msg = (
                f"steering at paragraphs is impossible: {error}; the knobs are delimiter = "
                f"{delimiter!r} and think = {think!r} (None: all of the text is thinking)"
            )
            raise KVPolicyError(msg) from error
        return cls(delimiters, opens, closes)

    def thinking_after(self, token_ids: Tensor, inside: bool = False) -> bool:
        """Whether thinking is open after some tokens, such as a prompt.

        Args:
            token_ids: ``[N]``, int64, on the device of the tables.
            inside: Whether it was open before them.

        Returns:
            The state after the last tag among them, or ``inside`` if there is no tag.
        """
        if self.opens is None or self.closes is None:
            return True
        opens, closes = look_up(self.opens, token_ids), look_up(self.closes, token_ids)
        tags = (opens | closes).nonzero()
        return bool(opens[tags[-1, 0]]) if tags.numel() else inside

    def update(self, inside: Tensor, token_ids: Tensor) -> None:
        """Update the thinking state with the tokens of one step.

        Pure tensor work, in place, so that a step can be captured in a graph.

        Args:
            inside: 1 for sequences that are thinking, else 0, ``[B]``, fp32; changed in place.
            token_ids: The tokens just read, ``[B]``, int64.
        """
        if self.opens is None or self.closes is None:
            inside.fill_(1.0)
            return
        inside.masked_fill_(look_up(self.opens, token_ids), 1.0)
        inside.masked_fill_(look_up(self.closes, token_ids), 0.0)


def steering_change(
    vector: Tensor,
    paragraphs: Paragraphs,
    hidden_states: Tensor,
    token_ids: Tensor,
    inside: Tensor,
    strength: Tensor,
) -> Tensor:
    """The change to add to the hidden states of one step; updates ``inside`` first.

    Args:
        vector: Steering vector, ``[M]``, fp32.
        paragraphs: Tables of the tokenizer.
        hidden_states: Residual stream entering the steered layer, ``[B, M]``.
        token_ids: The tokens just read, ``[B]``, int64.
        inside: 1 for sequences that are thinking, else 0, ``[B]``, fp32; changed in place.
        strength: Factor of the vector, ``[B]``, fp32.

    Returns:
        ``inside * strength * is_delimiter(token) * vector``, ``[B, M]``, in the dtype of
        ``hidden_states``, computed in fp32.
    """
    paragraphs.update(inside, token_ids)
    at_delimiter = look_up(paragraphs.delimiters, token_ids).float()  # [B]
    factor = inside * strength * at_delimiter
    return (factor[:, None] * vector).to(hidden_states.dtype)


def token_texts(tokenizer: Any) -> tuple[str, ...]:
    """The text of every token id, special tokens included.

    A token that holds only part of a character reads as the replacement character.

    Args:
        tokenizer: A Hugging Face tokenizer.

    Returns:
        One text for each id from 0, ``V`` of them.

    Raises:
        KVPolicyError: There is no tokenizer.
    """
    if tokenizer is None:
        msg = (
            "token texts need a tokenizer, and there is none; "
            "give the engine one: Engine(model, tokenizer, plan)"
        )
        raise KVPolicyError(msg)
    if tokenizer not in _texts:
        ids = [[i] for i in range(len(tokenizer))]
        _texts[tokenizer] = tuple(tokenizer.batch_decode(ids, skip_special_tokens=False))
    return _texts[tokenizer]


def texts_in_context(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds to the tokens before it, special tokens included.

    Some tokenizers add spaces by context. A character of several tokens is the text of the
    last of them; the others have none.

    Args:
        tokenizer: A Hugging Face tokenizer.
        token_ids: The tokens.

    Returns:
        One text for each token; joined they are the whole text.
    """

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        return text

    alone = {token: decode([token]) for token in set(token_ids)}
    texts = [alone[token] for token in token_ids]
    # Usually no text depends on context, so each distinct token is decoded only once.
    return texts if "".join(texts) == decode(token_ids) else _one_by_one(decode, token_ids)


def _one_by_one(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Decode each token together with the tokens before it that decide about spaces."""
    texts: list[str] = []
    # First token of the context; number of tokens whose text is known.
    context = done = 0
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[context:end])
        is_last = end == len(token_ids) or end - done == _MAX_TOKENS_PER_CHARACTER
        if text.endswith(_INCOMPLETE) and not is_last:
            texts.append("")
            continue
        texts.append(text[len(decode(token_ids[context:done])) :])
        context, done = done, end
    return texts


def tokens_containing(tokenizer: Any, text: str, device: torch.device | None = None) -> Tensor:
    r"""Ids whose text contains a string, such as ``"\n\n"``.

    Args:
        tokenizer: A Hugging Face tokenizer.
        text: The string.
        device: Device of the table; the CPU by default.

    Returns:
        Bool ``[V]``.

    Raises:
        KVPolicyError: There is no tokenizer, or no token contains the string.
    """
    problem = f"no token of the tokenizer contains {text!r}; give a text that is within one token"
    return _table(tokenizer, ("contains", text), lambda token: text in token, problem, device)


def tokens_equal(tokenizer: Any, text: str, device: torch.device | None = None) -> Tensor:
    """Ids whose text is a string, such as ``"</think>"``, up to surrounding white space.

    Args:
        tokenizer: A Hugging Face tokenizer.
        text: The string.
        device: Device of the table; the CPU by default.

    Returns:
        Bool ``[V]``.

    Raises:
        KVPolicyError: There is no tokenizer, or no such token.
    """
    problem = f"no token of the tokenizer is {text!r}; give a text that is a token of its own"
    return _table(tokenizer, ("is", text), lambda token: token.strip() == text, problem, device)


def look_up(table: Tensor, token_ids: Tensor) -> Tensor:
    """Index a table with token ids that may exceed the tokenizer's vocabulary.

    Models often have a few more logits than the tokenizer has tokens.

    Args:
        table: Bool ``[V]``.
        token_ids: Int64, any shape, on the device of the table.

    Returns:
        Bool, in the shape of ``token_ids``; false beyond ``V``.
    """
    last = table.shape[0] - 1
    return table[token_ids.clamp(max=last)] & (token_ids <= last)


def _table(
    tokenizer: Any,
    key: tuple[str, str],
    matches: Callable[[str], bool],
    problem: str,
    device: torch.device | None,
) -> Tensor:
    target = torch.device("cpu") if device is None else device
    texts = token_texts(tokenizer)
    tables = _tables.setdefault(tokenizer, {})
    full_key = (*key, str(target))
    if full_key not in tables:
        table = torch.tensor([matches(text) for text in texts])
        if not table.any():
            raise KVPolicyError(problem)
        tables[full_key] = table.to(target)
    return tables[full_key]
