"""Adaptive steering: the strength grows with the number of non-execution sentences."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from kvpolicy.toolkit import Paragraphs, look_up
from skipkv_plugin.sentences import Match, last_tokens

ThinkInPrompt = Literal["last", "any"]


def is_non_execution(
    token_ids: Sequence[int], tokenizer: Any, keywords: Sequence[str], match: Match
) -> bool:
    """Whether a sentence checks, doubts or starts over instead of advancing the solution.

    Args:
        token_ids: All tokens of the sentence.
        tokenizer: The engine's tokenizer; without one the answer is no.
        keywords: Words of non-execution sentences.
        match: ``"text"``: the text contains a keyword as a word, in any case. ``"ids"``: the
            tokens contain the last token of a keyword's encoding, as in the authors' code,
            which misses a word after a space or with another split.
    """
    if tokenizer is None or not keywords:
        return False
    if match == "ids":
        return not last_tokens(keywords, tokenizer).isdisjoint(token_ids)
    words = "|".join(map(re.escape, keywords))
    text = tokenizer.decode(list(token_ids))
    return re.search(rf"\b({words})\b", text, re.IGNORECASE) is not None


def strength(num_non_execution: int, *, alpha_0: float, gamma: float, alpha_max: float) -> float:
    """``alpha_0 + gamma * N_o``, at most ``alpha_max`` (SkipKV, section 4.2)."""
    alpha = alpha_0 + gamma * num_non_execution
    return min(alpha, alpha_max) if alpha_max else alpha


def thinking_after_prompt(
    paragraphs: Paragraphs, token_ids: Tensor, inside: bool, *, which: ThinkInPrompt, is_end: bool
) -> bool:
    """Whether thinking is open after a chunk of the prompt.

    Args:
        paragraphs: The tokens that open and close thinking.
        token_ids: The chunk, ``[L]``.
        inside: The answer for the chunk before it.
        which: ``"last"``: the last tag decides. ``"any"``: any opening tag of the prompt opens
            it and only its last token closes it, as in the authors' code.
        is_end: Whether the prompt ends with this chunk.
    """
    if which == "last" or paragraphs.opens is None or paragraphs.closes is None:
        return paragraphs.thinking_after(token_ids, inside)
    if is_end and look_up(paragraphs.closes, token_ids[-1]):
        return False
    return inside or bool(look_up(paragraphs.opens, token_ids).any())
