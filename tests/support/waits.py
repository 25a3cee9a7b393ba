"""Counting of waits: places at which the host waits until a device has done its work.

    with Waits("cuda") as waits:
        run.step()
    print(waits.total, waits.counted)

An operator waits if the host needs a value of the device: to read a number, to know how many rows
a mask has, or to copy to the host. A copy from the host waits unless it is ``non_blocking``. On a
machine without a GPU the device may be ``"meta"``, whose tensors have no values: what reads one
raises.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten

# Operators whose result, or its shape, the host reads.
_READS = frozenset(
    {
        _aten._local_scalar_dense,
        _aten.equal,
        _aten.nonzero,
        _aten.masked_select,
        _aten._unique2,
        _aten.unique_dim,
        _aten.unique_consecutive,
        _aten.repeat_interleave,
    }
)
_INDEXED = frozenset({_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_})
_COPIES = frozenset({_aten._to_copy, _aten.copy_})


class Waits(TorchDispatchMode):
    """Counts waits for a kind of device inside a ``with`` block.

    Attributes:
        device: Type of the device, such as ``"cuda"``. With ``"cpu"``, which never waits, reads
            of all tensors are counted, those of the host included.
        counted: Waits by the name of the operator.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.counted: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Waits in all."""
        return self.counted.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and count it if it waits."""
        kwargs = kwargs or {}
        if self._waits(func.overloadpacket, args, kwargs):
            self.counted[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs)

    def _waits(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if packet in _READS:
            return self._is_on_device(args[0])
        if packet in _INDEXED:
            # A mask is read to learn how many entries it has; other indices are not.
            indices = [one for one in tree_leaves(args[1]) if isinstance(one, Tensor)]
            masks = [one for one in indices if one.dtype in (torch.bool, torch.uint8)]
            from_host = [one for one in indices if one.device != args[0].device and one.dim()]
            return self._is_on_device(args[0]) and bool(masks or from_host)
        if packet in _COPIES:
            return self._copy_waits(packet, args, kwargs)
        return False

    def _copy_waits(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if packet is _aten.copy_:
            target, source = args[0].device, args[1].device
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            source = args[0].device
            target = torch.device(kwargs.get("device") or source)
            non_blocking = kwargs.get("non_blocking", False)
        if source.type == target.type or self.device not in (source.type, target.type):
            return False
        return target.type == "cpu" or not non_blocking

    def _is_on_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device
