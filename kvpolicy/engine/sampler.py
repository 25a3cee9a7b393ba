"""Sampling: from logits to the next token, each sequence with its own random generator."""

from collections import abc

import torch
from torch import Tensor

from kvpolicy.engine.request import Sampling
from kvpolicy.engine.sequence import Sequence

# Chooses the next token of each sequence from its logits ``[B, V]``.
Sampler = abc.Callable[[abc.Sequence[Sequence], Tensor], abc.Sequence[int]]


# Below this, quotients exceed fp32; the likeliest token has the probability 1 long before.
_LEAST_TEMPERATURE = 1e-30


def sample_next(sequences: abc.Sequence[Sequence], logits: Tensor) -> list[int]:
    """Sample the next token of each sequence with the sampling of its request."""
    tokens = logits.argmax(dim=-1)
    rows = [row for row, seq in enumerate(sequences) if seq.request.sampling.temperature > 0]
    if rows:
        samplings = [sequences[row].request.sampling for row in rows]
        generators = [sequences[row].generator for row in rows]
        tokens[rows] = sample(logits[rows].float(), samplings, generators)
    return tokens.tolist()


def probabilities(logits: Tensor, samplings: abc.Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """The distribution to sample from: temperature, then top-k, then top-p.

    This is the order of transformers' logits processors.

    Args:
        logits: ``[B, V]``, fp32.
        samplings: Sampling of each sequence; none of them greedy.

    Returns:
        Probabilities in falling order ``[B, V]``, 0 for tokens that cannot be sampled, and the
        token of each, ``[B, V]``. Rows need not sum to 1 exactly.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    vocab = logits.shape[1]
    temperature = column([sampling.temperature for sampling in samplings])
    scaled = logits / temperature.clamp(min=_LEAST_TEMPERATURE)
    ranked, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    top_k = column([sampling.top_k or vocab for sampling in samplings])
    ranked = ranked.masked_fill(torch.arange(vocab, device=logits.device) >= top_k, -torch.inf)
    likely = ranked.softmax(dim=-1)
    # A token belongs to the nucleus while those before it have less than top_p.
    before = likely.cumsum(dim=-1) - likely
    outside = before >= column([sampling.top_p for sampling in samplings])
    outside[:, 0] = False  # also if fp32 rounds top_p to 0
    return likely.masked_fill(outside, 0), tokens


def sample(
    logits: Tensor,
    samplings: abc.Sequence[Sampling],
    generators: abc.Sequence[torch.Generator],
) -> Tensor:
    """Sample the next token of every sequence.

    Args:
        logits: ``[B, V]``, fp32.
        samplings: Sampling of each sequence; none of them greedy.
        generators: Random generator of each sequence, on the CPU.

    Returns:
        Token ids ``[B]``, int64.
    """
    likely, tokens = probabilities(logits, samplings)
    uniform = torch.cat([torch.rand(1, generator=generator) for generator in generators])
    cumulative = likely.cumsum(dim=-1)
    point = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, point, right=True)
    # Rounding may put the point past the last token that can be sampled.
    last = (likely > 0).sum(dim=-1, keepdim=True) - 1
    return tokens.gather(1, torch.minimum(index, last))[:, 0]
