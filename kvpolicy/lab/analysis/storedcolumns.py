"""What tables say of stored samples, without the task that they were samples of."""

from collections.abc import Sequence

from kvpolicy.errors import ResultsError
from kvpolicy.hooks.discovery import nearest
from kvpolicy.lab.store.records import EvalSettingRecord
from kvpolicy.lab.tasks.likelihood import Agreement, Perplexity
from kvpolicy.lab.tasks.measures import ACCURACY, LENGTH, Column, mean_of

# Columns that are more than the mean of a value; whoever measures otherwise gets the mean.
_KNOWN = {column.name: column for column in (ACCURACY, *Perplexity().columns, *Agreement().columns)}


def columns_of(group: EvalSettingRecord) -> Sequence[Column]:
    """The columns of a group's measure, the one that is compared first.

    A column that kvpolicy does not know, of a task that some package brings along, is the mean
    of the value of its name.

    Args:
        group: The group.
    """
    return [
        _KNOWN.get(one.name) or mean_of(one.name, one.title, one.heading, is_share=one.is_share)
        for one in group.columns
    ]


def column_of(group: EvalSettingRecord, name: str | None) -> Column:
    """One column of a group's measure, or ``length``, which every group has.

    Args:
        group: The group.
        name: The column's name; its first one if not given.

    Raises:
        ResultsError: The group has no such column.
    """
    columns = columns_of(group)
    if name is None:
        return columns[0]
    known = {column.name: column for column in (*columns, LENGTH)}
    if name not in known:
        msg = f"task '{group.task}' was not measured by {name!r}{nearest(name, known)}"
        raise ResultsError(msg)
    return known[name]
