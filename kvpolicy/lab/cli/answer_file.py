"""``kvpolicy run --output``: answer a file of prompts, resumable at every answer.

With ``--json``, one object on stdout at the end: ``output``, ``num_prompts``, ``num_before``
(answers of earlier sessions), ``finish_reasons`` (how many of all answers have ended for which
reason), ``num_empty`` (how many of all show nothing), ``plan_digest``; and of this session
``prompt_tokens``, ``reused_tokens`` (of these, those that were not computed), ``new_tokens``,
``elapsed_s``, ``throughput_tok_s`` and ``workers``, a list with ``worker``, ``host``,
``num_prompts``, ``prompt_tokens``, ``reused_tokens``, ``new_tokens``, ``busy_s``,
``throughput_tok_s`` and, if there are prefix stores, ``prefix_store``, the fields of `StoreStats`.
"""

import sys
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.cli.failures import Interrupted
from kvpolicy.cli.options import (
    GenerationOptions,
    choose_plan,
    default_request,
    register_plugins,
    tell_no_effects,
)
from kvpolicy.cli.output import Progress, info, print_json, print_text, terminal_width
from kvpolicy.cli.prefix_options import format_reuse
from kvpolicy.cli.prompts import PromptFile
from kvpolicy.cli.text_table import format_table
from kvpolicy.errors import KVPolicyError, OutputError
from kvpolicy.prompts import ChatPrompts
from kvpolicy.quantities import format_count, format_seconds

if TYPE_CHECKING:
    from kvpolicy.engine.reuse.store import StoreStats
    from kvpolicy.lab.executors.executor import Answerer
    from kvpolicy.lab.prompt_files.answering import Answered, Answering
    from kvpolicy.lab.prompt_files.store import AnswerStore


@attrs.frozen
class Place:
    """Where prompts are answered: the options of workers.

    Attributes:
        on: ``--on``.
        address: ``--ray-address``.
        workers: ``--workers``.
        cpus: ``--cpus-per-worker``.
        gpus: ``--gpus-per-worker``.
    """

    on: str
    address: str | None
    workers: int | None
    cpus: int | None
    gpus: float | None

    def given(self) -> dict[str, object]:
        """The options that were given, by name; the values of others are false."""
        return {
            "--on ray": self.on == "ray",
            "--ray-address": self.address is not None,
            "--workers": self.workers is not None,
            "--cpus-per-worker": self.cpus is not None,
            "--gpus-per-worker": self.gpus is not None,
        }


def answer_file(
    options: GenerationOptions,
    output: Path,
    place: Place,
    *,
    overwrite: bool,
    keep_going: bool,
    prefix_store: Mapping[str, Any] | None,
    json: bool,
) -> bool:
    """Answer the prompts of a file that have no answer yet, and write the output.

    Args:
        options: The options given.
        output: The file for the answers.
        place: Where they are computed.
        overwrite: Whether an output of another run is replaced.
        keep_going: Whether a policy that fails ends only the affected prompts.
        prefix_store: Arguments of the `PrefixStore` of each process; ``None``: there is none.
        json: Whether to print JSON.

    Returns:
        Whether a prompt has an error as its answer.

    Raises:
        KVPolicyError: An option is wrong, or the output is of another run.
        Interrupted: By Ctrl-C; the message says what is kept.
    """
    if options.file is None or options.prompt is not None:
        msg = "--output is for the answers of a file; give --prompts FILE, and no other prompt."
        raise KVPolicyError(msg)
    if place.on == "here" and place.workers is not None:
        msg = "--workers is for Ray, a model here answers --slots prompts together; add --on ray."
        raise KVPolicyError(msg)
    if prefix_store is not None:  # no prompt goes on with an answer
        prefix_store = {**prefix_store, "conversations": False}
    register_plugins(options.policies.plugin)
    from kvpolicy.lab.executors.executor import open_executor
    from kvpolicy.lab.models import ModelCache
    from kvpolicy.lab.prompt_files.store import AnswerStore, check_output

    with PromptFile(options.file) as prompts:
        check_output(output, options.file)
        plan = choose_plan(options.plan, options.policies)
        models = ModelCache(**options.decoder.loading, compile=options.decoder.compile)
        with open_executor(
            place.on,
            models,
            address=place.address,
            workers=place.workers,
            cpus=place.cpus,
            gpus=place.gpus,
            prefix_store=prefix_store,
            info=info,
        ) as executor:
            answering = _answering(options, plan, executor, keep_going=keep_going)
            run = {
                "prompts": prompts.digest,
                "number of prompts": len(prompts),
                **answering.identity(),
            }
            with AnswerStore(output, run, len(prompts), overwrite=overwrite) as store:
                session = _Session(store, answering)
                session.answer(executor, prompts)
                session.print(json=json, on_ray=place.on == "ray")
                return store.reasons["error"] > 0


def _answering(
    options: GenerationOptions, plan: Any, executor: "Answerer", *, keep_going: bool
) -> "Answering":
    from kvpolicy.lab.prompt_files.answering import Answering

    chat, defaults = options.chat, default_request(options)  # before a large model is loaded
    model, tokenizer = executor.describe(options.decoder.name)
    if (note := ChatPrompts(tokenizer, chat).note) is not None:
        info(note)
    if options.max_new_tokens is None:
        most = executor.default_length(options.decoder.name)
        defaults = attrs.evolve(defaults, max_new_tokens=most)
    resolved = plan.resolve(model.num_layers, attention=model.attention)
    tell_no_effects(resolved)
    return Answering(
        model,
        resolved,
        resolved.digest(),
        defaults,
        chat,
        options.slots,
        "answer" if keep_going else "raise",
    )


@attrs.define
class _Worker:
    """What one worker has done in this session."""

    worker: int
    host: str
    num_prompts: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    busy_s: float = 0.0
    store: "StoreStats | None" = None

    @property
    def throughput_tok_s(self) -> float:
        return self.new_tokens / self.busy_s if self.busy_s else 0.0

    def add(self, answered: "Answered") -> None:
        self.num_prompts += len(answered.answers)
        self.prompt_tokens += sum(one.answer["prompt_len"] for one in answered.answers)
        self.reused_tokens += sum(one.reused_tokens for one in answered.answers)
        self.new_tokens += sum(one.answer["num_tokens"] for one in answered.answers)
        self.busy_s += answered.busy_s
        self.store = answered.store or self.store

    def to_dict(self) -> dict[str, Any]:
        plain = attrs.asdict(self, filter=lambda field, _: field.name != "store")
        of_store = {} if self.store is None else {"prefix_store": self.store.to_dict()}
        return plain | {"throughput_tok_s": self.throughput_tok_s} | of_store


class _Session:
    """One call of the command: answers what is left, and counts."""

    def __init__(self, store: "AnswerStore", answering: "Answering") -> None:
        self._store, self._answering = store, answering
        self._workers: dict[tuple[int, str], _Worker] = {}
        self._num_before = store.num_answered
        self._elapsed_s = 0.0

    def answer(self, executor: "Answerer", prompts: PromptFile) -> None:
        """Answer what is left, and write the output when nothing is.

        Raises:
            Interrupted: By Ctrl-C.
        """
        store = self._store
        for note in store.notes:
            info(note)
        self._print_start()
        try:
            if left := store.left():
                store.begin_session(_describe_session())
                begin = time.perf_counter()
                with (
                    Progress(store.num_prompts, self._num_before) as progress,
                    closing(executor.answer(self._answering, prompts, left)) as found,
                ):
                    for answered in found:
                        store.add((one.index, one.answer) for one in answered.answers)
                        worker = _Worker(answered.worker, answered.host)
                        self._workers.setdefault((worker.worker, worker.host), worker).add(answered)
                        if not answered.answers:  # files of a prefix store took time since the last
                            continue
                        self._elapsed_s = time.perf_counter() - begin
                        speed = f"{self._new_tokens / self._elapsed_s:,.0f} tokens/s"
                        progress.update(speed, store.num_answered)
            store.publish()
        except KeyboardInterrupt:
            msg = f"interrupted; {self._kept}."
            raise Interrupted(msg) from None
        except KVPolicyError as error:
            if isinstance(error, OutputError) or store.num_answered:
                msg = f"{str(error).rstrip('.')}; {self._kept}."
                raise type(error)(msg) from error
            raise

    def print(self, *, json: bool, on_ray: bool) -> None:
        """Print what was done: figures to stderr, or JSON to stdout; and the table of workers."""
        workers = [self._workers[key] for key in sorted(self._workers)]
        speed = self._new_tokens / self._elapsed_s if self._elapsed_s else 0.0
        reasons = dict(sorted(self._store.reasons.items()))
        if json:
            print_json(
                {
                    "output": str(self._store.output),
                    "num_prompts": self._store.num_prompts,
                    "num_before": self._num_before,
                    "finish_reasons": reasons,
                    "num_empty": self._store.num_empty,
                    "plan_digest": self._answering.plan_digest,
                    "prompt_tokens": self._prompt_tokens,
                    "reused_tokens": self._reused_tokens,
                    "new_tokens": self._new_tokens,
                    "elapsed_s": self._elapsed_s,
                    "throughput_tok_s": speed,
                    "workers": [worker.to_dict() for worker in workers],
                }
            )
        elif on_ray and workers:
            rows = [
                [
                    str(one.worker),
                    one.host,
                    str(one.num_prompts),
                    str(one.new_tokens),
                    f"{one.busy_s:.1f}",
                    f"{one.throughput_tok_s:.0f}",
                ]
                for one in workers
            ]
            headers = ["worker", "host", "prompts", "tokens", "busy s", "tokens/s"]
            table = format_table(headers, rows, right=(0, 2, 3, 4, 5), width=terminal_width())
            print_text(f"{table}\n")
        counts = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
        done = format_count(self._store.num_answered, "answer")
        took = f"{self._new_tokens:,} tokens in {format_seconds(self._elapsed_s)}, {speed:.0f}/s"
        figures = took if workers else "nothing was left to compute"
        info(f"{done} in {self._store.output} ({counts}): {figures}.")
        if empty := self._store.num_empty:
            show = "1 of them shows" if empty == 1 else f"{empty:,} of them show"
            info(f"{show} nothing: no text, or white space only.")
        if stores := [one.store for one in workers if one.store is not None]:
            info(format_reuse(self._reused_tokens, self._prompt_tokens, stores))

    @property
    def _prompt_tokens(self) -> int:
        return sum(worker.prompt_tokens for worker in self._workers.values())

    @property
    def _reused_tokens(self) -> int:
        return sum(worker.reused_tokens for worker in self._workers.values())

    @property
    def _new_tokens(self) -> int:
        return sum(worker.new_tokens for worker in self._workers.values())

    @property
    def _kept(self) -> str:
        store = self._store
        return (
            f"{store.num_answered} of {store.num_prompts} answers are kept in {store.folder}; run "
            "the same command again to continue"
        )

    def _print_start(self) -> None:
        store, num = self._store, self._num_before
        if store.is_complete:
            return
        done = f"{num} of {store.num_prompts} prompts are answered"
        begin = f"{format_count(store.num_prompts, 'prompt')}, into {store.output}"
        info(f"continuing in {store.folder}: {done}." if num else f"{begin}.")


def _describe_session() -> dict[str, Any]:
    import shlex

    from kvpolicy.lab.store.session import versions

    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["kvpolicy", *sys.argv[1:]]),
        "versions": versions(),
    }
