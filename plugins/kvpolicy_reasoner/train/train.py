"""Training of a bundled reasoner, in runs that can be interrupted and resumed."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvpolicy.errors import KVPolicyError, OutputError
from kvpolicy.files import atomic_write
from kvpolicy.lab.store.jsonl import lock_folder
from kvpolicy.lab.tasks.task import Split
from kvpolicy.model.libraries import first_sentence
from kvpolicy_reasoner import REASONER
from kvpolicy_reasoner.evaluate import attempt, score
from kvpolicy_reasoner.problems import problems_of
from kvpolicy_reasoner.train.data import DataPlan, examples_of_step, training_prompts
from kvpolicy_reasoner.train.learner import Learner, ProcessGroup, StepLosses, run_distributed
from kvpolicy_reasoner.train.recipes import Recipe, recipe_of

CHECKPOINT = "checkpoint.safetensors"


@attrs.frozen
class Progress:
    """Progress of a run.

    Attributes:
        step: Steps done.
        elapsed_s: Wall time of these steps, over all sessions.
    """

    step: int = 0
    elapsed_s: float = 0.0


def save_checkpoint(output: Path, tensors: Mapping[str, Tensor], progress: Progress) -> None:
    """Write a checkpoint atomically.

    Args:
        output: The folder of the run.
        tensors: Parameters and optimizer state.
        progress: Progress of the run.
    """
    metadata = {key: json.dumps(value) for key, value in attrs.asdict(progress).items()}
    partial = output / f"{CHECKPOINT}.partial"
    save_file({key: value.contiguous() for key, value in tensors.items()}, partial, metadata)
    os.replace(partial, output / CHECKPOINT)


def load_checkpoint(output: Path) -> tuple[dict[str, Tensor], Progress] | None:
    """Read the checkpoint of a run.

    Args:
        output: The folder of the run.

    Returns:
        The saved state, or ``None`` if there is no checkpoint yet.
    """
    path = output / CHECKPOINT
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
    return tensors, Progress(**metadata)


class RunClock:
    """Wall time of a run over all its sessions; does not affect the model."""

    def __init__(self, progress: Progress, save_every_s: float) -> None:
        """Start the clock.

        Args:
            progress: Progress of earlier sessions.
            save_every_s: Seconds between checkpoints.
        """
        now = time.perf_counter()
        self._started = now - progress.elapsed_s
        self._save_every_s = save_every_s
        self._saved = now
        self._lap = (progress.step, now)

    @property
    def elapsed_s(self) -> float:
        """Wall time so far."""
        return time.perf_counter() - self._started

    def is_save_due(self) -> bool:
        """Whether a checkpoint is due; if so, the interval to the next one starts."""
        now = time.perf_counter()
        is_due = now - self._saved >= self._save_every_s
        if is_due:
            self._saved = now
        return is_due

    def lap(self, step: int) -> float:
        """Steps per second since the previous lap.

        Args:
            step: Steps done.
        """
        last_step, last_time = self._lap
        self._lap = (step, time.perf_counter())
        return (step - last_step) / (self._lap[1] - last_time)

    def skip_lap(self) -> None:
        """Exclude the time since the previous lap from the next one."""
        self._lap = (self._lap[0], time.perf_counter())


IDENTITY = "run.json"
LOG = "log.jsonl"
MODEL = "model"
OVERLAP = "overlap.json"


@attrs.frozen
class RunIdentity:
    """Settings that must be equal for a run to be resumed.

    Attributes:
        seed: Random seed for weights and problems.
        tokens: Tokens of the whole run.
        tokens_per_step: Tokens of one step.
        workers: Processes that share a step; it changes the rounding of summed gradients.
        name: Name of the reasoner.
        device: Where steps are computed; it changes their rounding.
    """

    seed: int
    tokens: int
    tokens_per_step: int
    workers: int
    name: str = REASONER
    device: str = "cpu"

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.tokens // self.tokens_per_step

    @property
    def data_plan(self) -> DataPlan:
        """Parameters of the training data."""
        return DataPlan(self.seed, self.num_steps, self.tokens_per_step, self.name)


def claim_folder(output: Path, identity: RunIdentity, *, resume: bool) -> None:
    """Prepare the folder of a run.

    Args:
        output: The folder; created if missing.
        identity: The run.
        resume: Whether to keep the checkpoint and log of an earlier session.

    Raises:
        OutputError: The folder has other contents, or cannot be written.
    """
    if output.exists() and not output.is_dir():
        msg = f"--output {output} is a file; give a new folder, or the folder of the same run"
        raise OutputError(msg)
    expected = attrs.asdict(identity)
    if output.exists() and any(output.iterdir()):
        _check_owner(output, expected, resume=resume)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not resume:
            for name in (CHECKPOINT, LOG, OVERLAP):
                (output / name).unlink(missing_ok=True)
    except OSError as error:
        msg = f"--output {output} cannot be written: {error.strerror}; give another folder"
        raise OutputError(msg) from error
    atomic_write(output / IDENTITY, json.dumps(expected, indent=2) + "\n")


def _check_owner(output: Path, expected: dict[str, int | str], *, resume: bool) -> None:
    try:
        found = json.loads((output / IDENTITY).read_text())
        if not isinstance(found, dict):
            raise ValueError
    except (OSError, ValueError) as error:
        msg = (
            f"--output {output} contains other files; give an empty folder, or the folder of a "
            "training run"
        )
        raise OutputError(msg) from error
    differing = [
        f"{key} {found.get(key)} instead of {value}"
        for key, value in expected.items()
        if found.get(key) != value
    ]
    if resume and differing:
        msg = (
            f"--output {output} belongs to another run ({', '.join(differing)}); give another "
            "folder, the options of that run, or --restart"
        )
        raise OutputError(msg)


@attrs.frozen
class TrainingRecord:
    """One line of the log.

    Attributes:
        step: Steps done.
        num_steps: Steps of the whole run.
        tokens: Tokens seen.
        loss: Mean cross-entropy of the last step, with loss weights.
        settled_loss: Mean cross-entropy over tokens that the text before them determines.
        lr: Learning rate of the last step.
        elapsed_s: Wall time so far, over all sessions.
        throughput_tok_s: Tokens per second since the previous line.
        tune_accuracy: Greedy accuracy on held-out problems; ``None`` if not measured.
    """

    step: int
    num_steps: int
    tokens: int
    loss: float
    settled_loss: float
    lr: float
    elapsed_s: float
    throughput_tok_s: float
    tune_accuracy: float | None = None


def append_record(path: Path, record: TrainingRecord) -> None:
    """Append a line to the log.

    Args:
        path: The log; created if missing.
        record: The line.
    """
    with path.open("a") as file:
        file.write(json.dumps(attrs.asdict(record)) + "\n")


def read_records(path: Path) -> list[TrainingRecord]:
    """Read a log; an incomplete last line is skipped.

    Args:
        path: The log, which need not exist.

    Returns:
        The lines, oldest first.
    """
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [TrainingRecord(**json.loads(line)) for line in lines if line.endswith("\n")]


def rewind_log(path: Path, step: int) -> None:
    """Remove the lines of steps that a resumed run repeats.

    Args:
        path: The log, which need not exist.
        step: Steps done at the checkpoint.
    """
    kept = [record for record in read_records(path) if record.step <= step]
    atomic_write(path, "".join(json.dumps(attrs.asdict(record)) + "\n" for record in kept))


_NUM_HELD_OUT = 2000
_HELD_OUT: Sequence[Split] = ("tune", "test")


@attrs.frozen
class Overlap:
    """Overlap between training prompts and held-out prompts.

    Attributes:
        num_training: Training prompts, including repetitions.
        num_distinct: Distinct training prompts.
        num_held_out: Held-out prompts compared.
        num_shared: Held-out prompts that occur among the training prompts.
    """

    num_training: int
    num_distinct: int
    num_held_out: int
    num_shared: int


def count_overlap(plan: DataPlan) -> Overlap:
    """Generate the training prompts of a run again and count held-out prompts among them.

    Args:
        plan: Parameters of the training data.

    Returns:
        The counts, over the first 2,000 problems of seed 0 of each held-out split.
    """
    problems = problems_of(plan.name)
    held_out = {
        problem.prompt
        for split in _HELD_OUT
        for problem in problems.draw(_NUM_HELD_OUT, seed=0, split=split)
    }
    prompts = list(training_prompts(plan))
    distinct = set(prompts)
    return Overlap(
        num_training=len(prompts),
        num_distinct=len(distinct),
        num_held_out=len(held_out),
        num_shared=len(held_out & distinct),
    )


_LOG_EVERY_STEPS = 10
_NUM_TUNE_PROBLEMS = 50


def train(
    output: Path,
    *,
    name: str = REASONER,
    seed: int = 0,
    tokens: int | None = None,
    tokens_per_step: int | None = None,
    workers: int | None = None,
    device: str = "cpu",
    resume: bool = True,
    stop_after: int | None = None,
    save_every_s: float = 180.0,
    report: Callable[[TrainingRecord], None] | None = None,
) -> Path:
    """Train a reasoner, or resume its training.

    Args:
        output: Folder of the run: checkpoint, log, the model in Hugging Face format, or its
            adapter in PEFT's, and, after the last step, the overlap with held-out prompts.
        name: Name of the reasoner.
        seed: Random seed for initial weights and problems.
        tokens: Tokens of the whole run; as for the bundled weights if not given.
        tokens_per_step: Tokens of one optimizer step; as for the bundled weights if not given.
        workers: Single-thread processes that share each step; 2 if not given, 1 on a GPU.
        device: Where steps are computed, such as ``"cuda"``.
        resume: Whether to resume a run in ``output``, or to restart it.
        stop_after: Stop after this step; the learning rate is that of the whole run.
        save_every_s: Seconds between checkpoints.
        report: Called with each line of the log.

    Returns:
        The folder of the trained model.

    Raises:
        KVPolicyError: A number is out of range, ``output`` has other contents, or what the
            training starts from is not installed.
    """
    recipe = recipe_of(name)
    tokens = recipe.tokens if tokens is None else tokens
    tokens_per_step = recipe.tokens_per_step if tokens_per_step is None else tokens_per_step
    if workers is None:
        workers = 2 if device == "cpu" else 1
    _check(recipe, tokens, tokens_per_step, workers, device)
    recipe.check()
    identity = RunIdentity(seed, tokens, tokens_per_step, workers, name, device)
    claim_folder(output, identity, resume=resume)
    lock = lock_folder(output)
    try:
        last = identity.num_steps if stop_after is None else min(stop_after, identity.num_steps)
        run = _Run(output, identity, last, save_every_s)
        run_distributed(workers, run, lead=attrs.evolve(run, report=report))
        if last == identity.num_steps:
            overlap = count_overlap(identity.data_plan)
            atomic_write(output / OVERLAP, json.dumps(attrs.asdict(overlap), indent=2) + "\n")
    finally:
        lock.release()
    return output / MODEL


@attrs.frozen
class _Run:
    """The work of each process; only rank 0 writes and reports."""

    output: Path
    identity: RunIdentity
    last_step: int
    save_every_s: float
    report: Callable[[TrainingRecord], None] | None = None

    def __call__(self, processes: ProcessGroup) -> None:
        """Do the remaining steps."""
        recipe = recipe_of(self.identity.name)
        identity = self.identity
        learner = Learner(recipe, identity.seed, identity.num_steps, processes, identity.device)
        progress = self._restore(learner)
        if processes.rank == 0:
            rewind_log(self.output / LOG, progress.step)
        clock = RunClock(progress, self.save_every_s)
        for step in range(progress.step, self.last_step):
            losses = learner.step(step, examples_of_step(self.identity.data_plan, step))
            done = step + 1
            is_last = done == self.last_step
            if is_last or done % _LOG_EVERY_STEPS == 0:
                self._log(learner, processes, clock, done, losses)
            if processes.rank == 0 and (is_last or clock.is_save_due()):
                save_checkpoint(self.output, learner.state(), Progress(done, clock.elapsed_s))
                recipe.export(learner.snapshot(), recipe.build_tokenizer(), self.output / MODEL)
        # No process returns before the files are written.
        processes.barrier()

    def _restore(self, learner: Learner) -> Progress:
        """Load the last checkpoint, if there is one."""
        found = load_checkpoint(self.output)
        if found is None:
            return Progress()
        tensors, progress = found
        learner.load_state(tensors)
        return progress

    def _log(
        self,
        learner: Learner,
        processes: ProcessGroup,
        clock: RunClock,
        done: int,
        losses: StepLosses,
    ) -> None:
        """Append a line to the log, with the accuracy every `Recipe.evaluate_every_steps` steps."""
        num_steps = self.identity.num_steps
        tokens_per_s = clock.lap(done) * self.identity.tokens_per_step
        accuracy = None
        if done == num_steps or done % learner.recipe.evaluate_every_steps == 0:
            accuracy = tune_accuracy(learner, processes)
            clock.skip_lap()
        if processes.rank > 0:
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


def tune_accuracy(learner: Learner, processes: ProcessGroup) -> float:
    """Accuracy on held-out problems, which are divided among the processes."""
    recipe = learner.recipe
    problems = recipe.problems.draw(_NUM_TUNE_PROBLEMS, seed=0, split="tune")[
        processes.rank :: processes.size
    ]
    model, tokenizer = learner.snapshot(), recipe.build_tokenizer()
    limit = recipe.problems.max_new_tokens
    own = score(attempt(model, tokenizer, problems, max_new_tokens=limit))
    counts = torch.tensor([own.num_correct, own.total])
    processes.all_reduce(counts)
    num_correct, total = counts.tolist()
    return num_correct / total


def _check(recipe: Recipe, tokens: int, tokens_per_step: int, workers: int, device: str) -> None:
    if tokens_per_step < recipe.min_tokens_per_step:
        msg = (
            f"train got tokens_per_step={tokens_per_step}; expected {recipe.min_tokens_per_step} "
            "or more, so that the longest problem fits"
        )
        raise KVPolicyError(msg)
    if tokens < tokens_per_step:
        msg = (
            f"train got tokens={tokens}; expected at least {tokens_per_step}, which is one step "
            f"(the bundled weights took {recipe.tokens})"
        )
        raise KVPolicyError(msg)
    if workers < 1:
        msg = f"train got workers={workers}; expected 1 or more, at most one per core"
        raise KVPolicyError(msg)
    if workers > 1 and device != "cpu":
        msg = f"train got workers={workers} on device '{device}'; expected 1, or the device cpu"
        raise KVPolicyError(msg)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        msg = f"train got device '{device}', which is not there: {first_sentence(error)}"
        raise KVPolicyError(msg) from error
