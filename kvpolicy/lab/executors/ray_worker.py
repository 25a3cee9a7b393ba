"""What runs on one worker of a cluster: a model that stays loaded, and jobs done with it."""

import os
import socket
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

import kvpolicy
from kvpolicy.errors import KVPolicyError, ModelError
from kvpolicy.hooks.discovery import register_file, registered_files
from kvpolicy.lab.models import ModelCache, ModelInfo, describe_model
from kvpolicy.lab.store.session import describe_machine
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.grid import Cell
from kvpolicy.lab.sweep.jobs import Job, News
from kvpolicy.lab.sweep.probe import Probe, probe
from kvpolicy.lab.sweep.serve import Server


@attrs.frozen
class Setting:
    """What a worker takes over from the process that asks for it.

    Attributes:
        version: Version of kvpolicy; another one is refused.
        folder: Where the command was given: relative paths mean the same on every machine
            that has this folder.
        plugins: Name and content of each file given with ``--plugin``.
        threads: Threads to compute with.
        shelf: An empty one, which opens models as they are to be opened.
    """

    version: str
    folder: str
    plugins: tuple[tuple[str, bytes], ...]
    threads: int
    shelf: ModelCache

    @classmethod
    def here(cls, shelf: ModelCache, *, threads: int) -> "Setting":
        """The setting of this process.

        Args:
            shelf: As in the attributes.
            threads: Likewise.
        """
        files = registered_files()
        return cls(
            version=kvpolicy.__version__,
            folder=os.getcwd(),
            plugins=tuple((path.name, path.read_bytes()) for path in files),
            threads=threads,
            shelf=shelf,
        )


class Worker:
    """Describes models and does jobs; what goes wrong is an answer, too.

    An exception that a method raised would come back as Ray's own, with the traceback of
    another machine in its text; one that is returned comes back as it is.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._shelf = setting.shelf
        self._checked: ModelInfo | None = None
        self._is_settled = False

    def host(self) -> str:
        """Name of the machine."""
        return socket.gethostname()

    def describe(self, name: str) -> tuple[ModelInfo, Any] | Exception:
        """Load a model and describe it; see `ModelCache.describe`."""
        try:
            self._settle()
            return self._shelf.describe(name)
        except Exception as error:
            return _as_answer(error)

    def probe(self, comparison: Comparison, cell: Cell, limit_s: float) -> Probe | Exception:
        """Try a cell; see `kvpolicy.lab.sweep.probe.probe`."""
        try:
            self._settle()
            return probe(comparison, cell, self._shelf, limit_s)
        except Exception as error:
            return _as_answer(error)

    def machine(self) -> dict[str, Any] | Exception:
        """Describe what it computes with; see `kvpolicy.lab.store.session.describe_machine`."""
        try:
            self._settle()
            return describe_machine(threads=self._setting.threads)
        except Exception as error:
            return _as_answer(error)

    def serve(self, comparison: Comparison, job: Job) -> Iterator[News | Exception]:
        """Do a job.

        Args:
            comparison: What the job is part of.
            job: The job.

        Yields:
            News as they come, or at last what went wrong.
        """
        try:
            self._settle()
            cell = comparison.cell(job.cell)
            _check_code(cell)
            card = comparison.group_of(cell).model
            model, tokenizer = self._shelf.open(card.name)
            self._check(card, model)
            yield from Server(model, tokenizer, comparison).serve(job)
        except Exception as error:
            yield _as_answer(error)

    def _settle(self) -> None:
        """Become like the process that asked for us."""
        if self._is_settled:
            return
        import torch

        setting = self._setting
        if kvpolicy.__version__ != setting.version:
            msg = (
                f"kvpolicy is {kvpolicy.__version__} there and {setting.version} here; install "
                "the same version on every machine"
            )
            raise KVPolicyError(msg)
        if Path(setting.folder).is_dir():
            os.chdir(setting.folder)
        folder = Path(tempfile.mkdtemp(prefix="kvpolicy-plugins-"))
        for number, (name, content) in enumerate(setting.plugins):
            place = folder / str(number) / name
            place.parent.mkdir()
            place.write_bytes(content)
            register_file(place)
        torch.set_num_threads(setting.threads)
        self._is_settled = True

    def _check(self, card: ModelInfo, model: Any) -> None:
        """Refuse a model that is another one here than where the run was put together."""
        if self._checked == card:
            return
        found = attrs.asdict(describe_model(card.name, model))
        wanted = attrs.asdict(card)
        differences = [
            f"its {key} is {found[key]} there and {value} in this run"
            for key, value in wanted.items()
            if found[key] != value
        ]
        if differences:
            msg = (
                f"model '{card.name}' is another one there ({'; '.join(differences)}); every "
                "worker needs the same files and the same kind of device"
            )
            raise ModelError(msg)
        self._checked = card


def _check_code(cell: Cell) -> None:
    """Refuse policies whose code is another one here than where the run was put together."""
    if cell.resolved.digest() != cell.digest:
        msg = (
            f"a policy of '{cell.series}' has other code there; every worker needs the same "
            "version of the packages that policies come from"
        )
        raise KVPolicyError(msg)


def _as_answer(error: Exception) -> Exception:
    where = f"on {socket.gethostname()}"
    if isinstance(error, KVPolicyError):
        return KVPolicyError(f"{where}: {error}")
    return RuntimeError(f"{where}, in a worker:\n{''.join(traceback.format_exception(error))}")
