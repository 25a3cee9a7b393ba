"""What a hook must leave as it is: the tensors it is given, and the defaults of torch.

Tensors may be views of the cache, and the defaults decide what the model computes next: a policy
that changes either gives other tokens without an error. Not seen: changes that torch does not
count, through ``.data``, numpy, DLPack or the storage; `kvpolicy.testing.check_policy` compares
values. Weights, which `bind` sees once, are compared by value.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def _default_device() -> torch.device:
    return torch.empty(0).device  # a fifth of the time of torch.get_default_device()


def _set_default_device(device: torch.device) -> None:
    # None, not "cpu", which would intercept every function of torch.
    torch.set_default_device(None if device.type == "cpu" else device)


# What it is called, how it is read, and how it is put back.
_Default = tuple[str, Callable[[], Any], Callable[[Any], None]]
_DEFAULTS: tuple[_Default, ...] = (
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("default device", _default_device, _set_default_device),
    *(
        (
            f"autocast of {device}",
            lambda device=device: torch.is_autocast_enabled(device),
            lambda enabled, device=device: torch.set_autocast_enabled(device, enabled),
        )
        for device in ("cpu", "cuda")
    ),
)


class SideEffects:
    """Finds what one hook call changes."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Note the state before the call.

        Args:
            arguments: Arguments of the hook by name.
        """
        self._tensors = [
            (name, value, value._version)
            for name, value in arguments.items()
            # Those made in inference mode have no version.
            if isinstance(value, Tensor) and not value.is_inference()
        ]
        self._before = [read() for _, read, _ in _DEFAULTS]

    def problem(self) -> str | None:
        """What the call has changed, or ``None``; puts the defaults of torch back."""
        problem = None
        for (name, read, write), before in zip(_DEFAULTS, self._before, strict=True):
            if (now := read()) != before:
                write(before)
                problem = f"set torch's {name} to {now}; expected it to stay {before}"
        for name, value, version in self._tensors:
            if value._version != version:
                problem = f"changed its argument '{name}' in place; expected a copy to be changed"
        return problem
