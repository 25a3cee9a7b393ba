"""A second device on a machine that has one: tensors that refuse to mix with those elsewhere.

A tensor there wraps one of the CPU, gives ``meta`` for its device, and computes what the CPU
computes. What torch refuses on two GPUs is refused here: an operation on tensors of both
places raises, with the exceptions that torch makes (copies, single numbers from the CPU,
indices from the CPU). Within `second_device()`, factories and ``.to()`` know the place, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

THERE = torch.device("meta")
_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXED = (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default)


class There(Tensor):
    """A tensor of the second device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "There":
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=THERE
        )
        made.inner = inner
        return made

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_with_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_with_tensors(index), value)

    def __repr__(self) -> str:
        return f"There({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _with_tensors(index: Any) -> Any:
    """An index whose lists are tensors: torch would make them where there is no memory."""
    if isinstance(index, tuple):
        return tuple(_with_tensors(one) for one in index)
    return torch.tensor(index) if isinstance(index, list) else index


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    assert all(isinstance(one, There) or one.device != THERE for one in tensors), func
    anywhere = func in _COPIES
    judged = [args[0]] if func in _INDEXED else tensors
    if func in _INDEXED[1:] and args[2].dim():
        judged = [args[0], args[2]]
    if func in _INDEXED and not isinstance(args[0], There):
        judged = tensors
    there = [one for one in judged if isinstance(one, There)]
    here = [one for one in judged if not isinstance(one, There) and one.dim()]
    if there and here and not anywhere:
        msg = f"{func} was given tensors of two devices"
        raise RuntimeError(msg)
    target = kwargs.get("device")
    goes_there = bool(there) if target is None else torch.device(target) == THERE
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    plain = tree_map_only(There, lambda one: one.inner, (args, kwargs))
    result = func(*plain[0], **plain[1])
    if func is _aten.copy_.default or func._schema.is_mutable:
        return args[0]
    return tree_map_only(Tensor, There, result) if goes_there else result


@contextmanager
def second_device() -> Iterator[None]:
    """Let factories and ``.to()`` make tensors there.

    Inference mode does not allow views of such tensors; gradients are switched off instead.
    """
    make = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = make(data, **options)
        return made if device is None else made.to(device)

    inference = patch.object(torch, "inference_mode", torch.no_grad)
    with inference, patch.object(torch, "tensor", tensor), _Mode():
        yield


def spread(model: nn.Module, first_there: int) -> None:
    """Put the layers from a given one on, the last norm and the head on the second device.

    As with a ``device_map``, what enters a module is brought to where its weights are.
    """
    decoder = model.get_decoder()
    for module in [*decoder.layers[first_there:], decoder.norm, model.get_output_embeddings()]:
        _move(module)
        module.register_forward_pre_hook(_bring, with_kwargs=True)


def _move(module: nn.Module) -> None:
    for owner in module.modules():
        for name, weight in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(There(weight.data), requires_grad=False))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, There(buffer))


def _bring(_: nn.Module, args: Any, kwargs: Any) -> Any:
    def bring(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, There) else tensor.to(THERE)

    return tree_map_only(Tensor, bring, (args, kwargs))
