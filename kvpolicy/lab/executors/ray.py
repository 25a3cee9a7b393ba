"""The executor of a Ray cluster, whose workers may be lost while they run jobs.

A worker is a Ray actor that holds one model. Jobs are split where there are too few for all
workers, and results stream back one by one; only this process writes. Ray restarts a lost worker
as soon as a node has the resources. Its job does not wait for that: the samples that have not
arrived are queued again for any worker. Retries by Ray (``max_task_retries``) would repeat the
whole job, and on the same worker only.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from math import ceil
from typing import Any, Self

import attrs

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.executors.ray_cluster import connect, start_cluster
from kvpolicy.lab.executors.ray_worker import Worker, WorkerConfig
from kvpolicy.lab.models import Lengths, ModelCache, ModelInfo
from kvpolicy.lab.prompt_files.answering import (
    Answered,
    Answering,
    PromptAnswered,
    Shard,
    ShardFinished,
)
from kvpolicy.lab.sweep.grid import Sweep
from kvpolicy.lab.sweep.jobs import Event, Job, JobFinished, JobProgress, SampleMeasured
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.prompts import Prompt

Resources = Mapping[str, float]
Work = Job | Shard

_MIN_GPUS = 0.0001  # the smallest share that Ray counts
_JOBS_PER_WORKER = 3  # so that the last ones end at about the same time
_MOST_BATCHES = 64  # of a shard: its prompts are in the memory of a worker
_MAX_LOSSES = 3  # workers lost in a row without a sample from the same job
_RETRIES = 2  # of calls that run no samples
_MAX_RESTARTS = 20  # of one worker, so that one that always dies ends the sweep
_PATIENCE_S = 30.0  # before the user is told that no worker has begun


@attrs.frozen
class WorkerResources:
    """How many workers are wanted, and what each of them takes.

    Attributes:
        workers: Workers side by side; as many as fit into the cluster if ``None``.
        cpus: CPUs of each, and the threads it computes with.
        gpus: GPUs of each; if ``None``, 1 where there are any, else 0. A fraction is shared with
            other workers.

    Raises:
        KVPolicyError: Ray cannot assign this number of GPUs.
    """

    workers: int | None = None
    cpus: int = 1
    gpus: float | None = None

    def __attrs_post_init__(self) -> None:
        gpus = self.gpus
        if gpus is None or gpus == 0 or _MIN_GPUS <= gpus <= 1:
            return
        if not (gpus > 1 and float(gpus).is_integer()):
            msg = (
                f"--gpus-per-worker was given {gpus:g}; Ray assigns whole GPUs, or a fraction of "
                "one: try 0.5, 1 or 2."
            )
            raise KVPolicyError(msg)

    def of_each(self, nodes: Sequence[Resources], device: str | None) -> Resources:
        """Return the CPUs and GPUs of each worker.

        Args:
            nodes: Total resources of each node: ``"CPU"``, ``"GPU"``.
            device: Device of the models, if the user set one.
        """
        gpus = self.gpus
        if gpus is None and device is not None:
            gpus = float(device.startswith("cuda"))
        elif gpus is None:
            gpus = float(any(node.get("GPU", 0) >= 1 for node in nodes))
        return {"CPU": self.cpus, "GPU": gpus}

    def num_workers(self, nodes: Sequence[Resources], device: str | None) -> int:
        """Return the number of workers.

        Args:
            nodes: As in `of_each`.
            device: Likewise.

        Raises:
            KVPolicyError: No node has the resources of one worker, and no number was set.
        """
        if self.workers is not None:
            return self.workers
        each = self.of_each(nodes, device)
        found = sum(
            int(min(node.get(name, 0) / amount for name, amount in each.items() if amount))
            for node in nodes
        )
        if not found:
            msg = (
                "no node of the Ray cluster has the resources of a worker, "
                f"{format_resources(each)}; there are {format_nodes(nodes)}: give "
                "--cpus-per-worker or --gpus-per-worker, or --workers if nodes will join later."
            )
            raise KVPolicyError(msg)
        return found


def format_resources(resources: Resources) -> str:
    """Format resources, such as ``"1 CPU and 0.5 GPU"``."""
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"


def format_nodes(nodes: Sequence[Resources]) -> str:
    """Format the resources of all nodes, such as ``"8 CPU and 0 GPU on 2 nodes"``."""
    total = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    return f"{format_resources(total)} on {len(nodes)} node{'s' * (len(nodes) != 1)}"


def split_jobs(jobs: Sequence[Job], *, workers: int, slots: Callable[[Job], int]) -> list[Job]:
    """Split jobs so that all workers are busy until the end.

    A job stays whole where there are enough others, since only a job that one worker runs in
    one go has a speed. A job of one batch stays whole as well.

    Args:
        jobs: The jobs.
        workers: Workers side by side.
        slots: Samples of a job decoded together. A part has at least half as many: two halves
            side by side take less time than a batch and then the rest.

    Returns:
        The parts, in order.
    """
    if workers == 1:
        return list(jobs)
    share = ceil(sum(len(job.samples) for job in jobs) / (workers * _JOBS_PER_WORKER))
    parts = []
    for job in jobs:
        num = ceil(len(job.samples) / max(share, slots(job)))
        ends = [round(len(job.samples) * part / num) for part in range(num + 1)]
        parts += [Job(job.cell, job.samples[begin:end]) for begin, end in pairwise(ends)]
    return parts


def shard_size(num_prompts: int, *, workers: int, slots: int) -> int:
    """Prompts of a shard.

    Enough shards that all workers end at about the same time, and shards so long that slots are
    seldom free, although a worker gets its next shard only when the last prompt is answered.

    Args:
        num_prompts: All prompts to be answered.
        workers: Workers side by side.
        slots: Prompts that a worker answers together.
    """
    share = ceil(num_prompts / (workers * _JOBS_PER_WORKER))
    return min(max(share, slots), slots * _MOST_BATCHES)


@attrs.define(eq=False)
class _WorkerHandle:
    """One worker, seen from this process.

    Attributes:
        actor: Its Ray handle, of a `Worker`.
        pending: While it starts, a reference to the name of its host; while it runs a job, the
            stream of events; else ``None``.
        host: Name of its host; ``None`` while it starts.
        job: The job that it runs.
        left: Indices of the samples of the job that have not arrived.
        begin: When the job began, in seconds.
    """

    actor: Any
    pending: Any
    host: str | None = None
    job: Work | None = None
    left: list[int] = attrs.field(factory=list)
    begin: float = 0.0

    def assign(self, job: Work, method: str, shared: Any) -> None:
        """Let the worker run a job, by a method that is given what all jobs share and the job."""
        self.job, self.left, self.begin = job, list(job.samples), time.perf_counter()
        # If the worker is lost, only the samples that have not arrived are run again.
        run_job = getattr(self.actor, method).options(max_task_retries=0)
        self.pending = run_job.remote(shared, job)

    def finished_part(self) -> Iterator[JobFinished]:
        """Yield the event for the samples that arrived before the worker was lost, if any."""
        assert self.job is not None
        done = tuple(index for index in self.job.samples if index not in self.left)
        if done:
            part: Any = attrs.evolve(self.job, samples=done)
            yield JobFinished(part, None, time.perf_counter() - self.begin)

    def restart(self) -> None:
        """Wait for Ray to restart the lost worker."""
        self.job = self.host = None
        self.pending = self.actor.begin.remote()


class RayExecutor:
    """Runs jobs on a Ray cluster; a context manager.

    Models are described by a worker, so that this process needs neither their files nor memory
    for them.
    """

    def __init__(
        self,
        address: str | None,
        resources: WorkerResources,
        models: ModelCache,
        *,
        prefix_store: Mapping[str, Any] | None = None,
        info: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Connect to a cluster, or start one on this machine.

        Args:
            address: ``HOST:PORT`` of the cluster's head, or ``"auto"`` for the cluster that this
                machine is part of. Without one, a cluster is started and ends with the block.
            resources: How many workers, and what each of them takes.
            models: How workers load models; this cache stays empty.
            prefix_store: Arguments of the `PrefixStore` that each worker has for itself.
            info: Prints a message to the user.

        Raises:
            KVPolicyError: Ray is not installed, the cluster cannot be reached, or it lacks the
                resources of a worker.
        """
        self._info, self._last_info = info, ""
        self._workers: list[_WorkerHandle] = []
        if address is None:
            info("no Ray address is given: starting a cluster on this machine.")
            self._ray = start_cluster(cpus=(resources.workers or 1) * resources.cpus)
        else:
            self._ray = connect(address)
        try:
            nodes = self._nodes()
            self._each = resources.of_each(nodes, models.device)
            self._num_workers = resources.num_workers(nodes, models.device)
        except BaseException:
            self._ray.shutdown()
            raise
        self._config = WorkerConfig.of_this_process(
            models, threads=resources.cpus, prefix_store=prefix_store
        )
        self._actor = self._ray.remote(
            max_restarts=_MAX_RESTARTS,
            max_task_retries=-1,  # of `begin`: until a restarted worker has begun
            scheduling_strategy="SPREAD",
            num_cpus=self._each["CPU"],
            num_gpus=self._each["GPU"],
        )(Worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            self._ray.kill(worker.actor)
        self._ray.shutdown()

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Let a worker load and describe a model; see `ModelCache.describe`."""
        return self._call("describe", name)

    def bytes_per_sequence(self, name: str, plan: ResolvedPlan, lengths: Lengths) -> int:
        """Let a worker count what a plan allocates; see `ModelCache.bytes_per_sequence`."""
        return self._call("bytes_per_sequence", name, plan, lengths)

    def default_length(self, name: str) -> int:
        """Let a worker look up the most tokens to generate; see `ModelCache.default_length`."""
        return self._call("default_length", name)

    def machine(self, sweep: Sweep | None = None) -> dict[str, Any]:
        """Let a worker describe its machine; all workers are alike."""
        return self._call("machine")

    def num_workers(self, sweep: Sweep | None = None) -> int:
        """Return the maximum number of workers side by side."""
        return self._num_workers

    def run_jobs(self, sweep: Sweep, jobs: Sequence[Job]) -> Iterator[Event]:
        """Run jobs in parts, each as soon as a worker is free.

        Args:
            sweep: The sweep.
            jobs: The jobs, in the order in which they start.

        Yields:
            Events.

        Raises:
            KVPolicyError: A job failed, or worker after worker was lost with the same work.
        """

        def slots(job: Job) -> int:
            return sweep.setting_of(sweep.cell(job.cell)).slots

        parts = split_jobs(jobs, workers=self._num_workers, slots=slots)
        for _, event in self._run("run_job", sweep, parts, min(self._num_workers, len(parts))):
            yield event

    def answer(
        self, answering: Answering, prompts: Sequence[Prompt], left: Sequence[int]
    ) -> Generator[Answered, None, None]:
        """Answer prompts in shards, each as soon as a worker is free.

        Args:
            answering: What is done with each.
            prompts: All prompts, of which those of a shard are read when it begins.
            left: Numbers of those to answer.

        Yields:
            The answers, in any order, each once.

        Raises:
            KVPolicyError: A shard failed, or worker after worker was lost with the same prompts.
        """
        size = shard_size(len(left), workers=self._num_workers, slots=answering.slots)
        begins = range(0, len(left), size)
        shards = (Shard.of(prompts, left[begin : begin + size]) for begin in begins)
        last: dict[int, float] = {}
        workers = min(self._num_workers, len(begins))
        for worker, event in self._run("answer", answering, shards, workers):
            number, now = self._workers.index(worker), time.perf_counter()
            busy_s = now - max(last.get(number, 0.0), worker.begin)
            last[number] = now
            found = [event] if isinstance(event, PromptAnswered) else []
            store = event.store if isinstance(event, ShardFinished) else None
            yield Answered(number, str(worker.host), found, busy_s, store)

    def _run(
        self, method: str, shared: Any, jobs: Iterable[Work], num_workers: int
    ) -> Iterator[tuple[_WorkerHandle, Any]]:
        """Run jobs as soon as workers are free, and those of lost workers first.

        Args:
            method: The method of `Worker` that runs a job.
            shared: What it is given with every job.
            jobs: The jobs; the next one is taken when a worker is free.
            num_workers: Workers side by side.

        Yields:
            Events, each with its worker.
        """
        queue, losses = _Queue(jobs), Counter[Work]()
        shared_ref = self._ray.put(shared)
        while len(self._workers) < num_workers:
            self._start_worker()
        while queue or any(worker.job is not None for worker in self._workers):
            for worker in self._workers:
                if worker.pending is None and queue:
                    worker.assign(queue.take(), method, shared_ref)
            for worker in self._wait():
                for event in self._next(worker, queue, losses):
                    yield worker, event

    def _start_worker(self) -> None:
        """Request one more worker; it may have to wait for its resources."""
        actor = self._actor.remote(self._config)
        self._workers.append(_WorkerHandle(actor, actor.begin.remote()))

    def _next(self, worker: _WorkerHandle, queue: "_Queue", losses: Counter[Work]) -> Iterator[Any]:
        """Take the next event of a worker's job, or queue the rest of the job if it is lost."""
        assert worker.job is not None, "only events of jobs are waited for"
        try:
            event = self._ray.get(next(worker.pending))
        except (StopIteration, self._ray.exceptions.RayError) as error:
            self._raise_unless_lost(error)
            self._info(
                f"a worker on {worker.host} was lost ({type(error).__name__}); its "
                f"{len(worker.left)} unfinished {worker.job.noun} are done again."
            )
            yield from worker.finished_part()
            if worker.left:
                rest = attrs.evolve(worker.job, samples=tuple(worker.left))
                count_loss(rest, losses)
                queue.put_back(rest)
            worker.restart()
            return
        if isinstance(event, (SampleMeasured, PromptAnswered)):
            worker.left.remove(event.index)
        elif not isinstance(event, JobProgress):
            worker.job = worker.pending = None
        yield event

    def _wait(self) -> list[_WorkerHandle]:
        """Wait until something happens.

        Returns:
            The workers whose job has a new event; none, if only other workers have begun or
            nothing has happened for a while.
        """
        active = [worker for worker in self._workers if worker.pending is not None]
        refs = [worker.pending for worker in active]
        if not self._ray.wait(refs, timeout=_PATIENCE_S)[0]:
            self._explain_waiting()
            return []
        # Take all that are ready: the first of the list must not starve the others.
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        changed = [worker for worker in active if any(worker.pending is ref for ref in ready)]
        with_event = [worker for worker in changed if worker.job is not None]
        for worker in changed:
            if worker.job is None:
                self._finish_start(worker)
        return with_event

    def _finish_start(self, worker: _WorkerHandle) -> None:
        try:
            worker.host, worker.pending = self._ray.get(worker.pending), None
        except self._ray.exceptions.RayError as error:
            self._raise_unless_lost(error)
            raise _cannot_begin(error) from error

    def _explain_waiting(self) -> None:
        if any(worker.host is not None for worker in self._workers):
            return
        message = (
            f"no worker has begun yet: each needs {format_resources(self._each)}, and the Ray "
            f"cluster has {format_nodes(self._nodes())}; `ray status` shows what is free."
        )
        if message != self._last_info:
            self._last_info = message
            self._info(message)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the first worker, when it has begun."""
        if not self._workers:
            self._start_worker()
        worker = self._workers[0]
        while worker.host is None:
            self._wait()
        try:
            call = getattr(worker.actor, method).options(max_task_retries=_RETRIES)
            return self._ray.get(call.remote(*arguments))
        except self._ray.exceptions.RayError as error:
            self._raise_unless_lost(error)
            msg = (
                f"the worker on {worker.host} was lost before it ran any samples, {1 + _RETRIES} "
                f"times in a row ({type(error).__name__}), perhaps for lack of memory; give each "
                "worker more resources."
            )
            raise KVPolicyError(msg) from error

    def _raise_unless_lost(self, error: Exception) -> None:
        """Raise an error of the worker's code, which every worker would have; return for a loss."""
        is_raised = isinstance(error, self._ray.exceptions.RayTaskError)
        cause = getattr(error, "cause", None)
        if is_raised and isinstance(cause, (KVPolicyError, RuntimeError)):
            raise cause from None
        if is_raised or getattr(error, "actor_init_failed", False):
            raise _cannot_begin(error) from error

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]


class _Queue:
    """Jobs that wait: those that were put back first, then the others, made when they are taken."""

    def __init__(self, jobs: Iterable[Work]) -> None:
        self._jobs, self._taken = iter(jobs), deque[Work]()

    def __bool__(self) -> bool:
        if not self._taken:
            self._taken += islice(self._jobs, 1)
        return bool(self._taken)

    def take(self) -> Work:
        """The next job; the queue is not empty."""
        assert self
        return self._taken.popleft()

    def put_back(self, job: Work) -> None:
        """Make a job the next one."""
        self._taken.appendleft(job)


def count_loss(rest: Work, losses: Counter[Work]) -> None:
    """Count a worker that was lost before it finished these samples.

    Args:
        rest: The samples of its job that have not arrived. If the next worker finishes some of
            them, the rest is another job, and counting starts again.
        losses: The number of losses of each job.

    Raises:
        KVPolicyError: Too many workers in a row were lost with these samples.
    """
    losses[rest] += 1
    if losses[rest] >= _MAX_LOSSES:
        msg = (
            f"{losses[rest]} workers in a row were lost before they finished any of the same "
            f"{len(rest.samples)} {rest.noun}, perhaps for lack of memory; what is finished is "
            "kept: try again with fewer --slots, or more resources for each worker."
        )
        raise KVPolicyError(msg)


def _cannot_begin(error: Exception) -> KVPolicyError:
    """Return the error for a worker that cannot be created or cannot read its job."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return KVPolicyError(
        f"workers on Ray cannot begin: {lines[-1]}; kvpolicy, and the packages that provide tasks "
        "and policies, must be installed for the Python of every node."
    )
