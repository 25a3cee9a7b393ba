"""Error isolation: which sequences a failing hook call affects.

A hook is called for one or several sequences at once. If a policy raises, or its answer breaks
the contract, these sequences have no answer; the others are not affected.
"""

from collections import abc
from contextlib import contextmanager
from typing import Literal

import torch

from kvpolicy.engine.requests.results import HookFailure
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.errors import HookError, KVPolicyError, is_out_of_memory

OnHookError = Literal["raise", "answer"]

# Receives hook calls that have failed.
OnFailure = abc.Callable[[HookFailure], None]


class ErrorScope:
    """The sequences of the hook call under way.

    Attributes:
        on_hook_error: ``"raise"`` raises a `HookError`. ``"answer"`` ends the requests of the
            failing call with the error.
        on_failure: Receives calls that end requests; ``None``: nobody is told.
    """

    def __init__(self, on_hook_error: OnHookError, on_failure: OnFailure | None = None) -> None:
        if on_hook_error not in ("raise", "answer"):
            msg = (
                f"the engine was given on_hook_error={on_hook_error!r}; expected 'raise' or "
                "'answer'"
            )
            raise KVPolicyError(msg)
        self.on_hook_error, self.on_failure = on_hook_error, on_failure
        self._under_way: list[abc.Sequence[Sequence]] = [()]

    @property
    def sequences(self) -> abc.Sequence[Sequence]:
        """The sequences of the hook call under way; empty outside of hook calls."""
        return self._under_way[-1]

    def of_run(self, on_hook_error: OnHookError | None, on_failure: OnFailure) -> "ErrorScope":
        """The same scope for a run, which may handle errors in its own way.

        Args:
            on_hook_error: Its way; ``None``: as here.
            on_failure: Receives the calls that end requests of the run.
        """
        scope = ErrorScope(on_hook_error or self.on_hook_error, on_failure)
        scope._under_way = self._under_way
        return scope

    @contextmanager
    def covering(
        self,
        sequences: abc.Sequence[Sequence],
        fail: abc.Callable[[str], None] | None = None,
    ) -> abc.Iterator[None]:
        """Call hooks for some sequences in a block, which ends where a hook fails.

        A policy may raise a `KVPolicyError` of its own, for lack of a tokenizer for example:
        it concerns the whole run and is always raised.

        Args:
            sequences: The sequences of the hook calls in the block.
            fail: Is told the error, if it ends these sequences; ``None``: they end now.

        Raises:
            HookError: A hook has failed, and errors are raised; or memory ran out or the device
                failed, which concerns the whole run.
        """
        self._under_way.append(sequences)
        try:
            yield
        except HookError as error:
            if self.on_hook_error == "raise" or _is_of_machine(error.__cause__):
                raise
            for end in [seq.fail for seq in sequences] if fail is None else [fail]:
                end(str(error))
            if self.on_failure is not None:
                self.on_failure(HookFailure.of(error, tuple(seq.id for seq in sequences)))
        finally:
            self._under_way.pop()


def _is_of_machine(error: BaseException | None) -> bool:
    """Whether the device or the machine has failed, for which no policy is to blame."""
    return error is not None and (
        isinstance(error, torch.AcceleratorError) or is_out_of_memory(error)
    )
