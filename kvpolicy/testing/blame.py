"""Why a trial failed: it is tried again with one thing less, until the failure is gone."""

from collections.abc import Callable
from typing import Any

from kvpolicy.testing.clauses import ConformanceError, Example
from kvpolicy.testing.shorten import Actions, replay, shorten
from kvpolicy.testing.story import Arrival, BatchDependenceError, differs
from kvpolicy.testing.trial import Trial


def explain(trial: Trial, error: ConformanceError) -> ConformanceError:
    """The same failure under the clause that is to blame, with an example to run."""
    trial, error = shorten(trial, error)
    if isinstance(error, BatchDependenceError):
        clause = _why_differs(trial, error.arrival)
    else:
        clause = _why_wrong(trial, error)
    example = Example(trial.setup.words(), _code(trial))
    return ConformanceError(clause, error.expected, error.came, trial.maker.name, example)


def _why_wrong(trial: Trial, error: ConformanceError) -> str:
    """What a wrong answer needs to come: a dtype, grouped queries, an odd size, or nothing."""
    if error.clause not in ("answers", "nan"):
        return error.clause
    if trial.setup.dtype != "float32" and _holds(trial, dtype="float32"):
        return "precision"
    if trial.setup.group > 1 and _holds(trial, group=1):
        return "grouped_queries"
    setup = trial.setup
    roomy = {
        "budget": setup.budget + 8,
        "buffer": setup.buffer + 4,
        "kv_heads": setup.kv_heads + 1,
        "head_dim": 8,
        "slots": 2 * setup.slots,
    }
    if error.clause == "answers" and _holds(trial, _in_pairs, **roomy):
        return "sizes"
    return error.clause


def _why_differs(trial: Trial, arrival: Arrival) -> str:
    """What a request needs, to be served otherwise than alone."""
    (first,) = trial.alone([arrival])
    if any(differs(second, first) for second in trial.alone([arrival])):
        return "determinism"
    if any(differs(second, first) for second in trial.alone([arrival] * 3)):
        return "memory"
    setup = trial.setup
    if any(differs(second, first) for second in trial.alone([arrival], chunk=setup.chunk)):
        return "chunks"
    if any(differs(second, first) for second in trial.alone([arrival], copies=setup.slots)):
        return "slots"
    if _has_cancelled(trial) and _holds(trial, _without_cancelling):
        return "cancellation"
    if not _holds(trial, slots=1):
        return "memory"
    return "neighbours"


def _holds(trial: Trial, change: Callable[[Actions], Actions] = list, **sizes: Any) -> bool:
    """Whether the same trial, with something changed, breaks no clause."""
    _, error = replay(trial, change(trial.actions), **sizes)
    return error is None


def _has_cancelled(trial: Trial) -> bool:
    return any(name == "cancel" for name, _ in trial.actions)


def _without_cancelling(actions: Actions) -> Actions:
    return [action for action in actions if action[0] != "cancel"]


def _in_pairs(actions: Actions) -> Actions:
    """Two long prompts for every one, so that nothing is asked about one row or sequence."""
    changed: Actions = []
    for name, arguments in actions:
        if name == "arrive":
            longer = {**arguments, "prompt": arguments["prompt"] + 16}
            changed += [(name, longer), (name, longer)]
        else:
            changed.append((name, arguments))
    return changed


def _code(trial: Trial) -> str:
    """Lines that do it again."""
    lines = ["from kvpolicy.testing import Trial", ""]
    lines.append(f"trial = Trial({trial.maker.words}, {trial.setup.words()})")
    for name, arguments in trial.actions:
        said = ", ".join(f"{key}={value}" for key, value in arguments.items())
        lines.append(f"trial.{name}({said})")
    if not trial.actions or trial.actions[-1][0] != "finish":
        lines.append("trial.finish()")
    return "\n".join(lines)
