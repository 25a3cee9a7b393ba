"""Kernels that a GPU launches for a chunk of a prompt, counted without a GPU, by what they do.

An engine brings in a prompt on the device ``meta``, where tensors have no numbers, in the way of a
GPU: once with the operators of the model, and once with fused ones. An operator of torch that
computes counts as one kernel, a view or an allocation as none, and an operator of kvpolicy as what
it launches.

Chunks in the middle of a prompt are counted, with their compactions, of the layers of a plan and of
each of them twice: the difference is what the layers launch, the rest what a chunk does once.
Layers that are alike are left out as long as all kinds keep their shares. A layer that is full ends
a chunk: where layers have budgets or buffers of their own, some are compacted in one chunk and some
in another, and counts are means over the chunks of a cycle.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import attrs
from transformers import PreTrainedModel

from kvpolicy.engine.engine import Engine, Run
from kvpolicy.engine.requests.request import Request
from kvpolicy.lab.bench.diagnostics.counting import WithoutNumbers, counting
from kvpolicy.lab.bench.diagnostics.kernels import KINDS
from kvpolicy.lab.sweep.grid import Cell
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.graphs import GraphRunner
from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan

_CHUNK = 1024  # tokens at once under plans that say nothing of prompts
_MOST_BUFFERS = 4  # in which chunks are counted, if their cycle is longer

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
    """Kernels of a chunk of one prompt, in the mean over chunks.

    Attributes:
        of_layer: What each layer launches, in the mean over layers, by kind, see `kernels.KINDS`;
            rows that are stored, moved and brought together are among the ``others``.
        once: What the chunk launches beside, whatever the number of layers.
        reads: Values that the host reads, by the place in the code, in the model with more layers.
    """

    of_layer: Mapping[str, float]
    once: float
    reads: Mapping[str, float]


@attrs.frozen
class PromptKernels:
    """What prompts launch under one plan.

    Attributes:
        name: The plan.
        tokens: Tokens of a chunk, in the mean over chunks.
        plain: With the model's own operators.
        fused: With fused ones.
    """

    name: str
    tokens: float
    plain: ChunkKernels
    fused: ChunkKernels


def prompt_kernels_of(models: Callable[[int, int], PreTrainedModel], cell: Cell) -> PromptKernels:
    """What a chunk launches under a plan.

    Args:
        models: Gives a model of so many layers and positions on the device ``meta``.
        cell: The plan.
    """
    layers = _in_proportion(cell.resolved.layers)
    bounded = [layer for layer in layers if layer.bounded and layer.budget]
    buffers = [layer.prefill_buffer or layer.buffer for layer in bounded]
    chunk = min([_CHUNK, *buffers])
    most = max(((layer.budget or 0) + layer.buffer for layer in bounded), default=0)
    start = (most // chunk + 3) * chunk  # after so many tokens all layers compact
    window = min(math.lcm(*buffers), _MOST_BUFFERS * max(buffers, default=1))
    end = start + window + 2 * _CHUNK  # those that are counted are not the last
    built = {copies: models(copies * len(layers), end + _CHUNK) for copies in (1, 2)}
    plans = {copies: _of_layers(cell.resolved, layers * copies) for copies in built}
    counted: list[ChunkKernels] = []
    for fuses in (False, True):
        one, two = (
            _counted(_begun(built[num], plans[num], chunk, end, fuses=fuses), start, window)
            for num in built
        )
        counted.append(_of_two(one, two, len(layers)))
        tokens = one.num_tokens / one.num_chunks
    return PromptKernels(cell.series, tokens, *counted)


def _in_proportion(layers: Sequence[LayerPlan]) -> list[LayerPlan]:
    """As few layers as have each kind in the same share, in the order of the first of each.

    A layer that has others of its kind keeps one: what is asked about several at once is asked
    differently of one.
    """
    alike = [attrs.evolve(layer, layer_idx=0) for layer in layers]
    kinds = [one for number, one in enumerate(alike) if one not in alike[:number]]
    counts = [alike.count(kind) for kind in kinds]
    common = math.gcd(*counts)
    times = 2 if 1 < min(counts) == common else 1
    fewer = [times * num // common for num in counts]
    return [kind for kind, num in zip(kinds, fewer, strict=True) for _ in range(num)]


def _of_layers(plan: ResolvedPlan, layers: Sequence[LayerPlan]) -> ResolvedPlan:
    """A plan with other layers."""
    numbered = [attrs.evolve(layer, layer_idx=number) for number, layer in enumerate(layers)]
    return attrs.evolve(plan, layers=tuple(numbered), stacks=None)


@attrs.frozen
class _Chunks:
    """Chunks of one model, their tokens and kernels, by kind, and values that are read in them."""

    num_chunks: int
    num_tokens: int
    kernels: Mapping[str, int]
    reads: Mapping[str, int]


def _of_two(one: _Chunks, two: _Chunks, num_layers: int) -> ChunkKernels:
    chunks = one.num_chunks
    of_layers = {kind: two.kernels[kind] - one.kernels[kind] for kind in KINDS}
    once = sum(one.kernels.values()) - sum(of_layers.values())
    return ChunkKernels(
        of_layer={kind: num / (chunks * num_layers) for kind, num in of_layers.items()},
        once=once / chunks,
        reads={place: num / chunks for place, num in two.reads.items()},
    )


def _counted(run: Run, start: int, window: int) -> _Chunks:
    """Bring in so many tokens of a prompt, and count the chunks of the next."""

    def num_seen() -> int:
        return int(run.cache.seq_len[0])

    with WithoutNumbers():
        while num_seen() < start:
            run.step()
        begin, num_chunks = num_seen(), 0
        with counting() as counted:
            while num_seen() < begin + window:
                run.step()
                num_chunks += 1
    adds_up = any(layer.accumulators for layer in run.cache.layers)
    kernels = dict.fromkeys(KINDS, 0)
    for name, num in counted.operators.items():
        each = 1 + adds_up if name == _BY_WEIGHTS else 1
        kernels[_KIND_OF.get(name, "others")] += each * num
    return _Chunks(num_chunks, num_seen() - begin, kernels, counted.reads)


def _begun(
    model: PreTrainedModel, plan: ResolvedPlan, chunk: int, num_tokens: int, *, fuses: bool
) -> Run:
    """A run with one prompt, as on a GPU."""
    with WithoutNumbers():
        engine = Engine(_Unchecked(model), None, plan, slots=1, chunk=chunk)
        run = engine.generate([Request([1] * num_tokens, 2, stop_ids=())])
    runner = run.core.runner
    # No step is replayed here; where steps are, prompts run fused.
    runner.graphs = GraphRunner(runner.as_it_is) if fuses else None
    return run


class _Unchecked(ModelAdapter):
    """A model whose two ways of running cannot be compared, since it has no numbers."""

    def check_forward(self, *, static: bool) -> None:
        """Check nothing."""
