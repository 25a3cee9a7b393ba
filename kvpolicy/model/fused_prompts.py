"""Chunks of prompts in fewer kernels: the operators that a model runs for them, recorded and fused.

As with the decode steps of a graph (`kvpolicy.model.graphs`), groups of operators become one each.
But a chunk has as many tokens as come, and the host says where its rows go. So a recording is of
any number of sequences and tokens (`kvpolicy.model.fused.extents`), and attention is one call in
it, which stores the new rows and attends. Nothing of it belongs to a cache: one recording serves
all runs of an engine.

A model is recorded over a few tokens, when its first chunk comes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.devices import HAS_TRITON
from kvpolicy.errors import error_summary
from kvpolicy.model.attention import ATTEND, store_and_attend
from kvpolicy.model.forward_input import ForwardInput, forward_under_way, under_way
from kvpolicy.model.fused import extents
from kvpolicy.model.fused.operators import kernels_on
from kvpolicy.model.fused.record import NotRecordableError, Program, Recording, record
from kvpolicy.model.fused.rewrite import Counts, fuse
from kvpolicy.model.fused.step import Output, are_close
from kvpolicy.model.seen import Seen, runs_python
from kvpolicy.model.static_forward import module_of, storing_forward

# Another shape than those that are recorded.
_TRIED = (1, 4)

# Recordings that came to nothing before the model is left alone.
_MOST_FAILURES = 3


class FusedPrompts:
    """Runs chunks of prompts from a recording, as long as the model stays as it was.

    Attributes:
        problem: Why the model runs as it is; ``None``: it does not, or no chunk has come yet.
        fused: How many groups of operators have become one; ``None``: none yet.
    """

    problem: str | None = None
    fused: Counts | None = None

    def __init__(self, new_cache: Callable[[int, int], KVCache], token: int) -> None:
        """Nothing is recorded yet.

        Args:
            new_cache: Makes a cache of so many slots that hold so many rows.
            token: A token to record.
        """
        self._new_cache, self._token = new_cache, token
        self._program: Program | None = None
        self._seen: Seen | None = None
        self._num_failures = 0

    def run(self, call: Callable[..., Any], given: ForwardInput, *inputs: Tensor) -> Output | None:
        """Logits ``[B, 1, V]`` and hidden states of a chunk; ``None``: the model has to run it.

        Args:
            call: The twin of the model, or its ``forward``.
            given: The forward, which is under way.
            inputs: Token ids and positions, ``[B, L]`` each.
        """
        if not self._is_as_seen(module_of(call)):
            self._record(call, inputs[0].device)
        if self._program is None:
            return None
        if given.run_fused is None:
            logits, states = self._program(*inputs)
        else:
            logits, states = given.run_fused(self._program, given, inputs)
        return logits, states if given.wants_states else None

    def _is_as_seen(self, module: nn.Module) -> bool:
        """Whether what is known of a model holds; after some failures nothing is tried again."""
        seen = self._seen
        return seen is not None and (self._num_failures >= _MOST_FAILURES or seen.holds(module))

    def _record(self, call: Callable[..., Any], device: torch.device) -> None:
        """Record the model as it is now, if that can be had and gives the same numbers."""
        self._program = self.fused = self.problem = None
        module = module_of(call)
        try:
            program, precision = self._fused(call, device)
            self._seen = Seen(module)  # weights may have moved
            self._check(program, precision, call, device)
            if self._seen.holds(module):
                self._program = program
            else:  # it would be recorded before each chunk
                self.problem = "each forward changes its modules"
        except NotRecordableError as error:
            self.problem = str(error)
        except Exception as error:  # of Triton's compiler, of memory, or of the model itself
            self.problem = error_summary(error)
        if self._program is None:
            self._num_failures += 1
            self._seen = Seen(module)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # where weights were before they were joined

    def _fused(self, call: Callable[..., Any], device: torch.device) -> tuple[Program, torch.dtype]:
        """What runs a chunk in fewer kernels, and the precision of the model.

        Raises:
            NotRecordableError: There is no such thing.
        """
        if any(map(runs_python, module_of(call).modules())):
            msg = "modules of the model have hooks, which a recording would leave out"
            raise NotRecordableError(msg)
        if device.type == "cuda" and not HAS_TRITON:
            msg = "Triton is not installed"
            raise NotRecordableError(msg)
        recording, inputs = self.record(call, device)
        self.fused = fuse(recording)
        if not any(self.fused.values()):
            msg = "it has no norms, rotations, gates or products that are known"
            raise NotRecordableError(msg)
        program = recording.program(inputs, {ATTEND: store_and_attend, **kernels_on(device)})
        return program, recording.precision

    def _check(
        self,
        program: Program,
        precision: torch.dtype,
        call: Callable[..., Any],
        device: torch.device,
    ) -> None:
        """Compare a program with the model.

        Raises:
            NotRecordableError: It computes other numbers.
        """
        tried = self._inputs(_TRIED, device)
        (found, _), (expected, _) = (
            self._forward(run, *tried)() for run in (program, _as_it_is(call))
        )
        if not are_close(found, expected, precision):
            msg = "it would compute other numbers"
            raise NotRecordableError(msg)

    def record(
        self, call: Callable[..., Any], device: torch.device
    ) -> tuple[Recording, Sequence[Tensor]]:
        """The operators of a chunk of any size, and the inputs in whose place it is given others.

        Raises:
            NotRecordableError: It does what operators do not tell of.
        """
        inputs, others = (self._inputs(shape, device) for shape in (extents.FIRST, extents.SECOND))
        first, second = (
            record(self._forward(_as_it_is(call), *tokens)) for tokens in (inputs, others)
        )
        extents.tell_extents(first, second, inputs, others)
        return first, inputs

    def _inputs(self, shape: tuple[int, int], device: torch.device) -> Sequence[Tensor]:
        """Token ids and positions of sequences that begin."""
        num_sequences, num_columns = shape
        positions = torch.arange(num_columns, device=device).expand(num_sequences, -1).contiguous()
        return torch.full_like(positions, self._token), positions

    def _forward(
        self, run: Callable[..., Output], tokens: Tensor, positions: Tensor
    ) -> Callable[[], Output]:
        """A forward over a cache of its own."""
        num_sequences, num_columns = tokens.shape
        cache = self._new_cache(num_sequences, num_columns)
        step = EagerStep(cache, range(num_sequences), [num_columns] * num_sequences)
        given = ForwardInput(tokens, step, wants_states=True, in_graph=True)

        def forward() -> Output:
            with under_way(given):
                return run(tokens, positions)

        return forward


def _as_it_is(call: Callable[..., Any]) -> Callable[..., Output]:
    """Runs the model over tokens and positions in the forward under way."""

    def run(tokens: Tensor, positions: Tensor) -> Output:
        given = forward_under_way()
        output = storing_forward(call, given, tokens, positions)
        return output.logits, given.states

    return run
