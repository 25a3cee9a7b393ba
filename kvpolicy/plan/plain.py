"""Plain data for whatever knobs hold, equal when JSON is read again.

It differs where knobs differ, to the last number of a tensor, and is the same in every process:
digests of plans are made from it.
"""

import hashlib
import json
import re
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from kvpolicy.errors import type_name


def as_plain(data: dict[str, Any]) -> dict[str, Any]:
    """The same data without tuples, paths, sets, tensors and other objects.

    Of functions, and of objects that describe themselves, it has the text.

    Args:
        data: Values by name.
    """
    plain: dict[str, Any] = json.loads(json.dumps(_plain(data, within=())))
    return plain


def held_by(value: object) -> dict[str, Any]:
    """The attributes of an object, in ``__dict__`` or in slots."""
    state: Any = object.__getstate__(value)
    parts = state if isinstance(state, tuple) else (state,)
    return {name: one for part in parts if part is not None for name, one in part.items()}


def _plain(value: Any, *, within: tuple[object, ...]) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if any(value is one for one in within):  # it holds itself
        return type_name(value)
    plain = partial(_plain, within=(*within, value))
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {_plain_key(key): plain(one) for key, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return [plain(one) for one in sorted(value, key=repr)]
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
        return _hash_of_numbers(value.detach().cpu().contiguous().reshape(-1), value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _hash_of_numbers(np.ascontiguousarray(value).reshape(-1), value)
    if isinstance(value, nn.Module):
        return [_text(value), plain(dict(value.state_dict()))]
    if _describes_nothing(value):
        return [type_name(value), plain(held_by(value))]
    return _text(value)


def _plain_key(key: object) -> str | int | float:
    return key if isinstance(key, (str, int, float)) else repr(key)


def _hash_of_numbers(flat: Any, whole: Any) -> str:
    numbers = flat.view(torch.uint8 if isinstance(flat, Tensor) else np.uint8)
    found = hashlib.sha256(f"{whole.dtype} {list(whole.shape)}".encode())
    found.update(np.asarray(numbers).data)
    return found.hexdigest()


def _describes_nothing(value: object) -> bool:
    """Whether its text leaves out what it holds, or shortens it."""
    kind = type(value)
    return kind.__repr__ is object.__repr__ or attrs.has(kind) or is_dataclass(kind)


def _text(value: object) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
