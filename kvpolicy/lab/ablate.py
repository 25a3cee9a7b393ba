"""Running a comparison: what is not yet done goes to the pool, what is done is kept at once."""

from collections.abc import Container, Iterator, Sequence
from typing import Any

import attrs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpolicy.lab.fingerprint import fingerprint, fingerprint_texts
from kvpolicy.lab.grid import Cell
from kvpolicy.lab.measures import Outcome
from kvpolicy.lab.pool import Job, JobDone, Pool
from kvpolicy.lab.samples import CellTiming, Sample, sample_key
from kvpolicy.lab.store import Store
from kvpolicy.lab.tasks import Item, Split, Task
from kvpolicy.request import Sampling


@attrs.frozen
class SampleDone:
    """A sample is finished and kept."""

    cell: Cell
    sample: Sample


@attrs.frozen
class CellDone:
    """The last sample of a cell is finished and kept."""

    cell: Cell
    elapsed_s: float


Event = SampleDone | CellDone


@attrs.frozen
class Comparison:
    """Everything the samples depend on.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        model_name: What the user calls it.
        task: Where the items come from, and how a cell is measured with them.
        items: The items every cell is asked, each attempt at one for itself.
        cells: What is compared.
        seed: Chooses the items.
        max_new_tokens: The most tokens a sample may generate.
        slots: Samples decoded together.
        split: Split of the task that the items are of.
        sampling: How tokens are drawn.
        model_id: Fingerprint of the model.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    model_name: str
    task: Task
    items: Sequence[Item]
    cells: Sequence[Cell]
    seed: int
    max_new_tokens: int
    slots: int
    split: Split = "test"
    sampling: Sampling = attrs.field(factory=Sampling)
    model_id: str = attrs.field(init=False)

    @model_id.default
    def _fingerprint(self) -> str:
        return fingerprint(self.model)

    @property
    def num_attempts(self) -> int:
        """How often every item is asked."""
        return 1 + max((item.attempt for item in self.items), default=0)

    @property
    def num_samples(self) -> int:
        """Samples in all."""
        return len(self.cells) * len(self.items)

    def num_left(self, done: Container[str]) -> int:
        """Samples still to be done.

        Args:
            done: Keys of those that are done.
        """
        return sum(self.key(c, i) not in done for c in self.cells for i in self.items)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that tells this run from every other, for the manifest."""
        return {
            "model": self.model_name,
            "model_fingerprint": self.model_id,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "task": self.task.name,
            "n": len({item.index for item in self.items}),
            "seed": self.seed,
            # Said only where it differs, so that runs of earlier versions can go on.
            **({} if self.split == "test" else {"split": self.split}),
            **({} if self.num_attempts == 1 else {"attempts": self.num_attempts}),
            "prompt_hash": fingerprint_texts([self._text(item) for item in self.items]),
            "sampling": describe_sampling(self.sampling),
            "max_new_tokens": self.max_new_tokens,
            "slots": self.slots,
            "cells": [cell.to_dict() for cell in self.cells],
        }

    def key(self, cell: Cell, item: Item) -> str:
        """Name of one sample: a hash of everything it depends on."""
        return sample_key(
            plan=cell.digest,
            model=self.model_id,
            prompt=self._text(item),
            item=item.index,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            more=self._more(item),
        )

    def _text(self, item: Item) -> str:
        """All that is read of an item."""
        reads_reference = self.task.measure.reads_reference and item.reference is not None
        return f"{item.prompt}{item.reference}" if reads_reference else item.prompt

    def _more(self, item: Item) -> list[object]:
        usual = {"measure": "answers", "sampling": "greedy", "attempt": 0}
        ours = {
            "measure": self.task.measure.name,
            "sampling": describe_sampling(self.sampling),
            "attempt": item.attempt,
        }
        return [[what, value] for what, value in ours.items() if value != usual[what]]


def describe_sampling(sampling: Sampling) -> str:
    """How tokens are drawn, in words."""
    if sampling.greedy:
        return "greedy"
    top_p = "" if sampling.top_p == 1 else f", top-p {sampling.top_p:g}"
    return f"temperature {sampling.temperature:g}{top_p}"


def run(comparison: Comparison, store: Store, pool: Pool) -> Iterator[Event]:
    """Do what is not yet done; may be left at any moment and called again.

    Args:
        comparison: What to run.
        store: What is done, and where it is kept.
        pool: Who does it.

    Yields:
        What happens, as it happens. A sample is on disk before it is reported.
    """
    for news in pool.serve(_jobs(comparison, store)):
        cell = comparison.cells[news.job.cell]
        if isinstance(news, JobDone):
            if len(news.job.items) == len(comparison.items):
                store.add_timing(_timing(cell, news))
            yield CellDone(cell, news.elapsed_s)
        else:
            sample = _sample(comparison, cell, news.item, news.outcome)
            store.add(sample)
            yield SampleDone(cell, sample)


def _jobs(comparison: Comparison, store: Store) -> list[Job]:
    """What is left of each cell, the costliest cells first, so that none is waited for alone."""
    jobs = []
    for number, cell in enumerate(comparison.cells):
        left = [
            place
            for place, item in enumerate(comparison.items)
            if comparison.key(cell, item) not in store.samples
        ]
        if left:
            jobs.append(Job(number, tuple(left)))
    budgets = [cell.budget for cell in comparison.cells]
    return sorted(jobs, key=lambda job: -(budgets[job.cell] or float("inf")))


def _sample(comparison: Comparison, cell: Cell, place: int, outcome: Outcome) -> Sample:
    item, result = comparison.items[place], outcome.result
    return Sample(
        key=comparison.key(cell, item),
        cell=cell.digest,
        item=item.index,
        correct=outcome.correct,
        finish_reason=result.finish_reason,
        error=result.error,
        text=result.text or "",
        prompt_len=result.prompt_len,
        num_tokens=len(result.tokens),
        compactions=result.compactions,
        rows_evicted=result.rows_evicted,
        peak_rows=result.peak_rows,
        peak_bytes=result.peak_bytes,
        prefill_s=round(result.prefill_s, 6),
        decode_s=round(result.decode_s, 6),
        attempt=item.attempt,
        facets=dict(item.facets),
        values=dict(outcome.values),
        ungraded=outcome.problem,
    )


def _timing(cell: Cell, done: JobDone) -> CellTiming:
    return CellTiming(
        cell=cell.digest,
        num_requests=len(done.job.items),
        new_tokens=done.report.new_tokens,
        elapsed_s=done.report.elapsed_s,
        policy_s=done.report.policy_s,
        decode_s=done.report.decode_s,
        peak_kv_bytes=done.report.peak_kv_bytes,
    )
