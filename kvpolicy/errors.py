"""Every exception that kvpolicy raises on purpose.

A message states what failed, what was given, what is valid and what to try. The command line
prints it as one sentence and exits with status 2; any other exception is a defect of kvpolicy.
"""

import traceback
from collections import abc
from opcode import opname
from typing import Any


class KVPolicyError(Exception):
    """A mistake that the caller can correct; the message says how."""


class UnknownPolicyError(KVPolicyError):
    """No installed policy has this name."""


class PolicyLoadError(KVPolicyError):
    """A policy cannot be imported or built, or declares what the contract does not have."""


class KnobError(KVPolicyError):
    """A policy was given a knob that it does not have, or an invalid value."""


class PlanError(KVPolicyError):
    """A plan is malformed or does not fit the model."""


class CoverageError(PlanError):
    """A plan covers a layer of the model twice, or not at all."""


class BudgetError(PlanError):
    """A budget is missing, or too small for what the policies of the layer protect."""


class HookError(KVPolicyError):
    """A policy raised an exception in a hook; the original error is the cause.

    Attributes:
        summary: What has failed, without the words and answers of the policy: these may hold parts
            of a prompt.
        policy: Name of the policy; ``None``: it is an eviction of blocks.
        hook: Name of the hook.
        layer_idx: The layer, for hooks that are called per layer.
    """

    def __init__(
        self,
        message: str,
        *,
        summary: str | None = None,
        policy: str | None = None,
        hook: str | None = None,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(message)
        self.summary = summary or type_name(self)
        self.policy, self.hook, self.layer_idx = policy, hook, layer_idx


class HookResultError(HookError):
    """A policy returned a result that violates the contract."""


class ModelError(KVPolicyError):
    """A model cannot be loaded, or the engine cannot run it."""


class SteeringError(KVPolicyError):
    """A steering vector cannot be read or does not fit the model."""


class TaskError(KVPolicyError):
    """A task does not exist, cannot be loaded, or lacks what was requested."""


class RequestError(KVPolicyError):
    """One request cannot be served; in a run it becomes that request's result."""


class QueueFullError(KVPolicyError):
    """A request came when as many as allowed were running or waiting; it may be tried later."""


class EngineClosedError(KVPolicyError):
    """A request came to an engine that accepts none any more; the message says why."""


class CacheError(KVPolicyError):
    """A `PolicyCache` was given unsupported arguments, or input that does not continue it."""


class SnapshotError(CacheError):
    """A sequence cannot be copied, written or read, or its snapshot is of another plan or model."""


class OutputError(KVPolicyError):
    """An output folder or file cannot be written without losing data."""


class ResultsError(KVPolicyError):
    """A results folder cannot be read, or lacks what was requested."""


# Texts of exceptions and objects of other packages. Their ``__str__`` and ``__repr__`` may raise,
# return many lines, or return megabytes.

_LONGEST_TEXT = 500
_MOST_PLACES = 12


def error_summary(error: BaseException) -> str:
    """Another library's error on one line: its class and its message."""
    text = error_text(error)
    return f"{type_name(error)}: {text}" if text else type_name(error)


def error_text(error: BaseException) -> str:
    """The message of another library's error on one line; empty if it has none."""
    return _one_line(str, error, _LONGEST_TEXT, instead="(its message cannot be read)")


def error_kind(error: BaseException) -> str:
    """What an exception is, without its message, which may hold parts of a prompt."""
    return error.summary if isinstance(error, HookError) else type_name(error)


def error_origin(error: BaseException) -> dict[str, Any]:
    """The class of an exception and where it was raised; of a failing policy's, the original one.

    Returns:
        ``error``: the name of the class; ``at``: the innermost places that it came through, as
        ``FILE:LINE FUNCTION``. Nothing of its message.
    """
    if isinstance(error, HookError) and error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)[-_MOST_PLACES:]
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": type_name(error), "at": places}


def refusal_reason(error: BaseException) -> str:
    """Why a constructor refused its arguments: the message alone if it is meant for users.

    Validators of attrs raise with the message as first argument and objects behind it.
    """
    is_message = isinstance(error, (TypeError, ValueError)) and error.args
    if not (is_message and isinstance(error.args[0], str)):
        return error_summary(error)
    text = _one_line(str, error.args[0], _LONGEST_TEXT, instead="")
    return text.removesuffix(".") or error_summary(error)


def shown(value: object, longest: int = 60) -> str:
    """An object of a plugin in a message: its ``repr`` on one line, cut off if it is long."""
    return _one_line(repr, value, longest, instead=f"an object of {type_name(value)}")


def type_name(value: object) -> str:
    """Name of the class of an object."""
    return class_name(type(value))


def class_name(cls: type) -> str:
    """Name of a class; a metaclass may replace ``cls.__name__``."""
    name: str = type.__dict__["__name__"].__get__(cls)
    return name


def _one_line(
    read: abc.Callable[[object], str], value: object, longest: int, *, instead: str
) -> str:
    try:
        words = " ".join(str.split(read(value)))
    except BaseException as error:
        if is_interrupt(error):
            raise
        return instead
    return words if len(words) <= longest else f"{words[: longest - 1]}…"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory cannot be had."""
    # torch raises plain RuntimeErrors for memory of the CPU.
    is_torch = type_name(error) == "OutOfMemoryError"
    return isinstance(error, MemoryError) or is_torch or "DefaultCPUAllocator" in error_text(error)


def is_interrupt(error: BaseException) -> bool:
    """Whether the user pressed Ctrl-C; code that raises `KeyboardInterrupt` itself does not count.

    Python raises a real one between two instructions, never at a ``raise``.
    """
    if type(error) is not KeyboardInterrupt:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return True
    return opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] != "RAISE_VARARGS"
