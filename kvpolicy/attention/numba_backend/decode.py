"""Decode attention in Numba: one call for a layer, and each held row is read once.

torch has no operation for one query and several heads of a group that reads memory as fast as it
can be read, and it takes several operations to store a row. Here every slot and KV head is a task
of its own: it stores the new row, and attends to the rows that it holds, in an order that does not
depend on other slots. Tasks are shared among the threads of OpenMP that torch uses.

Importing it needs the extra ``cpu``.
"""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.base import DecodeLayer, window_factor
from kvpolicy.attention.torch_backend.decode import drop_oldest, store_and_attend
from kvpolicy.numba_common import FASTMATH, is_forked, start_threads, take_threads

start_threads()

_NO_WINDOW = np.empty((0, 0, 0, 0), dtype=np.float32)
_NO_TRACK = np.empty((0, 0, 0), dtype=np.float32)
_NO_BOUNDS = np.empty((0, 0), dtype=np.int64)
_NO_SINKS = np.empty(0, dtype=np.float32)


@njit(fastmath=FASTMATH, error_model="numpy")
def _exp(numbers, most, powers):
    """Replace numbers by ``exp(number - most)``, which is at most 1, with vector instructions.

    That of the C library takes one number at a time. The polynomial is that of the Cephes library
    (Moshier), whose error is below 1e-7.
    """
    two = powers.view(np.float32)
    for i in range(len(numbers)):
        x = numbers[i] - most
        # Smaller ones are 0 as well as this one is. NaN is not smaller.
        x = np.float32(-87) if x < np.float32(-87) else x
        n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
        r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
        y = np.float32(1.9875691500e-4)
        y = y * r + np.float32(1.3981999507e-3)
        y = y * r + np.float32(8.3334519073e-3)
        y = y * r + np.float32(4.1665795894e-2)
        y = y * r + np.float32(1.6666665459e-1)
        y = y * r + np.float32(5.0000001201e-1)
        powers[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
        numbers[i] = (y * r * r + r + np.float32(1)) * two[i]


@njit(fastmath=FASTMATH, error_model="numpy")
def weigh(weights, sums, squares, squares_logit, squares_logit2, sinks, softcap):
    """Make weights of the logits of a group, ``[G, T]``, in place, and accumulate them.

    Accumulators that are not wanted are empty, the others ``[T]``.
    """
    group, num_rows = weights.shape
    # What the softmax reads, for accumulators that need it.
    read = np.empty(max(squares_logit.shape[0], squares_logit2.shape[0]), np.float32)
    powers = np.empty(num_rows, np.int32)
    for member in range(group):
        logits = weights[member]
        if softcap:
            for row in range(num_rows):
                logits[row] = softcap * np.tanh(logits[row] / softcap)
        for row in range(read.shape[0]):
            read[row] = logits[row]
        most = sinks[member] if sinks.shape[0] else logits[0]
        for row in range(num_rows):
            most = max(most, logits[row])
        _exp(logits, most, powers)
        total = np.exp(sinks[member] - most) if sinks.shape[0] else np.float32(0)
        for row in range(num_rows):
            total += logits[row]
        for row in range(num_rows):
            logits[row] /= total
        for row in range(sums.shape[0]):
            sums[row] += logits[row]
        for row in range(squares.shape[0]):
            squares[row] += logits[row] * logits[row]
        for row in range(squares_logit.shape[0]):
            squares_logit[row] += logits[row] * logits[row] * read[row]
        for row in range(squares_logit2.shape[0]):
            squares_logit2[row] += logits[row] * logits[row] * read[row] * read[row]


@njit(fastmath=FASTMATH, error_model="numpy")
def _attend(
    query,
    keys,
    values,
    sums,
    squares,
    squares_logit,
    squares_logit2,
    sinks,
    scaling,
    softcap,
    output,
):
    """Attend from the heads of a group, ``[G, D]``, to the rows of their KV head.

    Keys are ``[T, D]``, values and the output of any other size, ``[T, V]``.

    Accumulators that are not wanted are empty, the others ``[T]``.
    """
    (group, dim), num_rows = query.shape, keys.shape[0]
    weights = np.empty((group, num_rows), np.float32)
    for row in range(num_rows):
        for member in range(group):
            logit = np.float32(0)
            for i in range(dim):
                logit += query[member, i] * keys[row, i]
            weights[member, row] = logit * scaling
    weigh(weights, sums, squares, squares_logit, squares_logit2, sinks, softcap)
    output[:] = 0
    for row in range(num_rows):
        for member in range(group):
            weight = weights[member, row]
            for i in range(values.shape[1]):
                output[member, i] += weight * values[row, i]


# One form of the function for all calls: compiling it takes seconds.
_ROWS, _SLAB, _SLAB_OF_NUMBERS = "f4[:,:,:]", "f4[:,:,:,::1]", "f4[:,:,::1]"
_SIGNATURE = (
    f"void({_ROWS}, {_ROWS}, {_ROWS}, {_SLAB}, {_SLAB}, i8[:,:,::1], "
    f"{', '.join([_SLAB_OF_NUMBERS] * len(ACCUMULATORS))}, {_SLAB}, "
    f"i8[:], b1[:], i8[:,:], i8, f4[:], i8[:,:], f4, f4, i8, f4, {_SLAB_OF_NUMBERS})"
)


@njit(error_model="numpy")
def cut(track, slot, head, first, end):
    """The numbers of some rows, ``[T]``, or none if the track is not wanted."""
    return track[slot, head, first:end] if track.shape[0] else track[:, 0, 0]


@njit(_SIGNATURE, parallel=True, cache=True, fastmath=FASTMATH, error_model="numpy")
def _decode(
    query,
    key,
    value,
    keys,
    values,
    positions,
    sums,
    squares,
    squares_logit,
    squares_logit2,
    window,
    seq_len,
    live,
    bounds,
    capacity,
    sinks,
    rows,
    scaling,
    softcap,
    sliding_window,
    factor,
    output,
):
    num_slots, num_heads = rows.shape
    group, dim = query.shape[1] // num_heads, query.shape[2]
    for task in prange(num_slots * num_heads):
        slot = task // num_heads
        head = task - slot * num_heads
        if live[slot]:
            # Slabs of heads that have segments are given as those of one head, `at`.
            at, first, newest, position = head, 0, rows[slot, head], seq_len[slot]
            if bounds.shape[0]:
                at, first = 0, bounds[slot, head]
                newest += bounds[slot, head + 1] - capacity
            keys[slot, at, newest] = key[slot, head]
            values[slot, at, newest] = value[slot, head]
            positions[slot, at, newest] = position
            for member in range(group if window.shape[2] else 0):
                own = head * group + member
                for i in range(dim):
                    window[slot, own, position % window.shape[2], i] = query[slot, own, i] * factor
            if sliding_window:
                while positions[slot, at, first] <= position - sliding_window:
                    first += 1
            end = newest + 1
            queries = np.empty((group, dim), np.float32)
            queries[:] = query[slot, head * group : (head + 1) * group]
            _attend(
                queries,
                keys[slot, at, first:end],
                values[slot, at, first:end],
                cut(sums, slot, at, first, end),
                cut(squares, slot, at, first, end),
                cut(squares_logit, slot, at, first, end),
                cut(squares_logit2, slot, at, first, end),
                sinks[head * group : (head + 1) * group],
                scaling,
                softcap,
                output[slot, head * group : (head + 1) * group],
            )
        else:
            output[slot, head * group : (head + 1) * group] = 0


def _array(slab: Tensor, one_head: bool) -> np.ndarray:
    """A slab as an array; the pools of its slots as those of one head, if they are wanted so."""
    pools: np.ndarray = slab.flatten(1, 2)[:, None].numpy() if one_head else slab.numpy()
    return pools


class NumbaLayer:
    """Decode attention in one layer, in fp32; its tensors are turned into arrays once.

    New rows in another precision, which may be stored in integers, are left to torch.
    """

    kernel = staticmethod(_decode)

    def __init__(self, layer: DecodeLayer) -> None:
        """Take the tensors of a layer."""
        self._layer = layer
        accumulated = layer.accumulated_by_name
        one_head = layer.bounds is not None
        self._arrays = [
            _array(layer.keys, one_head),
            _array(layer.values, one_head),
            _array(layer.positions, one_head),
            *(
                _array(accumulated[name], one_head) if name in accumulated else _NO_TRACK
                for name in ACCUMULATORS
            ),
            _NO_WINDOW if layer.window is None else layer.window.numpy(),
            layer.seq_len.numpy(),
            layer.live.numpy(),
            _NO_BOUNDS if layer.bounds is None else layer.bounds.numpy(),
            layer.keys.shape[2],
        ]
        self._rows = layer.rows.numpy()

    def more(self, head_dim: int) -> list[int]:
        """What the kernel is told of the layer beside its arrays, for heads of so many channels."""
        del head_dim
        return []

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
        layer, rows = self._layer, self._rows
        if is_forked() or key.dtype != torch.float32:
            return store_and_attend(
                layer, query, key, value, scaling=scaling, softcap=softcap, sinks=sinks
            )
        if layer.slides:
            rows = drop_oldest(layer).numpy()
        output = torch.empty(*query.shape[:2], value.shape[2])
        take_threads()
        self.kernel(
            query.float().numpy(),
            key.numpy(),
            value.numpy(),
            *self._arrays,
            *self.more(query.shape[2]),
            _NO_SINKS if sinks is None else sinks.detach().float().numpy(),
            rows,
            scaling,
            softcap,
            layer.sliding_window,
            window_factor(scaling, query.shape[2]),
            output.numpy(),
        )
        return output
