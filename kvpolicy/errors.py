"""Every exception kvpolicy raises on purpose.

A message says who, what came, what was wanted and what to try. The command line prints it
as one sentence and exits with status 2; anything else that escapes is a defect of ours.
"""


class KVPolicyError(Exception):
    """Something the caller can put right; the message says how."""


class UnknownPolicyError(KVPolicyError):
    """No installed policy has this name."""


class PolicyLoadError(KVPolicyError):
    """A policy is installed, or given as a file, but cannot be imported."""


class KnobError(KVPolicyError):
    """A policy was given a knob it does not have, or a value it cannot take."""


class PlanError(KVPolicyError):
    """A plan is malformed or does not fit the model."""


class CoverageError(PlanError):
    """A plan covers a layer of the model twice, or not at all."""


class BudgetError(PlanError):
    """A budget is missing, or too small for what the policies of the layer protect."""


class HookError(KVPolicyError):
    """A policy raised while answering a hook; the original error is the cause."""


class HookResultError(HookError):
    """A policy answered a hook with something the contract forbids."""


class ModelError(KVPolicyError):
    """A model cannot be loaded or cannot be run by the engine."""


class SteeringError(KVPolicyError):
    """A steering vector cannot be read or does not fit the model."""


class TaskError(KVPolicyError):
    """A task does not exist, cannot be loaded, or has not what is asked of it."""


class RequestError(KVPolicyError):
    """One request cannot be served; in a run it becomes that request's result."""


class CacheError(KVPolicyError):
    """A `PolicyCache` is asked for what it cannot do, or given what does not continue it."""


class OutputError(KVPolicyError):
    """An output folder or file cannot be used without losing something."""


class ResultsError(KVPolicyError):
    """A results folder cannot be read, or has not what is asked of it."""


def error_summary(error: BaseException) -> str:
    """Another library's error on one line: its class and its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
