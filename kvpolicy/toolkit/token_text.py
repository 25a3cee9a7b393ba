"""What tokens say: the text of every token id, and which ids hold a text.

A tokenizer is asked once. Tables are kept as long as the tokenizer is, one for each device.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvpolicy.errors import KVPolicyError

# What a tokenizer shows for a character whose bytes are not all there yet.
UNFINISHED = "\ufffd"
# Bytes of one character, and as many tokens where each is one byte.
_MOST_TOKENS_OF_A_CHARACTER = 4

_texts: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
_tables: WeakKeyDictionary[Any, dict[tuple[str, ...], Tensor]] = WeakKeyDictionary()


def token_texts(tokenizer: Any) -> tuple[str, ...]:
    """The text of every token id, special tokens included.

    A token that is no whole character by itself reads as the replacement character.

    Args:
        tokenizer: A Hugging Face tokenizer.

    Returns:
        One text for each id from 0, ``V`` of them.

    Raises:
        KVPolicyError: There is no tokenizer.
    """
    if tokenizer is None:
        msg = (
            "texts of tokens are asked for, and there is no tokenizer; "
            "give the engine one: Engine(model, tokenizer, plan)"
        )
        raise KVPolicyError(msg)
    if tokenizer not in _texts:
        ids = [[i] for i in range(len(tokenizer))]
        _texts[tokenizer] = tuple(tokenizer.batch_decode(ids, skip_special_tokens=False))
    return _texts[tokenizer]


def texts_in_context(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text of those before it, special tokens included.

    Some tokenizers put spaces by context, and some characters take several tokens: these are
    said by the last of them, and the others say nothing.

    Args:
        tokenizer: A Hugging Face tokenizer.
        token_ids: The tokens.

    Returns:
        One text for each token; one after another they are the whole text.
    """

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        return text

    alone = {token: decode([token]) for token in set(token_ids)}
    texts = [alone[token] for token in token_ids]
    # Mostly nothing depends on context, and tokens come again and again.
    return texts if "".join(texts) == decode(token_ids) else _one_by_one(decode, token_ids)


def _one_by_one(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Decode each token with those before it, as far back as it takes to know the spaces."""
    texts: list[str] = []
    context = said = 0  # the first token that is decoded once more; tokens whose text is known
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[context:end])
        is_last = end == len(token_ids) or end - said == _MOST_TOKENS_OF_A_CHARACTER
        if text.endswith(UNFINISHED) and not is_last:
            texts.append("")
            continue
        texts.append(text[len(decode(token_ids[context:said])) :])
        context, said = said, end
    return texts


def tokens_containing(tokenizer: Any, text: str, device: torch.device | None = None) -> Tensor:
    r"""Which ids hold a text, such as ``"\n\n"``.

    Args:
        tokenizer: A Hugging Face tokenizer.
        text: What to look for inside of tokens.
        device: Where the answer is needed; the CPU if not given.

    Returns:
        Bool ``[V]``.

    Raises:
        KVPolicyError: There is no tokenizer, or no token holds the text.
    """
    problem = f"no token of the tokenizer contains {text!r}; give a text that is within one token"
    return _table(tokenizer, ("contains", text), lambda token: text in token, problem, device)


def tokens_equal(tokenizer: Any, text: str, device: torch.device | None = None) -> Tensor:
    """Which ids are a text, such as ``"</think>"``, white space around it aside.

    Args:
        tokenizer: A Hugging Face tokenizer.
        text: What the token says.
        device: Where the answer is needed; the CPU if not given.

    Returns:
        Bool ``[V]``.

    Raises:
        KVPolicyError: There is no tokenizer, or no such token.
    """
    problem = f"no token of the tokenizer is {text!r}; give a text that is a token of its own"
    return _table(tokenizer, ("is", text), lambda token: token.strip() == text, problem, device)


def look_up(table: Tensor, token_ids: Tensor) -> Tensor:
    """Read a table for token ids that may lie beyond the tokenizer's vocabulary.

    Models often have a few more rows of logits than the tokenizer has tokens.

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
    holds: Callable[[str], bool],
    problem: str,
    device: torch.device | None,
) -> Tensor:
    where = torch.device("cpu") if device is None else device
    texts = token_texts(tokenizer)
    tables = _tables.setdefault(tokenizer, {})
    placed = (*key, str(where))
    if placed not in tables:
        table = torch.tensor([holds(text) for text in texts])
        if not table.any():
            raise KVPolicyError(problem)
        tables[placed] = table.to(where)
    return tables[placed]
