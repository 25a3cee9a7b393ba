"""Plain data and tensors as JSON, with the tensors beside it: what policies remember, in a file."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import type_name
from kvpolicy.files import MAX_NESTING

_SCALARS = (type(None), bool, int, float, str)
_COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset}


class NotPlainError(Exception):
    """Something that is no plain data; the message says what."""


def encode(value: object, tensors: dict[str, Tensor], prefix: str, depth: int = 0) -> Any:
    """A value as JSON.

    Args:
        value: ``None``, a truth value, number, text, bytes, tensor, or a list, tuple, set or dict
            of such.
        tensors: Receives the tensors, by names that begin with ``prefix``.
        prefix: The prefix.
        depth: How deeply the value is nested in others.

    Raises:
        NotPlainError: If the value is something else, or nested too deeply.
    """
    if depth > MAX_NESTING:
        msg = f"data that is nested more than {MAX_NESTING} levels deep"
        raise NotPlainError(msg)

    def inner(one: object) -> Any:
        return encode(one, tensors, prefix, depth + 1)

    if type(value) in _SCALARS:
        return value
    if type(value) is list:
        return [inner(one) for one in value]
    if type(value) is dict:
        return {"dict": [[inner(key), inner(one)] for key, one in value.items()]}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    for name, kind in _COLLECTIONS.items():
        if type(value) is kind:
            return {name: [inner(one) for one in value]}
    if type(value) is Tensor:
        if value.layout is not torch.strided or value.is_quantized:
            msg = "a tensor that is not dense"
            raise NotPlainError(msg)
        name = f"{prefix}{len(tensors)}"
        # A copy: tensors of a file must not share memory.
        tensors[name] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return {"tensor": name, "on_cpu": value.device.type == "cpu"}
    msg = f"an object of {type_name(value)}"
    raise NotPlainError(msg)


def decode(data: Any, tensors: Mapping[str, Tensor], moved: list[Tensor]) -> Any:
    """The value that `encode` was given.

    Args:
        data: What it returned.
        tensors: The tensors by name.
        moved: Receives the tensors that were not on the CPU.

    Raises:
        KeyError: If a tensor is missing.
        ValueError: If it is nothing that `encode` returns.
    """

    def inner(one: Any) -> Any:
        return decode(one, tensors, moved)

    if type(data) in _SCALARS:
        return data
    if type(data) is list:
        return [inner(one) for one in data]
    if "tensor" in data:
        tensor = tensors[data["tensor"]]
        if not data["on_cpu"]:
            moved.append(tensor)
        return tensor
    ((kind, contents),) = data.items()
    if kind == "dict":
        return {inner(key): inner(one) for key, one in contents}
    if kind == "bytes":
        return bytes.fromhex(contents)
    return _COLLECTIONS[kind](map(inner, contents))
