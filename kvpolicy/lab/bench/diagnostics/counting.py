"""What code asks of a device, counted: operators that compute, and values that the host reads.

On the device ``meta`` tensors have no numbers. `WithoutNumbers` lets the host read there all the
same, as zeros, so that code runs which would wait for a GPU.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import kvpolicy

_PACKAGE = Path(kvpolicy.__file__).parent
_LAB = _PACKAGE / "lab"

# Functions that give the host a value of a tensor.
_READING = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.cpu,
    Tensor.nonzero,
    torch.nonzero,
    torch.equal,
    Tensor.equal,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__array__,
}
# Operators that compute nothing.
_NOT_COMPUTING = (
    "aten::empty",
    "aten::new_empty",
    "aten::lift_fresh",
    "aten::detach",
    "aten::_local_scalar_dense",
)
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default


class Counted:
    """What was asked of a device.

    Attributes:
        operators: Operators that compute, by name; one of kvpolicy is one.
        reads: Values that the host has read, by the place in the code.
    """

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    @property
    def operations(self) -> int:
        """All operators that compute."""
        return self.operators.total()


@contextmanager
def counting() -> Iterator[Counted]:
    """Count what happens in a ``with`` block; what an operator does inside is not seen."""
    counted = Counted()
    with _Operators(counted), _Reads(counted):
        yield counted


class WithoutNumbers(TorchFunctionMode):
    """In a ``with`` block, what is read of the device ``meta`` is 0.

    Attention is the operator that GPUs have for it; on ``meta`` torch would take it apart.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READING or (func is Tensor.to and _goes_to_the_host(*args[1:], **kwargs)):
            args, kwargs = tree_map(_as_zeros, (args, kwargs))
        elif func is F.scaled_dot_product_attention and args[0].is_meta:
            return _FLASH(*args[:3])[0]
        return func(*args, **kwargs)


def _as_zeros(value: Any) -> Any:
    """What is read: an operator, as the copy to the host would be."""
    is_meta = isinstance(value, Tensor) and value.is_meta
    return torch.zeros(value.shape, dtype=value.dtype) if is_meta else value


def _goes_to_the_host(*args: Any, **kwargs: Any) -> bool:
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    return device is not None and device.type == "cpu"


class _Operators(TorchDispatchMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted = counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        schema = func._schema
        is_view = not schema.is_mutable and _memory(result) <= _memory((args, kwargs or {}))
        if not is_view and not schema.name.startswith(_NOT_COMPUTING):
            self._counted.operators[schema.name] += 1
        return result


def _memory(tensors: Any) -> set[int]:
    """The storages of tensors; packed weights share theirs with nothing."""
    found = (one for one in tree_leaves(tensors) if isinstance(one, Tensor))
    return {id(one) if one.is_mkldnn else one.untyped_storage()._cdata for one in found}


class _Reads(TorchFunctionMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READING:
            self._counted.reads[_place(sys._getframe(1))] += 1
        return func(*args, **kwargs or {})


def _place(frame: FrameType | None) -> str:
    """The innermost function of kvpolicy or a policy that is running, as ``file.py:function``."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if any(path.is_relative_to(_LAB / name) for name in ("bench", "cli")):
            break  # who counts
        if path.is_relative_to(_PACKAGE) or path.parent.name.startswith("kvpolicy_"):
            return f"{path.name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "the model"
