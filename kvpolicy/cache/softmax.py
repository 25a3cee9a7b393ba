"""How a layer turns logits into weights: plainly, capped, or with learned sinks.

What attention uses and what policies are told about it come from here, so that they cannot
differ. Everything is computed in fp32.
"""

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Softmax:
    """A layer's softmax over the rows that a query may see.

    Attributes:
        softcap: Logits become ``softcap * tanh(logits / softcap)`` (Gemma-2); ``None``: they
            stay what they are.
        sinks: A learned logit of each query head, ``[H_q]``, that takes its share of the
            weights and brings no value (GPT-OSS); ``None``: the weights of the rows sum to 1.
    """

    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is a softmax and nothing else, as fused kernels compute it."""
        return self.softcap is None and self.sinks is None

    def weights(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        """Weights of the rows for each query.

        Args:
            logits: Scaled dot products, ``[B, H_kv, G, L, T]``, fp32.
            visible: Rows each query may see, bool, broadcastable to ``logits``; ``None`` if
                all see all.

        Returns:
            ``[B, H_kv, G, L, T]``, fp32, exactly 0 for what is not visible; without sinks,
            NaN for a query that sees nothing.
        """
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if visible is not None:
            logits = logits.masked_fill(~visible, float("-inf"))
        if self.sinks is None:
            return logits.softmax(dim=-1)
        sinks = self.sinks.float().view(logits.shape[1], -1, 1, 1)
        total = torch.logaddexp(logits.logsumexp(dim=-1, keepdim=True), sinks)
        return (logits - total).exp()


PLAIN = Softmax()
