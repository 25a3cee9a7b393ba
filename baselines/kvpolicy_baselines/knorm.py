"""Knorm: short keys stay, as queries tend to attend to them."""

from typing import Any

import attrs
import torch
from attrs.validators import deep_iterable, ge, instance_of
from torch import Tensor

from kvpolicy import hookimpl


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@attrs.define(eq=False, kw_only=True)
class Knorm:
    """Knorm: tokens whose keys have a small norm stay, and the most recent ones.

    Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    2024 (arXiv 2406.11430); code at alessiodevoto/l2compress f93d6ca, also
    ``L2NormCluster`` of KVCache-Factory c97f9d7 and ``KnormPress`` of kvpress 8bb29b9. RoPE is
    a rotation, so that norms are those before it; every KV head chooses for itself.

    Deviations: the authors compress a prompt once and protect nothing; in decoding a new token
    with a long key would leave at once, so the newest rows stay (``n_recent = 0`` undoes it).
    They keep everything in the layers they skip; a slab has a fixed size, so that here a
    skipped layer is one in which this policy has no opinion: the policy listed before it
    decides, or else the newest rows stay. To keep everything in them, give these layers a
    group of their own with the stack ``["full"]``.

    Attributes:
        n_recent: Newest rows that always stay.
        skip_layers: Layers without an opinion, counted from 0; the authors' are 0 and 1.
    """

    n_recent: int = attrs.field(default=8, validator=[instance_of(int), ge(0)])
    skip_layers: tuple[int, ...] = attrs.field(
        default=(),
        converter=_listed,
        validator=deep_iterable([instance_of(int), ge(0)], instance_of(tuple)),
    )

    @property
    def protects(self) -> tuple[int, int]:
        """The recent rows, unless there are layers in which others decide."""
        return 0, 0 if self.skip_layers else self.n_recent

    @hookimpl
    def score(self, layer_idx: int, keys: Tensor) -> Tensor | None:
        """Rate shorter keys higher; pin the recent rows."""
        if layer_idx in self.skip_layers:
            return None
        scores = -keys.float().norm(dim=-1)
        scores[:, :, max(keys.shape[2] - self.n_recent, 0) :] = torch.inf
        return scores
