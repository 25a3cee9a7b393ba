"""The executor of a Ray cluster, whose workers may be lost and replaced while they run jobs.

A worker is a Ray actor that holds one model. Jobs are split where there are too few for all
workers, and results stream back one by one; only this process writes. When a worker is lost, the
samples of its job that have not arrived are queued again for any worker. Ray's own retries
(``max_task_retries``) would repeat the whole job, and only on a restart of the same actor, for
which there may be no node.
"""

import importlib
import importlib.util
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import Any, Self

import attrs

from kvpolicy.errors import KVPolicyError, error_summary
from kvpolicy.lab.executors.ray_worker import Worker, WorkerConfig
from kvpolicy.lab.models import ModelCache, ModelInfo
from kvpolicy.lab.store.session import num_cpus
from kvpolicy.lab.sweep.grid import EvalSetting, Sweep
from kvpolicy.lab.sweep.jobs import Event, ItemDone, Job, JobFinished

Resources = Mapping[str, float]

_MIN_GPUS = 0.0001  # the smallest share that Ray counts
_JOBS_PER_WORKER = 3  # so that the last ones end at about the same time
_MAX_LOSSES = 3  # workers lost in a row without a sample from the same job
_MAX_FAILED_STARTS = 3  # workers in a row that end before they have begun
_PATIENCE_S = 30.0  # before the user is told that no worker has begun
_CONNECT_TIMEOUT_S = 10.0
_OBJECT_STORE_BYTES = 200_000_000  # of a cluster that is started here: no large objects
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


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
    share = ceil(sum(len(job.items) for job in jobs) / (workers * _JOBS_PER_WORKER))
    parts = []
    for job in jobs:
        num = ceil(len(job.items) / max(share, slots(job)))
        ends = [round(len(job.items) * part / num) for part in range(num + 1)]
        parts += [Job(job.cell, job.items[begin:end]) for begin, end in pairwise(ends)]
    return parts


@attrs.define(eq=False)
class RunningJob:
    """A job that a worker runs or will run.

    Attributes:
        job: The job.
        done: Indices of the samples that have arrived.
        losses: Workers in a row that were lost before a sample of this work arrived.
        begin: When the worker started, in seconds.
    """

    job: Job
    done: list[int] = attrs.field(factory=list)
    losses: int = 0
    begin: float = 0.0

    def lost_worker(self) -> "tuple[list[Event], RunningJob | None]":
        """Handle the loss of the worker.

        Returns:
            The event for the samples that have arrived, if any, and the rest to run again, if any.

        Raises:
            KVPolicyError: Too many workers in a row were lost with this work.
        """
        losses = 1 if self.done else self.losses + 1
        rest = tuple(index for index in self.job.items if index not in self.done)
        if rest and losses >= _MAX_LOSSES:
            msg = (
                f"{losses} workers in a row were lost before they finished any of the same "
                f"{len(rest)} samples, perhaps for lack of memory; finished samples are kept: "
                "try again with fewer --slots, or more resources for each worker."
            )
            raise KVPolicyError(msg)
        events: list[Event] = []
        if self.done:
            part = Job(self.job.cell, tuple(self.done))
            events.append(JobFinished(part, None, time.perf_counter() - self.begin))
        return events, RunningJob(Job(self.job.cell, rest), losses=losses) if rest else None


@attrs.define(eq=False)
class RayWorkerHandle:
    """One worker, seen from this process.

    Attributes:
        actor: Its Ray handle, of a `Worker`.
        begun: Reference to its host's name, ready when the worker has resources and has begun.
        host: The host's name, once known.
        model: Name of the model that it holds.
        running: The job that it runs.
        stream: The events of that job.
    """

    actor: Any
    begun: Any
    host: str | None = None
    model: str | None = None
    running: RunningJob | None = None
    stream: Any = None


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
        info: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Connect to a cluster, or start one on this machine.

        Args:
            address: ``HOST:PORT`` of the cluster's head, or ``"auto"`` for the cluster that this
                machine is part of. Without one, a cluster is started and ends with the block.
            resources: How many workers, and what each of them takes.
            models: How workers load models; this cache stays empty.
            info: Prints a message to the user.

        Raises:
            KVPolicyError: Ray is not installed, the cluster cannot be reached, or it lacks the
                resources of a worker.
        """
        self._info, self._workers, self._last_info = info, list[RayWorkerHandle](), ""
        self._num_failed_starts = 0
        if address is None:
            info("no Ray address is given: starting a cluster on this machine.")
            self._ray = _start(cpus=(resources.workers or 1) * resources.cpus)
        else:
            self._ray = _connect(address)
        try:
            nodes = self._nodes()
            self._each = resources.of_each(nodes, models.device)
            self._num_workers = resources.num_workers(nodes, models.device)
        except BaseException:
            self._ray.shutdown()
            raise
        self._config = self._ray.put(WorkerConfig.of_this_process(models, threads=resources.cpus))
        self._actor = self._ray.remote(
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            num_cpus=self._each["CPU"],
            num_gpus=self._each["GPU"],
        )(Worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self._workers):
            self._stop(worker)
        self._ray.shutdown()

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Let a worker load and describe a model; see `ModelCache.describe`."""
        answer = self._call("describe", name)
        self._workers[0].model = name
        return answer

    def machine(self, sweep: Sweep) -> dict[str, Any]:
        """Let a worker describe its machine; all workers are alike."""
        return self._call("machine")

    def num_workers(self, sweep: Sweep) -> int:
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

        def setting_of(job: Job) -> EvalSetting:
            return sweep.setting_of(sweep.cell(job.cell))

        parts = split_jobs(jobs, workers=self._num_workers, slots=lambda j: setting_of(j).slots)
        waiting = deque(RunningJob(part) for part in parts)
        sweep_ref = self._ray.put(sweep)
        try:
            while waiting or self._busy():
                self._start_workers(len(waiting))
                self._assign(waiting, sweep_ref, lambda job: setting_of(job).model.name)
                for worker in self._wait():
                    yield from self._next(worker, waiting)
        finally:
            for worker in self._busy():
                self._stop(worker)

    def _busy(self) -> list[RayWorkerHandle]:
        return [worker for worker in self._workers if worker.running is not None]

    def _start_workers(self, num_waiting: int) -> None:
        while len(self._workers) < min(self._num_workers, len(self._busy()) + num_waiting):
            self._start_worker()

    def _start_worker(self) -> None:
        """Request one more worker; it may have to wait for its resources."""
        actor = self._actor.remote(self._config)
        self._workers.append(RayWorkerHandle(actor, actor.begin.remote()))

    def _stop(self, worker: RayWorkerHandle) -> None:
        self._workers.remove(worker)
        self._ray.kill(worker.actor)

    def _assign(
        self, waiting: deque[RunningJob], sweep_ref: Any, model_of: Callable[[Job], str]
    ) -> None:
        """Give a job to each free worker that has begun, of its model if possible."""
        for worker in self._workers:
            if not waiting:
                return
            if worker.host is None or worker.running is not None:
                continue
            mine = (one for one in waiting if model_of(one.job) == worker.model)
            worker.running = next(mine, waiting[0])
            waiting.remove(worker.running)
            worker.running.begin = time.perf_counter()
            worker.model = model_of(worker.running.job)
            worker.stream = worker.actor.run_job.remote(sweep_ref, worker.running.job)

    def _next(self, worker: RayWorkerHandle, waiting: deque[RunningJob]) -> Iterator[Event]:
        """Take the next event of a worker, or handle its loss."""
        running = worker.running
        assert running is not None, "only busy workers are waited for"
        try:
            event = self._ray.get(next(worker.stream))
        except (StopIteration, self._ray.exceptions.RayError) as error:
            self._stop(worker)
            self._raise_unless_lost(error)
            events, rest = running.lost_worker()
            self._info(
                f"a worker on {worker.host} was lost ({type(error).__name__}); its "
                f"{len(rest.job.items) if rest else 0} unfinished samples are done again."
            )
            if rest:
                waiting.appendleft(rest)
            yield from events
            return
        if isinstance(event, ItemDone):
            running.done.append(event.item)
        else:
            worker.running = worker.stream = None
        yield event

    def _wait(self) -> list[RayWorkerHandle]:
        """Wait until something happens.

        Returns:
            The busy workers with a new event; none, if only other workers have begun or nothing
            has happened for a while.
        """
        starting = [worker for worker in self._workers if worker.host is None]
        busy = self._busy()
        refs = [*(worker.stream for worker in busy), *(worker.begun for worker in starting)]
        if not self._ray.wait(refs, timeout=_PATIENCE_S)[0]:
            self._explain_waiting()
            return []
        # Take all that are ready: the first of the list must not starve the others.
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for worker in starting:
            if any(worker.begun is ref for ref in ready):
                self._finish_start(worker)
        return [worker for worker in busy if any(worker.stream is ref for ref in ready)]

    def _finish_start(self, worker: RayWorkerHandle) -> None:
        try:
            worker.host = self._ray.get(worker.begun)
        except self._ray.exceptions.RayError as error:
            self._stop(worker)
            self._num_failed_starts += 1
            self._raise_unless_lost(error)
            if self._num_failed_starts >= _MAX_FAILED_STARTS:
                raise _cannot_begin(error) from error
            return
        self._num_failed_starts = 0

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
        while self._workers[0].host is None:
            self._wait()
            if not self._workers:
                self._start_worker()
        worker = self._workers[0]
        try:
            return self._ray.get(getattr(worker.actor, method).remote(*arguments))
        except self._ray.exceptions.RayError as error:
            self._stop(worker)
            self._raise_unless_lost(error)
            msg = (
                f"the worker on {worker.host} was lost before it ran any samples "
                f"({type(error).__name__}), perhaps for lack of memory; give each worker more "
                "resources."
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


def _cannot_begin(error: Exception) -> KVPolicyError:
    """Return the error for a worker that cannot be created or cannot read its job."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return KVPolicyError(
        f"workers on Ray cannot begin: {lines[-1]}; kvpolicy, and the packages that provide tasks "
        "and policies, must be installed for the Python of every node."
    )


def _start(*, cpus: int) -> Any:
    """Start a cluster on this machine, which ends with `ray.shutdown`; return the ``ray`` module.

    Args:
        cpus: CPUs to announce, if the machine has fewer.
    """
    ray = _import_ray(is_own_cluster=True)
    _init(
        ray,
        address="local",
        num_cpus=max(num_cpus(), cpus),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
    )
    return ray


def _connect(address: str) -> Any:
    """Connect to the cluster of this machine; return the ``ray`` module."""
    if "://" in address:
        msg = (
            f"Ray address '{address}' is for Ray Client, which cannot stream results; run the "
            "command on a machine of the cluster, with its HOST:PORT or auto."
        )
        raise KVPolicyError(msg)
    ray = _import_ray(is_own_cluster=False)
    try:
        if address != "auto":
            _check_port(address)
        _init(ray, address=address)
    except Exception as error:
        msg = (
            f"no Ray cluster answers at '{address}' ({error_summary(error)}); on a machine that "
            "`ray start` made part of it, give its HOST:PORT or auto."
        )
        raise KVPolicyError(msg) from error
    return ray


def _check_port(address: str) -> None:
    """Fail early if nothing listens; Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        msg = "it is not HOST:PORT"
        raise ValueError(msg)
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def _import_ray(*, is_own_cluster: bool) -> Any:
    if importlib.util.find_spec("ray") is None:
        msg = "Ray is not installed; run `pip install 'kvpolicy[ray]'`."
        raise KVPolicyError(msg)
    # Ray reads these once, in every process of a cluster that it starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_own_cluster and not any(name in os.environ for name in _AUTH):
        # Without a token, anyone who reaches the cluster could run code in it.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    return importlib.import_module("ray")


def _init(ray: Any, **options: Any) -> None:
    """Connect, and keep Ray's messages out of stdout; they stay in Ray's logs."""
    # Ray prints messages of the cluster to stdout even with log_to_driver=False; its own
    # debugger silences them in this way.
    worker: Any = importlib.import_module("ray._private.worker")
    worker._worker_logs_enabled = False
    ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
