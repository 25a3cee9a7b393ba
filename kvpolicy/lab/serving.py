"""One job of a comparison through the engine."""

import hashlib
import time
from collections.abc import Iterator, Sequence

import attrs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpolicy.engine import Engine
from kvpolicy.lab.chat import encode
from kvpolicy.lab.measures import Asked, Measure
from kvpolicy.lab.pool import ItemDone, Job, JobDone, News
from kvpolicy.lab.tasks import Item
from kvpolicy.plan import Plan
from kvpolicy.request import Request, Sampling


@attrs.frozen
class Server:
    """Serves jobs with one model.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        plans: Plan of each cell.
        items: The items.
        measure: How they are measured.
        sampling: How tokens are drawn; every attempt at an item has a seed of its own.
        slots: Samples decoded together, at most.
        max_new_tokens: The most tokens a sample may generate.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    plans: Sequence[Plan]
    items: Sequence[Item]
    measure: Measure
    sampling: Sampling
    slots: int
    max_new_tokens: int

    def serve(self, job: Job) -> Iterator[News]:
        """Measure the items of a job under the plan of its cell.

        Args:
            job: The job.

        Yields:
            Outcomes as they are known, and the report at the end.
        """
        begun = time.perf_counter()
        slots = min(self.slots, len(job.items))
        engine = Engine(self.model, self.tokenizer, self.plans[job.cell], slots=slots)
        items = [self.items[place] for place in job.items]
        asked = [Asked(item, self._request(item)) for item in items]
        trial = self.measure.begin(engine, asked)
        for result in trial.run:
            yield ItemDone(job, job.items[result.id], trial.outcome(result))
        yield JobDone(job, trial.run.report, time.perf_counter() - begun)

    def _request(self, item: Item) -> Request:
        sampling = attrs.evolve(self.sampling, seed=attempt_seed(self.sampling.seed, item))
        return Request(encode(item, self.tokenizer), self.max_new_tokens, sampling)


def attempt_seed(seed: int, item: Item) -> int:
    """Seed of one attempt: two attempts, or two items with one text, are drawn apart.

    Args:
        seed: Seed of the run.
        item: The attempt.
    """
    text = f"{seed} {item.index} {item.attempt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
