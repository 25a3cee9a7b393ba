"""Operators of torch: one layer of a decode step, on any device, and what else a GPU launches.

A graph sees one call of ``kvpolicy::decode`` with declared effects instead of operations whose
shapes depend on how many rows are held. So a model's whole decode step can be traced without a
break. On the device ``meta``, where tensors have no numbers, each kernel of a GPU is an operator,
so that they can be counted there: ``kvpolicy::compact`` is one that moves rows within a slab.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.attention.base import AttentionBackend, Compact, Decode, DecodeLayer
from kvpolicy.attention.torch_backend.backend import TorchBackend

# Defined and implemented by hand: `torch.library.custom_op` adds two layers of Python to a call.
_LIBRARY = torch.library.Library("kvpolicy", "DEF")
_LIBRARY.define(
    "decode(Tensor query, Tensor key, Tensor value, "
    "Tensor(a!) keys, Tensor(b!) values, Tensor(c!) positions, "
    "Tensor rows, Tensor seq_len, Tensor live, Tensor(d!)[] tracks, "
    "Tensor(e!)[] accumulated, str[] accumulators, Tensor(f!)? window, Tensor? bounds, "
    "int sliding_window, int key_bits, int value_bits, Tensor(g!)? exact_keys, "
    "Tensor(h!)? exact_values, float scaling, float softcap, "
    "Tensor? sinks) -> Tensor"
)
_LIBRARY.define(
    "compact(Tensor(a!) slab, Tensor keep, Tensor slots, Tensor num_kept, Tensor num_rows, "
    "int fill=0, *, Tensor? start=None, Tensor? beside=None, Tensor? lanes=None) -> ()"
)
# What follows the new rows in the schema, in its order.
_LAYER = tuple(field.name for field in attrs.fields(DecodeLayer))

DECODE = torch.ops.kvpolicy.decode.default


class OperatorBackend(TorchBackend):
    """Decodes by the operator, which runs the backend of its tensors' device."""

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend in one call that a graph can hold."""
        return partial(decode, layer)


class MetaBackend(OperatorBackend):
    """What a GPU would launch, on the device ``meta``: operators that compute nothing."""

    compact: Compact | None = torch.ops.kvpolicy.compact.default


def decode(
    layer: DecodeLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store one new row in every slot, and attend to the rows that it holds, see `Decode`."""
    of_layer = [getattr(layer, name) for name in _LAYER]
    output: Tensor = DECODE(query, key, value, *of_layer, scaling, softcap, sinks)
    return output


def implement(backend_for: Callable[[torch.device, torch.dtype], AttentionBackend]) -> None:
    """Have the operator run the backend of a device and a precision of keys."""

    def run(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        layer = DecodeLayer(*rest[: len(_LAYER)])
        scaling, softcap, sinks = rest[len(_LAYER) :]
        attend = backend_for(layer.keys.device, layer.keys.dtype).bind(layer)
        return attend(query, key, value, scaling=scaling, softcap=softcap, sinks=sinks)

    for device in ("CPU", "CUDA"):
        _LIBRARY.impl("decode", run, device)


def _shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    del key
    return query.new_empty(*query.shape[:-1], value.shape[-1])


_LIBRARY.impl("compact", lambda *_, **__: None, "Meta")
torch.library.register_fake("kvpolicy::decode", _shape, lib=_LIBRARY)
