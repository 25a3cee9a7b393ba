"""Knorm: keep keys with a small norm, which tend to receive attention."""

from typing import Any, ClassVar

import attrs
import torch
from attrs.validators import deep_iterable, ge, instance_of
from torch import Tensor

from kvpolicy import hookimpl


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@attrs.define(eq=False, kw_only=True)
class Knorm:
    """Knorm: keep tokens whose keys have a small norm, and the most recent ones.

    Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    2024 (arXiv 2406.11430); code at alessiodevoto/l2compress f93d6ca, also
    ``L2NormCluster`` of KVCache-Factory c97f9d7 and ``KnormPress`` of kvpress 8bb29b9. RoPE is
    a rotation and does not change norms. Every KV head chooses its own rows.

    Deviations: the authors compress a prompt once and protect nothing. While decoding, a new
    token with a long key would leave at once, so the newest rows stay (``n_recent = 0`` undoes
    it). The authors keep everything in the layers they skip. Slabs have a fixed size, so in a
    skipped layer this policy gives no scores: the policy listed before it decides, or else the
    newest rows stay. To keep everything there, give these layers a group of their own with the
    stack ``["full"]``.

    Attributes:
        n_recent: Newest rows that always stay.
        skip_layers: Layers without scores, counted from 0; the authors skip 0 and 1.
    """

    ragged: ClassVar[bool] = True

    n_recent: int = attrs.field(default=8, validator=[instance_of(int), ge(0)])
    skip_layers: tuple[int, ...] = attrs.field(
        default=(),
        converter=_as_tuple,
        validator=deep_iterable([instance_of(int), ge(0)], instance_of(tuple)),
    )

    @property
    def protects(self) -> tuple[int, int]:
        """The recent rows; if some layers are skipped, `protect` says where."""
        return 0, 0 if self.skip_layers else self.n_recent

    @hookimpl(when="skip_layers")
    def protect(self, layer_idx: int, positions: Tensor) -> Tensor | None:
        """Protect the recent rows in layers that are not skipped."""
        if layer_idx in self.skip_layers:
            return None
        num_rows = positions.shape[2]
        recent = torch.arange(num_rows, device=positions.device) >= num_rows - self.n_recent
        return recent.expand(positions.shape)

    @hookimpl(specname="score", when="skip_layers")
    def score_some_layers(self, layer_idx: int, keys: Tensor) -> Tensor | None:
        """Score shorter keys higher in layers that are not skipped."""
        return None if layer_idx in self.skip_layers else self.score(keys)

    @hookimpl(when=lambda self: not self.skip_layers)
    def score(self, keys: Tensor) -> Tensor:
        """Score shorter keys higher."""
        return -keys.float().norm(dim=-1)
