"""Rewriting a recorded forward: groups of its operators become one each.

What is looked for is what is computed, not what modules are called: a root mean square norm, with
the sum before it; the rotation of the halves of queries and keys, with norms before it; the gate of
an MLP; products of one input with several weights. What computes something else stays as it is.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from kvpolicy.devices import HAS_NUMBA
from kvpolicy.model.fused.join_weights import joined
from kvpolicy.model.fused.operators import ADD_NORM, DTYPES, GATE, LONGEST_ROW, NORM, ROTATE
from kvpolicy.model.fused.record import (
    Layout,
    Recording,
    getitem,
    is_contiguous,
    layout,
    location,
    uncast,
    writes,
)

aten = torch.ops.aten

# What a node is given may be anything to torch's types; the patterns look before they read.
Node = Any
Graph = fx.Graph

_POW, _MEAN, _RSQRT = aten.pow.Tensor_Scalar, aten.mean.dim, aten.rsqrt.default
_ADD, _MUL = aten.add.Tensor, aten.mul.Tensor
_SILU, _LINEAR, _NEG = aten.silu.default, aten.linear.default, aten.neg.default
_DETACH = aten.detach.default
_CAT, _SLICE, _TRANSPOSE = aten.cat.default, aten.slice.Tensor, aten.transpose.int

#: What `fuse` makes of groups of operators, and how many of each.
Counts = dict[str, int]


def fuse(recording: Recording, *, joins: bool = True) -> Counts:
    """Rewrite a recording.

    Args:
        recording: The recording, which is changed.
        joins: Whether products of one input become one. Their weights are moved in memory, see
            `join_weights`.

    Returns:
        How many norms, rotations, gates and joint products there are now.
    """
    graph = recording.graph
    counts = {
        "norms": _fuse_norms(graph),
        "rotations": _fuse_rotations(graph),
        "gates": _fuse_gates(graph),
        "joint products": _join_products(recording) if joins else 0,
    }
    _drop_unused(graph)
    return counts


def call_on_cpu(recording: Recording) -> None:
    """Have the fused operators of a recording write to memory of their own, see `bind`."""
    if not HAS_NUMBA:
        return
    from kvpolicy.model.fused.numba_bind import bind

    for node in recording.graph.nodes:
        if _is(node, _DETACH):
            node.replace_all_uses_with(node.args[0])
    bind(recording)
    _drop_unused(recording.graph)


# Norms


def _fuse_norms(graph: Graph) -> int:
    num = 0
    for node in list(graph.nodes):
        found = _norm_at(node)
        if found is None:
            continue
        states, weight, eps = found
        parts = _sum_at(states)
        with graph.inserting_after(states):
            if parts is None:
                normed = _call(graph, NORM, (states, weight, eps), layout(node))
            else:
                both = _call(graph, ADD_NORM, (*parts, weight, eps), None)
        if parts is not None:
            with graph.inserting_after(both):
                normed = _call(graph, getitem, (both, 1), layout(node))
                total = _call(graph, getitem, (both, 0), layout(node))
            states.replace_all_uses_with(total)
        _lies_as(normed, node)
        node.replace_all_uses_with(normed)
        num += 1
    return num


def _norm_at(node: Node) -> tuple[Node, Node, float] | None:
    """States, weight and epsilon of the norm that a node is the result of."""
    for weight, normed in _factors(node):
        size = _constant_row(weight)
        scaled = uncast(normed)
        for wide, inverse in _factors(scaled):
            if not _is(inverse, _RSQRT) or not _is(shifted := inverse.args[0], _ADD):
                continue
            mean, eps = shifted.args
            if not isinstance(eps, float) or not _is(mean, _MEAN):
                continue
            squares, axes, keeps = (*mean.args, False)[:3]
            if axes != [-1] or not keeps or squares.target is not _POW:
                continue
            if squares.args != (wide, 2):
                continue
            states = uncast(wide)
            kind = _layout(states)
            if (
                _layout(wide) == Layout(kind.shape, torch.float32)
                and kind.dtype in DTYPES
                and _layout(weight) == Layout((kind.shape[-1],), kind.dtype)
                and _layout(normed) == _layout(node) == kind
                and size is not None
                and kind.shape[-1] <= LONGEST_ROW
                and not _is_changed(states)
            ):
                return states, weight, eps
    return None


def _sum_at(states: Node) -> tuple[Node, Node] | None:
    """Two tensors alike of which states are the sum."""
    if not _is(states, _ADD) or len(states.args) != 2 or states.kwargs:
        return None
    first, second = states.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    return (first, second) if layout(first) == layout(second) == layout(states) else None


# Rotations


def _fuse_rotations(graph: Graph) -> int:
    """One for a query and a key that are rotated alike."""
    found: dict[tuple[Node, Node], list[tuple[Node, Node]]] = {}
    for node in graph.nodes:
        rotation = _rotation_at(node)
        if rotation is not None:
            states, cos, sin = rotation
            found.setdefault((cos, sin), []).append((states, node))
    num = 0
    for (cos, sin), rotated in found.items():
        for (query, query_end), (key, key_end) in zip(rotated[::2], rotated[1::2], strict=False):
            place = _place_between(graph, (query, key, cos, sin), (query_end, key_end))
            if place is None or _layout(query).shape[::3] != _layout(key).shape[::3]:
                continue
            with graph.inserting_before(place):
                (query, key), norms = _without_norms(graph, (query, key))
                both = _call(graph, ROTATE, (query, key, cos, sin, *norms), None)
                for index, end in enumerate((query_end, key_end)):
                    part = _call(graph, getitem, (both, index), layout(end))
                    _lies_as(part, end)
                    end.replace_all_uses_with(part)
            num += 1
    return num


def _rotation_at(node: Node) -> tuple[Node, Node, Node] | None:
    """What is rotated, ``[W, H, L, D]``, and by what, ``[W, 1, L, D]`` each."""
    if not _is(node, _ADD) or len(node.args) != 2 or node.kwargs:
        return None
    along, across = node.args
    for states, cos in _factors(along):
        for half, sin in _factors(across):
            if not _is(half, _CAT) or half.args[1:] not in ((-1,), (3,)) or len(half.args[0]) != 2:
                continue
            minus, first = half.args[0]
            if not _is(minus, _NEG):
                continue
            kind = _layout(states)
            if len(kind.shape) != 4 or kind.shape[3] % 2:
                continue
            slots, _, length, dim = kind.shape
            turns = Layout((slots, 1, length, dim), kind.dtype)
            if (
                _slice_of(minus.args[0], states, dim // 2, dim)
                and _slice_of(first, states, 0, dim // 2)
                and _layout(cos) == _layout(sin) == turns
                and layout(node) == kind
                and kind.dtype in DTYPES
                and not any(map(_is_changed, (states, cos, sin)))
            ):
                return states, cos, sin
    return None


def _slice_of(node: Any, states: Node, start: int, stop: int) -> bool:
    if not _is(node, _SLICE) or node.args[0] is not states:
        return False
    axis, first, last = (
        (*node.args[1:], 0, None, None)[:3] if len(node.args) < 4 else node.args[1:4]
    )
    dim = _layout(states).shape[-1]
    last = dim if last is None else min(last, dim)
    return axis in (-1, 3) and (first or 0) == start and last == stop


def _without_norms(graph: Graph, rotated: Sequence[Node]) -> tuple[list[Node], list[Any]]:
    """What is rotated before its norms, if all have one over their heads and nobody else reads it.

    Returns:
        The states, and the weights and the epsilon of their norms.
    """
    norms = [node.args[0] for node in rotated if _is(node, _TRANSPOSE) and node.args[1:] == (1, 2)]
    norms = [node for node in norms if _is(node, NORM) and len(node.users) == 1]
    if len(norms) != len(rotated) or len({norm.args[2] for norm in norms}) != 1:
        return list(rotated), [None, None, 0.0]
    states = [
        _call(graph, _TRANSPOSE, (norm.args[0], 1, 2), layout(node))
        for norm, node in zip(norms, rotated, strict=True)
    ]
    for node in states:
        at = location(node.args[0])
        if at is not None:
            offset, (slots, tokens, heads, channels) = at
            node.meta["location"] = offset, (slots, heads, tokens, channels)
    return states, [*(norm.args[1] for norm in norms), norms[0].args[2]]


# Gates


def _fuse_gates(graph: Graph) -> int:
    num = 0
    for node in list(graph.nodes):
        for opened, up in _factors(node):
            if not _is(opened, _SILU) or not layout(opened) == layout(up) == layout(node):
                continue
            gate = opened.args[0]
            if _layout(gate).dtype not in DTYPES or _is_changed(gate):
                continue
            with graph.inserting_before(node):
                gated = _call(graph, GATE, (gate, up), layout(node))
            _lies_as(gated, node)
            node.replace_all_uses_with(gated)
            num += 1
            break
    return num


# Products


def _join_products(recording: Recording) -> int:
    """Products of one input with several weights become one, of which each takes its columns."""
    graph, tensors = recording.graph, recording.tensors
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in graph.nodes:
        if _is(node, _LINEAR) and not node.kwargs:
            states, *weights = (*node.args, None)[:3]
            if all(one is None or one.op == "get_attr" for one in weights):
                kinds = [one is not None and _layout(one).dtype for one in weights]
                groups.setdefault((states, *kinds), []).append(node)
    num = 0
    for (states, *_), products in groups.items():
        if len(products) < 2 or _is_changed(states):
            continue
        weights = []
        for place in (1, 2):
            parts = [(*node.args, None)[place] for node in products]
            weights.append(
                None if parts[0] is None else joined([tensors[one.target] for one in parts])
            )
        weight, bias = weights
        if weight is None or (bias is None and len(products[0].args) > 2 and products[0].args[2]):
            continue
        _replace_products(recording, states, products, weight, bias)
        num += 1
    return num


def _replace_products(
    recording: Recording,
    states: Node,
    products: Sequence[Node],
    weight: Tensor,
    bias: Tensor | None,
) -> None:
    graph = recording.graph
    arguments = [states]
    for tensor in (weight, bias):
        if tensor is not None:
            name = f"joined_{len(recording.tensors)}"
            recording.tensors[name] = tensor
            with graph.inserting_before():
                arguments.append(graph.create_node("get_attr", name))
    *axes, _ = _layout(products[0]).shape
    with graph.inserting_before(products[0]):
        product = _call(
            graph,
            _LINEAR,
            tuple(arguments),
            Layout((*axes, len(weight)), _layout(products[0]).dtype),
        )
        start = 0
        for node in products:
            stop = start + _layout(node).shape[-1]
            part = _call(graph, _SLICE, (product, len(axes), start, stop), layout(node))
            node.replace_all_uses_with(part)
            start = stop


# Nodes


def _call(graph: Graph, target: Any, args: tuple[Any, ...], kind: Layout | None) -> Node:
    node = graph.call_function(target, args)
    node.meta["is_view"] = target in (_SLICE, _TRANSPOSE)
    if kind is not None:
        node.meta["layout"] = kind
    return node


def _lies_as(node: Node, replaced: Node) -> None:
    """Note for views where the result of a kernel lies, which is contiguous."""
    at, shape = location(replaced), _layout(replaced).shape
    if at is not None and is_contiguous(shape, at[1]):
        node.meta["location"] = at


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def _layout(node: Any) -> Layout:
    """What a node gives; nothing matches that of what gives no tensor."""
    return (layout(node) if isinstance(node, fx.Node) else None) or Layout((), torch.bool)


def _factors(node: Any) -> Iterator[tuple[Node, Node]]:
    """The two tensors that a node multiplies, in both orders."""
    if _is(node, _MUL) and all(isinstance(one, fx.Node) for one in node.args):
        first, second = node.args
        yield first, second
        yield second, first


def _constant_row(node: Node) -> int | None:
    """The length of a row of numbers that no operator has made."""
    shape = _layout(node).shape
    return shape[0] if node.op == "get_attr" and len(shape) == 1 else None


def _is_changed(node: Node) -> bool:
    """Whether an operator changes a tensor in place."""
    return any(node in writes(user) for user in node.users)


def _place_between(graph: Graph, needed: Sequence[Node], replaced: Sequence[Node]) -> Node | None:
    """A node before which all that is needed is there, and nothing replaced is read."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    last = max(needed, key=order.__getitem__)
    place: Node = last.next
    first_use = min(order[user] for node in replaced for user in node.users)
    return place if order[last] < first_use and not {*needed} & {*replaced} else None


def _drop_unused(graph: Graph) -> None:
    """Leave out what nobody reads and what changes nothing."""
    for node in reversed(list(graph.nodes)):
        if node.op == "output" or node.users:
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None or (schema.returns and not schema.is_mutable):
            graph.erase_node(node)
