"""A model as it was: what a recording of its operators leaves out, and what it must not outlive.

A recording knows tensors, and not the modules that have them. So before each use the modules are
looked at, and the addresses of what they hold.
"""

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules

_TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_GLOBAL_TABLES = (all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks)


class Seen:
    """A model, and what else a recording reads, as they were."""

    def __init__(self, module: nn.Module, addresses: Sequence[int] = ()) -> None:
        """Note a model, and addresses that are not those of its weights."""
        tables: list[Mapping[Any, Any]] = [*_GLOBAL_TABLES]
        for part in module.modules():
            tables += [vars(part), *(vars(part)[name] for name in _TABLES)]
        self._module = module
        self._tables = [(live, list(live.values())) for live in tables]
        self._weights = [*module.parameters(), *module.buffers()]
        self._addresses = self._with_weights(addresses)
        self._autocasts = self._autocast()

    def holds(self, module: nn.Module, addresses: Sequence[int] = ()) -> bool:
        """Whether nothing has changed that decides what a forward computes, and where."""
        return (
            module is self._module
            and all(
                len(live) == len(values) and all(map(is_, live.values(), values))
                for live, values in self._tables
            )
            and self._addresses == self._with_weights(addresses)
            and self._autocasts == self._autocast()
        )

    def _with_weights(self, addresses: Sequence[int]) -> list[int]:
        return [*addresses, *map(Tensor.data_ptr, self._weights)]

    def _autocast(self) -> list[bool]:
        return [*map(torch.is_autocast_enabled, ("cpu", "cuda"))]


def runs_python(module: nn.Module) -> bool:
    """Whether hooks of users or of accelerate run when a module is called."""
    hooks = (module._forward_pre_hooks, module._forward_hooks)
    return any(not _is_ours(hook) for table in hooks for hook in table.values()) or hasattr(
        module, "_hf_hook"
    )


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("kvpolicy.")
