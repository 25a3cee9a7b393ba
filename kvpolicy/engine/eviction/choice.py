"""The final scores of rows, of a cache or given as tensors: asked, protected, out of sight."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.cache.rows import HeldRows
from kvpolicy.hooks.late_checks import LateChecks
from kvpolicy.hooks.stack import Stack
from kvpolicy.state import Bound


def final_scores(
    rows: HeldRows,
    stack: Stack,
    layer_idx: int,
    *,
    late: LateChecks | None = None,
    bound: Bound | None = None,
    supplied: Mapping[str, Any] | None = None,
    **shared: Any,
) -> Tensor:
    """Scores of rows, ``[B, H_kv, T]``, fp32: ``inf`` if protected, ``-inf`` if out of sight.

    ``-inf``, too, in columns that a head has no row for.

    Args:
        rows: The rows.
        stack: The policies.
        layer_idx: The layer, or the first of several.
        late: Keeps answers whose values are checked later; ``None``: they are now.
        bound: What the policies have made of the layer's weights.
        supplied: Arguments of `score` that come from elsewhere, by name.
        shared: Arguments of `protect` and `score`: positions, budget, prompt_len, is_image and
            memory.
    """
    protected = stack.protected(layer_idx, seq_len=rows.seq_len, **shared)
    arguments = shared | _score_arguments(rows, stack, protected)
    arguments |= {"bound": bound or Bound(), **(supplied or {})}
    scores = stack.score(rows, layer_idx, arguments, late)
    if protected is not None:
        # A policy may answer inf: its rows come behind those that are protected.
        most = torch.finfo(scores.dtype).max
        scores = scores.clamp(max=most).masked_fill(protected, float("inf"))
    # Out of sight in some heads: what all heads cannot see was dropped.
    for hidden in (rows.out_of_sight, rows.absent):
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _score_arguments(rows: HeldRows, stack: Stack, protected: Tensor | None) -> dict[str, Any]:
    """Arguments of `score` only; tensors that no policy names are not computed."""
    reads = stack.reads
    if protected is None and "protected" in reads:
        protected = torch.zeros_like(rows.positions, dtype=torch.bool)
    return {
        "keys": rows.keys if "keys" in reads else None,
        "values": rows.values if "values" in reads else None,
        "queries": rows.queries if "queries" in reads else None,
        "lookahead_queries": None,
        "attn_weights": rows.attn_weights if "attn_weights" in reads else None,
        **{name: rows.track(name) if name in reads else None for name in ACCUMULATORS},
        "seq_len": rows.seq_len,
        "num_new": rows.num_new if "num_new" in reads else None,
        "protected": protected,
        "tracks": rows.tracks,
    }
