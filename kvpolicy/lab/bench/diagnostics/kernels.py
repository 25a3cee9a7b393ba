"""Kernels that a GPU launches in a decode step, counted without a GPU, by what they do.

A step is recorded as on a GPU, before and after its operators are fused. An operator of torch that
computes counts as one kernel, a view or an allocation as none, and an operator of kvpolicy as what
it launches. A product of matrices may be two: cuBLAS adds a sum where it splits one. No numbers are
needed: models on the device ``meta`` have none, and may be of any size.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Node
from transformers import PreTrainedModel

from kvpolicy.attention.chunks import DEFAULT_PROCESSORS, chunks_of
from kvpolicy.attention.operator import DECODE
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import Slab
from kvpolicy.cache.static_step import Continuation, StaticStep
from kvpolicy.engine.requests.request import Sampling
from kvpolicy.lab.bench.workload import Decode
from kvpolicy.lab.sweep.grid import Cell
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.forward_input import ForwardInput
from kvpolicy.model.fused.operators import ADD_NORM, GATE, NORM, ROTATE
from kvpolicy.model.fused.record import Recording, is_view, record
from kvpolicy.model.fused.rewrite import fuse
from kvpolicy.model.static_forward import static_forward

#: Kinds of kernels.
KINDS = ("products", "attention", "norms", "RoPE", "gates", "others")

_KIND_OF = {
    torch.ops.aten.linear.default: "products",
    DECODE: "attention",
    NORM: "norms",
    ADD_NORM: "norms",
    ROTATE: "RoPE",
    GATE: "gates",
}


@attrs.frozen
class Kernels:
    """Kernels of a step.

    Attributes:
        name: The plan.
        plain: Those of the model's own operators, by kind, see `KINDS`. Norms, RoPE, gates and
            sums of residuals are among the ``others``, like what draws the next token.
        fused: Those after fusing. Norms with the sums before them, RoPE and gates that were found
            are single kernels then; what was not found is among the ``others``.
    """

    name: str
    plain: Mapping[str, int]
    fused: Mapping[str, int]


def kernels_of(model: PreTrainedModel, cell: Cell, work: Decode) -> Kernels:
    """The kernels of a decode step under a plan.

    Weights of the model are moved, see `kvpolicy.model.fused.join_weights`.

    Args:
        model: A model whose decode steps are static.
        cell: The plan, of which the sizes of slabs and the form of their rows count.
        work: Sequences, and the rows of a slab that has no budget.
    """
    adapter = ModelAdapter(model)
    slabs = [
        Slab(
            int(layer.budget) + layer.buffer if layer.budget else work.held,
            key_bits=layer.rows.key_bits,
            value_bits=layer.rows.value_bits,
            exact=layer.rows.exact,
        )
        for layer in cell.resolved.layers
    ]
    step = StaticStep(KVCache(adapter.layer_shapes(), slabs, work.batch), in_graph=True)
    greedy = Continuation(work.held, frozenset(), Sampling())
    step.begin([0] * work.batch, [greedy] * work.batch)
    found: list[Kernels] = []

    def count(call: Any, given: Any) -> tuple[Tensor, Tensor | None]:
        recording = record(lambda: static_forward(call, given))
        plain = _count(recording)
        fuse(recording)
        found.append(Kernels(cell.series, plain, _count(recording)))
        output: tuple[Tensor, Tensor | None] = recording.output
        return output

    tokens = torch.zeros(work.batch, 1, dtype=torch.int64)
    adapter.forward(ForwardInput(tokens, step, run=count, draws=True))
    return found[0]


def _count(recording: Recording) -> dict[str, int]:
    counts = Counter(dict.fromkeys(KINDS, 0))
    for node in recording.graph.nodes:
        if node.op != "call_function" or not hasattr(node.target, "_schema") or is_view(node):
            continue
        num = len(list(_launched(node, recording))) if node.target is DECODE else 1
        counts[_KIND_OF.get(node.target, "others")] += num
    return dict(counts)


def _launched(node: Node, recording: Recording) -> Iterator[str]:
    """What the Triton backend launches for one layer."""
    names = [one.name for one in DECODE._schema.arguments]
    arguments: dict[str, Any] = dict(zip(names, node.args, strict=False))
    slots, heads, capacity, _ = recording.tensors[arguments["keys"].target].shape
    if arguments["sliding_window"] == capacity:
        yield from ("drop keys", "drop values", "drop positions")
    yield "append"
    yield "attend"
    if chunks_of(capacity, slots * heads, DEFAULT_PROCESSORS)[0] > 1:
        yield "join"
