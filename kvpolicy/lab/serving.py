"""One job of a comparison through the engine."""

import time
from collections.abc import Iterator, Sequence

import attrs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpolicy.engine import Engine
from kvpolicy.lab.pool import ItemDone, Job, JobDone, News
from kvpolicy.plan import Plan


@attrs.frozen
class Server:
    """Serves jobs with one model.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        plans: Plan of each cell.
        prompts: Prompt of each item.
        slots: Samples decoded together, at most.
        max_new_tokens: The most tokens a sample may generate.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    plans: Sequence[Plan]
    prompts: Sequence[str]
    slots: int
    max_new_tokens: int

    def serve(self, job: Job) -> Iterator[News]:
        """Run the items of a job under the plan of its cell.

        Args:
            job: The job.

        Yields:
            Results as they are finished, and the report at the end.
        """
        begun = time.perf_counter()
        slots = min(self.slots, len(job.items))
        engine = Engine(self.model, self.tokenizer, self.plans[job.cell], slots=slots)
        prompts = [self.prompts[place] for place in job.items]
        run = engine.generate(prompts, max_new_tokens=self.max_new_tokens)
        for result in run:
            yield ItemDone(job, job.items[result.id], result)
        yield JobDone(job, run.report, time.perf_counter() - begun)
