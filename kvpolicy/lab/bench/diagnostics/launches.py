"""What a decode step asks of a device, counted instead of timed: operations, and values read.

The counts depend on the number of layers and on the policy, and neither on the machine nor on the
sizes of the model: they tell without a GPU what one would have to do. On a GPU every operation is a
launch, and every value that the host reads is a wait.
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from kvpolicy.engine.engine import Engine
from kvpolicy.lab.bench.contenders.contender import MODEL_ALONE
from kvpolicy.lab.bench.contenders.engine import filled_run
from kvpolicy.lab.bench.diagnostics.counting import Counted, counting
from kvpolicy.lab.bench.workload import Decode
from kvpolicy.lab.sweep.grid import Cell
from kvpolicy.model.static_forward import Compiled, StaticForward, static_forward

_MOST_STEPS = 1024  # in search of a compaction


@attrs.frozen
class Launches:
    """What a step of one contender asks of a device.

    Attributes:
        name: The contender.
        operations: Operations that compute, in a step that compacts nothing; an operator of
            kvpolicy is one.
        compacting: Operations that a step has more if it compacts one sequence in all layers that
            evict; ``None`` if no step does.
        reads: Values that the host reads in a step that compacts nothing, by the place in the code.
        compacting_reads: Those that it reads more to compact one sequence.
        read_bytes: Bytes of keys and values that a step attends to.
        path: How steps were run: ``"static"``, or ``"eager: REASON"``; empty for the model alone.
        graphs: Graphs that `torch.compile` makes of the forward of static steps, some of which
            compact between them; ``None`` if that was not counted.
        breaks: Places at which it interrupts a graph.
    """

    name: str
    operations: int
    compacting: int | None
    reads: Mapping[str, int]
    compacting_reads: Mapping[str, int]
    read_bytes: int
    path: str
    graphs: int | None = None
    breaks: int | None = None


def launches_alone(model: PreTrainedModel, work: Decode) -> Launches:
    """What the model asks for, on one token of each sequence and without a cache."""
    token_ids = torch.zeros(work.batch, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(input_ids=token_ids, use_cache=False)
        with counting() as counted:
            model(input_ids=token_ids, use_cache=False)
    return Launches(MODEL_ALONE, counted.operations, None, counted.reads, {}, 0, "")


def launches_under(model: PreTrainedModel, cell: Cell, work: Decode) -> Launches:
    """What the engine asks for under one plan."""
    # As a GPU would run it: kernels and not the host look at the rows that are held, and what
    # policies answer is checked on the device.
    engine = _engine(model, cell, work, static_forward)
    run = filled_run(engine, work, steps=_MOST_STEPS)
    run.evictor.defers = True
    run.step()
    row_bytes = [layer.row_bytes for layer in run.cache.layers]
    num_evicting = sum(layer.evicts for layer in cell.resolved.layers)
    plain: Counted | None = None
    compacting: Counted | None = None
    read_bytes = 0
    for _ in range(_MOST_STEPS):
        before = run.report.compactions
        held = int(row_bytes @ (run.cache.rows.sum(axis=1) + work.batch))
        with counting() as counted:
            run.step()
        num_compacted = run.report.compactions - before
        if not num_compacted and plain is None:
            plain, read_bytes = counted, held
        elif num_compacted == num_evicting:
            compacting = counted
        if plain and (compacting or not num_evicting):
            break
    assert plain is not None, "every step compacts"
    more = None if compacting is None else compacting.operations - plain.operations
    more_reads = {} if compacting is None else compacting.reads - plain.reads
    reason = run.engine.eager_reason
    graphs, breaks = (None, None) if reason else _graphs_and_breaks(model, cell, work)
    return Launches(
        name=cell.series,
        operations=plain.operations,
        compacting=more,
        reads=plain.reads,
        compacting_reads=more_reads,
        read_bytes=read_bytes,
        path=f"eager: {reason}" if reason else "static",
        graphs=graphs,
        breaks=breaks,
    )


def _graphs_and_breaks(model: PreTrainedModel, cell: Cell, work: Decode) -> tuple[int, int]:
    """What `torch.compile` makes of as many steps as compact every sequence once."""
    steps = max((layer.buffer for layer in cell.resolved.layers if layer.budget), default=1) + 1
    torch._dynamo.reset()
    counters.clear()
    engine = _engine(model, cell, work, torch.compile(static_forward, backend="eager"))
    run = filled_run(engine, work, steps=steps)
    for _ in range(steps):
        run.step()
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _engine(model: PreTrainedModel, cell: Cell, work: Decode, forward: StaticForward) -> Engine:
    """An engine whose static steps are run by another function, in the form of compiled ones."""
    engine = Engine(model, None, cell.resolved, slots=work.batch)
    engine.compiled = _InGraphForm(forward)
    return engine


class _InGraphForm(Compiled):
    """Runs static steps in the form of those that are compiled, by another function."""

    def __init__(self, forward: StaticForward) -> None:
        self.seconds = 0.0
        self._run = forward

    def __call__(self, call: Callable[..., Any], given: Any) -> tuple[Tensor, Tensor | None]:
        """As `static_forward`."""
        return self._run(call, given)
