"""Retention in closed form: weights that decay, how many rows they amount to, and the losses.

A token created at position i with retention ``beta_i`` counts ``beta_i^(t-i)`` at position t. Axis
letters as in `kvpolicy.hookspecs`; ``T`` are the tokens of a text, and leading axes are free.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CapNorm = Literal["active", "paper"]
CapOver = Literal["head", "model"]

_BLOCK = 256  # positions whose decayed weights are in memory at once


def decay_bias(log_beta: Tensor, start: int, stop: int) -> Tensor:
    """What retention adds to the logits of queries ``start`` to ``stop``: ``(t - i) log beta_i``.

    Args:
        log_beta: Logarithm of each token's retention, ``[..., T]``.
        start: Position of the first query.
        stop: Position after the last query.

    Returns:
        ``[..., stop - start, stop]``, for keys before ``stop``; 0 where the key is newer.
    """
    return log_beta[..., None, :stop] * _ages(start, stop, log_beta.device)


def soft_occupancy(log_beta: Tensor) -> Tensor:
    """Rows that a head still holds, counted softly: ``S_t = sum over i <= t of beta_i^(t-i)``.

    There is no linear recurrence, because each token keeps its own base: the sum takes time
    ``T^2``. It is taken in blocks that are computed again for the gradient, so that memory grows
    with ``T`` only.

    Args:
        log_beta: ``[..., T]``.

    Returns:
        ``[..., T]``; at least 1, as the newest token counts in full.
    """
    num_tokens = log_beta.shape[-1]
    sums = []
    for start in range(0, num_tokens, _BLOCK):
        stop = min(start + _BLOCK, num_tokens)
        if log_beta.requires_grad and num_tokens > _BLOCK:
            sums.append(checkpoint(_block_occupancy, log_beta, start, stop, use_reentrant=False))
        else:
            sums.append(_block_occupancy(log_beta, start, stop))
    return torch.cat(sums, dim=-1)


def capacity_loss(
    log_beta: Tensor,
    memory: float,
    *,
    present: Tensor | None = None,
    norm: CapNorm = "active",
    over: CapOver = "head",
) -> Tensor:
    """How far the soft occupancy exceeds the rows that a head may hold.

    Args:
        log_beta: ``[L, B, H_kv, T]``, of layers and texts.
        memory: Rows that a head may hold, ``M``.
        present: Which tokens belong to their text, bool ``[B, T]``; others come last.
        norm: ``"paper"``: ``max(0, S_t - M) / t`` in the mean. ``"active"``, as in the authors'
            code: ``max(0, S_t - M) / max(1, t - M)`` in the mean over those above 0. ``t`` counts
            tokens from 1.
        over: ``"head"``: each head of each layer has ``M`` rows. ``"model"``: all heads of all
            layers have ``M L H_kv`` rows together, as in DBTrimKV.

    Returns:
        The loss, a scalar; 0 if no head holds too much.
    """
    occupancy = soft_occupancy(log_beta)
    t = torch.arange(1, log_beta.shape[-1] + 1, device=log_beta.device, dtype=log_beta.dtype)
    if over == "model":
        occupancy = occupancy.mean(dim=(0, 2), keepdim=True)
    above = (occupancy - memory).clamp(min=0)
    counted = torch.ones_like(above, dtype=torch.bool)
    if present is not None:
        counted = counted & present[None, :, None]
    if norm == "paper":
        per_text = (above / t).where(counted, 0).sum(dim=-1) / counted.sum(dim=-1).clamp(min=1)
        return per_text.mean()
    excess = above / (t - memory).clamp(min=1)
    active = counted & (excess > 0)
    return excess.where(active, 0).sum() / active.sum().clamp(min=1)


def log_utility(log_beta: Tensor, age: Tensor, horizon: int) -> Tensor:
    """Logarithm of what rows are worth to the next queries: their decayed weights, summed.

    ``log(beta^a + beta^(a+1) + ... + beta^(a+n-1)) = a log beta + log((1 - beta^n) / (1 - beta))``
    for ages from ``a`` on and ``n`` queries; DBTrimKV (arXiv 2605.09649). With one query it is
    TRIM-KV's score.

    Args:
        log_beta: Any shape, fp32, at most 0.
        age: Age of each row at the next query, of the same shape.
        horizon: Queries that count, ``n``.

    Returns:
        The same shape.
    """
    worth = log_beta * age
    if horizon == 1:
        return worth
    # As beta approaches 1, the quotient approaches n; both terms are then below fp32.
    ended = -torch.expm1(log_beta)
    quotient = torch.where(
        ended > 0, -torch.expm1(horizon * log_beta) / ended.clamp(min=1e-38), float(horizon)
    )
    return worth + quotient.log()


def _block_occupancy(log_beta: Tensor, start: int, stop: int) -> Tensor:
    """Soft occupancy at positions ``start`` to ``stop``, ``[..., stop - start]``."""
    older = torch.ones(stop - start, stop, dtype=torch.bool, device=log_beta.device).tril(start)
    return decay_bias(log_beta, start, stop).exp().where(older, 0).sum(dim=-1)


def _ages(start: int, stop: int, device: torch.device) -> Tensor:
    """Age of each key at each query, ``[stop - start, stop]``; 0 where it is newer."""
    t = torch.arange(start, stop, device=device)[:, None]
    return (t - torch.arange(stop, device=device)).clamp(min=0)
