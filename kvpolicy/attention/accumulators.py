"""Accumulators: what rows keep of the attention that they have received, updated with every query.

Each is one number per row and KV head, fp32, 0 in a new row: a track of the slab, which is
allocated if a policy names it as an argument of `score`. The set is closed, because every kernel
that computes attention weights updates them. Here is the definition, in torch's operations; the
kernels in Numba and Triton do the same.

With weights ``A`` and logits ``Z``, both fp32, of the query heads of a group:

    attn_sums            += sum of A
    attn_squares         += sum of A^2
    attn_squares_logit   += sum of A^2 Z
    attn_squares_logit2  += sum of A^2 Z^2

``Z`` is what the softmax reads: scaled, and after a soft cap. A row that a query does not see gets
nothing from it.

Shapes: ``B`` sequences, ``H_kv`` KV heads, ``T`` rows, and ``N`` queries of a KV head: those of all
query heads of its group.
"""

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

ATTN_SUMS = "attn_sums"
ATTN_SQUARES = "attn_squares"
ATTN_SQUARES_LOGIT = "attn_squares_logit"
ATTN_SQUARES_LOGIT2 = "attn_squares_logit2"

# In the order in which kernels are given them.
ACCUMULATORS = (ATTN_SUMS, ATTN_SQUARES, ATTN_SQUARES_LOGIT, ATTN_SQUARES_LOGIT2)


def read_logits(names: Collection[str]) -> bool:
    """Whether any of these accumulators is made from logits."""
    return ATTN_SQUARES_LOGIT in names or ATTN_SQUARES_LOGIT2 in names


def accumulate(
    tracks: Mapping[str, Tensor],
    weights: Tensor,
    logits: Tensor,
    live: Tensor | None = None,
) -> None:
    """Update accumulators by the weights of some queries.

    Args:
        tracks: Accumulators by name, ``[B, H_kv, T]`` each; changed in place.
        weights: Attention weights, ``[B, H_kv, N, T]``, fp32.
        logits: What their softmax read, likewise; overwritten if an accumulator is made from them.
        live: Sequences whose rows receive anything, bool ``[B]``; ``None``: all.
    """
    if len(tracks) == 1 and ATTN_SUMS in tracks:  # what most policies read, in less Python
        received = weights.sum(dim=2)
        tracks[ATTN_SUMS].add_(received if live is None else received * live[:, None, None])
        return
    for name, received in _received(tracks, weights, logits):
        if name in tracks:
            tracks[name].add_(received if live is None else received * live[:, None, None])


def _received(
    names: Collection[str],
    weights: Tensor,
    logits: Tensor,
) -> Iterator[tuple[str, Tensor]]:
    """What rows receive from some queries, ``[B, H_kv, T]``, for these accumulators and others."""
    if ATTN_SUMS in names:
        yield ATTN_SUMS, weights.sum(dim=2)
    of_logits = read_logits(names)
    if ATTN_SQUARES in names or of_logits:
        powers = weights.square()
        yield ATTN_SQUARES, powers.sum(dim=2)
        if of_logits:
            logits.masked_fill_(weights == 0, 0)  # 0 * -inf would be NaN
            for name in (ATTN_SQUARES_LOGIT, ATTN_SQUARES_LOGIT2):
                yield name, powers.mul_(logits).sum(dim=2)
