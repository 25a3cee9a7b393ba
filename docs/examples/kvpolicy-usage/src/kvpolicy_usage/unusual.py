"""Unusual: rows stay whose token entered the layer in an unusual state."""

from collections.abc import Mapping
from typing import ClassVar

import attrs
from torch import Tensor

from kvpolicy import Tracks, hookimpl

_TRACK = "unusual"


@attrs.define(eq=False, kw_only=True)
class Unusual:
    """Rows stay whose token entered the layer in an unusual state.

    What enters attention is normalised, so that most of its numbers are small; a token that the
    layer singles out has a few large ones. Its fourth moment says so, which keys and values no
    longer show. The hook `annotate` computes it once for each token, in prefill and in the decode
    step itself. An example without a paper.
    """

    annotates_in_step: ClassVar[bool] = True
    tracks: ClassVar[tuple[str, ...]] = (_TRACK,)

    @hookimpl
    def annotate(self, states: Tensor, values: Tensor) -> Mapping[str, Tensor]:
        """The kurtosis of a token's state, the same for all KV heads."""
        squares = states.float().square()
        kurtosis = squares.square().mean(dim=1) / squares.mean(dim=1).square().clamp(min=1e-12)
        return {_TRACK: kurtosis[:, None].expand(-1, values.shape[1])}

    @hookimpl
    def score(self, tracks: Tracks) -> Tensor:
        """Score rows by their annotation."""
        return tracks[_TRACK]
