"""The harness's tasks, found by name and loaded, with a sentence for whatever goes wrong."""

import difflib
import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

from kvpolicy.errors import KVPolicyError, TaskError, error_summary
from kvpolicy.model.hub import hub_reachable


class Tasks(TaskManager):
    """The tasks of a run.

    Attributes:
        names: Their names, and those of groups of them.
    """

    def __init__(
        self, asked: Sequence[str], folders: Sequence[Path] = (), *, execute_code: bool = False
    ) -> None:
        """Find tasks; their data sets are not looked for yet.

        Args:
            asked: Names of tasks, groups or tags, patterns such as ``mmlu_*``, and YAML files.
            folders: Where tasks of one's own are.
            execute_code: Whether tasks may run programs that the model wrote.

        Raises:
            TaskError: There is no such task or folder.
        """
        for folder in folders:
            if not folder.is_dir():
                msg = f"--include-path was given '{folder}', which is no folder"
                raise TaskError(msg)
        self._execute_code = execute_code
        # The harness's own tasks are files by the thousand, and take seconds to list.
        self._list(folders, include_defaults=False)
        if not all(_is_file(name) or name in self.all_subtasks for name in asked):
            self._list(folders, include_defaults=True)
        self.names = list(dict.fromkeys(name for one in asked for name in self._matching(one)))

    def load(self, task_list: Any) -> Any:
        """Load tasks and their data sets.

        Raises:
            TaskError: A task is malformed, its data set cannot be had, or the model cannot be
                asked it.
        """
        try:
            loaded = super().load(task_list)
        except KVPolicyError:
            raise
        except Exception as error:  # whatever a task's file and a hundred packages may raise
            msg = f"{_listed(self.names)} cannot be loaded: {error_summary(error).rstrip('.')}"
            if isinstance(error, ConnectionError) and not hub_reachable():
                msg += (
                    "; the hub cannot be reached from here, so data sets must have been "
                    "downloaded before, or be local files"
                )
            raise TaskError(msg) from error
        for name, task in loaded["tasks"].items():
            self._check(name, task)
        return loaded

    def _list(self, folders: Sequence[Path], *, include_defaults: bool) -> None:
        try:
            super().__init__(include_path=list(folders), include_defaults=include_defaults)
        except Exception as error:
            where = ", ".join(map(str, folders)) or "the harness"
            msg = f"the tasks in {where} cannot be listed: {error_summary(error)}"
            raise TaskError(msg) from error

    def _matching(self, name: str) -> list[str]:
        if _is_file(name) or name in self.task_index:
            return [name]
        found = fnmatch.filter(self.all_tasks, name)
        if not found:
            near = difflib.get_close_matches(name, self.all_tasks, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "see `lm-eval ls tasks`"
            msg = f"the harness has no task '{name}'; {hint}"
            raise TaskError(msg)
        return found

    def _check(self, name: str, task: Any) -> None:
        if getattr(task, "MULTIMODAL", False):
            msg = f"task '{name}' shows pictures or plays sounds, and the engine reads text only"
            raise TaskError(msg)
        if getattr(task, "UNSAFE_CODE", False) and not self._execute_code:
            msg = (
                f"task '{name}' runs programs that the model writes, with nothing to confine "
                "them; add --execute-code if they may"
            )
            raise TaskError(msg)


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml") and Path(name).is_file()


def _listed(names: Sequence[str]) -> str:
    return f"task{'' if len(names) == 1 else 's'} {', '.join(names[:5])}" + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )
