"""Untrained weights whose first layer already looks a few tokens back.

To copy a fact, a model first has to know which token stood before the one it reads. Learning
that took this model longer than everything else: with plain random weights, traces that name
the right fact and then guess its number were still common after 20 M tokens. With these biases
it names and reads facts after 2 M. They are a start, not a constraint: training may move them.
"""

import torch
from torch import nn
from transformers import Qwen2ForCausalLM

# Pairs of dimensions that turn fastest, and how far they reach: the logit of the token looked
# back at exceeds those of other near tokens by up to REACH ** 2 * PAIRS / sqrt(head_dim).
_PAIRS = 4
_REACH = 4.75


@torch.no_grad()
def look_back(model: Qwen2ForCausalLM) -> None:
    """Make head ``h`` of the first layer look ``h + 1`` tokens back, by its biases alone.

    RoPE turns a constant key by its position and a constant query by its own; a query that is
    turned back by ``d`` positions beforehand meets the key ``d`` tokens earlier in phase.

    Args:
        model: Weights fresh from their random initialisation; changed in place.
    """
    attention = model.model.layers[0].self_attn
    head_dim: int = attention.head_dim
    half = head_dim // 2  # transformers turns dimension i together with dimension i + half
    speeds = model.model.rotary_emb.inv_freq[:_PAIRS]
    keys = _by_head(attention.k_proj, head_dim)
    queries = _by_head(attention.q_proj, head_dim)
    keys[:, :_PAIRS] = _REACH
    for head in range(queries.shape[0]):
        back = speeds * (head + 1)
        queries[head, :_PAIRS] = _REACH * back.cos()
        queries[head, half : half + _PAIRS] = -_REACH * back.sin()


def _by_head(projection: nn.Linear, head_dim: int) -> torch.Tensor:
    """The bias of a projection as ``[H, D]``, a view."""
    assert projection.bias is not None
    return projection.bias.view(-1, head_dim)
