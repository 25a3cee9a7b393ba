"""Sampling: from logits to the next token, as the request of each sequence asks for."""

from collections import abc

import numpy as np
import torch
from torch import Tensor

from kvpolicy.attention.draw import columns_of, draw, flag_missing
from kvpolicy.devices import upload
from kvpolicy.engine.requests.sequence import Sequence

# Chooses the next tokens ``[B]`` of sequences from their logits ``[B, V]``, on the same device;
# `NO_TOKEN` where the logits name none.
Sampler = abc.Callable[[abc.Sequence[Sequence], Tensor], Tensor]


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


def forced(tokens: abc.Sequence[int], logits: Tensor) -> Tensor:
    """The answer of a sampler that leads sequences along given tokens."""
    return flag_missing(_int64(tokens, logits.device), logits)


def _int64(values: abc.Sequence[int], device: torch.device) -> Tensor:
    return upload(np.array(values, dtype=np.int64), device)
