"""Batch grouping: requests with prompts of like length are served together."""

from collections.abc import Sequence

import attrs
from attrs.validators import ge, instance_of

from kvpolicy import hookimpl
from kvpolicy.engine.request import Waiting


@attrs.define(eq=False, kw_only=True)
class SkipKVBatches:
    """Batch grouping: prompts in order of length, served in whole batches.

    SkipKV, MLSys 2026 (arXiv 2512.07993), section 4.3: requests are sorted by the length of
    their prompts and cut into batches, so that padded batches lose little of their budget to
    pads. Our engine stores no pads, so that grouping saves prefill work only; in plans with
    ``padding = "stored"`` it shows what it does in the paper.

    Attributes:
        batch_size: Requests of a batch, which is admitted when no other is under way; 0 fills
            every slot as soon as it is free, with the request whose prompt is shortest.
        by_length: Whether requests are sorted; if not, they go in order of arrival, as the
            paper's baselines do.
    """

    batch_size: int = attrs.field(default=0, validator=[instance_of(int), ge(0)])
    by_length: bool = attrs.field(default=True, validator=instance_of(bool))

    @hookimpl
    def schedule(
        self, waiting: Sequence[Waiting], num_free: int, num_active: int
    ) -> list[list[int]]:
        """Admit the next batch, or wait until the one under way has ended."""
        if self.batch_size and num_active:
            return []
        order = sorted(waiting, key=lambda request: request.prompt_len * self.by_length)
        num = min(self.batch_size or num_free, num_free)
        return [[request.id for request in order[:num]]]
