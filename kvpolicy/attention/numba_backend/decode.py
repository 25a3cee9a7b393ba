"""Decode attention in Numba: one call for a layer, and each held row is read once.

torch has no operation for one query and several heads of a group that reads memory as fast as it
can be read, and it takes several operations to store a row. Here the rows of a slot and KV head are
cut into parts, each of which is a task of its own: it attends to its rows, a block at a time, which
integers become numbers in; the part with the newest row stores that before. The outputs of parts
are then added, weighted by their sums of exponentials (Flash-Decoding, Dao et al., 2023), in an
order that does not depend on other slots. Tasks are shared among the threads of OpenMP that torch
uses.

Importing it needs the extra ``cpu``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.base import DecodeLayer, window_factor
from kvpolicy.attention.integers import group_size
from kvpolicy.attention.numba_backend.kept import kept
from kvpolicy.attention.numba_backend.lanes import LANES, larger, read, repeated, write
from kvpolicy.attention.numba_backend.rows import (
    BF16,
    FP16,
    FP32,
    num_near,
    numbers,
    put_exact,
    read_scales,
    store,
)
from kvpolicy.attention.numba_backend.tiles import add, can_read, multiply, rows_ahead
from kvpolicy.attention.torch_backend.decode import drop_oldest, store_and_attend
from kvpolicy.numba_common import FASTMATH, exp, is_forked, start_threads, take_threads
from kvpolicy.opaque import call_opaque

start_threads()

_NO_WINDOW = np.empty((0, 0, 0, 0), dtype=np.uint8)
_NO_TRACK = np.empty((0, 0, 0), dtype=np.float32)
_NO_RING = np.empty((1, 1, 0, 0), dtype=np.uint8)
_NO_BOUNDS = np.empty((0, 0), dtype=np.int64)
_NO_SINKS = np.empty(0, dtype=np.float32)

_FORMS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}

# Rows of a head that are a task: enough tasks for all threads, and each is worth its start.
_PART, _LONG_PART = 256, 1024
_MANY = 8  # tasks of a head, with which longer ones are enough
_BLOCK = 64  # rows that become numbers at once, which stay in the first cache

# Arguments of `multiply` and `add`; for literals Numba would compile them once more.
_FIRST, _CACHED, _NUMBERS = np.int64(0), np.int64(0), np.int64(FP32)


@njit(fastmath=FASTMATH, error_model="numpy")
def _most(logits, num_rows):
    """The largest of the first numbers of an array ``[1, ...]``, of which there is one."""
    most, whole = logits[0, 0], num_rows - num_rows % LANES
    lanes = repeated(most)
    for row in range(0, whole, LANES):
        lanes = larger(lanes, read(logits, 0, row))
    found = np.empty((1, LANES), np.float32)
    write(found, 0, 0, lanes)
    for lane in range(LANES):
        most = max(most, found[0, lane])
    for row in range(whole, num_rows):
        most = max(most, logits[0, row])
    return most


@njit(fastmath=FASTMATH, error_model="numpy")
def _attend(
    query,
    keys,
    values,
    positions,
    newest,
    exact_keys,
    exact_values,
    forms,
    softcap,
    logits,
    most,
    total,
    output,
):
    """Attend from the heads of a group to some rows of their KV head.

    Args:
        query: ``[G, D]``, with the factor on the logits.
        keys: Bytes of ``T`` rows, ``[T, ...]``.
        values: Likewise.
        positions: Their positions, ``[T]``.
        newest: Position of the query.
        exact_keys: Bytes of exact copies of the newest keys, ``[E, ...]``; ``E`` is 0 if there
            are none.
        exact_values: Those of values.
        forms: The form of rows, and channels of a group, of keys and of values; and the form of
            exact copies, see `kvpolicy.attention.numba_backend.rows`.
        softcap: See `Decode`.
        logits: Receives what the softmax reads, ``[G, >= T]``, unless it is empty.
        most: Receives the largest logit of each head, ``[G]``.
        total: Receives the sums of ``exp(logit - most)``, ``[G]``.
        output: Receives the sums of values by these factors, ``[G, V]``.
    """
    (members, dim), num_rows = query.shape, keys.shape[0]
    key_form, key_size, value_form, value_size, own_form = forms
    # Vectors behind the last row are read as if it had no weight.
    padded = (num_rows + LANES - 1) // LANES * LANES
    weights = np.empty((members, padded + LANES), np.float32)
    powers = np.empty(padded, np.int32)
    steps, leasts = np.empty(num_rows, np.float32), np.empty(num_rows, np.float32)
    direct = num_rows - num_near(positions, newest, exact_keys)
    direct = direct if can_read(key_form, dim) else 0
    multiply(query, keys[:direct], key_form, rows_ahead(keys), _FIRST, weights)
    if key_form == 8:
        read_scales(keys[:direct], dim, steps, leasts)
        for member in range(members):
            _scale_logits(query[member], steps, leasts, weights[member, :direct])
    scratch = np.empty((_BLOCK if direct < num_rows else 0, dim), np.float32)
    for first in range(direct, num_rows, _BLOCK):
        block = numbers(keys[first : first + _BLOCK], key_form, key_size, scratch)
        if exact_keys.shape[0]:
            put_exact(block, positions[first : first + _BLOCK], newest, exact_keys, own_form)
        multiply(query, block.view(np.uint8), _NUMBERS, _CACHED, first, weights)
    for member in range(members):
        own = weights[member, :padded]
        own[num_rows:] = -np.inf
        if softcap:
            for row in range(num_rows):
                own[row] = softcap * np.tanh(own[row] / softcap)
        if logits.shape[0]:
            logits[member, :num_rows] = own[:num_rows]
        most[member] = _most(weights[member : member + 1], padded)
        exp(own, most[member], powers)
        number = np.float32(0)
        for row in range(padded):
            number += own[row]
        total[member] = number
    output[:] = 0
    dim = output.shape[1]
    direct = num_rows - num_near(positions, newest, exact_values)
    direct = direct if can_read(value_form, dim) else 0
    if value_form == 8:
        read_scales(values[:direct], dim, steps, leasts)
        for member in range(members):
            output[member] = _scale_weights(steps, leasts, weights[member, :direct])
    add(weights, values[:direct], value_form, rows_ahead(values), _FIRST, output)
    scratch = np.empty((_BLOCK if direct < num_rows else 0, dim), np.float32)
    for first in range(direct, num_rows, _BLOCK):
        block = numbers(values[first : first + _BLOCK], value_form, value_size, scratch)
        if exact_values.shape[0]:
            put_exact(block, positions[first : first + _BLOCK], newest, exact_values, own_form)
        add(weights, block.view(np.uint8), _NUMBERS, _CACHED, first, output)


@njit(fastmath=FASTMATH, error_model="numpy")
def _scale_logits(query, steps, leasts, logits):
    """Make logits, ``[T]``, of products of a query ``[D]`` with codes, which stand for numbers."""
    total = np.float32(0)
    for i in range(query.shape[0]):
        total += query[i]
    for row in range(logits.shape[0]):
        logits[row] = steps[row] * logits[row] + leasts[row] * total


@njit(fastmath=FASTMATH, error_model="numpy")
def _scale_weights(steps, leasts, weights):
    """Make weights of codes of those of rows, ``[T]``; returns what each channel has besides."""
    number = np.float32(0)
    for row in range(weights.shape[0]):
        number += weights[row] * leasts[row]
        weights[row] *= steps[row]
    return number


@njit(fastmath=FASTMATH, error_model="numpy")
def _combine(most, total, parts, sinks, output):
    """Make the output of a group, ``[G, V]``, of those of parts of its rows, see `_attend`.

    Afterwards ``most`` and ``total`` of the first part are those of all rows.
    """
    (num_parts, members), dim = most.shape, output.shape[1]
    for member in range(members):
        largest = sinks[member] if sinks.shape[0] else most[0, member]
        for part in range(num_parts):
            largest = max(largest, most[part, member])
        whole = np.exp(sinks[member] - largest) if sinks.shape[0] else np.float32(0)
        for part in range(num_parts):
            whole += np.exp(most[part, member] - largest) * total[part, member]
        output[member] = 0
        for part in range(num_parts):
            share = np.exp(most[part, member] - largest) / whole
            for i in range(dim):
                output[member, i] += share * parts[part, member, i]
        most[0, member], total[0, member] = largest, whole


@njit(fastmath=FASTMATH, error_model="numpy")
def _accumulate(logits, most, total, sums, squares, squares_logit, squares_logit2):
    """Accumulate weights of rows, of logits that the softmax reads, ``[G, >= T]``.

    Accumulators that are not wanted are empty, the others ``[T]``.
    """
    num_rows = max(sums.shape[0], squares.shape[0], squares_logit.shape[0], squares_logit2.shape[0])
    weights, powers = np.empty(num_rows, np.float32), np.empty(num_rows, np.int32)
    for member in range(logits.shape[0]):
        read = logits[member, :num_rows]
        weights[:] = read
        exp(weights, most[member], powers)
        for row in range(num_rows):
            weights[row] /= total[member]
        for row in range(sums.shape[0]):
            sums[row] += weights[row]
        for row in range(squares.shape[0]):
            squares[row] += weights[row] * weights[row]
        for row in range(squares_logit.shape[0]):
            squares_logit[row] += weights[row] * weights[row] * read[row]
        for row in range(squares_logit2.shape[0]):
            squares_logit2[row] += weights[row] * weights[row] * read[row] * read[row]


@njit(error_model="numpy")
def _tasks(positions, seq_len, live, bounds, capacity, rows, sliding_window):
    """Cut what is attended to into parts of about as many rows, which are tasks.

    How the rows of a head are cut depends on their number only, and with it the order in which
    they are added up.

    Returns:
        Slot, KV head, first row and end in the slab of each task, ``[tasks, 4]``; and the tasks
        before each slot and head, ``[W * H_kv + 1]``.
    """
    num_slots, num_heads = rows.shape
    spans = np.zeros((num_slots * num_heads, 2), np.int64)
    before = np.zeros(num_slots * num_heads + 1, np.int64)
    for slot in range(num_slots):
        for head in range(num_heads):
            one = slot * num_heads + head
            before[one + 1] = before[one]
            if live[slot]:
                # Slabs of heads that have segments are given as those of one head.
                at, first, newest = head, 0, rows[slot, head]
                if bounds.shape[0]:
                    at, first = 0, bounds[slot, head]
                    newest += bounds[slot, head + 1] - capacity
                if sliding_window:
                    unseen = seq_len[slot] - sliding_window
                    first += np.searchsorted(positions[slot, at, first:newest], unseen, "right")
                spans[one] = first, newest + 1
                num_rows = newest - first
                before[one + 1] += max(min(num_rows // _PART, _MANY), num_rows // _LONG_PART) + 1
    tasks = np.empty((before[-1], 4), np.int64)
    for one in range(num_slots * num_heads):
        num_parts = before[one + 1] - before[one]
        first, end = spans[one]
        for part in range(num_parts):
            tasks[before[one] + part] = (
                one // num_heads,
                one % num_heads,
                first + (end - first) * part // num_parts,
                first + (end - first) * (part + 1) // num_parts,
            )
    return tasks, before


# One form of the function for all calls: compiling it takes seconds.
_ROWS, _BYTES = "f4[:,:,:]", "u1[:,:,:]"
_SLAB, _SLAB_OF_NUMBERS = "u1[:,:,:,::1]", "f4[:,:,::1]"
_SIGNATURE = (
    f"void({_ROWS}, {_ROWS}, {_ROWS}, {_BYTES}, {_BYTES}, {_BYTES}, {_SLAB}, {_SLAB}, i8[:,:,::1], "
    f"{', '.join([_SLAB_OF_NUMBERS] * len(ACCUMULATORS))}, {_SLAB}, {_SLAB}, {_SLAB}, "
    "i8[:], b1[:], i8[:,:], i8, UniTuple(i8, 5), f4[:], i8[:,:], f4, f4, i8, "
    f"{_SLAB_OF_NUMBERS})"
)


@njit(error_model="numpy")
def _cut(track, slot, head, first, end):
    """The numbers of some rows, ``[T]``, or none if the track is not wanted."""
    return track[slot, head, first:end] if track.shape[0] else track[:, 0, 0]


@njit(error_model="numpy")
def _ring(rings, slot, head):
    """The exact copies of a head, ``[E, D]``, or none."""
    return rings[slot, head] if rings.shape[2] else rings[0, 0]


@kept(_SIGNATURE, parallel=True)
def _decode(
    query,
    key,
    value,
    asked,
    own_key,
    own_value,
    keys,
    values,
    positions,
    sums,
    squares,
    squares_logit,
    squares_logit2,
    window,
    exact_keys,
    exact_values,
    seq_len,
    live,
    bounds,
    capacity,
    forms,
    sinks,
    rows,
    scaling,
    softcap,
    sliding_window,
    output,
):
    num_slots, num_heads = rows.shape
    group, dim = query.shape[1] // num_heads, query.shape[2]
    tasks, before = _tasks(positions, seq_len, live, bounds, capacity, rows, sliding_window)
    num_tasks = len(tasks)
    accumulates = max(len(sums), len(squares), len(squares_logit), len(squares_logit2))
    longest = 0
    for task in range(num_tasks):
        longest = max(longest, tasks[task, 3] - tasks[task, 2])
    logits = np.empty((num_tasks if accumulates else 0, group, longest), np.float32)
    most = np.empty((num_tasks, group), np.float32)
    total = np.empty((num_tasks, group), np.float32)
    parts = np.empty((num_tasks, group, value.shape[2]), np.float32)
    for task in prange(num_tasks):
        slot, head, first, end = tasks[task]
        at = 0 if bounds.shape[0] else head
        own_keys, own_values = _ring(exact_keys, slot, head), _ring(exact_values, slot, head)
        if task + 1 == before[slot * num_heads + head + 1]:  # it has the new row
            position = seq_len[slot]
            new_key, new_value = own_key[slot, head], own_value[slot, head]
            store(key[slot, head], new_key, forms[0], forms[1], keys[slot, at, end - 1])
            store(value[slot, head], new_value, forms[2], forms[3], values[slot, at, end - 1])
            positions[slot, at, end - 1] = position
            # Other parts read other places of a ring: the row that was there is too far by now.
            if own_keys.shape[0]:
                own_keys[position % own_keys.shape[0]] = new_key
            if own_values.shape[0]:
                own_values[position % own_values.shape[0]] = new_value
            for member in range(group if window.shape[2] else 0):
                own = head * group + member
                window[slot, own, position % window.shape[2]] = asked[slot, own]
        queries = np.empty((group, dim), np.float32)
        queries[:] = query[slot, head * group : (head + 1) * group] * scaling
        _attend(
            queries,
            keys[slot, at, first:end],
            values[slot, at, first:end],
            positions[slot, at, first:end],
            seq_len[slot],
            own_keys,
            own_values,
            forms,
            softcap,
            logits[task] if accumulates else logits[:, 0],
            most[task],
            total[task],
            parts[task],
        )
    for slot in range(num_slots):
        for head in range(num_heads):
            own = slice(head * group, (head + 1) * group)
            if live[slot]:
                begin, end = before[slot * num_heads + head], before[slot * num_heads + head + 1]
                _combine(
                    most[begin:end],
                    total[begin:end],
                    parts[begin:end],
                    sinks[own],
                    output[slot, own],
                )
            else:
                output[slot, own] = 0
    for task in prange(num_tasks if accumulates else 0):
        slot, head, first, end = tasks[task]
        at = 0 if bounds.shape[0] else head
        of_head = before[slot * num_heads + head]
        _accumulate(
            logits[task],
            most[of_head],
            total[of_head],
            _cut(sums, slot, at, first, end),
            _cut(squares, slot, at, first, end),
            _cut(squares_logit, slot, at, first, end),
            _cut(squares_logit2, slot, at, first, end),
        )


def _array(slab: Tensor, one_head: bool) -> np.ndarray:
    """A slab as an array; the pools of its slots as those of one head, if they are wanted so."""
    pools: np.ndarray = slab.flatten(1, 2)[:, None].numpy() if one_head else slab.numpy()
    return pools


def _bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor, in the place of its last axis."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    found: np.ndarray = tensor.view(torch.uint8).numpy()
    return found


def precisions(layer: DecodeLayer) -> set[torch.dtype]:
    """Those in which a layer has numbers as they are; one, or none if it has integers only."""
    sides = (layer.keys, layer.key_bits), (layer.values, layer.value_bits)
    found = {slab.dtype for slab, bits in sides if not bits}
    others = layer.window, layer.exact_keys, layer.exact_values
    return found | {one.dtype for one in others if one is not None}


class NumbaLayer:
    """Decode attention in one layer; its tensors become arrays once.

    New rows in another precision than those that are stored as numbers are left to torch.
    """

    def __init__(self, layer: DecodeLayer) -> None:
        """Take the tensors of a layer."""
        self._layer = layer
        accumulated = layer.accumulated_by_name
        one_head = layer.bounds is not None
        self._arrays = [
            _array(layer.keys.view(torch.uint8), one_head),
            _array(layer.values.view(torch.uint8), one_head),
            _array(layer.positions, one_head),
            *(
                _array(accumulated[name], one_head) if name in accumulated else _NO_TRACK
                for name in ACCUMULATORS
            ),
            _NO_WINDOW if layer.window is None else _bytes(layer.window),
            _NO_RING if layer.exact_keys is None else _bytes(layer.exact_keys),
            _NO_RING if layer.exact_values is None else _bytes(layer.exact_values),
            layer.seq_len.numpy(),
            layer.live.numpy(),
            _NO_BOUNDS if layer.bounds is None else layer.bounds.numpy(),
            layer.keys.shape[2],
        ]
        self._rows = layer.rows.numpy()
        self._precisions = precisions(layer)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store one new row in every slot, and attend to the rows that it holds, see `Decode`."""
        output: Tensor = call_opaque(self._attend, query, key, value, scaling, softcap, sinks)
        return output

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        layer, rows = self._layer, self._rows
        if is_forked() or not self._can_attend(key.dtype):
            return store_and_attend(
                layer, query, key, value, scaling=scaling, softcap=softcap, sinks=sinks
            )
        if layer.slides:
            rows = drop_oldest(layer).numpy()
        output = torch.empty(*query.shape[:2], value.shape[2])
        arguments = self._arguments(query, key, value, scaling, softcap, sinks, rows, output)
        take_threads()
        _decode(*arguments)
        return output.to(query.dtype)

    def fixed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> tuple[Callable[[], None], Tensor] | None:
        """What attends to tensors that stay where they are, and the tensor it always writes to.

        Making arrays of tensors takes longer than attending to some hundred rows, and is done here
        once. ``None``: in this layer, more is to be done at each step.
        """
        layer = self._layer
        tensors = query, key, value
        is_scaled = layer.window is not None and window_factor(scaling, query.shape[2]) != 1
        has_arrays = all(one.dtype == torch.float32 and one.stride(-1) == 1 for one in tensors)
        if is_forked() or not self._can_attend(key.dtype) or layer.slides or is_scaled:
            return None
        if not has_arrays or (sinks is not None and sinks.dtype != torch.float32):
            return None
        output = torch.empty(*query.shape[:2], value.shape[2])
        arguments = self._arguments(*tensors, scaling, softcap, sinks, self._rows, output)

        def attend() -> None:
            take_threads()
            _decode(*arguments)

        return attend, output

    def _can_attend(self, dtype: torch.dtype) -> bool:
        """Whether new rows of a precision are stored here."""
        return dtype in _FORMS and not self._precisions - {dtype}

    def _arguments(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float,
        sinks: Tensor | None,
        rows: np.ndarray,
        output: Tensor,
    ) -> tuple[Any, ...]:
        """What `_decode` is given."""
        layer, head_dim, own = self._layer, query.shape[2], _FORMS[key.dtype]
        factor = window_factor(scaling, head_dim)
        asked = query if factor == 1 or layer.window is None else query * factor
        return (
            query.float().numpy(),
            key.float().numpy(),
            value.float().numpy(),
            _bytes(asked.to(key.dtype)),
            _bytes(key),
            _bytes(value),
            *self._arrays,
            (
                layer.key_bits or own,
                group_size(head_dim, layer.key_bits),
                layer.value_bits or own,
                group_size(value.shape[2], layer.value_bits),
                own,
            ),
            _NO_SINKS if sinks is None else sinks.detach().float().numpy(),
            rows,
            scaling,
            softcap,
            layer.sliding_window,
            output.numpy(),
        )
