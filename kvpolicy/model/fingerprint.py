"""Fingerprints: whether what was computed with a model can be used with another one.

A fingerprint is exact: it covers every number that the modules of a model store, its configuration,
and the attributes of modules that other packages than torch and transformers have made, which say
what adapters are active, disabled or merged, and how they are scaled.

Reading all weights takes about a second for a gigabyte, so it is done once. Later looks compare
what is seen at once: the modules and their hooks, and of each tensor its address, torch's count of
its writes, and a few of its numbers. What looks different is read again. Only a write that torch
does not count, one through ``.data``, and that leaves all of these numbers alone, is not noticed.
"""

import hashlib
import json
import threading
import uuid
from collections import abc
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary, ref

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.errors import ModelError, type_name

# Numbers of each tensor that every look reads.
_NUM_SAMPLES = 16

# Bytes that are copied from a device and hashed at once.
_PIECE_BYTES = 2**26

# What configurations say of where a model comes from.
_NOT_SETTINGS = {"architectures", "transformers_version", "version"}

# Modules of these packages compute what their class, tensors and the configuration say.
_DESCRIBED = {"torch", "transformers"}

# Hooks of these change no results of a model; what others do depends on what they close over.
_KNOWN_FUNCTIONS = {*_DESCRIBED, "accelerate", "kvpolicy", "peft"}

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class ModelFingerprint:
    """The fingerprint of a model whose weights, adapters and modules may change."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: WeakKeyDictionary[nn.Module, tuple[_Look, bytes]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def current(self) -> str:
        """The fingerprint of the model as it is now.

        Raises:
            ModelError: If weights are not in memory.
        """
        with self._lock:
            modules = dict(self._model.named_modules())
            changed = []
            for module, tensors in zip(modules.values(), _tensors(modules.values()), strict=True):
                known = self._known.get(module)
                if known is None or not known[0].is_of(module, tensors):
                    changed.append((module, _Look(module, tensors)))
            if changed:
                with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                    digests = pool.map(_digest, [module for module, _ in changed])
                    for (module, look), digest in zip(changed, digests, strict=True):
                        self._known[module] = look, digest
            found = hashlib.sha256(_settings(self._model).encode())
            for name, module in modules.items():
                found.update(f"{name} ".encode() + self._known[module][1])
            return found.hexdigest()


def model_fingerprint(model: nn.Module) -> str:
    """The fingerprint of a model as it is now: 64 hexadecimal digits.

    Raises:
        ModelError: If weights are not in memory.
    """
    return ModelFingerprint(model).current()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of a tokenizer: its class, its vocabulary, its rules and its chat template."""
    found = hashlib.sha256(type_name(tokenizer).encode())
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = {} if backend is None else json.loads(backend.to_str())
    for setting in ("padding", "truncation"):  # of the last call
        rules.pop(setting, None)
    read = [sorted(vocabulary.items()), rules, getattr(tokenizer, "chat_template", None)]
    found.update(json.dumps(read, sort_keys=True).encode())
    return found.hexdigest()


@attrs.frozen(eq=False)
class _Tensors:
    """What one sees of the tensors of a module at once.

    Attributes:
        refs: The tensors, weakly.
        writes: Where each is, and how often it was written.
        sample: A few numbers of each.
    """

    refs: list[Any]
    writes: list[tuple[int, int]]
    sample: bytes

    def are_those(self, before: "_Tensors") -> bool:
        """Whether they are still what they were."""
        return (
            self.sample == before.sample
            and self.writes == before.writes
            and all(map(is_, self.refs, before.refs))
        )


class _Look:
    """What a module was when it was hashed, as far as one sees it without reading all of it."""

    def __init__(self, module: nn.Module, tensors: _Tensors) -> None:
        self._tensors = tensors
        self._tables = [table.copy() for table in _tables(module)]
        own = vars(module)
        self._forward = own.get("forward")
        self._attributes = [] if _is_described(module) else list(own.values())
        # What is written in place; the others are compared as objects.
        self._containers = [
            (value, deepcopy(value))
            for name, value in own.items()
            if self._attributes and name not in _OF_EVERY_MODULE and _is_container(value)
        ]

    def is_of(self, module: nn.Module, tensors: _Tensors) -> bool:
        """Whether a module is still what it was."""
        own = vars(module)
        return (
            tensors.are_those(self._tensors)
            and list(_tables(module)) == self._tables
            and own.get("forward") is self._forward
            and (not self._attributes or _are_same(self._attributes, own.values()))
            and all(live == before for live, before in self._containers)
        )


def _are_same(before: abc.Sequence[Any], now: abc.Collection[Any]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, dict, set))


def _is_described(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in _DESCRIBED


def _tables(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """The modules and hooks of a module."""
    return module._modules, module._forward_pre_hooks, module._forward_hooks


@torch.inference_mode()
def _tensors(modules: abc.Iterable[nn.Module]) -> list[_Tensors]:
    """The tensors of each module, with samples that are copied together from each device."""
    found: list[_Tensors] = []
    picked: dict[Any, list[tuple[int, Tensor]]] = {}
    for number, module in enumerate(modules):
        parts = [part for one in _of_module(module) for part in _parts(one)]
        for part in parts:
            kind = part.device, part.dtype
            picked.setdefault(kind, []).append((number, _some(part)))
        writes = [_writes(part) for part in parts]
        found.append(_Tensors(list(map(ref, parts)), writes, b""))
    samples = [b""] * len(found)
    for group in picked.values():
        content = torch.cat([some for _, some in group]).cpu().view(torch.uint8).numpy().tobytes()
        start = 0
        for number, some in group:
            samples[number] += content[start : start + some.nbytes]
            start += some.nbytes
    return [attrs.evolve(one, sample=sample) for one, sample in zip(found, samples, strict=True)]


def _writes(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor is, and how often it was written; torch does not tell of all."""
    where = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return where, 0 if tensor.is_inference() else tensor._version


def _of_module(module: nn.Module) -> list[Tensor]:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in tensors if tensor is not None]


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors of which one consists that is quantised or shared; itself if it is plain.

    Raises:
        ModelError: If they are not in memory.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        # Since torch 2.13 a shared one also names the devices that share it.
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for one in inner if isinstance(one, Tensor) for part in _parts(one)]
    if tensor.is_meta:
        msg = (
            "the weights of the model cannot be told from others, because some are offloaded or "
            "not loaded; load all of them into the memory of its devices"
        )
        raise ModelError(msg)
    return [tensor]


def _some(tensor: Tensor) -> Tensor:
    """A few numbers from all over a tensor."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return tensor.new_empty(0, layout=torch.strided)
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in strides)
    num = min(extent, _NUM_SAMPLES)
    return tensor.as_strided((num,), (extent // num,))


def _digest(module: nn.Module) -> bytes:
    """A hash of all that a module stores."""
    found = hashlib.sha256(type_name(module).encode())
    own = vars(module)
    if not _is_described(module):
        plain = {
            name: _plain(value)
            for name, value in own.items()
            if name not in _OF_EVERY_MODULE and name != "forward"
        }
        found.update(json.dumps(plain).encode())
    _, before, after = _tables(module)
    functions = [*before.values(), *after.values(), *filter(None, [own.get("forward")])]
    if not all(map(_is_known, functions)):
        found.update(uuid.uuid4().bytes)  # it equals no other, as long as they stay
    stored: dict[str, Any] = {}
    # Quantised layers, and those whose weights are packed, say here what their numbers are.
    module._save_to_state_dict(stored, "", keep_vars=True)
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers[name]
        if buffer is not None and buffer.is_floating_point():
            # Computed when the model is built: the last bits depend on the machine.
            buffer = buffer.bfloat16()
        stored[name] = buffer
    for name, value in sorted(stored.items()):
        found.update(json.dumps([name, _plain(value)]).encode())
    return found.digest()


def _plain(value: Any) -> Any:
    """Plain data that differs where values do; tensors as hashes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return _tensor_hash(value)
    if isinstance(value, abc.Mapping):
        return [[_plain(key), _plain(one)] for key, one in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return type_name(value)


@torch.inference_mode()
def _tensor_hash(tensor: Tensor) -> str:
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    for plain in _parts(tensor):
        part = plain.detach()
        numbers = part.dequantize() if part.is_quantized else part
        flat = numbers.to_dense().reshape(-1)
        for piece in flat.split(_PIECE_BYTES // flat.itemsize):
            found.update(piece.cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def _is_known(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__module__", "")).partition(".")[0] in _KNOWN_FUNCTIONS


def _settings(model: nn.Module) -> str:
    """The configuration of a model, without where it comes from."""
    config = getattr(model, "config", None)
    found = {} if config is None else _without_origin(config.to_dict())
    return json.dumps(found, sort_keys=True, default=repr)


def _without_origin(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: _without_origin(one)
        for key, one in value.items()
        if key not in _NOT_SETTINGS and not str(key).startswith("_")
    }
