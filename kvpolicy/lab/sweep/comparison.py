"""A comparison: groups, and under which plans each of them is run."""

from collections.abc import Container, Sequence
from typing import Any

import attrs

import kvpolicy
from kvpolicy.lab.sweep.grid import Cell
from kvpolicy.lab.sweep.group import Group
from kvpolicy.lab.tasks.task import Item


@attrs.frozen
class Comparison:
    """What is run, as values: no model is loaded by having one.

    Attributes:
        name: What the user calls it.
        groups: The groups, in the order in which they are told of.
        cells: Every group under each of its plans, in the order of the groups.
        record: Items of each cell, from the first, of which it is recorded what compactions keep.
            No sample depends on it.
    """

    name: str
    groups: Sequence[Group]
    cells: Sequence[Cell]
    record: int = 0
    _groups: dict[str, Group] = attrs.field(init=False, repr=False, eq=False)
    _cells: dict[str, Cell] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_groups", {group.id: group for group in self.groups})
        object.__setattr__(self, "_cells", {cell.id: cell for cell in self.cells})
        assert len(self._groups) == len(self.groups), "groups are told apart by their id"
        assert len(self._cells) == len(self.cells), "and so are cells"

    @property
    def num_samples(self) -> int:
        """Samples in all."""
        return sum(len(self.group_of(cell).items) for cell in self.cells)

    def cell(self, id: str) -> Cell:
        """The cell of an id."""
        return self._cells[id]

    def group_of(self, cell: Cell) -> Group:
        """The group that a cell belongs to."""
        return self._groups[cell.group]

    def cells_of(self, group: Group) -> list[Cell]:
        """The cells of a group, in order."""
        return [cell for cell in self.cells if cell.group == group.id]

    def key(self, cell: Cell, item: Item) -> str:
        """Name of one sample of a cell."""
        return self.group_of(cell).key(cell.digest, item)

    def left(self, cell: Cell, done: Container[str]) -> list[int]:
        """Places of a cell's items that are still to be done.

        Args:
            cell: The cell.
            done: Keys of the samples that are done.
        """
        items = self.group_of(cell).items
        return [place for place, item in enumerate(items) if self.key(cell, item) not in done]

    def recorded(self, cell: Cell) -> list[int]:
        """Places of a cell's items that are recorded: the first attempts at the first items."""
        items = self.group_of(cell).items
        return [place for place, item in enumerate(items) if item.attempt == 0][: self.record]

    def num_unrecorded(self, done: Container[str], recorded: Container[str]) -> int:
        """Samples that are done and should be recorded, and are not.

        Args:
            done: Keys of the samples that are done.
            recorded: Keys of those that are recorded.
        """
        keys = [
            self.key(cell, self.group_of(cell).items[place])
            for cell in self.cells
            for place in self.recorded(cell)
        ]
        return sum(key in done and key not in recorded for key in keys)

    def num_left(self, done: Container[str]) -> int:
        """Samples still to be done.

        Args:
            done: Keys of those that are done.
        """
        return sum(len(self.left(cell, done)) for cell in self.cells)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that tells this run from every other, for the manifest."""
        return {
            "name": self.name,
            "version": kvpolicy.__version__,
            "groups": [group.to_dict() for group in self.groups],
            "cells": [cell.to_dict() for cell in self.cells],
        }
