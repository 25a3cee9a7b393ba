"""One job of a comparison through the engine."""

import hashlib
import time
from collections.abc import Iterator

import attrs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpolicy.engine.engine import Engine
from kvpolicy.engine.request import Request
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.group import Group
from kvpolicy.lab.sweep.jobs import ItemDone, Job, JobDone, News
from kvpolicy.lab.sweep.recording import keeping
from kvpolicy.lab.tasks.chat_template import encode
from kvpolicy.lab.tasks.measures import Asked, Trial
from kvpolicy.lab.tasks.task import Item


@attrs.frozen
class Server:
    """Serves the jobs of one model.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        comparison: What the jobs are parts of.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    comparison: Comparison

    def serve(self, job: Job) -> Iterator[News]:
        """Measure the items of a job under the plan of its cell.

        Args:
            job: The job, of a group of this model.

        Yields:
            Outcomes as they are known, and the report at the end.
        """
        begun = time.perf_counter()
        trial = self.begin(job)
        recorded = self.comparison.recorded(self.comparison.cell(job.cell))
        chosen = [number for number, place in enumerate(job.items) if place in recorded]
        with keeping(trial.run, chosen) as keeper:
            for result in trial.run:
                kept = keeper.taken(result) if result.id in keeper.requests else None
                yield ItemDone(job, job.items[result.id], trial.outcome(result), kept)
        yield JobDone(job, trial.run.report, time.perf_counter() - begun)

    def begin(self, job: Job) -> Trial:
        """Begin with the items of a job; nothing is computed before the trial's run goes on.

        Args:
            job: The job, of a group of this model.
        """
        cell = self.comparison.cell(job.cell)
        group = self.comparison.group_of(cell)
        slots = min(group.slots, len(job.items))
        engine = Engine(self.model, self.tokenizer, cell.resolved, slots=slots)
        items = [group.items[place] for place in job.items]
        asked = [Asked(item, self._request(group, item)) for item in items]
        return group.task.measure.begin(engine, asked)

    def _request(self, group: Group, item: Item) -> Request:
        """What the engine is asked; every attempt at an item is drawn with a seed of its own."""
        sampling = attrs.evolve(group.sampling, seed=attempt_seed(group.sampling.seed, item))
        return Request(encode(item, self.tokenizer), group.max_new_tokens, sampling)


def attempt_seed(seed: int, item: Item) -> int:
    """Seed of one attempt: two attempts, or two items with one text, are drawn apart.

    Args:
        seed: Seed of the run.
        item: The attempt.
    """
    text = f"{seed} {item.index} {item.attempt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
