"""Batch grouping: serve requests with prompts of similar length together."""

from collections.abc import Sequence

import attrs
from attrs.validators import ge, instance_of

from kvpolicy import WaitingRequest, hookimpl


@attrs.define(eq=False, kw_only=True)
class SkipKVBatches:
    """Batch grouping: admit prompts in order of length, in whole batches.

    SkipKV, MLSys 2026 (arXiv 2512.07993), section 4.3: requests are sorted by prompt
    length and divided into batches, so that padded batches lose little of their budget to pads.
    This engine stores no pads, so grouping only saves prefill work; with ``padding = "stored"``
    in the plan it has the effect of the paper.

    Attributes:
        batch_size: Requests of a batch. A batch is admitted when the one before has finished. 0
            fills every slot as soon as it is free, shortest prompt first.
        by_length: Whether requests of equal priority are sorted by length; if not, they are
            admitted in order of arrival, like the paper's baselines.
    """

    batch_size: int = attrs.field(default=0, validator=[instance_of(int), ge(0)])
    by_length: bool = attrs.field(default=True, validator=instance_of(bool))

    @hookimpl
    def schedule(
        self, waiting: Sequence[WaitingRequest], num_free: int, num_active: int
    ) -> list[list[int]]:
        """Admit the next batch, or wait until the running one has finished."""
        if self.batch_size and num_active:
            return []
        order = sorted(waiting, key=lambda one: (-one.priority, one.prompt_len * self.by_length))
        num = min(self.batch_size or num_free, num_free)
        return [[request.id for request in order[:num]]]
