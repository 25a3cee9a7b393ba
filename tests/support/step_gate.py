"""A gate that holds back the steps of an `AsyncEngine`."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets steps begin while it is open; its `wait` is what is called before each step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left = math.inf

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left)
            self._left -= 1

    def open(self) -> None:
        self.close(after=math.inf)

    def close(self, *, after: float = 0) -> None:
        """Let so many further steps begin."""
        with self._changed:
            self._left = after
            self._changed.notify()

    @contextmanager
    def closed(self, *, after: float = 0) -> Iterator[None]:
        self.close(after=after)
        try:
            yield
        finally:
            self.open()
