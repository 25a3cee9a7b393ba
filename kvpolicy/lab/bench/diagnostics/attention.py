"""flash-attn beside our attention kernel on a GPU: equal outputs first, then which is faster."""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.errors import KVPolicyError, error_summary
from kvpolicy.kernels.decode import Counts, DecodeSlabs
from kvpolicy.kernels.flash_attention import flash_problem
from kvpolicy.kernels.operator import decode
from kvpolicy.lab.bench.timing import synchronized_time
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.graphs import CudaGraphs, Graph, Output

_TURNS, _REPLAYS = 15, 20
# Of the largest output: 16-bit types round in another order.
_TOLERANCE = 0.03

Capture = Callable[[Callable[[], Output]], Graph]


def compare_attention(
    model: PreTrainedModel, *, batch: int, rows: int, capture: Capture | None = None
) -> str:
    """Store and attend in a layer like the model's first one, with either kernel, from a graph.

    Args:
        model: The model, for its sizes, precision and device.
        batch: Sequences.
        rows: Rows that each holds, the new one included.
        capture: Captures a function; default: as a CUDA graph.

    Returns:
        A sentence: how long either takes, or why flash-attn cannot be measured.

    Raises:
        KVPolicyError: The outputs differ.
    """
    if problem := flash_problem(model.device, model.dtype):
        return f"attention is not compared with flash-attn: {problem}."
    step = _step(model, batch, rows)
    capture = capture or CudaGraphs()
    try:
        ours, theirs = step(flash=False), step(flash=True)
        graphs = [capture(partial(_output, step, flash)) for flash in (False, True)]
    except RuntimeError as error:  # of CUDA, or of flash-attn, which may know other limits
        return f"attention is not compared with flash-attn: {error_summary(error)}"
    if (ours - theirs).abs().max() > _TOLERANCE * ours.abs().max():
        msg = (
            f"flash-attn and our kernel differ by {float((ours - theirs).abs().max()):.2g} over "
            f"{rows:,} rows: a defect of kvpolicy or of flash-attn; no speed was measured"
        )
        raise KVPolicyError(msg)
    turns = [[_time(graph, model.device) for graph in graphs] for _ in range(_TURNS)]
    our_s, their_s = (median(times) for times in zip(*turns, strict=True))
    faster = "flash-attn" if their_s < our_s else "our kernel"
    return (
        f"a layer of {batch} sequences with {rows:,} rows takes {our_s * 1e6:,.0f} us with our "
        f"kernel and {their_s * 1e6:,.0f} us with flash-attn: {faster} is faster."
    )


def _step(model: PreTrainedModel, batch: int, rows: int) -> Callable[..., Tensor]:
    """Stores the last row of random slabs and attends, as often as it is called."""
    shape, device = ModelAdapter(model).layer_shapes()[0], model.device
    rng = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, device=device).to(shape.dtype)

    slab = (batch, shape.num_kv_heads, rows, shape.head_dim)
    positions = torch.arange(rows, device=device).expand(slab[:3]).contiguous()
    slabs = DecodeSlabs(normal(*slab), normal(*slab), positions)
    before = positions[:, :, -1].contiguous()
    counts = Counts(before, before[:, 0].contiguous(), torch.ones_like(before[:, 0]).bool())
    query = normal(batch, shape.num_heads, shape.head_dim)
    key, value = (normal(batch, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    return partial(decode, query, key, value, slabs, counts, scaling=shape.head_dim**-0.5)


def _output(step: Callable[..., Tensor], flash: bool) -> Output:
    return step(flash=flash), None


def _time(graph: Graph, device: torch.device) -> float:
    """Seconds of a replay."""
    start = synchronized_time(device)
    for _ in range(_REPLAYS):
        graph.replay()
    return (synchronized_time(device) - start) / _REPLAYS
