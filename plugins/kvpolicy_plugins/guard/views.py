"""Parts of a set, as views: the sets of a store are large, and most calls look at few elements."""

from collections.abc import Container, Iterator, Set

import attrs

from kvpolicy import Block


@attrs.frozen(eq=False)
class Part(Set[Block]):
    """The elements of a set that another one has, or has not.

    Attributes:
        whole: The set.
        other: The other one.
        inside: Whether elements are in ``other``.
    """

    whole: Set[Block]
    other: Container[Block]
    inside: bool

    def __contains__(self, block: object) -> bool:
        return block in self.whole and (block in self.other) is self.inside

    def __iter__(self) -> Iterator[Block]:
        return (block for block in self.whole if (block in self.other) is self.inside)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return next((True for _ in self), False)


def either(first: Set[Block], second: Set[Block]) -> Set[Block]:
    """The first set that is not empty."""
    return first if first else second
