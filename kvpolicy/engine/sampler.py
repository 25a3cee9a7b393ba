"""The sampler: from logits to the next tokens, as the request of each sequence asks for."""

from collections import abc

import numpy as np
import torch
from torch import Tensor

from kvpolicy.attention.draw import columns_of, draw, flag_missing
from kvpolicy.devices import upload
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Drawn, Output, Step
from kvpolicy.model.tensor_parallel import SingleProcess

# Chooses the next tokens ``[B]`` of sequences from their logits ``[B, V]``, on the same device;
# `NO_TOKEN` where the logits name none.
ChooseTokens = abc.Callable[[abc.Sequence[Sequence], Tensor], Tensor]


class Sampler:
    """Draws the tokens of steps, unless the runner has drawn them already."""

    def __init__(self, processes: SingleProcess, choose: ChooseTokens | None = None) -> None:
        """Take the processes that hold the model, and what chooses tokens in place of requests."""
        self._processes, self._choose = processes, choose

    def reads_tokens(self, sequences: abc.Iterable[Sequence]) -> bool:
        """Whether tokens of these sequences are chosen by what reads the ones before."""
        return self._choose is not None or has_processors(sequences)

    def sample(self, step: Step, output: Output) -> Drawn:
        """The next tokens of the sequences that a step completes."""
        if output.drawn is not None:
            return Drawn([[token] for token in output.drawn.read().tolist()])
        tokens: list[list[int]] = [[] for _ in step.sequences]
        places = [place for place, is_last in enumerate(step.completes) if is_last]
        if places and step.error is None:
            complete = len(places) == len(tokens)
            sequences = [step.sequences[place] for place in places]
            logits = output.logits if complete else output.logits[places]
            drawn = (self._choose or sample_next)(sequences, logits)
            same = self._processes.same_tokens(drawn)
            for show in step.on_drawn:
                show(sequences, logits, same)
            for place, token in zip(places, same.tolist(), strict=True):
                tokens[place].append(token)
        return Drawn(tokens)


def sample_next(sequences: abc.Sequence[Sequence], logits: Tensor) -> Tensor:
    """Sample the next token of each sequence with the sampling of its request."""
    columns = columns_of([seq.sampling for seq in sequences], logits.device)
    position = _int64([seq.num_tokens for seq in sequences], logits.device)
    return draw(processed(sequences, logits), columns, position)


def has_processors(sequences: abc.Iterable[Sequence]) -> bool:
    """Whether logits of any of these sequences are processed, which needs their newest tokens."""
    return any(seq.processors is not None for seq in sequences)


def processed(sequences: abc.Sequence[Sequence], logits: Tensor) -> Tensor:
    """The logits ``[B, V]`` that tokens are chosen from; the same where nothing changes them."""
    if not has_processors(sequences):
        return logits
    new = logits.to(torch.float32, copy=True)  # as generate does
    for row, seq in enumerate(sequences):
        if seq.processors is not None:
            tokens = seq.token_ids(seq.processors.num_tokens, seq.num_tokens)
            new[row] = seq.processors(tokens, new[row])
    return new


def teacher_forced(tokens: abc.Sequence[int], logits: Tensor) -> Tensor:
    """The answer of a sampler that leads sequences along given tokens."""
    return flag_missing(_int64(tokens, logits.device), logits)


def _int64(values: abc.Sequence[int], device: torch.device) -> Tensor:
    return upload(np.array(values, dtype=np.int64), device)
