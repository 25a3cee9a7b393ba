"""How a layer turns logits into attention weights: plain softmax, soft cap, learned sinks.

Attention and the weights that policies read are both computed here, so they cannot differ.
Everything is computed in fp32.
"""

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Softmax:
    """The softmax of one layer.

    Attributes:
        softcap: Logits become ``softcap * tanh(logits / softcap)`` (Gemma-2); ``None``: no cap.
        sinks: A learned logit of each query head, ``[H_q]``, that takes a share of the weights
            and adds no value (GPT-OSS); ``None``: the weights of the rows sum to 1.
        is_plain: Whether there is neither cap nor sinks, so that fused kernels can compute it.
    """

    softcap: float | None = None
    sinks: Tensor | None = None
    is_plain: bool = attrs.field(init=False)

    @is_plain.default
    def _has_neither(self) -> bool:
        return self.softcap is None and self.sinks is None

    def weights(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        """Attention weights of the rows for each query.

        Args:
            logits: Scaled dot products, ``[B, H_kv, G, L, T]``, fp32; they are overwritten.
            visible: Rows each query may see, bool, broadcastable to ``logits``; ``None``: all.

        Returns:
            ``[B, H_kv, G, L, T]``, fp32, exactly 0 for invisible rows; without sinks, NaN for a
            query that sees no row.
        """
        return self.weights_of(self.masked(logits, visible))

    def masked(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        """What the softmax reads: logits after the cap, ``-inf`` for invisible rows.

        Arguments are those of `weights`; ``logits`` are overwritten.
        """
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if visible is not None:
            logits = logits.masked_fill_(~visible, float("-inf"))
        return logits

    def weights_of(self, masked: Tensor, *, overwrite: bool = True) -> Tensor:
        """Attention weights from what `masked` returned, which may be overwritten."""
        if self.sinks is None:
            return masked.softmax(dim=-1)
        sinks = self.sinks.float().reshape(masked.shape[1], -1, 1, 1)
        total = torch.logaddexp(masked.logsumexp(dim=-1, keepdim=True), sinks)
        return (masked.sub_(total) if overwrite else masked - total).exp_()


PLAIN = Softmax()


def observed_weights(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    seq_len: Tensor,
    *,
    softmax: Softmax = PLAIN,
    sliding_window: int | None = None,
    present: Tensor | None = None,
) -> Tensor:
    """Attention weights of the newest queries over the rows that each of them may see.

    Args:
        queries: The last ``W`` queries after RoPE, ``[B, H_q, W, D]``, oldest first.
        keys: Keys after RoPE, ``[B, H_kv, T, D]``.
        positions: Position of each row's token in its sequence, ``[B, H_kv, T]``.
        seq_len: Tokens each sequence has seen, ``[B]``.
        softmax: The layer's softmax.
        sliding_window: Tokens each query sees, its own included; ``None`` for all.
        present: Rows that there are, bool ``[B, H_kv, T]``; ``None``: all.

    Returns:
        ``[B, H_q, W, T]``, fp32; zeros for a query that sees none of the rows.
    """
    num_queries = queries.shape[2]
    newest = torch.arange(-num_queries, 0, device=positions.device)
    seen = seq_len.to(positions.device, non_blocking=True)
    query_positions = (seen[:, None] + newest)[:, None, None, :, None]
    rows = positions[:, :, None, None, :]
    visible = rows <= query_positions
    if sliding_window is not None:
        visible = visible & (rows > query_positions - sliding_window)
    if present is not None:
        visible = visible & present[:, :, None, None, :]
    grouped = queries.float().unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    logits = (grouped @ keys.float().transpose(2, 3)).mul_(keys.shape[-1] ** -0.5)
    logits = logits.unflatten(2, (-1, num_queries))
    # A query all of whose rows were evicted has no weights; its softmax is NaN.
    return softmax.weights(logits, visible).masked_fill_(~visible, 0).flatten(1, 2)
