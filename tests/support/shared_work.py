"""What cells share, counted."""

from collections.abc import Callable
from typing import Any

import attrs

from kvpolicy.lab.shared import Shared


@attrs.define(eq=False)
class Watched(Shared):
    """Counts what is made."""

    num_made: int = 0

    def get(self, key: object, make: Callable[[], Any]) -> Any:
        def counted() -> Any:
            self.num_made += 1
            return make()

        return super().get(key, counted)
