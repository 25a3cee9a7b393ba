"""What a model computes in each forward."""

from typing import Any

from torch import Tensor, nn


def shapes_of_forwards(model: Any) -> list[tuple[int, ...]]:
    """The list to which the shape of the token ids of each forward of a model will be added."""
    shapes: list[tuple[int, ...]] = []

    def note(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        shapes.append(tuple(given[0].shape))

    model.get_input_embeddings().register_forward_pre_hook(note)
    return shapes
