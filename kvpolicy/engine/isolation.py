"""Whom a hook call is about, and what becomes of them if it fails.

A hook is asked about one or several sequences at once. If a policy raises, or answers wrongly,
there is no answer for these sequences; what the others hold is untouched.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from kvpolicy.engine.sequence import LiveSequence
from kvpolicy.errors import HookError, KVPolicyError

OnHookError = Literal["raise", "answer"]

# A policy may meet these without being to blame: not a sequence, but the device is in trouble.
_FATAL = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)


class ErrorScope:
    """Knows whom the hook call under way is about.

    Attributes:
        on_hook_error: ``"raise"`` passes a `HookError` on. ``"answer"`` answers the requests
            that the failing call was about with the error.
        sequences: Whom the call under way is about; nobody outside of hook calls.
    """

    def __init__(self, on_hook_error: OnHookError) -> None:
        if on_hook_error not in ("raise", "answer"):
            msg = (
                f"the engine was given on_hook_error={on_hook_error!r}; 'raise' or 'answer' "
                "is wanted"
            )
            raise KVPolicyError(msg)
        self.on_hook_error = on_hook_error
        self.sequences: Sequence[LiveSequence] = ()

    @contextmanager
    def about(self, sequences: Sequence[LiveSequence]) -> Iterator[None]:
        """Ask policies about some sequences in a block, which is left where a hook fails.

        What a policy raises as a `KVPolicyError` of its own, for want of a tokenizer for
        example, is no failed hook: it concerns the run, and passes.

        Args:
            sequences: Whom the hook calls of the block are about.

        Raises:
            HookError: A hook has failed and errors are raised; or there was no memory left, or
                the device failed, which is no reason to end these sequences and no others.
        """
        before, self.sequences = self.sequences, sequences
        try:
            yield
        except HookError as error:
            if self.on_hook_error == "raise" or isinstance(error.__cause__, _FATAL):
                raise
            for sequence in sequences:
                sequence.fail(str(error))
        finally:
            self.sequences = before
