"""A model as it was: what a recording of its operators leaves out, and what it must not outlive.

A recording knows tensors, and not the modules that have them. So before each use the modules are
looked at, and the addresses of what they hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, methodcaller
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
        self._module, self._tables = module, tables
        self._sizes, self._values = [*map(len, tables)], [*self._all_values()]
        self._weights = [*module.parameters(), *module.buffers()]
        self._addresses = self._with_weights(addresses)
        self._autocasts = self._autocast()

    def holds(self, module: nn.Module, addresses: Sequence[int] = ()) -> bool:
        """Whether nothing has changed that decides what a forward computes, and where."""
        return (
            module is self._module
            and [*map(len, self._tables)] == self._sizes
            and all(map(is_, self._all_values(), self._values))
            and self._addresses == self._with_weights(addresses)
            and self._autocasts == self._autocast()
        )

    def _all_values(self) -> Iterator[Any]:
        """Of all tables, one after the other: it is asked before each step, of thousands."""
        return chain.from_iterable(map(methodcaller("values"), self._tables))

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
