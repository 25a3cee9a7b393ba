"""Steer: policies change the states that enter a layer, in decode steps."""

from collections import abc
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.extensions.base import Extension
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Step
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.state import Memory, RegisterFile


class Steer(Extension):
    """Asks policies for changes within the forward."""

    # They run in Python, which a graph would leave out.
    graph_problem = "policies steer"

    def __init__(
        self,
        stacks: abc.Sequence[Stack],
        registers: RegisterFile,
        tokenizer: Any,
        timings: PolicyTimings,
        errors: ErrorScope,
    ) -> None:
        """Find who steers.

        Args:
            stacks: The policies of each layer.
            registers: The registers of all slots.
            tokenizer: The model's, if there is one.
            timings: Measures the time of policies.
            errors: Isolates errors of hooks.
        """
        self._stacks, self._registers, self._tokenizer = stacks, registers, tokenizer
        self._timings, self._errors = timings, errors

    def repeats(self, sequences: abc.Sequence[Sequence]) -> int:
        """Policies are not asked about sequences that have ended."""
        return 1

    def before(self, step: Step) -> None:
        """Have the forward of a decode step ask for changes."""
        if step.is_decode:
            step.steer = partial(self._ask, step)

    def _ask(self, step: Step, layer_idx: int, states: Tensor) -> Tensor | None:
        """Ask the policies of a layer for a change to the states entering it, ``[B, M]``."""
        change, active = None, step.sequences
        if step.error is not None or not self._stacks[layer_idx].is_steered(layer_idx):
            return None
        registers = self._registers.of_slots(0, len(active))
        # A copy that torch counts changes of: the states themselves are made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            states = states.clone()
        with (
            self._errors.covering(active, step.fail),
            self._timings.time("steer_s", None),
            registers.on(states.device) as registers,
        ):
            change = self._stacks[layer_idx].steer(
                layer_idx,
                states,
                step.newest.to(states.device),
                tokenizer=self._tokenizer,
                registers=registers,
                memory=Memory([seq.memory for seq in active]),
            )
        return change
