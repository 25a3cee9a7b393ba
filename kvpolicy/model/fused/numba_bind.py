"""Binding: fused operators of a recorded step on a CPU write to memory that is theirs.

In a step of few rows, calling a kernel takes longer than running it: its results are allocated, and
what it reads are views of views. Where all that is, is known when the step is recorded. So a bound
operator gets the address of a product, knows where in it its numbers are, and gives the same
tensors each time. What a step answers is not among these.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from kvpolicy.model.fused import numba_kernels
from kvpolicy.model.fused.operators import ADD_NORM, GATE, NORM, ROTATE
from kvpolicy.model.fused.record import (
    Layout,
    Recording,
    getitem,
    layout,
    location,
    uncast,
    viewed,
    writes,
)
from kvpolicy.model.numba_panels import MOST_ROWS, Panels
from kvpolicy.numba_common import is_forked

_NUMBER = 4  # bytes

# What a bound operator calls, and its memory, which is what it gives.
Bound = tuple[Callable[..., Any], Any]

_PRODUCT = torch.ops.mkldnn._linear_pointwise.default  # with packed weights


def bind(recording: Recording) -> int:
    """Bind the fused operators of a recording, where they compute in fp32.

    Returns:
        How many there are.
    """
    graph, num = recording.graph, 0
    answered = _answered(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _PRODUCT and not is_forked():
            num += _bind_product(recording, node, answered)
        if hasattr(getattr(node.target, "__self__", None), "fixed") and node not in answered:
            num += _bind_opaque(recording, node)
        if node.target not in _BINDERS or node in answered:
            continue
        operands = [_Operand.of(one) for one in node.args if isinstance(one, fx.Node)]
        found = None if None in operands else _BINDERS[node.target](operands, node.args[-1])
        if found is not None:
            call, memory = found
            with graph.inserting_before(node):
                bound = graph.call_function(call, tuple(one.base for one in operands if one))
            node.replace_all_uses_with(bound)
            bound.meta.update(node.meta, memory=memory)
            graph.erase_node(node)
            num += 1
    return num


def _bind_product(recording: Recording, node: Any, answered: set[fx.Node]) -> bool:
    """Multiply few rows with packed weights in Numba, if it knows how the weights lie."""
    states, weights, bias, *_ = node.args
    panels = Panels.of(recording.tensors[weights.target]) if weights.op == "get_attr" else None
    products = [node]
    if panels is not None and panels.dtype == torch.bfloat16:  # it casts both ways
        states, products = uncast(states), [*node.users]
    rows = _Operand.of(states)
    if panels is None or rows is None or (stride := rows.row_stride) is None:
        return False
    shape = *rows.shape[:-1], panels.num_outputs
    if prod(shape[:-1]) > MOST_ROWS[panels.dtype] or any(
        _dtype(one) != torch.float32 or uncast(one) is not node for one in products
    ):
        return False
    out = None if answered.intersection(products) else torch.empty(shape)
    call = _product(panels, rows.offset, stride, shape, out)
    graph = recording.graph
    with graph.inserting_before(node):
        bound = graph.call_function(call, (rows.base, *([] if bias is None else [bias])))
    bound.meta.update(products[0].meta, memory=out)
    for one in products:
        one.replace_all_uses_with(bound)
    for one in dict.fromkeys((*products, node)):
        graph.erase_node(one)
    return True


def _bind_opaque(recording: Recording, node: Any) -> bool:
    """Call what computes by other means than torch with tensors that are always the same."""
    bases, arguments = [], []
    for one in node.args:
        operand = _Operand.of(one) if isinstance(one, fx.Node) else None
        tensor = None if operand is None else _tensor(recording, operand)
        if isinstance(one, fx.Node) and (operand is None or tensor is None):
            return False
        bases += [] if operand is None else [operand.base]
        arguments.append(one if tensor is None else tensor)
    found = node.target.__self__.fixed(*arguments)
    if found is None:
        return False
    call, memory = found
    graph = recording.graph
    with graph.inserting_before(node):
        bound = graph.call_function(_after(call, memory), tuple(bases))
    bound.meta.update(node.meta, memory=memory)
    node.replace_all_uses_with(bound)
    graph.erase_node(node)
    return True


def _after(call: Callable[[], None], memory: Tensor) -> Callable[..., Tensor]:
    """A call that comes after what writes to the tensors that it is given, and its memory."""

    def opaque(*_: Tensor) -> Tensor:
        call()
        return memory

    return opaque


def _tensor(recording: Recording, operand: "_Operand") -> Tensor | None:
    """What a kernel reads, if it always lies in the same memory."""
    base: Any = operand.base
    memory: Tensor | None
    if base.op == "get_attr":
        memory = recording.tensors[base.target]
    elif base.target is getitem:
        parts, index = base.args
        memory = (parts.meta.get("memory") or {index: None})[index]
    else:
        memory = base.meta.get("memory")
    if memory is None:
        return None
    start = memory.storage_offset() + operand.offset // _NUMBER
    return memory.as_strided(operand.shape, operand.strides, start)


def _product(
    panels: Panels, offset: int, stride: int, shape: tuple[int, ...], out: Tensor | None
) -> Callable[..., Tensor]:
    """The product of rows so many bytes behind a tensor's first; ``out``: where to."""

    def multiply(states: Tensor, bias: Tensor | None = None) -> Tensor:
        products = torch.empty(shape) if out is None else out
        panels.multiply(states.data_ptr() + offset, stride, products)
        return products if bias is None else products.add_(bias)

    return multiply


def _answered(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory is that of what a graph returns."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    found: set[fx.Node] = set()
    waiting = list(output.all_input_nodes)
    while waiting:
        node = waiting.pop()
        found.add(node)
        base = node.all_input_nodes[0] if node.target is getitem else viewed(node)
        bases = [*writes(node), *([] if base is None else [base])]
        waiting += [one for one in bases if one not in found]
    return found


@attrs.frozen
class _Operand:
    """What a kernel reads.

    Attributes:
        base: Node of the tensor that has the memory.
        offset: Bytes from its first number to the first that is read.
        shape: Sizes.
        strides: Numbers from one to the next, by axis.
    """

    base: fx.Node
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, node: fx.Node) -> "_Operand | None":
        """That of a node; ``None`` if it is not known, or is not in fp32."""
        kind = layout(node)
        if kind is None or kind.dtype != torch.float32 or 0 in kind.shape:
            return None
        base = node
        while (below := viewed(base)) is not None:
            base = below
        at, of_base = location(node), location(base)
        if base is node:  # results of kernels are contiguous
            return cls(node, 0, kind.shape, _contiguous(kind) if at is None else at[1])
        if at is None or of_base is None or _dtype(base) != torch.float32:
            return None
        return cls(base, _NUMBER * (at[0] - of_base[0]), kind.shape, at[1])

    @property
    def row_stride(self) -> int | None:
        """Numbers from row to row of ``[..., M]``; ``None`` if rows do not lie evenly."""
        *sizes, _ = self.shape
        stride, rows = None, 1
        for size, step in zip(reversed(sizes), reversed(self.strides[:-1]), strict=True):
            if size == 1:
                continue
            stride = step if stride is None else stride
            if step != stride * rows:
                return None
            rows *= size
        lies_close = self.shape[-1] == 1 or self.strides[-1] == 1
        return (self.shape[-1] if stride is None else stride) if lies_close else None


def _dtype(node: fx.Node) -> torch.dtype | None:
    kind = layout(node)
    return None if kind is None else kind.dtype


def _contiguous(kind: Layout) -> tuple[int, ...]:
    return tuple(prod(kind.shape[axis + 1 :]) for axis in range(len(kind.shape)))


def _rows(*operands: Any) -> tuple[int, int, list[int]] | None:
    """Number and size of the rows of operands that are alike, and the stride of each operand."""
    *axes, size = operands[0].shape
    strides = [one.row_stride for one in operands]
    return None if None in strides else (prod(axes), size, strides)


def _bind_norm(operands: list[Any], eps: float) -> Bound | None:
    states, weight = operands
    found = _rows(states)
    if found is None or weight.row_stride is None:
        return None
    rows, size, (stride,) = found
    out, kernel = torch.empty(states.shape), numba_kernels.norm_at
    to, own, offset = out.data_ptr(), weight.offset, states.offset

    def norm(states: Tensor, weight: Tensor) -> Tensor:
        kernel(rows, size, states.data_ptr() + offset, stride, weight.data_ptr() + own, to, eps)
        return out

    return norm, out


def _bind_add_norm(operands: list[Any], eps: float) -> Bound | None:
    states, added, weight = operands
    found = _rows(states, added)
    if found is None or weight.row_stride is None:
        return None
    rows, size, (stride, added_stride) = found
    outs, kernel = (torch.empty(states.shape), torch.empty(states.shape)), numba_kernels.add_norm_at
    total, out = (one.data_ptr() for one in outs)
    first, second, third = states.offset, added.offset, weight.offset

    def add_norm(states: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        kernel(
            rows,
            size,
            states.data_ptr() + first,
            stride,
            added.data_ptr() + second,
            added_stride,
            weight.data_ptr() + third,
            total,
            out,
            eps,
        )
        return outs

    return add_norm, outs


def _bind_rotation(operands: list[Any], eps: float) -> Bound | None:
    query, key, cos, sin, *weights = operands
    if weights and (len(weights) != 2 or None in [one.row_stride for one in weights]):
        return None
    slots, heads, _, dim = query.shape
    # Angles of several slots may be one and the same.
    turns = [one.strides[0] if slots > 1 else dim for one in (cos, sin)]
    if 0 in turns or any(one.strides[-1] != 1 for one in (query, key, cos, sin)):
        return None
    outs, kernel = (torch.empty(query.shape), torch.empty(key.shape)), numba_kernels.rotate_at
    to, key_to = (one.data_ptr() for one in outs)
    of_query, of_key = query.strides[:2], key.strides[:2]
    offsets = [one.offset for one in operands]
    key_heads = key.shape[1]

    def rotate(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        query, key, cos, sin, *weights = [
            one.data_ptr() + offset for one, offset in zip(tensors, offsets, strict=True)
        ]
        query_weight, key_weight = weights or (0, 0)
        kernel(
            slots,
            heads,
            key_heads,
            dim,
            query,
            *of_query,
            key,
            *of_key,
            cos,
            turns[0],
            sin,
            turns[1],
            query_weight,
            key_weight,
            to,
            key_to,
            eps,
        )
        return outs

    return rotate, outs


def _bind_gate(operands: list[Any], _: Any) -> Bound | None:
    gate, up = operands
    found = _rows(gate, up)
    if found is None:
        return None
    rows, size, (stride, up_stride) = found
    out, kernel = torch.empty(gate.shape), numba_kernels.gate_at
    to, first, second = out.data_ptr(), gate.offset, up.offset

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        kernel(rows, size, gate.data_ptr() + first, stride, up.data_ptr() + second, up_stride, to)
        return out

    return gated, out


_BINDERS: dict[Any, Callable[[list[Any], Any], Bound | None]] = {
    NORM: _bind_norm,
    ADD_NORM: _bind_add_norm,
    ROTATE: _bind_rotation,
    GATE: _bind_gate,
}
