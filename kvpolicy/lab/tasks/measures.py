"""Earlier names of `kvpolicy.lab.tasks.task`."""

from kvpolicy.lab.tasks.task import (
    ACCURACY,
    LENGTH,
    Column,
    Graded,
    GradeError,
    by_item,
    grader_of,
    mean_of,
)
from kvpolicy.lab.tasks.task import EvalOutcome as Outcome
from kvpolicy.lab.tasks.task import EvalRequest as Asked
from kvpolicy.lab.tasks.task import Evaluation as Trial
from kvpolicy.lab.tasks.task import Metric as Measure

__all__ = [
    "ACCURACY",
    "LENGTH",
    "Asked",
    "Column",
    "GradeError",
    "Graded",
    "Measure",
    "Outcome",
    "Trial",
    "by_item",
    "grader_of",
    "mean_of",
]
