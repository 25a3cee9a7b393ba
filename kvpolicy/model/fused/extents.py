"""Sizes of a recording that are those of its inputs, told by recording twice.

Operators are recorded with the sizes that they were given, such as those of a view. Where two
recordings of one function, of more and of less, differ in a number, this is a size: it is a
multiple of the sequences, of their token columns, or of both. All other numbers are the function's
own.
"""

from collections.abc import Sequence
from typing import Any

import attrs
from torch import Tensor
from torch.fx import Graph, Node

from kvpolicy.model.fused.record import Extent, NotRecordableError, Recording

#: Sequences and token columns of the two recordings, so that their ratios, 2 / 3, 3 / 11 and that
#: of the products, 2 / 11, are not those of one of them and a few more, such as ``L + 1``.
FIRST, SECOND = (2, 3), (3, 11)


def tell_extents(
    first: Recording, second: Recording, inputs: Sequence[Tensor], others: Sequence[Tensor]
) -> None:
    """Tell which sizes of a recording are those of its inputs.

    Args:
        first: The recording, of inputs of the shape `FIRST`; it is changed.
        second: A recording of the same function, of inputs of the shape `SECOND`.
        inputs: Those of the first.
        others: Those of the second.

    Raises:
        NotRecordableError: Other operators are run, or a size depends in another way on the shape.
    """
    alike = _Alike(first.graph, second.graph)
    same = {id(one): other for one, other in zip(inputs, others, strict=True)}
    for one, other in zip(first.graph.nodes, second.graph.nodes, strict=True):
        if one.op == "get_attr":
            tensor, of_second = first.tensors[str(one.target)], second.tensors[str(other.target)]
            if same.get(id(tensor), tensor) is not of_second:
                msg = "numbers come from the host for each number of tokens"
                raise NotRecordableError(msg)
            continue
        one.args = alike.told(one.args, other.args)
        one.kwargs = alike.told(one.kwargs, other.kwargs)


class _Alike:
    """Two graphs of the same operators."""

    def __init__(self, first: Graph, second: Graph) -> None:
        if [*map(_kind, first.nodes)] != [*map(_kind, second.nodes)]:
            msg = "other operators run for other numbers of tokens"
            raise NotRecordableError(msg)
        self._same: dict[Node, Node] = dict(zip(first.nodes, second.nodes, strict=True))

    def told(self, one: Any, other: Any) -> Any:
        """What an operator is given in the first graph, by what it is given in the second."""
        if isinstance(one, Node):
            if self._same[one] is not other:
                msg = "operators are given others' results for other numbers of tokens"
                raise NotRecordableError(msg)
            return one
        if isinstance(one, (tuple, list)) and type(one) is type(other) and len(one) == len(other):
            told = [self.told(*pair) for pair in zip(one, other, strict=True)]
            return told if isinstance(one, list) else tuple(told)
        if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            return {name: self.told(value, other[name]) for name, value in one.items()}
        if one == other:
            return one
        found = _extent(one, other)
        if found is None:
            msg = f"it is not known how {one} and {other} depend on the number of tokens"
            raise NotRecordableError(msg)
        return found


def _kind(node: Node) -> Any:
    return node.op, None if node.op == "get_attr" else node.target


def _extent(one: object, other: object) -> Extent | None:
    """The size that two numbers are."""
    if type(one) is not int or type(other) is not int:
        return None
    for extent in (Extent(1, True, True), Extent(1, True, False), Extent(1, False, True)):
        unit, of_other = (_size(extent, *shape) for shape in (FIRST, SECOND))
        factor, rest = divmod(one, unit)
        if not rest and factor * of_other == other:
            return attrs.evolve(extent, factor=factor)
    return None


def _size(extent: Extent, num_sequences: int, num_columns: int) -> int:
    """The size for so many tokens."""
    return (
        extent.factor
        * (num_sequences if extent.of_sequences else 1)
        * (num_columns if extent.of_columns else 1)
    )
