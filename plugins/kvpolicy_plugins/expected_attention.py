"""Expected attention: what queries of the distribution seen so far would give to each row."""

import math
from collections.abc import Callable
from typing import ClassVar

import attrs
import torch
from attrs.validators import ge, instance_of, lt
from torch import Tensor

from kvpolicy import Bound, LayerWeights, hookimpl


@attrs.frozen(eq=False)
class _Future:
    """The rotation of a layer's model, to where later tokens are.

    Attributes:
        rotate: Moves queries by some positions; see `LayerWeights`.
        mean: Mean of the rotations by 0 to ``n_future - 1`` positions, transposed, ``[D, D]``.
    """

    rotate: Callable[[Tensor, Tensor], Tensor]
    mean: Tensor


@attrs.define(eq=False, kw_only=True)
class ExpectedAttention:
    """ExpectedAttention: keep the rows that later queries are expected to attend to.

    Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future
    Queries Distribution", 2025 (arXiv 2510.00636); code at NVIDIA/kvpress 0.5.5,
    ``ExpectedAttentionPress``.

    Queries before RoPE are taken as Gaussian, with the mean and covariance of those seen so far,
    and are rotated to the mean of the next ``n_future`` positions by ``R``:

        mu, Sigma = R mean(q), R cov(q) R^T
        z_j = k_j mu / sqrt(D) + k_j Sigma k_j / (2 D)         the log of E[exp(q k_j / sqrt(D))]
        s_j = (mean_g(softmax(z)_j) + epsilon) |v_j|           g: query heads of the KV head

    The softmax runs over the rows after the first ``n_sink`` tokens, which always stay, and whose
    queries do not count. Here every query is moved from its position to that of the next token and
    multiplied by the mean of the rotations that follow; this is the same, since rotations commute,
    and ``k Sigma k`` is the mean of ``(k (q - mu))^2``, without a covariance matrix.

    Deviations:

    * The statistics are those of the last ``window_size`` queries, where the code uses those of the
      whole prompt: to remember more queries costs more than the cache. With as many as there are
      tokens, scores are the code's. Where a thought goes on, its latest queries resemble the next
      ones more than those of the question do.
    * Rows are scored whenever the buffer is full, not once after the prompt.
    * Everything is computed in fp32, and of equal scores the newer row stays.

    Raises `ModelError` when an engine is built, for models whose queries cannot be moved: without a
    rotary embedding, or with one that changes with the length (dynamic NTK, longrope).

    Attributes:
        window_size: Most recent queries that give mean and covariance.
        n_future: Positions after the newest token over which the rotation is averaged.
        n_sink: First tokens of the sequence that always stay.
        use_covariance: Whether ``Sigma`` is used, or the mean only.
        use_vnorm: Whether scores are multiplied by the norm of the value.
        epsilon: Added to the attention before that.
    """

    ragged: ClassVar[bool] = True

    window_size: int = attrs.field(default=128, validator=[instance_of(int), ge(1)])
    n_future: int = attrs.field(default=512, validator=[instance_of(int), ge(1)])
    n_sink: int = attrs.field(default=4, validator=[instance_of(int), ge(0)])
    use_covariance: bool = attrs.field(default=True, validator=instance_of(bool))
    use_vnorm: bool = attrs.field(default=True, validator=instance_of(bool))
    epsilon: float = attrs.field(
        default=0.0, validator=[instance_of((int, float)), ge(0), lt(math.inf)]
    )

    @property
    def protects(self) -> tuple[int, int]:
        """The sinks."""
        return self.n_sink, 0

    @hookimpl
    def bind(self, weights: LayerWeights) -> _Future:
        """Average the rotations by the distances of the next tokens."""
        basis = torch.eye(weights.head_dim, device=weights.device)[None, :, None]
        by = torch.arange(self.n_future, device=basis.device)
        total = torch.zeros_like(basis[0, :, 0])
        for distances in by.split(64):
            spread = basis.expand(-1, -1, len(distances), -1)
            total += weights.rotate(spread, distances.expand(spread.shape[:3]))[0].sum(dim=1)
        return _Future(weights.rotate, total / self.n_future)

    @hookimpl
    def score(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        queries: Tensor,
        seq_len: Tensor,
        bound: Bound,
    ) -> Tensor:
        """Score rows by the attention that later queries are expected to give them."""
        queries = queries[:, :, -self.window_size :].float()
        num_queries, dim = queries.shape[2:]
        # How far each query is from the next token, and whether it is one of a sink.
        back = torch.arange(num_queries, 0, -1, device=queries.device)
        position = seq_len.to(queries.device, non_blocking=True)[:, None] - back  # [B, W]
        future: _Future = bound.of(self)
        moved = future.rotate(queries, back.expand(queries.shape[:3])) @ future.mean
        moved = moved.unflatten(1, (keys.shape[1], -1))  # [B, H_kv, G, W, D]
        counts = (position >= self.n_sink)[:, None, None, :, None].float()
        num = counts.sum(dim=3, keepdim=True).clamp(min=1)
        mean = (moved * counts).sum(dim=3, keepdim=True) / num
        others = keys.float().mT[:, :, None]  # [B, H_kv, 1, D, T]
        logits = (mean @ others)[:, :, :, 0] / math.sqrt(dim)  # [B, H_kv, G, T]
        if self.use_covariance:
            spread = ((moved - mean) * counts) @ others  # [B, H_kv, G, W, T]
            logits = logits + spread.square().sum(dim=3) / num[:, :, :, 0] / (2 * dim)
        is_sink = positions < self.n_sink  # or no row, where heads share a budget
        logits = logits.masked_fill(is_sink[:, :, None], -torch.inf)
        expected = logits.softmax(dim=-1).mean(dim=2).masked_fill(is_sink, 0)
        if self.use_vnorm:
            expected = (expected + self.epsilon) * values.float().norm(dim=-1)
        return expected
