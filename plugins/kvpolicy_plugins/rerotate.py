"""Rerotate: rows that stay close ranks, as if what has left had never been there."""

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.cache.rows import LayerRows
from kvpolicy.toolkit.ranking import take_rows

_TRACK = "rerotate_moved"


@attrs.define(eq=False, kw_only=True)
class Rerotate:
    """Rows that stay are rotated to stand side by side, as StreamingLLM does with its cache.

    ``["streaming", "rerotate"]`` is StreamingLLM as published: Xiao et al., 2024
    (arXiv 2309.17453), section 3.2, "positions within the cache rather than those in the
    original text"; code at mit-han-lab/streaming-llm 2e50426, which caches keys before RoPE and
    rotates them, and the query, by their place in the cache in every step. ``["h2o",
    "rerotate"]`` places rows as H2O's ``..._streaming`` classes do (FMInference/H2O ac75c2a);
    any policy may stand before it. kvpress has it as ``KeyRerotationPress``.

    Attention under RoPE depends on differences of positions only. So nothing has to be rotated
    at every step: at a compaction the rows that stay are moved up to stand directly before the
    token to come, and what follows stands where it stands. No distance ever exceeds budget and
    buffer. Positions that policies see remain those of the sequence.

    Deviations: rows leave when the buffer is full, not before every token. In half precision
    every move rounds a key once more.

    It refuses models whose keys cannot be moved: without a rotary embedding, or with one that
    changes with the length (dynamic NTK, longrope).
    """

    tracks: ClassVar[tuple[str, ...]] = (_TRACK,)

    @hookimpl
    def evict(self, rows: LayerRows, keep: Tensor) -> bool:
        """Keep the chosen rows, moved to end directly before the next token."""
        num_kept = keep.shape[2]
        last = rows.seq_len.to(keep.device)[:, None, None]  # place of the next token
        place = last - num_kept + torch.arange(num_kept, device=keep.device)
        target = place - rows.positions.gather(2, keep)  # how far from its own position
        moved = rows.track(_TRACK).gather(2, keep).long()
        keys = rows.rotate(take_rows(rows.keys, keep), target - moved)
        rows.set_track(_TRACK, rows.track(_TRACK).scatter(2, keep, target.float()))
        rows.keep(keep, keys=keys)
        return True
