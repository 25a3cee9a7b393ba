"""A policy whose scores an oracle knows without keys, and that oracle's layers."""

import attrs
import torch
from list_reference import ListLayer
from torch import Tensor

from kvpolicy import Engine, hookimpl


def rating(head: int, position: int) -> float:
    """A score that ranks rows differently in every head."""
    return float((position * 37 + head * 53) % 29)


def ratings(positions: Tensor) -> Tensor:
    """The same for rows at positions ``[B, H_kv, T]``."""
    heads = torch.arange(positions.shape[1], device=positions.device)[:, None]
    return ((positions * 37 + heads * 53) % 29).float()


@attrs.define(eq=False)
class Rated:
    """Scores by `rating`; is due every ``every`` tokens, or never if 0."""

    every: int = 0

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        return ratings(positions)

    @hookimpl
    def due(self, seq_len: Tensor) -> Tensor:
        return seq_len % self.every == 0 if self.every else seq_len < 0


def list_layers(
    engine: Engine, budget: int, buffer: int, every: int = 0, num_staying: int = 0
) -> list[ListLayer]:
    """The layers of an engine under `Rated`."""
    return [
        ListLayer(
            shape.sliding_window,
            budget,
            buffer,
            rating,
            lambda seq_len: bool(every) and seq_len % every == 0,
            num_staying,
        )
        for shape in engine.adapter.layer_shapes()
    ]
