"""Train a bundled reasoner, in runs that can be stopped and resumed."""

import json
from collections.abc import Callable
from pathlib import Path

import attrs
import torch

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.store.jsonl import lock_folder
from kvpolicy_reasoner import REASONER
from kvpolicy_reasoner.evaluate import attempt, score
from kvpolicy_reasoner.export import export_model
from kvpolicy_reasoner.train.checkpoint import Progress, load_checkpoint, save_checkpoint
from kvpolicy_reasoner.train.clock import RunClock
from kvpolicy_reasoner.train.data import examples_of_step
from kvpolicy_reasoner.train.learner import Learner, StepLosses
from kvpolicy_reasoner.train.log import TrainingRecord, append_record, rewind_log
from kvpolicy_reasoner.train.overlap import count_overlap
from kvpolicy_reasoner.train.recipes import Recipe, recipe_of
from kvpolicy_reasoner.train.runfolder import (
    LOG,
    MODEL,
    OVERLAP,
    RunIdentity,
    claim_folder,
    write_text,
)
from kvpolicy_reasoner.train.workers import Team, run_together

TOKENS_PER_STEP = 8192

_LOG_EVERY_STEPS = 10
_EVALUATE_EVERY_STEPS = 400
_NUM_TUNE_PROBLEMS = 50


def train(
    output: Path,
    *,
    name: str = REASONER,
    seed: int = 0,
    tokens: int | None = None,
    tokens_per_step: int = TOKENS_PER_STEP,
    workers: int = 2,
    resume: bool = True,
    stop_after: int | None = None,
    save_every_s: float = 180.0,
    report: Callable[[TrainingRecord], None] | None = None,
) -> Path:
    """Train a reasoner, or continue to.

    Args:
        output: Folder of the run: checkpoint, log, the model in Hugging Face form, and, when the
            run is complete, the count of prompts shared with the held-out sets.
        name: Which of the bundled reasoners to train.
        seed: Chooses the untrained weights and the problems.
        tokens: Tokens of the whole run; those of the shipped weights if not given.
        tokens_per_step: Tokens of one optimiser step.
        workers: Processes of one thread each that share the work of a step.
        resume: Continue the run found in ``output``; else start it again.
        stop_after: Stop when this many steps are done in all; the schedule stays that of the
            whole run.
        save_every_s: Seconds between checkpoints.
        report: Called with every line of the log.

    Returns:
        The folder of the trained model.

    Raises:
        KVPolicyError: A number is out of range, or ``output`` belongs to something else.
    """
    recipe = recipe_of(name)
    tokens = recipe.tokens if tokens is None else tokens
    _check(recipe, tokens, tokens_per_step, workers)
    identity = RunIdentity(seed, tokens, tokens_per_step, workers, name)
    claim_folder(output, identity, resume=resume)
    lock = lock_folder(output)
    try:
        last = identity.num_steps if stop_after is None else min(stop_after, identity.num_steps)
        run = _Run(output, identity, last, save_every_s)
        run_together(workers, run, lead=attrs.evolve(run, report=report))
        if last == identity.num_steps:
            overlap = count_overlap(identity.data_plan)
            write_text(output / OVERLAP, json.dumps(attrs.asdict(overlap), indent=2) + "\n")
    finally:
        lock.release()
    return output / MODEL


@attrs.frozen
class _Run:
    """A run as each of the processes sees it; only the first one writes and reports."""

    output: Path
    identity: RunIdentity
    last_step: int
    save_every_s: float
    report: Callable[[TrainingRecord], None] | None = None

    def __call__(self, team: Team) -> None:
        """Do the steps that are left."""
        recipe = recipe_of(self.identity.name)
        learner = Learner(recipe, self.identity.seed, self.identity.num_steps, team)
        progress = self._restore(learner)
        if team.rank == 0:
            rewind_log(self.output / LOG, progress.step)
        clock = RunClock(progress, self.save_every_s)
        for step in range(progress.step, self.last_step):
            losses = learner.step(step, examples_of_step(self.identity.data_plan, step))
            done = step + 1
            is_last = done == self.last_step
            if is_last or done % _LOG_EVERY_STEPS == 0:
                self._log(learner, team, clock, done, losses)
            if team.rank == 0 and (is_last or clock.is_save_due()):
                save_checkpoint(self.output, learner.state(), Progress(done, clock.elapsed_s))
                export_model(learner.snapshot(), recipe.build_tokenizer(), self.output / MODEL)
        # Nobody leaves before the files are there.
        team.wait()

    def _restore(self, learner: Learner) -> Progress:
        """Go back to the last checkpoint, if there is one."""
        found = load_checkpoint(self.output)
        if found is None:
            return Progress()
        tensors, progress = found
        learner.load_state(tensors)
        return progress

    def _log(
        self, learner: Learner, team: Team, clock: RunClock, done: int, losses: StepLosses
    ) -> None:
        """Write one line; now and then, measure the accuracy for it."""
        num_steps = self.identity.num_steps
        tokens_per_s = clock.lap(done) * self.identity.tokens_per_step
        accuracy = None
        if done == num_steps or done % _EVALUATE_EVERY_STEPS == 0:
            accuracy = _tune_accuracy(learner, team)
            clock.skip_lap()
        if team.rank > 0:
            return
        record = TrainingRecord(
            step=done,
            num_steps=num_steps,
            tokens=done * self.identity.tokens_per_step,
            loss=losses.loss,
            settled_loss=losses.settled,
            lr=losses.lr,
            elapsed_s=clock.elapsed_s,
            throughput_tok_s=tokens_per_s,
            tune_accuracy=accuracy,
        )
        append_record(self.output / LOG, record)
        if self.report is not None:
            self.report(record)


def _tune_accuracy(learner: Learner, team: Team) -> float:
    """Solve held-out problems, each process its share of them."""
    recipe = learner.recipe
    problems = recipe.problems.draw(_NUM_TUNE_PROBLEMS, seed=0, split="tune")[
        team.rank :: team.size
    ]
    model, tokenizer = learner.snapshot(), recipe.build_tokenizer()
    share = score(attempt(model, tokenizer, problems))
    counts = torch.tensor([share.right, share.total])
    team.add_up(counts)
    right, total = counts.tolist()
    return right / total


def _check(recipe: Recipe, tokens: int, tokens_per_step: int, workers: int) -> None:
    if tokens_per_step < recipe.min_tokens_per_step:
        msg = (
            f"training got {tokens_per_step} tokens per step; expected"
            f" {recipe.min_tokens_per_step} or more, so that the longest problem fits."
        )
        raise KVPolicyError(msg)
    if tokens < tokens_per_step:
        msg = (
            f"training got {tokens} tokens; expected one step of {tokens_per_step} at least"
            f" (the shipped weights took {recipe.tokens})."
        )
        raise KVPolicyError(msg)
    if workers < 1:
        msg = f"training got {workers} workers; expected 1 or more, at most one per core."
        raise KVPolicyError(msg)
