"""The model's forward in a static step: one function of tensors at fixed addresses.

It reads nothing on the host, so it runs as it is, compiled by `torch.compile` without a break, or
replayed from a CUDA graph.
"""

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from transformers import Cache

from kvpolicy.cache.static_step import StaticStep
from kvpolicy.compat import cache_argument
from kvpolicy.errors import ModelError, error_summary
from kvpolicy.extras import install_extra

# Tests take one that needs no compiler.
BACKEND = "inductor"

# Graphs of one process: a few for each plan, as slabs and batches have other sizes.
_MOST_GRAPHS = 256


class NewRows(Cache):
    """The cache of a forward in a graph: attention itself stores the new rows."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The new rows of a layer as they are."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing depends on it: the positions of tokens are given."""
        return 0


_NEW_ROWS = cache_argument(NewRows())

# Runs the model over a static step: `static_forward`, or what does the same in less time.
StaticForward = Callable[[Callable[..., Any], Any], tuple[Tensor, Tensor | None]]


def static_forward(call: Callable[..., Any], given: Any) -> tuple[Tensor, Tensor | None]:
    """Run the model over a static step, and finish the step if it draws its tokens itself.

    Args:
        call: The twin of the model, or its ``forward``.
        given: A `ForwardInput`, for attention and hooks; a hook fills in its hidden states.

    Returns:
        Logits, ``[W, V]``, and, if wanted, hidden states after the final norm, ``[W, 1, M]``.
    """
    step: StaticStep = given.step
    output = storing_forward(call, given, step.token_ids[: step.width, None], step.position_ids)
    logits = output.logits[:, -1]
    if given.draws:
        step.finish(logits, given.states)
    return logits, given.states


def storing_forward(
    call: Callable[..., Any], given: Any, token_ids: Tensor, position_ids: Tensor
) -> Any:
    """Run the model over new tokens whose rows attention stores, as it does in a graph.

    Args:
        call: The twin of the model, or its ``forward``.
        given: A `ForwardInput`, for attention and hooks.
        token_ids: ``[B, L]``.
        position_ids: Likewise.

    Returns:
        What the model gives; logits are those after the newest tokens.
    """
    return call(
        input_ids=token_ids,
        position_ids=position_ids,
        use_cache=True,
        logits_to_keep=1,
        kvpolicy_forward=given,
        **_NEW_ROWS,
    )


def module_of(call: Callable[..., Any]) -> nn.Module:
    """The module of a forward, or the module itself."""
    owner: Any = call
    module: nn.Module = getattr(owner, "__self__", owner)
    return module


def compile_problem(device: torch.device, *, packed: bool) -> str | None:
    """Why a forward on a device cannot be compiled; ``None`` if it can.

    Args:
        device: The device.
        packed: Whether linear layers have packed weights.
    """
    if BACKEND != "inductor":
        return None
    if packed:
        return "its weights are packed for the CPU, and Inductor does not know their products"
    if device.type == "cuda":
        if find_spec("triton") is None:
            return f"Triton is not installed, which {install_extra('kernels')} brings"
        return None
    try:
        # What Inductor needs on a CPU, and finds out late.
        import torch.utils.cpp_extension  # noqa: F401
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:  # whatever they may raise
        return f"torch finds no C++ compiler that it can use ({error_summary(error)})"
    return None


class Compiled:
    """`static_forward`, compiled by `torch.compile` when it is first called, without a break.

    Batches of other widths and slabs of other sizes may need a few graphs more.

    Attributes:
        seconds: How long calls took that compiled.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._forward = torch.compile(static_forward, fullgraph=True, backend=BACKEND)

    def clock(self) -> float:
        """Seconds of a clock that stands still while this compiles."""
        return time.perf_counter() - self.seconds

    def __call__(self, call: Callable[..., Any], given: Any) -> tuple[Tensor, Tensor | None]:
        """As `static_forward`.

        Raises:
            ModelError: If the model cannot be compiled.
        """
        start, graphs = time.perf_counter(), counters["stats"]["unique_graphs"]
        try:
            with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS):
                return self._forward(call, given)
        except TorchDynamoException as error:
            name = type(module_of(call)).__name__
            msg = (
                f"the forward of {name} cannot be compiled: {error_summary(error)}; leave out "
                "compile"
            )
            raise ModelError(msg) from error
        finally:
            if counters["stats"]["unique_graphs"] != graphs:
                self.seconds += time.perf_counter() - start
