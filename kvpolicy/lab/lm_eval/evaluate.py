"""One evaluation by lm-evaluation-harness: its tasks, its metrics, and what they cost."""

import difflib
import fnmatch
import hashlib
import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partialmethod
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import datasets
import huggingface_hub
import lm_eval
import tqdm
from lm_eval.api.model import CachingLM
from lm_eval.defaults import DEFAULT_OTHER_SEED as FEWSHOT_SEED
from lm_eval.tasks import TaskManager
from sqlitedict import SqliteDict

from kvpolicy.errors import KVPolicyError, OutputError, TaskError, error_summary
from kvpolicy.lab.lm_eval.model import PolicyLM
from kvpolicy.model.hub import hub_reachable

# The key of the harness's record under which `evaluate` adds its own.
OURS = "kvpolicy"


class Tasks(TaskManager):
    """The tasks of an evaluation.

    Attributes:
        names: Their names, and those of groups of them.
    """

    def __init__(
        self, requested: Sequence[str], folders: Sequence[Path] = (), *, execute_code: bool = False
    ) -> None:
        """Find tasks; their data sets are not loaded yet.

        Args:
            requested: Names of tasks, groups or tags, patterns such as ``mmlu_*``, YAML files.
            folders: Folders with tasks of the user's own.
            execute_code: Whether tasks may run programs that the model wrote.

        Raises:
            TaskError: A task or folder does not exist.
        """
        for folder in folders:
            if not folder.is_dir():
                msg = f"--include-path was given '{folder}', which is no folder"
                raise TaskError(msg)
        self._execute_code = execute_code
        with _task_errors("the tasks cannot be listed"):
            # The harness's own tasks are thousands of files, which take seconds to list.
            super().__init__(include_path=list(folders), include_defaults=False)
            if not all(_is_file(name) or name in self.all_subtasks for name in requested):
                super().__init__(include_path=list(folders), include_defaults=True)
        self.names = list(dict.fromkeys(name for one in requested for name in self._matching(one)))

    def load(self, task_list: Any) -> Any:
        """Load tasks and their data sets.

        Raises:
            TaskError: A task is malformed, its data set cannot be loaded, or the model cannot
                answer it.
        """
        with _task_errors(f"{_format_names(self.names)} cannot be loaded"):
            loaded = super().load(task_list)
        for name, task in loaded["tasks"].items():
            if getattr(task, "MULTIMODAL", False):
                msg = f"task '{name}' uses images or audio, and the engine reads text only"
                raise TaskError(msg)
            if getattr(task, "UNSAFE_CODE", False) and not self._execute_code:
                msg = (
                    f"task '{name}' runs programs that the model writes, without a sandbox; add "
                    "--execute-code to allow it"
                )
                raise TaskError(msg)
        return loaded

    def _matching(self, name: str) -> list[str]:
        if _is_file(name) or name in self.all_tasks:
            return [name]
        found = fnmatch.filter(self.all_tasks, name)
        if not found:
            near = difflib.get_close_matches(name, self.all_tasks, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "see `lm-eval ls tasks`"
            msg = f"the harness has no task '{name}'; {hint}"
            raise TaskError(msg)
        return found


class AnswerCache(CachingLM):
    """The harness's cache of answers, for an evaluation that is resumed.

    The harness looks answers up by the texts of their requests. Here, each plan and model has a
    table of its own. Requests that sample are cached too, with their random seed; the harness's
    own ``--use_cache`` leaves them out.

    Attributes:
        path: The file, an SQLite database.
        num_found: Answers of this plan and model that were in the file when it was opened.
    """

    def __init__(self, lm: PolicyLM, path: Path) -> None:
        """Open the file, or make it.

        Raises:
            OutputError: The file holds something else, or cannot be opened.
        """
        self._is_new = not path.exists()
        try:
            with closing(sqlite3.connect(path)) as database:
                database.execute("PRAGMA schema_version")  # reads the file's header
        except sqlite3.Error as error:
            msg = f"{path} is no cache of answers: {error}; choose another --output."
            raise OutputError(msg) from error
        run = (lm.identity, version("kvpolicy"), lm.think_end_token)
        table = hashlib.blake2b(repr(run).encode(), digest_size=8).hexdigest()
        self.lm = lm
        self.path = path
        self.cache_db = str(path)
        self.dbdict = SqliteDict(self.cache_db, tablename=f"answers_{table}", autocommit=True)
        self.num_found = len(self.dbdict)
        lm.set_cache_hook(self.get_cache_hook())

    def __getattr__(self, name: str) -> Any:
        """As in the harness; answers of generations are looked up by the engine's settings."""
        answer: Callable[[list[Any]], list[Any]] = super().__getattr__(name)
        if name != "generate_until":
            return answer
        return lambda requests: answer(self.lm.with_engine_settings(requests))

    def close(self) -> None:
        """Close the file; delete it if it was made here and holds nothing."""
        is_empty = not len(self.dbdict)
        self.dbdict.close()
        if is_empty and self._is_new:
            self.path.unlink(missing_ok=True)


def evaluate(
    lm: PolicyLM,
    tasks: Tasks,
    *,
    cache: AnswerCache | None = None,
    limit: float | None = None,
    num_fewshot: int | None = None,
    generation: Mapping[str, Any] | None = None,
    seed: int | None = None,
    chat: bool = False,
    system_instruction: str | None = None,
    log_samples: bool = False,
) -> dict[str, Any]:
    """Evaluate a model under a plan on tasks.

    Args:
        lm: The model.
        tasks: The tasks.
        cache: Keeps answers as they come, and finds those of an earlier process.
        limit: The most questions of each task, or, below 1, the share of them.
        num_fewshot: Examples before each question; by default the task's own number.
        generation: What replaces settings of the tasks' ``generation_kwargs``.
        seed: Random seed for the choice of examples; by default the harness's own.
        chat: Whether to apply the model's chat template to questions.
        system_instruction: A system prompt.
        log_samples: Whether the record holds every question and answer.

    Returns:
        The record of ``lm_eval.evaluate``, and under ``"kvpolicy"``: ``plan`` and its
        ``plan_digest``, ``model_fingerprint``, ``slots``, ``num_recalled`` (answers that were
        in the cache), ``costs`` of each task as in `Cost` and ``reports`` of each kind of
        request as in `RunReport`, both of what was computed in this process.

    Raises:
        KVPolicyError: A task cannot be loaded or answered, or a policy fails.
    """
    if chat and not getattr(lm.tokenizer, "chat_template", None):
        msg = "this model's tokenizer has no chat template; leave --apply-chat-template out"
        raise TaskError(msg)
    with _harness_settings():
        loaded = tasks.load(tasks.names)
        for task in loaded["tasks"].values():
            _configure(task, num_fewshot, generation or {}, FEWSHOT_SEED if seed is None else seed)
        with _task_errors(f"{_format_names(tasks.names)} cannot be evaluated"):
            record: dict[str, Any] = lm_eval.evaluate(
                lm if cache is None else cache,
                loaded,
                limit=limit,
                apply_chat_template=chat,
                system_instruction=system_instruction,
                fewshot_as_multiturn=True,
                log_samples=log_samples,
                confirm_run_unsafe_code=True,  # `Tasks` has refused them if they may not run
            )
    engine = lm.engine
    return record | {
        OURS: {
            "plan": engine.plan.to_dict(),
            **lm.identity,
            "slots": engine.num_slots,
            "num_recalled": 0 if cache is None else cache.num_found,
            "costs": {name: attrs.asdict(cost) for name, cost in lm.costs.items()},
            "reports": {kind: report.to_dict() for kind, report in lm.reports.items()},
        }
    }


def _configure(
    task: Any, num_fewshot: int | None, generation: Mapping[str, Any], seed: int
) -> None:
    """Apply the user's settings to a task by the rules of ``lm_eval.simple_evaluate``.

    That function is not called: it starts other programs to describe the machine.
    """
    if generation and task.get_config("output_type") == "generate_until":
        task.set_config("generation_kwargs", dict(generation), update=True)
    default = task.get_config("num_fewshot")
    if default is None or (num_fewshot is not None and default != 0):
        # A task that says 0 means it: examples would give its answers away.
        task.set_config("num_fewshot", num_fewshot or 0)
    task.set_fewshot_seed(seed)


@contextmanager
def _task_errors(problem: str) -> Iterator[None]:
    """Raise `TaskError` for whatever a task's file, its code or its packages raise."""
    try:
        yield
    except KVPolicyError:
        raise
    except Exception as error:
        msg = f"{problem}: {error_summary(error).rstrip('.')}"
        if isinstance(error, ConnectionError) and not hub_reachable():
            msg += (
                "; the hub cannot be reached from here, so data sets must have been downloaded "
                "before, or be local files"
            )
        raise TaskError(msg) from error


@contextmanager
def _harness_settings() -> Iterator[None]:
    """Silence the harness and its progress bars, and do not wait for a network that is absent."""
    logger = logging.getLogger("lm_eval")
    replaced: list[tuple[Any, str, Any]] = [
        # The harness's bars have no switch.
        (tqdm.tqdm, "__init__", partialmethod(tqdm.tqdm.__init__, disable=True)),
    ]
    if not hub_reachable():  # otherwise `datasets` tries again and again
        replaced += [
            (m, "HF_HUB_OFFLINE", True) for m in (huggingface_hub.constants, datasets.config)
        ]
    with ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        stack.callback(datasets.enable_progress_bars)
        datasets.disable_progress_bars()
        for holder, name, value in replaced:
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        yield


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml") and Path(name).is_file()


def _format_names(names: Sequence[str]) -> str:
    return f"task{'' if len(names) == 1 else 's'} {', '.join(names[:5])}" + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )
