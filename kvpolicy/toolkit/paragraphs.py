r"""Steering while a sequence thinks: the arithmetic of one decode step.

A change is added where the token just read ends a paragraph (its text contains ``"\n\n"``)
inside the thinking part, as in SEAL (Chen et al., 2025, arXiv 2504.07986) and SkipKV (2026,
arXiv 2512.07993, section 4.2): ``h <- h + strength * vector``.
"""

from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import KVPolicyError
from kvpolicy.toolkit.token_text import look_up, tokens_containing, tokens_equal

PARAGRAPH = "\n\n"
THINK_TAGS = ("<think>", "</think>")


@attrs.frozen(eq=False)
class Paragraphs:
    r"""Where paragraphs end and where thinking begins and ends, in tokens of one tokenizer.

    Attributes:
        delimiters: Ids whose text contains the delimiter, bool ``[V]``.
        opens: Ids that open the thinking part, bool ``[V]``; none if all of a text is one.
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
        """Look into a tokenizer; cheap after the first time.

        Args:
            tokenizer: A Hugging Face tokenizer.
            delimiter: Text within the tokens that end a paragraph.
            think: Tokens that open and close the thinking part; ``None`` for a model without
                such tokens, all of whose text counts as thinking.
            device: Where the tables are needed; the CPU if not given.

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
        """Tell whether thinking is open after some tokens, such as a prompt.

        Args:
            token_ids: ``[N]``, int64, on the device of the tables.
            inside: Whether it was open before them.

        Returns:
            What the last tag among them says, or ``inside`` if there is none.
        """
        if self.opens is None or self.closes is None:
            return True
        opens, closes = look_up(self.opens, token_ids), look_up(self.closes, token_ids)
        tags = (opens | closes).nonzero()
        return bool(opens[tags[-1, 0]]) if tags.numel() else inside

    def update(self, inside: Tensor, token_ids: Tensor) -> None:
        """Follow the tokens of one step into and out of the thinking part.

        Pure tensor work, in place, so that a step can be captured in a graph.

        Args:
            inside: 1 for sequences that were thinking, else 0, ``[B]``, fp32; is changed.
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
    """The change to add to the hidden states of one step; `inside` is brought up to date first.

    Args:
        vector: Steering vector, ``[M]``, fp32.
        paragraphs: Tables of the tokenizer.
        hidden_states: Residual stream entering the steered layer, ``[B, M]``.
        token_ids: The tokens just read, ``[B]``, int64.
        inside: 1 for sequences that are thinking, else 0, ``[B]``, fp32; is changed in place.
        strength: What the vector is multiplied with, ``[B]``, fp32.

    Returns:
        ``inside * strength * is_delimiter(token) * vector``, ``[B, M]``, in the dtype of
        ``hidden_states``, computed in fp32.
    """
    paragraphs.update(inside, token_ids)
    at_delimiter = look_up(paragraphs.delimiters, token_ids).float()  # [B]
    factor = inside * strength * at_delimiter
    return (factor[:, None] * vector).to(hidden_states.dtype)
