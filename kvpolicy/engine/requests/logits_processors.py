"""Logits processors of a sequence: what `generate` would do to its logits before it draws.

And what OpenAI's interface has beside that: a bias of tokens, and penalties on the answer's own.
"""

from collections import abc

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from kvpolicy.engine.requests.request import Sampling


def own_processors(
    sampling: Sampling, num_prompt: int, device: torch.device
) -> list[LogitsProcessor]:
    """What a request asks for that is no field of a generation config.

    Args:
        sampling: What it asks for.
        num_prompt: Tokens of its prompt, which is not penalised.
        device: Device of the logits.
    """
    found: list[LogitsProcessor] = []
    if sampling.logit_bias:
        found.append(_LogitBias(sampling.logit_bias, device))
    if sampling.frequency_penalty or sampling.presence_penalty:
        found.append(
            _AnswerPenalties(num_prompt, sampling.frequency_penalty, sampling.presence_penalty)
        )
    return found


class _LogitBias(LogitsProcessor):
    def __init__(self, pairs: abc.Sequence[tuple[int, float]], device: torch.device) -> None:
        tokens, values = zip(*pairs, strict=True)
        self._tokens = torch.tensor(tokens, device=device)
        self._values = torch.tensor(values, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_add(1, self._tokens, self._values[None].to(scores.dtype))


class _AnswerPenalties(LogitsProcessor):
    """As in OpenAI's documentation: ``mu[j] - c[j] * frequency - (c[j] > 0) * presence``."""

    def __init__(self, num_prompt: int, frequency: float, presence: float) -> None:
        self._num_prompt, self._frequency, self._presence = num_prompt, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self._num_prompt :]
        ones = torch.ones_like(answer, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add(1, answer, ones)
        return scores - self._frequency * counts - self._presence * (counts > 0)


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
