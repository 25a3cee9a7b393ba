"""Calls of functions that compute by other means than operators of torch, such as Numba's.

Nothing that follows torch's operators sees what they do. Who records operators asks here to be
given such a call as a whole.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# Runs a function with its arguments, and notes that it has.
Witness = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_WITNESS: ContextVar[Witness | None] = ContextVar("witness", default=None)


def call_opaque(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of tensors that reads and writes them past torch.

    Args:
        function: The function; called again with other numbers in tensors of the same shapes, it
            does the same to them. It may be a method of an object that has another one, ``fixed``:
            given tensors, it answers with a function without arguments, which does the same to
            what these hold by then, and with the tensor to which that writes each time; or with
            ``None``.
        args: Its arguments.
        kwargs: Likewise.
    """
    witness = _WITNESS.get()
    return function(*args, **kwargs) if witness is None else witness(function, args, kwargs)


@contextmanager
def witnessed(by: Witness) -> Iterator[None]:
    """Have calls in a ``with`` block be run by someone else."""
    token = _WITNESS.set(by)
    try:
        yield
    finally:
        _WITNESS.reset(token)
