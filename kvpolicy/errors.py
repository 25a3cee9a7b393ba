"""Every exception that kvpolicy raises on purpose.

A message states what failed, what was given, what is valid and what to try. The command line
prints it as one sentence and exits with status 2; any other exception is a defect of kvpolicy.
"""


class KVPolicyError(Exception):
    """A mistake that the caller can correct; the message says how."""


class UnknownPolicyError(KVPolicyError):
    """No installed policy has this name."""


class PolicyLoadError(KVPolicyError):
    """A policy is installed, or given as a file, but cannot be imported."""


class KnobError(KVPolicyError):
    """A policy was given a knob that it does not have, or an invalid value."""


class PlanError(KVPolicyError):
    """A plan is malformed or does not fit the model."""


class CoverageError(PlanError):
    """A plan covers a layer of the model twice, or not at all."""


class BudgetError(PlanError):
    """A budget is missing, or too small for what the policies of the layer protect."""


class HookError(KVPolicyError):
    """A policy raised an exception in a hook; the original error is the cause."""


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


class CacheError(KVPolicyError):
    """A `PolicyCache` was given unsupported arguments, or input that does not continue it."""


class OutputError(KVPolicyError):
    """An output folder or file cannot be written without losing data."""


class ResultsError(KVPolicyError):
    """A results folder cannot be read, or lacks what was requested."""


def error_summary(error: BaseException) -> str:
    """Another library's error on one line: its class and its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
