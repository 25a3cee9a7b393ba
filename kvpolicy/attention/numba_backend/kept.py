"""Compiled functions that are kept for later processes, until something that they call changes.

Numba keeps what it compiles of a function by the file in which the function stands. A function that
calls others, of files that were changed since, would go on as before.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from numba import njit

from kvpolicy import numba_common

# What compiled functions of the package call beside what stands in their own file.
_SOURCES = [Path(numba_common.__file__), *sorted(Path(__file__).parent.glob("*.py"))]
_DIGEST = crc32(b"".join(source.read_bytes() for source in _SOURCES))


def kept(*signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """What `numba.njit` is with ``cache=True``, for functions that call others of this folder.

    Args:
        signature: The types of arguments, if the function is compiled at once.
        options: Others of `numba.njit`.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        function.__qualname__ += f"_{_DIGEST:08x}"  # the files that Numba keeps have this name
        return njit(*signature, cache=True, error_model="numpy", **options)(function)

    return compiled
