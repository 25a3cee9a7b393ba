"""A whole decode step in fewer kernels, if that can be had and gives the same numbers."""

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from kvpolicy.devices import HAS_TRITON
from kvpolicy.errors import error_summary
from kvpolicy.model.fused.record import NotRecordableError, record
from kvpolicy.model.fused.rewrite import Counts, call_on_cpu, fuse

# What a step answers: logits ``[W, V]`` and hidden states.
Output = tuple[Tensor, Tensor | None]


@attrs.frozen(eq=False)
class Fused:
    """A function of tensors in fewer kernels, or as it was.

    Attributes:
        run: The function.
        counts: How many groups of operators have become one; ``None``: it could not be recorded.
        problem: Why it is as it was; ``None``: it is not.
    """

    run: Callable[[], Output]
    counts: Counts | None
    problem: str | None


def fused(run: Callable[[], Output], *, binds: bool = False) -> Fused:
    """Rewrite what a step does, so that it needs fewer kernels; it is run a few times.

    Args:
        run: The step.
        binds: Whether the kernels are bound to memory, on a CPU; see `bind`. Products are left as
            they are then: packed weights are joined already.
    """
    counts = None
    try:
        recording = record(run)
        (logits, _), on_gpu = recording.output, recording.output[0].is_cuda
        if on_gpu and not HAS_TRITON:
            return Fused(run, None, "Triton is not installed")
        logits = logits.clone()
        counts = fuse(recording, joins=not binds)
        if binds:
            call_on_cpu(recording)
        program = recording.program()
        found, _ = program()
    except NotRecordableError as error:
        return Fused(run, counts, str(error))
    except Exception as error:  # of Triton's compiler, of memory, or of the function itself
        return Fused(run, counts, error_summary(error))
    if on_gpu:
        torch.cuda.empty_cache()  # where weights were before they were joined
    if not any(counts.values()):
        problem = "it has no norms, rotations, gates or products that are known"
        return Fused(run, counts, problem)
    if not are_close(found, logits, recording.precision):
        return Fused(run, counts, "it would compute other numbers")
    return Fused(program, counts, None)


def are_close(found: Tensor, expected: Tensor, precision: torch.dtype) -> bool:
    """Whether logits are equal up to rounding, by the norm of their difference.

    Args:
        found: Logits.
        expected: Others.
        precision: What numbers were rounded to on the way to them.
    """
    share = 0.1 if precision.itemsize < 4 else 0.01
    distance = (found.float() - expected.float()).norm()
    return not distance > share * expected.float().norm()  # NaN is no matter of how it is run
