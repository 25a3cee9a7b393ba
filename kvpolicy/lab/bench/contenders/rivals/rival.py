"""Another engine, as contenders: a subprocess with an interpreter of its own, which has it.

What is common to all of them is here: the process, the questions that it is asked, and the check
that it computes the same model. A rival is a value (`Rival`), in a file of its own, and a worker
beside it, which `worker.py` runs in the other interpreter.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.contenders.contender import Contender, Measurement
from kvpolicy.lab.bench.models import kv_row_bytes
from kvpolicy.lab.bench.workload import Decode, Text
from kvpolicy.model.libraries import quiet_libraries

_WORKER = Path(__file__).with_name("worker.py")
_STEPS = 32  # at least; with fewer, a step by the difference of two lengths has much noise
_CHECKED = 24  # tokens of the prompt with which a rival is tried


@attrs.frozen
class Room:
    """What a rival is to have room for.

    Attributes:
        kv_bytes: Bytes of keys and values of all sequences.
        most_tokens: Tokens of the longest sequence.
        batch: Most sequences that are decoded together.
    """

    kv_bytes: int
    most_tokens: int
    batch: int


@attrs.frozen
class Rival:
    """Another engine.

    Attributes:
        name: Name in tables.
        option: The option of the command that names its interpreter.
        worker: File that `worker.py` runs in the other interpreter.
        arguments: What the worker is started with, given the model, the forms of its weights that
            are measured, a folder to write to, and the room.
        environment: Further variables of its environment.
        forms: Forms of the weights of a model in fp32 that it has, besides the model as it is, by
            the names that `kvpolicy.lab.bench.contenders.form.Form` has for them.
        devices: Types of devices on which it runs.
        most_held: The most tokens to which it is filled: who prefills them takes long for more.
        same_tokens: Whether its tokens are those of the model, so that they can be checked; not
            so where its cache is filled with random numbers.
    """

    name: str
    option: str
    worker: Path
    arguments: Callable[[PreTrainedModel, Sequence[str], Path, Room], dict[str, Any]]
    environment: Callable[[Room], Mapping[str, str]] = lambda _: {}
    forms: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    most_held: int | None = None
    same_tokens: bool = True

    def problem(self, model: PreTrainedModel) -> str | None:
        """Why it cannot run a model; ``None`` if it can be tried."""
        if model.device.type not in self.devices:
            return (
                f"{self.name} is measured on {' and '.join(self.devices)}, and the model is on "
                f"'{model.device}'; leave out {self.option}"
            )
        return None

    def contender_name(self, form: str) -> str:
        """Its name in tables with a form of the weights that may be one of its own."""
        return f"{self.name}, {form}" if form in self.forms else self.name

    @contextmanager
    def started(
        self, model: PreTrainedModel, python: Path, room: Room, *, forms: Sequence[str] = ()
    ) -> Iterator[list[Contender]]:
        """Start it; it runs until the block ends.

        Args:
            model: The model, which it gets as files.
            python: An interpreter that has it.
            room: What it is to have room for.
            forms: Forms in which the model is measured; those that it has not are left out.

        Yields:
            A contender for the model as it is, and for each form.

        Raises:
            KVPolicyError: The interpreter or the engine cannot be started, or computes something
                else than the model.
        """
        if problem := self.problem(model):
            raise KVPolicyError(problem)
        mine = ["", *(form for form in forms if form in self.forms)]
        prefix = f"kvpolicy-{self.name.lower()}-"
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            with quiet_libraries():
                arguments = self.arguments(model, mine, Path(folder), room)
            worker = _Worker(self, python, self.environment(room), Path(folder) / "log")
            try:
                worker.ask(arguments)
                if self.same_tokens:
                    self._check_tokens(model, worker, python)
                yield [self._contender(model, form, worker) for form in mine]
            finally:
                worker.close()

    def _check_tokens(self, model: PreTrainedModel, worker: "_Worker", python: Path) -> None:
        """Refuse an engine whose first token is not that of the model as it is."""
        (prompt,) = Decode(1, _CHECKED, 1).prompts(model.config.vocab_size)
        answer = worker.ask({"prompts": [prompt], "new_tokens": 2, "form": ""})
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
        given, wanted = answer["tokens"][0][0], int(logits.argmax())
        # Where two tokens are as likely, rounding decides.
        if logits[wanted] - logits[given] > 0.05 * logits.std():
            msg = (
                f"{self.name} of {python} answers a prompt with token {given}, where the model's "
                f"is {wanted}: it computes something else; leave out {self.option}"
            )
            raise KVPolicyError(msg)

    def _contender(self, model: PreTrainedModel, form: str, worker: "_Worker") -> Contender:
        row_bytes = kv_row_bytes(model)

        def measured(work: Decode | Text, new_tokens: int) -> Measurement:
            prompts = work.prompts(model.config.vocab_size)
            answer = worker.ask({"prompts": prompts, "new_tokens": new_tokens, "form": form})
            held = sum(map(len, prompts))
            return Measurement(
                tuple(answer["steps_s"]),
                kv_bytes=(held + work.batch * (new_tokens - 1)) * row_bytes,
                read_bytes=(held + work.batch * new_tokens / 2) * row_bytes,
                prefill_s=answer.get("prefill_s"),
            )

        return Contender(
            self.contender_name(form),
            lambda work: measured(work, work.steps + 1),
            lambda work: measured(work, work.new_tokens),
            period=_STEPS,
            most_held=self.most_held,
            is_outside=True,
            has_limit=form not in self.forms,
        )


class _Worker:
    """The subprocess."""

    def __init__(
        self, rival: Rival, python: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        self._rival, self._python, self._log = rival, python, log
        try:
            with log.open("wb") as errors:
                self._process = subprocess.Popen(
                    # Isolated: the folder of the worker has modules of other names' meaning.
                    [python, "-I", _WORKER, rival.worker],
                    env={**os.environ, **environment},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
        except OSError as error:
            msg = (
                f"{rival.option} was given {python}, which cannot be started ({error.strerror}); "
                f"give the interpreter of an environment with {rival.name}: VENV/bin/python"
            )
            raise KVPolicyError(msg) from error

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Send one line and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            first, *_ = answer["error"].splitlines() or [""]
            msg = (
                f"running {self._rival.name} of {self._python} failed: {first:.200}; install it in "
                "an environment of its own as docs/benchmarks/bench.md says, or leave out "
                f"{self._rival.option}"
            )
            raise KVPolicyError(msg)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it ended without a word")


def beside(name: str) -> Path:
    """The file of a worker in this folder."""
    return Path(__file__).with_name(name)


def common_environment(_: Room) -> dict[str, str]:
    """Variables that keep a library from the network, and threads as many as torch's."""
    return {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
