"""Protect: keep the first and the newest tokens under any policy."""

from collections.abc import Generator
from typing import ClassVar

import attrs
import torch
from attrs.validators import ge, instance_of
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False, kw_only=True)
class Protect:
    """Wrapper: keep attention sinks and recent rows under any policy.

    Wraps `score` of the policies listed before it: ``["h2o", "protect"]``. Attention sinks are
    those of Xiao et al., 2024 (arXiv 2309.17453); H2O, SnapKV and R-KV protect recent rows.

    Attributes:
        n_sink: First tokens of the sequence that always stay.
        n_recent: Newest rows that always stay.
    """

    layers_alike: ClassVar[bool] = True

    n_sink: int = attrs.field(default=4, validator=[instance_of(int), ge(0)])
    n_recent: int = attrs.field(default=8, validator=[instance_of(int), ge(0)])

    @property
    def protects(self) -> tuple[int, int]:
        """The sinks and the recent rows."""
        return self.n_sink, self.n_recent

    @hookimpl(wrapper=True)
    def score(self, positions: Tensor) -> Generator[None, Tensor, Tensor]:
        """Pin the sinks and the recent rows."""
        scores = yield
        num_rows = positions.shape[2]
        recent = torch.arange(num_rows, device=positions.device) >= num_rows - self.n_recent
        return scores.masked_fill((positions < self.n_sink) | recent, torch.inf)
