"""What is logged of an engine beside its requests: policies that fail, and its end if it breaks."""

import logging
from weakref import WeakValueDictionary

from kvpolicy.engine.requests.results import HookFailure
from kvpolicy.errors import error_kind, error_origin
from kvpolicy.serve.logs import log
from kvpolicy.serve.record import Record


class EngineLog:
    """Logs the failures of the engine of one plan; an `EngineListener`."""

    def __init__(self, plan: str) -> None:
        """Begin.

        Args:
            plan: Name of the plan.
        """
        self._plan = plan
        # Of the requests that are still being answered.
        self._records: WeakValueDictionary[int, Record] = WeakValueDictionary()

    def note_choice(self, number: int, record: Record) -> None:
        """Note which request a choice belongs to.

        Args:
            number: Number of the choice in the engine.
            record: The request.
        """
        self._records[number] = record

    def hook_failed(self, failure: HookFailure) -> None:
        """Log a hook call that has failed, with the ids of its requests.

        Args:
            failure: The call.
        """
        found = [self._records.get(number) for number in failure.requests]
        ids = dict.fromkeys(record.id for record in found if record is not None)
        log(
            "hook_failed",
            logging.WARNING,
            plan=self._plan,
            request_ids=list(ids),
            policy=failure.policy,
            hook=failure.hook,
            layer=failure.layer_idx,
            message=failure.summary,
            error=failure.error,
            at=list(failure.at),
        )

    def broke(self, error: BaseException) -> None:
        """Log that the engine has broken.

        Args:
            error: What has broken it.
        """
        message = broken_sentence(self._plan, error_kind(error))
        log("engine_broken", logging.ERROR, plan=self._plan, message=message, **error_origin(error))


def broken_sentence(plan: str, broken_by: str) -> str:
    """What an operator is told of an engine that has broken.

    Args:
        plan: Name of its plan.
        broken_by: See `AsyncEngine.broken_by`.
    """
    return f"the engine of plan '{plan}' has broken: {broken_by}; the process must be started again"
