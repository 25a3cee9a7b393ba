"""Log-probabilities of drawn tokens, and of prompts, for requests that ask for them."""

from collections import abc
from functools import cached_property

import numpy as np
from torch import Tensor

from kvpolicy.devices import upload
from kvpolicy.engine.extensions.base import ANY, Extension
from kvpolicy.engine.requests.results import TokenLogprobs
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Drawn, Output, Step

# Logits that a prefill forward has at most, if those after all of its tokens are wanted.
_MOST_LOGITS = 2**26


class Logprobs(Extension):
    """Measures tokens, and notes what it finds with their sequences."""

    def __init__(self, vocab_size: int) -> None:
        """Take the number of tokens that the model knows."""
        self._most_tokens = max(_MOST_LOGITS // vocab_size, 1)
        self._measured: list[Measured] = []  # of the step under way

    def forward_limit(self, sequences: abc.Sequence[Sequence]) -> int:
        """Fewer tokens in a forward where logits after all of them are wanted."""
        return self._most_tokens if _asks(sequences) else ANY

    def repeats(self, sequences: abc.Sequence[Sequence]) -> int:
        """What is measured of a step is read with its tokens."""
        return 1 if any(seq.request.logprobs is not None for seq in sequences) else ANY

    def before(self, step: Step) -> None:
        """Ask for logits."""
        self._measured.clear()
        step.wants_logits |= not step.is_decode and _asks(step.sequences)
        if any(seq.request.logprobs is not None for seq in step.sequences):
            step.on_drawn.append(self._measure)

    def after(self, step: Step, output: Output, drawn: Drawn) -> None:
        """Note what was measured of the tokens that sequences have taken."""
        if output.all_logits is not None:
            self._measure_prompts(step, output.all_logits)
        for measured in self._measured:
            for seq in step.sequences:
                # It may have ended before, or without a token.
                if len(seq.logprobs) < len(seq.own_tokens) and seq.id in measured.by_number:
                    seq.logprobs.append(measured.by_number[seq.id])

    def _measure(self, sequences: abc.Sequence[Sequence], logits: Tensor, tokens: Tensor) -> None:
        """Measure tokens that are taken later, if their sequences are still there."""
        wanted: dict[int, tuple[int, int]] = {}
        for row, seq in enumerate(sequences):
            if seq.request.logprobs is not None:
                wanted[seq.id] = row, seq.request.logprobs
        if wanted:
            self._measured.append(Measured(wanted, logits, tokens))

    def _measure_prompts(self, step: Step, logits: Tensor) -> None:
        """Note the log-probabilities of prompts, of logits ``[B, L, V]`` after a chunk."""
        for row, (seq, length) in enumerate(zip(step.sequences, step.lengths, strict=True)):
            if (num_top := seq.request.prompt_logprobs) is None:
                continue
            end = int(self.cache.seq_len[seq.slot])
            known = logits[row, -length:]
            following = np.array(seq.prompt[end - len(known) + 1 : end + 1], dtype=np.int64)
            tokens = upload(following, logits.device)
            if len(tokens):
                wanted = {place: (place, num_top) for place in range(len(tokens))}
                seq.prompt_logprobs += Measured(wanted, known, tokens).by_number.values()


def _asks(sequences: abc.Iterable[Sequence]) -> bool:
    """Whether the log-probabilities of any of their prompts are wanted."""
    return any(seq.request.prompt_logprobs is not None for seq in sequences)


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
        rows = upload(np.array([row for row, _ in wanted.values()]), logits.device)
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
