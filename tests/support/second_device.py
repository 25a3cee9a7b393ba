"""A simulated second device: its tensors cannot be mixed with CPU tensors.

A tensor of the second device wraps a CPU tensor, reports ``meta`` as its device, and computes on
the CPU. As torch does for two GPUs, an operation on tensors of both devices raises, except for
copies, scalars from the CPU and indices from the CPU. Within `second_device()`, factories and
``.to()`` support the second device.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

SECOND_DEVICE = torch.device("meta")
_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXED = (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default)


class SecondDeviceTensor(Tensor):
    """A tensor of the second device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "SecondDeviceTensor":
        wrapped = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=SECOND_DEVICE
        )
        wrapped.inner = inner
        return wrapped

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_with_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_with_tensors(index), value)

    def __repr__(self) -> str:
        return f"SecondDeviceTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _with_tensors(index: Any) -> Any:
    """An index with lists converted to tensors, which torch would create on ``meta``."""
    if isinstance(index, tuple):
        return tuple(_with_tensors(one) for one in index)
    return torch.tensor(index) if isinstance(index, list) else index


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    assert all(
        isinstance(one, SecondDeviceTensor) or one.device != SECOND_DEVICE for one in tensors
    ), func
    is_copy = func in _COPIES
    checked = [args[0]] if func in _INDEXED else tensors
    if func in _INDEXED[1:] and args[2].dim():
        checked = [args[0], args[2]]
    if func in _INDEXED and not isinstance(args[0], SecondDeviceTensor):
        checked = tensors
    on_second = [one for one in checked if isinstance(one, SecondDeviceTensor)]
    on_cpu = [one for one in checked if not isinstance(one, SecondDeviceTensor) and one.dim()]
    if on_second and on_cpu and not is_copy:
        msg = f"{func} was given tensors of two devices"
        raise RuntimeError(msg)
    target = kwargs.get("device")
    to_second = bool(on_second) if target is None else torch.device(target) == SECOND_DEVICE
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    plain = tree_map_only(SecondDeviceTensor, lambda one: one.inner, (args, kwargs))
    result = func(*plain[0], **plain[1])
    if func is _aten.copy_.default or func._schema.is_mutable:
        return args[0]
    return tree_map_only(Tensor, SecondDeviceTensor, result) if to_second else result


@contextmanager
def second_device() -> Iterator[None]:
    """Let factories and ``.to()`` create tensors on the second device.

    Inference mode does not allow views of such tensors, so gradients are disabled instead.
    """
    make = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        wrapped = make(data, **options)
        return wrapped if device is None else wrapped.to(device)

    inference = patch.object(torch, "inference_mode", lambda mode=True: torch.no_grad())
    with ExitStack() as block:
        block.enter_context(inference)
        block.enter_context(patch.object(torch, "tensor", tensor))
        for module in ("choose", "by_weights"):  # it has numbers, and is no GPU
            name = f"kvpolicy.attention.{module}.has_no_numbers"
            block.enter_context(patch(name, lambda _: False))
        block.enter_context(_Mode())
        yield


def spread(model: nn.Module, first_moved: int) -> None:
    """Move the layers from a given one on, the last norm and the head to the second device.

    As with a ``device_map``, the inputs of a module are moved to the device of its weights.
    """
    decoder = model.get_decoder()
    for module in [*decoder.layers[first_moved:], decoder.norm, model.get_output_embeddings()]:
        _move(module)
        module.register_forward_pre_hook(_move_inputs, with_kwargs=True)


def _move(module: nn.Module) -> None:
    for owner in module.modules():
        for name, weight in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(SecondDeviceTensor(weight.data), requires_grad=False))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, SecondDeviceTensor(buffer))


def _move_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
    def move(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, SecondDeviceTensor) else tensor.to(SECOND_DEVICE)

    return tree_map_only(Tensor, move, (args, kwargs))
