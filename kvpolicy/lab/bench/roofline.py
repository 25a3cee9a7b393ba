"""The roofline of a machine: the least time of a decode step, by memory and by arithmetic.

A step must read the weights and all keys and values once, and multiply each weight with a number of
every sequence.
"""

from collections.abc import Callable
from typing import Self

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.lab.bench.models import kv_row_bytes, weight_bytes
from kvpolicy.lab.bench.timing import synchronized_time
from kvpolicy.model.packed import Product

MOVED = {"cpu": 2**29, "cuda": 2**32}  # bytes, more than caches hold
SIDE = {"cpu": 1024, "cuda": 8192}  # of square matrices
_NUM_TRIALS = 5


@attrs.frozen
class Machine:
    """What a machine can do at best.

    Attributes:
        bytes_per_s: Bytes of memory moved in a second.
        products_per_s: Multiplications and additions in a second, each counted.
    """

    bytes_per_s: float
    products_per_s: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Measure the machine that a model is on."""
        speed = product_speed(model.device, model.dtype)
        return cls(memory_bandwidth(model.device), speed)


@attrs.frozen
class ModelSize:
    """What a step must read and multiply.

    Attributes:
        weight_bytes: Bytes of weights that every step reads.
        num_weights: Their number.
        row_bytes: Bytes of keys and values of one token in all layers.
        num_layers: Decoder layers.
        query_size: Numbers of the queries of one token in all layers.
    """

    weight_bytes: int
    num_weights: int
    row_bytes: int
    num_layers: int
    query_size: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """The size of a model."""
        num_bytes, config = weight_bytes(model), model.config
        return cls(
            weight_bytes=num_bytes,
            num_weights=num_bytes // model.dtype.itemsize,
            row_bytes=kv_row_bytes(model),
            num_layers=config.num_hidden_layers,
            query_size=config.num_hidden_layers * config.num_attention_heads * config.head_dim,
        )


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


def least_prefill_s(machine: Machine, size: ModelSize, num_tokens: int) -> float:
    """The least seconds of a prompt's prefill: products with weights, and of queries with rows.

    A query attends to half of the prompt in the mean, in two products.
    """
    with_weights = 2 * num_tokens * size.num_weights
    with_rows = 2 * num_tokens**2 * size.query_size
    return (with_weights + with_rows) / machine.products_per_s


def memory_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """The most bytes per second that the memory of a device moves.

    The faster of a sum, which reads every byte, and a negation in place, which reads and writes
    every byte. A copy is no measure on a CPU: writing to another place reads it first, unseen.

    Args:
        device: The device.
        num_bytes: Bytes of the numbers; enough to exceed all caches if not given.
    """
    size = num_bytes or MOVED.get(device.type, MOVED["cpu"])
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
    side = side or SIDE.get(device.type, SIDE["cpu"])
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
