"""Log-probabilities of generated tokens, for the requests that ask for them."""

from collections import abc
from functools import cached_property

import attrs
import torch
from torch import Tensor


@attrs.frozen
class TokenLogprobs:
    """How likely the model found a token, and which tokens it found likeliest at its place.

    They are those of the model itself: temperature, top-k and top-p are left out.

    Attributes:
        token: The token that was taken.
        logprob: Its log-probability, natural logarithm.
        top: The likeliest tokens with their log-probabilities, likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Measured:
    """Log-probabilities of one step, on the device until they are read."""

    def __init__(
        self, wanted: abc.Mapping[int, tuple[int, int]], logits: Tensor, tokens: Tensor
    ) -> None:
        """Compute them.

        Args:
            wanted: For the number of each request that asks: its row, and how many of the
                likeliest tokens.
            logits: Logits of the step, ``[W, V]``.
            tokens: The tokens that were taken, ``[W]``, int64, on the same device.
        """
        self._wanted = dict(wanted)
        rows = torch.tensor([row for row, _ in wanted.values()], device=logits.device)
        logprobs = logits[rows].float().log_softmax(dim=-1)
        self._tokens = tokens[rows]
        # Instead of a token there may be -1, whose sequence ends with an error.
        self._taken = logprobs.gather(1, self._tokens.clamp(min=0)[:, None])[:, 0]
        most = max(num for _, num in wanted.values())
        self._top = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)

    @cached_property
    def by_number(self) -> dict[int, TokenLogprobs]:
        """What was measured, by the number of the request; waits for the device."""
        columns = (self._tokens, self._taken, self._top.indices, self._top.values)
        found = zip(self._wanted.items(), *(one.tolist() for one in columns), strict=True)
        return {
            number: TokenLogprobs(token, taken, tuple(zip(top[:num], values[:num], strict=True)))
            for (number, (_, num)), token, taken, top, values in found
        }
