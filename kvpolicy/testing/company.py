"""Policies that stand around the one under test: beneath it, above it, and in other layers."""

from collections.abc import Generator
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy.markers import hookimpl


@attrs.define(eq=False)
class KeyLengths:
    """Rows with long keys stay: answers when the policy under test has no score of its own."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        """Rate rows by the Euclidean length of their keys."""
        return keys.float().norm(dim=-1)


@attrs.define(eq=False)
class Pinned:
    """A wrapper: the first row and the two newest stay, whatever lies beneath."""

    protects: ClassVar[tuple[int, int]] = (1, 2)

    @hookimpl(wrapper=True)
    def score(self, positions: Tensor) -> Generator[None, Tensor, Tensor]:
        """Pin the first row and the two newest."""
        scores = yield
        num_rows = positions.shape[2]
        newest = torch.arange(num_rows, device=positions.device) >= num_rows - 2
        return scores.masked_fill((positions < 1) | newest, torch.inf)
