"""A worker on a Ray cluster: holds one model and runs jobs with it. Runs in a process of Ray's."""

import socket
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from kvpolicy.engine.engine import Engine
from kvpolicy.engine.reuse.store import PrefixStore
from kvpolicy.errors import KVPolicyError, ModelError
from kvpolicy.lab.executors.process_setup import ProcessSetup
from kvpolicy.lab.models import Lengths, LoadedModel, ModelCache, ModelInfo, describe_model
from kvpolicy.lab.prompt_files.answering import (
    Answering,
    PromptAnswered,
    Shard,
    ShardFinished,
    answer_shard,
)
from kvpolicy.lab.store.session import describe_machine
from kvpolicy.lab.sweep.grid import Sweep
from kvpolicy.lab.sweep.jobs import Event, Job, run_job
from kvpolicy.plan.resolved import ResolvedPlan


@attrs.frozen
class WorkerConfig:
    """What a worker takes over from the process that starts it.

    Attributes:
        setup: How its process is set up.
        models: An empty cache with the options for loading models.
        prefix_store: Arguments of the `PrefixStore` that it has for prompts of files; ``None``: it
            has none.
    """

    setup: ProcessSetup
    models: ModelCache
    prefix_store: Mapping[str, Any] | None = None

    @classmethod
    def of_this_process(
        cls,
        models: ModelCache,
        *,
        threads: int,
        prefix_store: Mapping[str, Any] | None = None,
    ) -> "WorkerConfig":
        """Make the configuration that matches this process."""
        return cls(ProcessSetup.of_this_process(threads=threads), models, prefix_store)


class Worker:
    """Describes models and runs jobs.

    Ray may restart it at any time; the first call after that sets the process up again. Every
    method raises a `KVPolicyError` for a user's mistake and a `RuntimeError` with the traceback
    for a defect; both name the host.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._models = config.models
        self._is_set_up = False
        self._checked: ModelInfo | None = None
        self._engine: tuple[Answering, Engine] | None = None

    def begin(self) -> str:
        """Set this process up like the one that starts it.

        Returns:
            Name of the host.

        Raises:
            KVPolicyError: It has another version of kvpolicy.
        """
        with self._set_up():
            return socket.gethostname()

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Load a model and describe it; see `ModelCache.describe`."""
        with self._set_up():
            return self._models.describe(name)

    def bytes_per_sequence(self, name: str, plan: ResolvedPlan, lengths: Lengths) -> int:
        """Count what a plan allocates; see `ModelCache.bytes_per_sequence`."""
        with self._set_up():
            return self._models.bytes_per_sequence(name, plan, lengths)

    def default_length(self, name: str) -> int:
        """The most tokens to generate by default; see `ModelCache.default_length`."""
        with self._set_up():
            return self._models.default_length(name)

    def machine(self) -> dict[str, Any]:
        """Describe this machine; see `kvpolicy.lab.store.session.describe_machine`."""
        with self._set_up():
            return describe_machine(threads=self._config.setup.threads)

    def run_job(self, sweep: Sweep, job: Job) -> Iterator[Event]:
        """Run a job; see `kvpolicy.lab.sweep.jobs.run_job`.

        Raises:
            KVPolicyError: The model or a policy differs from the one that the sweep was built with.
        """
        with self._set_up():
            cell = sweep.cell(job.cell)
            _check_code(cell.resolved, cell.digest, f"'{cell.series}'")
            loaded = self._open(sweep.setting_of(cell).model)
            yield from run_job(sweep, job, loaded)

    def answer(
        self, answering: Answering, shard: Shard
    ) -> Iterator[PromptAnswered | ShardFinished]:
        """Answer the prompts of a shard; see `kvpolicy.lab.prompt_files.answering.answer_shard`.

        Raises:
            KVPolicyError: As for `run_job`.
        """
        with self._set_up():
            _check_code(answering.plan, answering.plan_digest, "the plan")
            if self._engine is None or self._engine[0] != answering:
                loaded, given = self._open(answering.model), self._config.prefix_store
                store = None if given is None else PrefixStore(**given)
                self._engine = answering, answering.engine(loaded, store)
            yield from answer_shard(answering, shard, self._engine[1])

    def _open(self, info: ModelInfo) -> LoadedModel:
        loaded = self._models.open(info.name)
        self._check_model(info, loaded)
        return loaded

    @contextmanager
    def _set_up(self) -> Iterator[None]:
        """Set this process up, once; errors in the block name the host."""
        host = socket.gethostname()
        try:
            if not self._is_set_up:
                self._config.setup.apply()
                self._is_set_up = True
            yield
        except KVPolicyError as error:
            msg = f"on {host}: {error}"
            raise KVPolicyError(msg) from None
        except Exception:
            msg = f"on {host}, in a worker:\n{traceback.format_exc()}"
            raise RuntimeError(msg) from None

    def _check_model(self, info: ModelInfo, loaded: LoadedModel) -> None:
        if self._checked == info:
            return
        found, wanted = attrs.asdict(describe_model(info.name, loaded)), attrs.asdict(info)
        differences = [
            f"its {key} is {found[key]} there and {value} in this run"
            for key, value in wanted.items()
            if found[key] != value
        ]
        if differences:
            msg = (
                f"model '{info.name}' differs there ({'; '.join(differences)}); every worker "
                "needs the same files and the same kind of device"
            )
            raise ModelError(msg)
        self._checked = info


def _check_code(plan: ResolvedPlan, digest: str, name: str) -> None:
    if plan.digest() != digest:
        msg = (
            f"a policy of {name} has different code there; every worker needs the same "
            "version of the packages that provide policies"
        )
        raise KVPolicyError(msg)
