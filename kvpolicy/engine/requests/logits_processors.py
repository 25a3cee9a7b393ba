"""Logits processors of a sequence: what `generate` would do to its logits before it draws."""

from collections import abc

import torch
from torch import Tensor
from transformers import LogitsProcessorList


class SequenceProcessors:
    """The processors of one sequence, with its tokens where they read them.

    Attributes:
        num_tokens: Tokens of the sequence that they were given.
    """

    def __init__(self, processors: LogitsProcessorList, max_len: int) -> None:
        """Nothing is given yet.

        Args:
            processors: They keep nothing between calls.
            max_len: The most tokens of the sequence.
        """
        self.num_tokens = 0
        self._processors, self._max_len = processors, max_len
        self._tokens: Tensor | None = None  # [1, max_len]

    def copied(self) -> "SequenceProcessors":
        """Those of a sequence that goes on by itself."""
        return SequenceProcessors(self._processors, self._max_len)

    def __call__(self, new_tokens: abc.Sequence[int], logits: Tensor) -> Tensor:
        """Process the logits of the next token.

        Args:
            new_tokens: Tokens of the sequence after those that were given before.
            logits: ``[V]``, fp32.

        Returns:
            ``[V]``, fp32.
        """
        if self._tokens is None:
            size = (1, self._max_len)
            self._tokens = torch.empty(size, dtype=torch.int64, device=logits.device)
        before, self.num_tokens = self.num_tokens, self.num_tokens + len(new_tokens)
        self._tokens[0, before : self.num_tokens] = torch.tensor(new_tokens)
        tokens: torch.LongTensor = self._tokens[:, : self.num_tokens]  # type: ignore[assignment]
        return self._processors(tokens, logits[None])[0]
