"""The operator ``kvpolicy::decode`` of torch: one layer of a decode step, on any device.

A graph sees one call with declared effects instead of operations whose shapes depend on how many
rows are held. So a model's whole decode step can be traced without a break.
"""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.attention.choose import attend_on_cpu
from kvpolicy.attention.torch_backend.decode import Counts, DecodeSlabs
from kvpolicy.attention.torch_backend.fixed_shapes import attend_in_fixed_shapes
from kvpolicy.devices import HAS_TRITON

# Defined and implemented by hand: `torch.library.custom_op` adds two layers of Python to a call.
_LIBRARY = torch.library.Library("kvpolicy", "DEF")
_LIBRARY.define(
    "decode(Tensor query, Tensor key, Tensor value, "
    "Tensor(a!) keys, Tensor(b!) values, Tensor(c!) positions, Tensor(d!)[] tracks, "
    "Tensor(e!)[] accumulated, str[] accumulators, Tensor(f!)? window, Tensor? bounds, "
    "Tensor rows, Tensor seq_len, Tensor live, "
    "float scaling, float softcap, Tensor? sinks, int sliding_window) -> Tensor"
)
# What follows the new rows in the schema, in its order.
_SLABS = tuple(field.name for field in attrs.fields(DecodeSlabs))
_COUNTS = tuple(field.name for field in attrs.fields(Counts))
_OPTIONS = ("scaling", "softcap", "sinks", "sliding_window")

DECODE = torch.ops.kvpolicy.decode.default


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slabs: DecodeSlabs,
    counts: Counts,
    *,
    scaling: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    sliding_window: int = 0,
) -> Tensor:
    """Store one new row in every slot, and attend to the rows that it holds.

    Arguments and result are those of `torch_backend.decode.attend_with_torch`.
    """
    of_layer = [getattr(slabs, name) for name in _SLABS]
    of_slots = [getattr(counts, name) for name in _COUNTS]
    options = (scaling, softcap, sinks, sliding_window)
    output: Tensor = DECODE(query, key, value, *of_layer, *of_slots, *options)
    return output


def _on_cpu(*arguments: Any) -> Tensor:
    return _called(attend_on_cpu, *arguments)


def _on_cuda(*arguments: Any) -> Tensor:
    attend: Callable[..., Tensor] = attend_in_fixed_shapes
    if HAS_TRITON:
        from kvpolicy.attention.triton_backend.decode import decode

        attend = decode
    return _called(attend, *arguments)


def _shape(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


def _called(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> Tensor:
    """Call an implementation with the operator's arguments."""
    slabs, rest = rest[: len(_SLABS)], rest[len(_SLABS) :]
    counts, options = rest[: len(_COUNTS)], rest[len(_COUNTS) :]
    named = dict(zip(_OPTIONS, options, strict=True))
    return attend(query, key, value, DecodeSlabs(*slabs), Counts(*counts), **named)


_LIBRARY.impl("decode", _on_cpu, "CPU")
_LIBRARY.impl("decode", _on_cuda, "CUDA")
torch.library.register_fake("kvpolicy::decode", _shape, lib=_LIBRARY)
