"""From logits to the next token, each sequence with a generator of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.engine.request import Sampling


def sample(
    logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]
) -> Tensor:
    """Draw the next token of every sequence.

    Args:
        logits: ``[B, V]``.
        samplings: How each sequence draws, B of them.
        generators: Where each sequence gets its randomness, on the CPU, B of them. A greedy
            sequence takes nothing from its own.

    Returns:
        Token ids ``[B]``, int64, on the CPU.
    """
    tokens = logits.argmax(dim=-1)
    drawing = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    if drawing:
        drawn = _draw(
            logits[drawing].float(),
            [samplings[row] for row in drawing],
            [generators[row] for row in drawing],
        )
        tokens[drawing] = drawn
    return tokens.cpu()


def probabilities(logits: Tensor, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """The distribution that each sequence draws from: temperature, then top-k, then top-p.

    The order is that of transformers' logits processors.

    Args:
        logits: ``[B, V]``, fp32.
        samplings: How each sequence draws; none of them greedy.

    Returns:
        Probabilities in falling order ``[B, V]``, 0 for tokens that may not be drawn, and the
        token each belongs to, ``[B, V]``. Rows need not sum to 1 exactly.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    vocab = logits.shape[1]
    scaled = logits / column([sampling.temperature for sampling in samplings])
    ranked, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    top_k = column([sampling.top_k or vocab for sampling in samplings])
    ranked = ranked.masked_fill(torch.arange(vocab, device=logits.device) >= top_k, -torch.inf)
    likely = ranked.softmax(dim=-1)
    # A token is drawn from the nucleus while those before it have less than top_p.
    before = likely.cumsum(dim=-1) - likely
    outside = before >= column([sampling.top_p for sampling in samplings])
    return likely.masked_fill(outside, 0), tokens


def _draw(
    logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]
) -> Tensor:
    likely, tokens = probabilities(logits, samplings)
    uniform = torch.cat([torch.rand(1, generator=generator) for generator in generators])
    cumulative = likely.cumsum(dim=-1)
    point = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, point, right=True)
    # Rounding may put the point past the last token that may be drawn.
    last = (likely > 0).sum(dim=-1, keepdim=True) - 1
    return tokens.gather(1, torch.minimum(index, last))[:, 0]
