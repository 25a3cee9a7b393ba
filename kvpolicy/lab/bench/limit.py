"""The limit of the machine, as a contender: what no step can be faster than.

A step must read the weights and all keys and values once, and multiply each weight with a number of
every sequence. How fast the machine does either is measured in every turn: it is what this machine
gives at that time.
"""

from collections.abc import Callable
from typing import Self

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.lab.bench.contender import (
    Contender,
    Decode,
    Machine,
    Measurement,
    Text,
    Work,
    synchronized_time,
)
from kvpolicy.lab.bench.models import kv_row_bytes, weight_bytes
from kvpolicy.model.packed import Product

LIMIT = "machine limit"

_MOVED = {"cpu": 2**29, "cuda": 2**32}  # bytes, more than caches hold
_SIDE = {"cpu": 1024, "cuda": 8192}  # of square matrices
_NUM_TRIALS = 5


def machine_limit(model: PreTrainedModel) -> Contender:
    """The least time of a step with the full cache.

    It is the longer of reading the weights and multiplying with them, and then reading the rows.
    """
    size = ModelSize.of(model)

    def run(work: Work) -> Measurement:
        machine = Machine(memory_bandwidth(model.device), product_speed(model.device, model.dtype))
        read = _mean_tokens(work) * size.row_bytes
        step_s = least_step_s(machine, size, work.batch, read)
        return Measurement((step_s,), kv_bytes=round(read), read_bytes=read, machine=machine)

    return Contender(LIMIT, run, run, references={}, has_cache=False)


@attrs.frozen
class ModelSize:
    """What a step must read and multiply.

    Attributes:
        weight_bytes: Bytes of weights that every step reads.
        num_weights: Their number.
        row_bytes: Bytes of keys and values of one token in all layers.
    """

    weight_bytes: int
    num_weights: int
    row_bytes: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """The size of a model."""
        num_bytes = weight_bytes(model)
        return cls(num_bytes, num_bytes // model.dtype.itemsize, kv_row_bytes(model))


def least_step_s(machine: Machine, size: ModelSize, batch: int, read_bytes: float) -> float:
    """The least seconds of a step: weights are read or multiplied, and then rows are read.

    Args:
        machine: What the machine can do.
        size: The model.
        batch: Sequences decoded together.
        read_bytes: Bytes of keys and values that the step reads.
    """
    weights_s = max(
        size.weight_bytes / machine.bytes_per_s,
        2 * batch * size.num_weights / machine.products_per_s,
    )
    return weights_s + read_bytes / machine.bytes_per_s


def memory_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """The most bytes per second that the memory of a device moves.

    The faster of a sum, which reads every byte, and a negation in place, which reads and writes
    every byte. A copy is no measure on a CPU: writing to another place reads it first, unseen.

    Args:
        device: The device.
        num_bytes: Bytes of the numbers; enough to exceed all caches if not given.
    """
    size = num_bytes or _MOVED.get(device.type, _MOVED["cpu"])
    numbers = torch.ones(size // 4, device=device)
    summing_s = _least_s(numbers.sum, device)
    negating_s = _least_s(numbers.neg_, device)
    return numbers.nbytes * max(1 / summing_s, 2 / negating_s)


def product_speed(device: torch.device, dtype: torch.dtype, side: int | None = None) -> float:
    """Additions and multiplications per second in a product of two large square matrices.

    On a CPU the faster of torch's own product and that with packed weights.

    Args:
        device: The device.
        dtype: Their precision.
        side: Their size; enough for the processor's best speed if not given.
    """
    side = side or _SIDE.get(device.type, _SIDE["cpu"])
    states = torch.ones(side, side, dtype=dtype, device=device)
    found = torch.empty_like(states)
    least_s = _least_s(lambda: torch.mm(states, states, out=found), device)
    if device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available():
        # Packed weights may be multiplied faster.
        packed = Product([torch.nn.Linear(side, side, bias=False)])
        least_s = min(least_s, _least_s(lambda: packed.columns(states, 0), device))
    return 2 * side**3 / least_s


def _least_s(act: Callable[[], object], device: torch.device) -> float:
    """The least seconds that something takes."""
    times = []
    act()
    for _ in range(_NUM_TRIALS):
        start = synchronized_time(device)
        act()
        times.append(synchronized_time(device) - start)
    return min(times)


def _mean_tokens(work: Work) -> float:
    """Tokens that a step attends to, summed over the sequences, the mean over the steps."""
    if isinstance(work, Decode):
        return work.batch * (work.held + (work.steps + 1) / 2)
    return work.batch * _mean_length(work)


def _mean_length(work: Text) -> float:
    return (work.prompt_min + work.prompt_max + work.new_tokens) / 2
