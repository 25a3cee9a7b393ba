"""Rerotate: move the keys that stay to consecutive positions."""

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy import LayerRows, hookimpl
from kvpolicy.toolkit import take_rows

_TRACK = "rerotate_moved"


@attrs.define(eq=False, kw_only=True)
class Rerotate:
    """Add-on: rotate the rows that stay to consecutive positions, as StreamingLLM does.

    ``["streaming", "rerotate"]`` is StreamingLLM as published: Xiao et al., 2024
    (arXiv 2309.17453), section 3.2, "positions within the cache rather than those in the
    original text"; code at mit-han-lab/streaming-llm 2e50426, which caches keys before RoPE and
    rotates them, and the query, by their index in the cache in every step. ``["h2o",
    "rerotate"]`` places rows as H2O's ``..._streaming`` classes do (FMInference/H2O ac75c2a);
    it works after any policy. In kvpress it is ``KeyRerotationPress``.

    Attention with RoPE depends only on differences of positions, so nothing has to be rotated
    in every step. At a compaction the rows that stay are moved to the positions directly before
    the next token, which keeps its own position. No distance exceeds budget plus buffer.
    Policies still see the positions of the sequence.

    Deviations: rows leave when the buffer is full, not before every token. In half precision
    every move rounds a key once more.

    Raises `ModelError` for models whose keys cannot be moved: without a rotary embedding, or
    with one that changes with the length (dynamic NTK, longrope).
    """

    tracks: ClassVar[tuple[str, ...]] = (_TRACK,)

    @hookimpl
    def evict(self, rows: LayerRows, keep: Tensor) -> bool:
        """Keep the chosen rows at the positions directly before the next token."""
        num_kept = keep.shape[2]
        seq_len = rows.seq_len.to(keep.device, non_blocking=True)  # positions of the next tokens
        new = seq_len[:, None, None] - num_kept + torch.arange(num_kept, device=keep.device)
        target = new - rows.positions.gather(2, keep)  # distance from the original position
        moved = rows.track(_TRACK).gather(2, keep).long()
        keys = rows.rotate(take_rows(rows.keys, keep), target - moved)
        rows.set_track(_TRACK, rows.track(_TRACK).scatter(2, keep, target.float()))
        rows.keep(keep, keys=keys)
        return True
