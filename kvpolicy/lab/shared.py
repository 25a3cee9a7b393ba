"""What several cells of a sweep need and is the same for all: computed once, and kept.

A metric that compares plans with the full cache needs the full cache's run of the same requests for
every plan. The first cell of a process computes it, and the others follow it. There is one `Shared`
for each model in memory, in each process, and it ends with the model.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

import attrs

#: The most bytes that the processes of one machine keep of what their cells share.
MOST_BYTES = 4 * 2**30


class Reusable(Protocol):
    """What is kept for the cells that follow."""

    @property
    def is_reusable(self) -> bool:
        """Whether another cell can use it: it is complete, and nothing of it was released."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps."""


_Kept = TypeVar("_Kept", bound=Reusable)
_Key = TypeVar("_Key")
_Piece = TypeVar("_Piece")


@attrs.define(eq=False)
class Shared:
    """Keeps what was made, for those who ask with an equal key.

    Attributes:
        most_bytes: The most bytes that are kept. What is larger should release itself as it grows,
            and is made again by each who asks.
    """

    most_bytes: float = MOST_BYTES
    _kept: list[tuple[object, Reusable]] = attrs.field(factory=list, init=False, repr=False)

    def get(self, key: object, make: Callable[[], _Kept]) -> _Kept:
        """Return what was made for a key, or make it.

        Args:
            key: All that decides what is made, beside the model: compared by ``==``. It holds a
                word of the caller's own, so that nobody else has an equal key.
            make: Makes it; nothing need be computed yet. It is kept while it is in use, and
                afterwards if it is reusable then.

        Returns:
            It, made now or before.
        """
        usable = [(known, value) for known, value in self._kept if value.is_reusable]
        found = next((value for known, value in usable if known == key), None)
        others = [(known, value) for known, value in usable if value is not found]
        value = make() if found is None else cast(_Kept, found)
        # The latest is the last: those that were not asked for longest leave first.
        room = self.most_bytes - value.num_bytes
        while sum(one.num_bytes for _, one in others) > room:
            others.pop(0)
        self._kept = [*others, (key, value)]
        return value


@attrs.define(eq=False)
class Pieces(Generic[_Key, _Piece]):
    """What a run makes piece by piece: kept for all who read it, or if too large for the first.

    Attributes:
        most_bytes: The most bytes that are kept for all. When there are more, pieces that were read
            are released, and from then on each is when it is read.
        num_bytes: Bytes of all that were added.
    """

    most_bytes: float
    num_bytes: int = attrs.field(default=0, init=False)
    _pieces: dict[_Key, _Piece] = attrs.field(factory=dict, init=False, repr=False)
    _read: set[_Key] = attrs.field(factory=set, init=False, repr=False)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing was released so far."""
        return self.num_bytes <= self.most_bytes

    def __contains__(self, key: _Key) -> bool:
        return key in self._pieces

    def add(self, key: _Key, piece: _Piece, num_bytes: int) -> None:
        """Add a piece of some bytes."""
        self._pieces[key] = piece
        self.num_bytes += num_bytes
        self._release()

    def read(self, key: _Key) -> _Piece:
        """Return a piece that was added."""
        piece = self._pieces[key]
        self._read.add(key)
        self._release()
        return piece

    def _release(self) -> None:
        if not self.keeps_all:
            for key in self._read:
                del self._pieces[key]
            self._read.clear()
