"""What the rows that are held are worth to the queries of one layer."""

import attrs
import torch
from attrs.validators import and_, ge, gt, le
from torch import Tensor

from kvpolicy.attention.softmax import Softmax

# Values of a sample.
RETAINED = "retained_attention"
LOOK_BACKS_HELD = "look_backs_held"
ERROR = "output_error"
LOOK_BACKS = "look_backs"  # how many there were, of which the share above is held

# By distance only: the share of all attention that falls on rows so far away, held or not.
ATTENTION = "attention"

# What values are broken down by.
LAYER, HEAD, DISTANCE = "layer", "head", "attention_distance"
SINKS = "first 4"  # in place of a distance

#: Tokens at the beginning of a sequence that are no look-backs: attention sinks.
NUM_SINKS = 4

#: The least distance of each group of rows, in tokens; sinks are a group of their own, the last.
DISTANCES = (0, 16, 64, 256, 1024, 4096)

# The weights of so many bytes are computed at a time.
_BLOCK_BYTES = 8 << 20


@attrs.frozen
class LookBack:
    """What a strong look-back is: much of the attention of a query, to a row far back.

    The first four tokens of a sequence are none: they are attention sinks.

    Attributes:
        weight: The least share of the query's attention, in its head.
        distance: The least number of tokens between the row's token and that of the query.
    """

    weight: float = attrs.field(default=0.05, kw_only=True, validator=and_(gt(0), le(1)))
    distance: int = attrs.field(default=64, kw_only=True, validator=ge(1))


@attrs.frozen(eq=False)
class LayerRows:
    """The rows of one sequence in one layer under the full cache, and when they leave a plan.

    Attributes:
        keys: Keys of consecutive tokens, the newest last, ``[H_kv, T, D]``.
        values: Values likewise.
        first: Position of the first of them.
        gone_at: Position of the first query that does not see a row under the plan, ``[H_kv, T]``.
        softmax: The softmax of the layer.
        window: Tokens that a query sees, itself included; ``None``: all.
    """

    keys: Tensor
    values: Tensor
    first: int
    gone_at: Tensor
    softmax: Softmax
    window: int | None


@attrs.frozen(eq=False)
class HeldShares:
    """What was found, as fp64 on the CPU.

    Attributes:
        retained: Share of the attention that falls on rows held, by head, ``[H_q]``; mean over
            queries.
        errors: Relative error of the output, likewise.
        look_backs: Number of strong look-backs by head, those held and all, ``[2, H_q]``.
        attention: Share of the attention by group of rows, on those held and on all,
            ``[2, len(DISTANCES) + 1]``; mean over heads and queries.
        far: Number of strong look-backs by group of rows, those held and all, likewise.
    """

    retained: Tensor
    errors: Tensor
    look_backs: Tensor
    attention: Tensor
    far: Tensor


def held_shares(queries: Tensor, begin: int, rows: LayerRows, look_back: LookBack) -> HeldShares:
    """Compare the attention over all rows with that over the rows held.

    Args:
        queries: Queries at consecutive positions, ``[H_q, N, D]``.
        begin: Position of the first.
        rows: The rows.
        look_back: What a strong look-back is.
    """
    keys, values = rows.keys.float(), rows.values.float()
    (num_kv_heads, num_rows, size), (num_heads, num_queries, _) = keys.shape, queries.shape
    device, num_groups = keys.device, len(DISTANCES) + 1
    of_heads = torch.zeros(4, num_heads, dtype=torch.float64)
    of_groups = torch.zeros(4, num_groups, dtype=torch.float64)
    grouped = queries.float().unflatten(0, (num_kv_heads, -1))  # [H_kv, G, N, D]
    positions = torch.arange(rows.first, rows.first + num_rows, device=device)
    bounds = torch.tensor(DISTANCES[1:], device=device)
    block = max(1, _BLOCK_BYTES // (4 * num_rows * num_heads))
    for start in range(0, num_queries, block):
        part = grouped[:, :, start : start + block]
        now = torch.arange(begin + start, begin + start + part.shape[2], device=device)[:, None]
        away = now - positions  # [n, T]
        seen = away >= 0
        if rows.window is not None:
            seen = seen & (away < rows.window)
        held = seen & (now < rows.gone_at[:, None, None])  # [H_kv, 1, n, T]
        logits = part @ keys[:, None].transpose(2, 3) * size**-0.5
        weights = rows.softmax.weights(logits[None].clone(), seen)[0]
        left = rows.softmax.weights(logits[None], held)[0]
        full = weights @ values[:, None]
        error = (left @ values[:, None] - full).norm(dim=-1) / full.norm(dim=-1)
        total = weights.sum(dim=-1, keepdim=True)
        retained = (weights * held).sum(dim=-1) / total[..., 0]
        shares = weights / total
        strong = (shares >= look_back.weight) & (away >= look_back.distance)
        strong &= positions >= NUM_SINKS
        of_heads += torch.stack(
            [
                retained.sum(dim=-1).flatten(),
                # A head whose values are all zero has no error.
                error.nan_to_num(nan=0.0).sum(dim=-1).flatten(),
                (strong & held).sum(dim=(-2, -1)).flatten(),
                strong.sum(dim=(-2, -1)).flatten(),
            ]
        ).cpu()
        group = torch.bucketize(away, bounds, right=True)
        group = group.where(positions >= NUM_SINKS, len(DISTANCES)).flatten()
        of_groups += torch.stack(
            [
                # By row and query, over all heads.
                torch.bincount(group, one.sum(dim=(0, 1)).flatten().double(), num_groups)
                for one in (shares * held, shares, strong & held, strong)
            ]
        ).cpu()
    return HeldShares(
        of_heads[0] / num_queries,
        of_heads[1] / num_queries,
        of_heads[2:],
        of_groups[:2] / (num_heads * num_queries),
        of_groups[2:],
    )
