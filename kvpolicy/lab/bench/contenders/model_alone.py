"""The model alone, as a contender: an upper bound on speed."""

from collections.abc import Callable

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.compat import cache_argument
from kvpolicy.errors import error_summary
from kvpolicy.lab.bench.contenders.contender import MODEL_ALONE, Contender, Measurement
from kvpolicy.lab.bench.profile import profile_steps
from kvpolicy.lab.bench.timing import durations, synchronized_time
from kvpolicy.lab.bench.workload import Decode, Text
from kvpolicy.model.fused.step import Output, fused
from kvpolicy.model.graphs import CudaGraphs, Graph
from kvpolicy.model.static_forward import NewRows

_NUM_STEPS = 64  # all steps take the same time

# Without a cache, transformers looks for several texts in one row, and waits for what it finds.
_NO_ROWS = cache_argument(NewRows())

Capture = Callable[[Callable[[], Output]], Graph]


def model_alone(
    model: PreTrainedModel, capture: Capture | None = None, *, is_compiled: bool = False
) -> Contender:
    """The model on one token of each sequence, without a cache: an upper bound on speed.

    Each token attends to itself only, so that everything but attention over a cache is measured.
    On a GPU its steps are fused and replayed from a graph, as the engine's are.

    Args:
        model: The model.
        capture: Captures a step; default: as a CUDA graph on a GPU, and not at all elsewhere.
        is_compiled: Whether the forward is compiled, which fuses in its own way.
    """
    if capture is None and model.device.type == "cuda":
        capture = CudaGraphs()

    @torch.inference_mode()
    def run(work: Decode | Text) -> Measurement:
        prompts = work.prompts(model.config.vocab_size)
        token_ids = torch.tensor([prompt[:1] for prompt in prompts], device=model.device)

        position_ids, drawn = torch.zeros_like(token_ids), torch.empty_like(token_ids)

        def step() -> Output:
            """The token of every step is the same: what is fused must not depend on the last."""
            output = model(
                input_ids=token_ids,
                position_ids=position_ids,
                use_cache=True,
                logits_to_keep=1,
                **_NO_ROWS,
            )
            logits = output.logits[:, -1]
            drawn.copy_(logits.argmax(dim=-1, keepdim=True))
            return logits, None

        take, path = _replayed(step, capture, fuses=not is_compiled)
        most_steps, profiled = (
            (work.steps, work.profiled) if isinstance(work, Decode) else (work.new_tokens, 0)
        )
        times = []
        for _ in range(min(most_steps, _NUM_STEPS) + 2):
            take()
            times.append(synchronized_time(model.device))

        def take_profiled() -> int:
            for _ in range(profiled):
                take()
            return profiled

        profile = profile_steps(take_profiled, model.device) if profiled else None
        return Measurement(
            durations(times[1:]), kv_bytes=0, read_bytes=0, path=path, profile=profile
        )

    return Contender(MODEL_ALONE, run, run, references={}, has_cache=False)


def _replayed(
    step: Callable[[], Output], capture: Capture | None, *, fuses: bool
) -> tuple[Callable[[], object], str]:
    """What takes a step, and how."""
    if capture is None:
        return step, ""
    path = "in a graph"
    if fuses:
        found = fused(step)
        step = found.run
        path += "" if found.problem is None else f", not fused: {found.problem}"
    try:
        graph = attrs.evolve(capture(step), program=step)
    except RuntimeError as error:  # of CUDA, or of modules that read values on the host
        return step, f"without a graph: {error_summary(error)}"
    return graph.replay, path
