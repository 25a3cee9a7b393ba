"""Replaying static steps from graphs, which costs the host one launch instead of one per operation.

A graph is captured for each width of a batch when it is first needed, the widest first, so that
narrower ones find room in its memory. What is captured runs a few times before. No slot takes part
in these runs, and a step in which none does changes nothing.

The first of these runs is recorded, and groups of its operators become one each, which is what is
captured; see `kvpolicy.model.fused`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.cache.static_step import StaticStep
from kvpolicy.errors import KVPolicyError, error_summary
from kvpolicy.model.fused.rewrite import Counts
from kvpolicy.model.fused.step import Output, fused
from kvpolicy.model.seen import runs_python
from kvpolicy.model.static_forward import Compiled, StaticForward, module_of

# Libraries allocate and choose kernels in the first runs.
_WARM_UPS = 3


@attrs.frozen(eq=False)
class Graph:
    """A captured step.

    Attributes:
        replay: Runs it again, on what the same addresses hold by then.
        output: Its output, which every replay overwrites.
        program: The fused step, if that was captured; the graph reads its tensors.
    """

    replay: Callable[[], None]
    output: Output
    program: Callable[[], Output] | None = None


class CudaGraphs:
    """Captures CUDA graphs that share one pool of memory.

    Attributes:
        warm_ups: How often a function runs before it is captured.
    """

    def __init__(self, warm_ups: int = _WARM_UPS) -> None:
        self.warm_ups = warm_ups
        self._pool: Any = None

    def __call__(self, run: Callable[[], Output]) -> Graph:
        """Capture a function of tensors at fixed addresses.

        Args:
            run: The function; it reads nothing on the host.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(self.warm_ups):
                run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return Graph(graph.replay, output)


class GraphRunner:
    """Runs static steps of one batch from graphs.

    Attributes:
        problem: Why steps run without graphs; ``None``: they are replayed.
        fused: How many groups of operators have become one; ``None``: nothing was captured yet, or
            the step is captured as it is.
        not_fused: Why it is captured as it is, if it is.
        newest: The graph of the last step, which may be replayed for one that follows it in the
            same batch; ``None``: it ran without.
    """

    problem: str | None = None
    fused: Counts | None = None
    not_fused: str | None = None
    newest: Graph | None = None

    def __init__(
        self, forward: StaticForward, capture: Callable[[Callable[[], Output]], Graph] | None = None
    ) -> None:
        """Nothing is captured yet.

        Args:
            forward: What is captured.
            capture: Captures a function; default: as a CUDA graph.
        """
        self._forward = forward
        self._capture = capture or CudaGraphs()
        self._fuses = not isinstance(forward, Compiled)  # which fuses in its own way
        self._graphs: dict[tuple[object, ...], Graph] = {}
        self._module: nn.Module | None = None
        self._weights: list[Mapping[str, Tensor | None]] = []
        self._addresses: list[int] = []
        self._memory: list[Tensor] = []

    def __call__(self, call: Callable[..., Any], given: Any) -> Output:
        """As `static_forward`. The output is overwritten by the next step."""
        step: StaticStep = given.step
        if self.problem is None:
            self._note_changes(module_of(call), step)
        kind = (given.draws, *step.drawn_by)
        for width in (step.cache.num_slots, step.width):
            if self.problem is None and (width, *kind) not in self._graphs:
                self._add((width, *kind), call, given)
        self.newest = None
        if self.problem is not None:
            return self._forward(call, given)
        graph = self.newest = self._graphs[step.width, *kind]
        graph.replay()
        return graph.output

    def forget(self) -> None:
        """Capture every step again, because what was captured lacks work that has failed."""
        self._graphs.clear()
        self.newest = None

    def _add(self, key: tuple[Any, ...], call: Callable[..., Any], given: Any) -> None:
        """Capture a step of some width, which does what the step under way does."""
        self._memory = []  # which fusing may free
        try:
            with given.step.idle(key[0]):

                def run() -> Output:
                    return self._forward(call, given)

                program = self._fused(run)
                self._note_changes(module_of(call), given.step)  # weights may have moved
                self._graphs[key] = attrs.evolve(self._capture(program or run), program=program)
            # A step that follows another is replayed without a look at the model. Should a weight
            # have been given other memory by then, that step is the last with the memory of before.
            self._memory = [
                tensor.detach()
                for tensors in self._weights
                for tensor in tensors.values()
                if tensor is not None
            ]
        except KVPolicyError:
            raise  # of a policy, or of a model that cannot be compiled
        except Exception as error:  # of CUDA, of Triton's compiler, of a cache on a full disk
            self.problem = f"a step cannot be captured: {error_summary(error)}"
            self._graphs.clear()

    def _fused(self, run: Callable[[], Output]) -> Callable[[], Output] | None:
        """What computes a step in fewer kernels; ``None`` if it is to be captured as it is."""
        if not self._fuses or self.not_fused is not None:
            return None
        found = fused(run)
        self.fused, self.not_fused = found.counts or self.fused, found.problem
        return found.run if found.problem is None else None

    def _note_changes(self, module: nn.Module, step: StaticStep) -> None:
        """Forget graphs that speak of other addresses than those of now."""
        if module is not self._module:
            self._module = module
            self._weights = [
                tensors
                for part in module.modules()
                for tensors in (part._parameters, part._buffers)
                if tensors
            ]
            if any(map(runs_python, module.modules())):
                self.problem = "modules of the model have hooks, which a graph would leave out"
        addresses = [
            *step.addresses,
            *(
                tensor.data_ptr()
                for tensors in self._weights
                for tensor in tensors.values()
                if tensor is not None
            ),
        ]
        if addresses != self._addresses:
            self._addresses = addresses
            self._graphs.clear()
            self._memory = []
