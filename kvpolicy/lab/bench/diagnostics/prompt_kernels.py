"""Kernels that a GPU launches for a chunk of a prompt, counted without a GPU, by what they do.

An engine brings in a prompt on the device ``meta``, where tensors have no numbers, in the way of a
GPU: once with the operators of the model, and once with fused ones. An operator of torch that
computes counts as one kernel, a view or an allocation as none, and an operator of kvpolicy as what
it launches. A chunk in the middle of a prompt is counted, with its compaction, of models with few
layers and with more: the difference is what each layer launches, the rest what the chunk does
once.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import attrs
from transformers import PreTrainedModel

from kvpolicy.engine.engine import Engine, Run
from kvpolicy.engine.requests.request import Request
from kvpolicy.lab.bench.diagnostics.counting import WithoutNumbers, counting
from kvpolicy.lab.bench.diagnostics.kernels import KINDS
from kvpolicy.lab.sweep.grid import Cell
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.graphs import GraphRunner

LAYERS = (2, 4)  # of the two models
_CHUNK = 1024  # tokens at once under plans that say nothing of prompts

_BY_WEIGHTS = "kvpolicy::attend_by_weights"  # a kernel, and one that adds up
_KIND_OF = {
    "aten::linear": "products",
    "aten::_scaled_dot_product_flash_attention": "attention",
    _BY_WEIGHTS: "attention",
    "kvpolicy::norm": "norms",
    "kvpolicy::add_norm": "norms",
    "kvpolicy::rotate": "RoPE",
    "kvpolicy::gate": "gates",
}


@attrs.frozen
class ChunkKernels:
    """Kernels of a chunk of one prompt.

    Attributes:
        of_layer: What each layer launches, by kind, see `kernels.KINDS`; rows that are stored,
            moved and brought together are among the ``others``.
        once: What the chunk launches beside, whatever the number of layers.
        reads: Values that the host reads, by the place in the code, in the model with more layers.
    """

    of_layer: Mapping[str, float]
    once: float
    reads: Mapping[str, int]


@attrs.frozen
class PromptKernels:
    """What prompts launch under one plan.

    Attributes:
        name: The plan.
        tokens: Tokens of a chunk.
        plain: With the model's own operators.
        fused: With fused ones.
    """

    name: str
    tokens: int
    plain: ChunkKernels
    fused: ChunkKernels


def prompt_kernels_of(
    models: Callable[[int, int], PreTrainedModel], cells: Mapping[int, Cell]
) -> PromptKernels:
    """What a chunk launches under a plan.

    Args:
        models: Gives a model of so many layers and positions on the device ``meta``.
        cells: The plan for each number of `LAYERS`.
    """
    (one, *_) = cells.values()
    bounded = [layer for layer in one.resolved.layers if layer.bounded and layer.budget]
    chunk = min([_CHUNK, *(layer.prefill_buffer or layer.buffer for layer in bounded)])
    most = max(((layer.budget or 0) + layer.buffer for layer in bounded), default=0)
    num_before = most // chunk + 3  # chunks after which every chunk compacts
    built = {num: models(num, (num_before + 3) * chunk) for num in LAYERS}
    plain, fused = (
        _of_two(
            *(_counted(built[num], cells[num], chunk, num_before, fuses=fuses) for num in LAYERS)
        )
        for fuses in (False, True)
    )
    return PromptKernels(one.series, chunk, plain, fused)


@attrs.frozen
class _Chunk:
    """Kernels of one chunk of one model, by kind, and values that are read."""

    kernels: Counter[str]
    reads: Mapping[str, int]


def _of_two(few: _Chunk, many: _Chunk) -> ChunkKernels:
    layers = LAYERS[1] - LAYERS[0]
    of_layer = {kind: (many.kernels[kind] - few.kernels[kind]) / layers for kind in KINDS}
    once = few.kernels.total() - LAYERS[0] * sum(of_layer.values())
    return ChunkKernels(of_layer, once, many.reads)


def _counted(
    model: PreTrainedModel, cell: Cell, chunk: int, num_before: int, *, fuses: bool
) -> _Chunk:
    """Bring in some chunks of a prompt, and count the next one."""
    with WithoutNumbers():
        run = _begun(model, cell, chunk, num_before + 2, fuses=fuses)
        for _ in range(num_before):
            run.step()
        with counting() as counted:
            run.step()
    adds_up = any(layer.accumulators for layer in run.cache.layers)
    kernels: Counter[str] = Counter()
    for name, num in counted.operators.items():
        each = 1 + adds_up if name == _BY_WEIGHTS else 1
        kernels[_KIND_OF.get(name, "others")] += each * num
    return _Chunk(kernels, dict(counted.reads))


def _begun(model: PreTrainedModel, cell: Cell, chunk: int, num_chunks: int, *, fuses: bool) -> Run:
    """A run with one prompt, as on a GPU."""
    engine = Engine(_Unchecked(model), None, cell.resolved, slots=1, chunk=chunk)
    run = engine.generate([Request([1] * (chunk * num_chunks), 2, stop_ids=())])
    runner = run.core.runner
    # No step is replayed here; where steps are, prompts run fused.
    runner.graphs = GraphRunner(runner.as_it_is) if fuses else None
    return run


class _Unchecked(ModelAdapter):
    """A model whose two ways of running cannot be compared, since it has no numbers."""

    def check_forward(self, *, static: bool) -> None:
        """Check nothing."""
