"""The operator ``kvpolicy::decode`` of torch: one layer of a decode step, on any device.

A graph sees one call with declared effects instead of operations whose shapes depend on how many
rows are held. So a model's whole decode step can be traced without a break.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.attention.base import AttentionBackend, Decode, DecodeLayer
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
# What follows the new rows in the schema, in its order.
_LAYER = tuple(field.name for field in attrs.fields(DecodeLayer))

DECODE = torch.ops.kvpolicy.decode.default


class OperatorBackend(TorchBackend):
    """Decodes by the operator, which runs the backend of its tensors' device."""

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend in one call that a graph can hold."""
        return partial(decode, layer)


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


torch.library.register_fake("kvpolicy::decode", _shape, lib=_LIBRARY)
