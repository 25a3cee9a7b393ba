"""The core: what the engine's loop and a `PolicyCache` share, and the two halves of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress

import attrs

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.engine.evictor import Evictor
from kvpolicy.engine.extensions.base import Extension, Extensions
from kvpolicy.engine.runner import Runner
from kvpolicy.engine.step import Drawn, Output, Step
from kvpolicy.hooks.timing import PolicyTimings


@attrs.define(eq=False)
class Core:
    """A cache for some slots, with what computes, evicts and extends.

    Attributes:
        cache: What each slot holds.
        evictor: Evicts rows.
        extensions: Features, each called at fixed places.
        timings: Seconds that policies take.
        runner: Runs steps.
    """

    cache: KVCache
    evictor: Evictor
    extensions: Extensions
    timings: PolicyTimings
    runner: Runner = attrs.field(init=False)

    @contextmanager
    def extended(self, one: Extension) -> Iterator[None]:
        """Have one more extension in a block: it may look at steps, and has no states of slots."""
        one.attach(self)
        self.extensions.add(one)
        try:
            yield
        finally:
            self.extensions.remove(one)

    def run(self, step: Step) -> Output:
        """Run a step; its rows are provisional."""
        for one in self.extensions:
            one.before(step)
        step.checks = self.evictor.take_checks()
        return self.runner.run(step)

    def commit(self, step: Step, output: Output, drawn: Drawn) -> None:
        """Make what a step has computed a fact: tokens and rows.

        If a policy has failed in the forward, its sequences end, and only the decode steps before
        the failure count.
        """
        left = [seq.finish_reason is None for seq in step.sequences]
        if step.checks is not None:
            step.checks.settle()
        if not step.is_decode:
            for seq, largest in zip(step.sequences, output.logits.amax(dim=1), strict=True):
                seq.largest = largest
        pairs = zip(step.sequences, drawn.tokens, strict=True)
        num_new = [seq.take(tokens) for seq, tokens in pairs]
        self.evictor.take_back()
        self.runner.commit(step, output, drawn, num_new)
        step.steer = step.annotating = None  # they refer to the step
        step.embedded = None
        if step.error is not None:
            for seq in step.sequences:
                seq.fail(step.error)
            if output.drawn is None:
                return
        if not all(left):  # they have ended since it was launched, and their slots are empty
            step = attrs.evolve(step, sequences=list(compress(step.sequences, left)))
            drawn = Drawn(list(compress(drawn.tokens, left)))
        for one in self.extensions:
            one.after(step, output, drawn)
