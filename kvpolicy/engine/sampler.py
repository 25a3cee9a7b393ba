"""Sampling: from logits to the next token, as the request of each sequence asks for."""

from collections import abc

import torch
from torch import Tensor

from kvpolicy.engine.request import Sampling
from kvpolicy.engine.sequence import Sequence
from kvpolicy.kernels.draw import SamplingColumns, draw, flag_missing

# Chooses the next tokens ``[B]`` of sequences from their logits ``[B, V]``, on the same device;
# `NO_TOKEN` where the logits name none.
Sampler = abc.Callable[[abc.Sequence[Sequence], Tensor], Tensor]


def sample_next(sequences: abc.Sequence[Sequence], logits: Tensor) -> Tensor:
    """Sample the next token of each sequence with the sampling of its request."""
    columns = columns_of([seq.request.sampling for seq in sequences], logits.device)
    position = _int64([seq.num_tokens for seq in sequences], logits.device)
    return draw(logits, columns, position)


def forced(tokens: abc.Sequence[int], logits: Tensor) -> Tensor:
    """The answer of a sampler that leads sequences along given tokens."""
    return flag_missing(_int64(tokens, logits.device), logits)


def columns_of(samplings: abc.Sequence[Sampling], device: torch.device | str) -> SamplingColumns:
    """The samplings as tensors, without those that none of them needs."""
    if all(sampling.greedy for sampling in samplings):
        return SamplingColumns()
    temperatures = [sampling.temperature for sampling in samplings]
    top_k = [sampling.top_k for sampling in samplings]
    top_p = [sampling.top_p for sampling in samplings]
    return SamplingColumns(
        temperature=torch.tensor(temperatures, dtype=torch.float32, device=device),
        seed=_int64([sampling.seed for sampling in samplings], device),
        top_k=_int64(top_k, device) if any(top_k) else None,
        top_p=torch.tensor(top_p, dtype=torch.float64, device=device) if min(top_p) < 1 else None,
    )


def _int64(values: abc.Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
