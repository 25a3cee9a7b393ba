"""Adaptive steering: the more a sequence has checked and doubted, the harder it is steered."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from skipkv_plugin.policy import SkipKV

KeywordMatch = Literal["text", "ids"]


def is_non_execution(
    token_ids: Sequence[int], tokenizer: Any, keywords: Sequence[str], match: KeywordMatch
) -> bool:
    """Whether a sentence checks, doubts or starts over, and so brings nothing forward.

    Args:
        token_ids: All tokens of the sentence.
        tokenizer: The engine's tokenizer; without one no sentence is.
        keywords: Words that tell.
        match: ``"text"``: the text has one as a word of its own, in any case. ``"ids"``: the
            tokens hold the last token of a keyword's encoding (the authors' code, which so
            misses a word that has a space before it, or is split elsewhere).
    """
    if tokenizer is None or not keywords:
        return False
    if match == "ids":
        return not {
            tokenizer.encode(word, add_special_tokens=False)[-1] for word in keywords
        }.isdisjoint(token_ids)
    words = "|".join(map(re.escape, keywords))
    text = tokenizer.decode(list(token_ids))
    return re.search(rf"\b({words})\b", text, re.IGNORECASE) is not None


def strength(num_non_execution: int, policy: "SkipKV") -> float:
    """``alpha_0 + gamma * N_o``, at most ``alpha_max`` (SkipKV, section 4.2)."""
    alpha = policy.alpha_0 + policy.gamma * num_non_execution
    return min(alpha, policy.alpha_max) if policy.alpha_max else alpha
