"""Records of a run folder: evaluation settings and cells, samples, items and timings."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin

import attrs
import cattrs
from attrs.validators import ge, in_
from cattrs.v import format_exception

from kvpolicy.errors import ResultsError, refusal_reason
from kvpolicy.validators import MAX_SEED

FORMAT = 2  # of run folders

Record = TypeVar("Record")


@attrs.frozen
class ColumnInfo:
    """How tables show one quantity that a task measures.

    Attributes:
        name: Name in files.
        title: Heading in tables.
        heading: Axis label in plots, with the unit.
        is_share: Whether the quantity lies between 0 and 1.
        more_is_better: Whether a larger quantity is a better one; ``None``: a run that did not say.
    """

    name: str
    title: str
    heading: str
    is_share: bool
    # Runs that did not say are compared with those that do.
    more_is_better: bool | None = attrs.field(default=None, eq=False)


@attrs.frozen
class EvalSettingRecord:
    """One evaluation setting: a model on a task with a seed (``groups`` of the manifest).

    Attributes:
        group: Id, 16 hexadecimal digits: a hash of all settings that decide its samples.
        model: Model as the user typed it.
        model_fingerprint: Hash of the model's configuration and weights.
        device: Device of the model.
        dtype: Precision of the weights, whether they are packed, and decode steps compiled.
        task: Task with its options.
        seed: Random seed for choosing items and sampling tokens.
        split: Split of the task.
        n: Number of items.
        attempts: Samples per item.
        prompt_hash: Hash of the items' prompts.
        sampling: Sampling method in text form.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Nucleus sampling threshold.
        max_new_tokens: Generation limit of a sample.
        slots: Samples decoded together.
        measure: How cells are measured, such as ``"answers"``.
        columns: What tables show; the first column is compared between cells.
    """

    group: str
    model: str
    model_fingerprint: str
    device: str
    dtype: str
    task: str
    seed: int
    split: str
    n: int = attrs.field(validator=ge(1))
    attempts: int = attrs.field(validator=ge(1))
    prompt_hash: str
    sampling: str
    temperature: float
    top_p: float
    max_new_tokens: int
    slots: int
    measure: str
    columns: tuple[ColumnInfo, ...]


def _has_layers(record: object, field: object, resolved: dict[str, Any]) -> None:
    layers = resolved.get("layers", [])
    if not (_is_list_of_dicts(layers) and all(_has_stack(layer) for layer in layers)):
        msg = "'resolved' is not a resolved plan"
        raise ValueError(msg)


def _has_stack(layer: dict[str, Any]) -> bool:
    return _is_list_of_dicts(layer.get("stack", []))


def _is_list_of_dicts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


@attrs.frozen
class CellRecord:
    """One evaluation setting under one resolved plan (``cells`` of the manifest).

    Attributes:
        cell: Id, 16 hexadecimal digits: a hash of the setting and the plan.
        group: Id of the evaluation setting.
        series: Name of the plan in tables and plots, without its budget.
        budget: Rows kept by a compaction, averaged over the compacting layers; ``None`` if
            nothing is evicted.
        buffer: Rows added between compactions; ``None`` if nothing is evicted.
        knobs: Values of the varied knobs, by ``policy.knob``.
        plan: Digest of the resolved plan.
        resolved: The resolved plan as plain data.
        bytes_per_sequence: Bytes that the cache allocates for each sequence of the setting; for a
            full cache those of the longest. ``None``: a run that did not count them.
        byte_limits: Bytes for each sequence that the run was given and within which this is the
            plan of its series with the largest budget; empty if it was given budgets.
    """

    cell: str
    group: str
    series: str
    budget: float | None
    buffer: float | None
    knobs: dict[str, Any]
    plan: str
    resolved: dict[str, Any] = attrs.field(validator=_has_layers)
    bytes_per_sequence: int | None = None
    byte_limits: tuple[int, ...] = ()


@attrs.frozen
class Breakdown:
    """Measured quantities of the parts of a sample, such as the layers of the model.

    Attributes:
        parts: What the parts are called: whole numbers or texts.
        values: Measured quantities by name, a value for each part; ``None`` where a part has none.
    """

    parts: list[int | str]
    values: dict[str, list[float | None]]

    @classmethod
    def of(cls, parts: Iterable[tuple[int | str, Mapping[str, float]]]) -> Self:
        """Make one from the values of each part, which are rounded to 6 digits."""
        parts = list(parts)
        names = dict.fromkeys(name for _, values in parts for name in values)
        return cls(
            [part for part, _ in parts],
            {name: [_rounded(values.get(name)) for _, values in parts] for name in names},
        )

    def values_of(self, place: int) -> dict[str, float]:
        """The values of the part at some place."""
        found = {name: values[place] for name, values in self.values.items()}
        return {name: value for name, value in found.items() if value is not None}


@attrs.frozen
class Sample:
    """One prompt answered under one plan; complete without any other record.

    Attributes:
        key: Hash of everything the sample depends on.
        cell: Id of the cell.
        group: Id of the evaluation setting.
        model: Model as the user typed it.
        task: Task with its options.
        seed: Random seed for choosing items and sampling tokens.
        series: Name of the plan in tables and plots, without its budget.
        budget: Rows kept by a compaction, averaged over the compacting layers; ``None`` if
            nothing is evicted.
        buffer: Rows added between compactions; ``None`` if nothing is evicted.
        plan: Digest of the resolved plan.
        item: Number of the item in its task and seed.
        attempt: Number of the attempt at the item, from 0.
        correct: Verdict of the grader; ``False`` for a failed request, ``None`` if nothing was
            graded or the grader gave no verdict.
        ungraded: Why the grader gave no verdict.
        finish_reason: ``"stop"``, ``"length"`` (truncated at ``max_new_tokens``) or ``"error"``.
        error: Error message of a failed request.
        prompt_len: Tokens of the prompt.
        num_tokens: Generated tokens.
        compactions: Times at which at least one layer was compacted.
        rows_evicted: Evicted rows, summed over layers and KV heads.
        peak_rows: Most rows held by any layer.
        peak_bytes: Bytes of keys and values in those rows and of states, summed over layers.
        prefill_s: Seconds in forwards of this prompt, shared with prompts prefilled together.
        decode_s: Seconds from the first generated token to the last.
        facets: Properties of the item to group by, such as its difficulty.
        values: Measured quantities by name, for tasks that measure instead of grading.
        text: Generated text.
        breakdowns: Measured quantities of its parts, by what the parts are, such as ``"layer"``.
    """

    key: str
    cell: str
    group: str
    model: str
    task: str
    seed: int
    series: str
    budget: float | None
    buffer: float | None
    plan: str
    item: int
    attempt: int
    correct: bool | None
    ungraded: str | None
    finish_reason: str = attrs.field(validator=in_(("stop", "length", "error")))
    error: str | None
    prompt_len: int
    num_tokens: int
    compactions: int
    rows_evicted: int
    peak_rows: int
    peak_bytes: int
    prefill_s: float
    decode_s: float
    facets: dict[str, int | str]
    values: dict[str, float]
    text: str
    breakdowns: dict[str, Breakdown] = attrs.field(factory=dict)

    @property
    def facet_names(self) -> list[str]:
        """What a table can be broken down by: properties of the item, and kinds of parts."""
        return list(dict.fromkeys([*self.facets, *self.breakdowns]))

    def by_facet(self, facet: str) -> "Iterator[tuple[int | str, Sample]]":
        """The sample under its value of a facet, or each part as a sample; nothing without it."""
        if facet in self.facets:
            yield self.facets[facet], self
        elif facet in self.breakdowns:
            found = self.breakdowns[facet]
            for place, part in enumerate(found.parts):
                yield part, attrs.evolve(self, values=found.values_of(place), breakdowns={})


@attrs.frozen
class ItemRecord:
    """Prompt and expected answer of one item, for later readers of the samples.

    Attributes:
        group: Id of the evaluation setting.
        model: Model as the user typed it; its chat template is part of the prompt.
        task: Task with its options.
        seed: Random seed for choosing items.
        item: Number of the item in its task and seed.
        prompt: Text given to the model.
        answer: Expected answer, in the form that the task's grader uses.
        reference: A text that answers the prompt, if the data set has one.
        facets: Properties of the item to group by, such as its difficulty.
    """

    group: str
    model: str
    task: str
    seed: int
    item: int
    prompt: str
    answer: str
    reference: str | None
    facets: dict[str, int | str]


@attrs.frozen
class CellTiming:
    """Cost of a cell whose samples were all run without interruption.

    An interrupted cell has no timing: its batches were not full, so its speed would measure the
    interruption.

    Attributes:
        cell: Id of the cell.
        num_requests: Samples of the cell.
        new_tokens: Generated tokens.
        elapsed_s: Seconds from the first prompt to the last result, without those of compiling.
        policy_s: Seconds of policy work in decode steps: observe, score, select, evict, steer.
        decode_s: Seconds in decode steps, compactions included.
        peak_kv_bytes: Peak KV bytes of the whole batch.
        compile_s: Seconds in which decode steps were compiled. A process compiles once for each
            shape, so that they depend on what it ran before; no other field includes them.
    """

    cell: str
    num_requests: int
    new_tokens: int
    elapsed_s: float
    policy_s: float
    decode_s: float
    peak_kv_bytes: int
    compile_s: float = 0.0

    @property
    def throughput_tok_s(self) -> float | None:
        """Generated tokens per second; ``None`` if there are none: every request failed."""
        return self.new_tokens / self.elapsed_s if self.new_tokens else None

    @property
    def policy_share(self) -> float | None:
        """Share of the decode time spent on policies; ``None`` without decode steps."""
        return self.policy_s / self.decode_s if self.decode_s else None


def sample_key(
    group: EvalSettingRecord,
    plan: str,
    example: Sequence[str | None],
    *,
    item: int,
    attempt: int,
    version: str,
) -> str:
    """The key of a sample: a hash of everything that it depends on.

    Args:
        group: The evaluation setting.
        plan: Digest of the resolved plan.
        example: Prompt, answer and reference; the reference is ``None`` if it is not read.
        item: Number of the item.
        attempt: Number of the attempt at it.
        version: Version of kvpolicy.

    Returns:
        32 hexadecimal digits.
    """
    parts = [
        plan,
        group.model_fingerprint,
        group.task,
        group.measure,
        item,
        json.dumps(list(example)),
        attempt,
        group.seed,
        group.sampling,
        group.max_new_tokens,
        version,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def structure_records(
    cls: type[Record], lines: Sequence[dict[str, Any]], path: Path
) -> list[Record]:
    """Build the records of a JSON lines file.

    Args:
        cls: A record class.
        lines: The objects of the file.
        path: The file, for the message.

    Raises:
        ResultsError: A line has missing, additional or wrongly typed fields.
    """
    return [structure_record(cls, line, f"{path}, line {i}") for i, line in enumerate(lines, 1)]


def structure_record(cls: type[Record], record: dict[str, Any], where: str) -> Record:
    """Build a record from plain data, checking names, types and ranges of all fields.

    Args:
        cls: A record class.
        record: Plain data read from a file that anybody may have edited.
        where: File and line, for the message.

    Raises:
        ResultsError: The data has missing, additional or wrongly typed fields, or a number that
            cannot be one of a run.
    """
    try:
        return _converter.structure(record, cls)
    except cattrs.BaseValidationError as error:
        problems = cattrs.transform_error(error, format_exception=_describe)
    shown = f"{'; '.join(problems[:3])}{'; ...' if len(problems) > 3 else ''}"
    msg = f"{where}, is damaged or from another version of kvpolicy: {shown}."
    raise ResultsError(msg)


def _exactly(*types: type) -> Any:
    """A structure hook that accepts values of these types and converts nothing."""

    def check(value: Any, cls: Any) -> Any:
        if type(value) not in types:
            msg = f"{value!r:.60} is not {types[0].__name__}"
            raise TypeError(msg)
        return value

    return check


def _number(*types: type) -> Any:
    """A structure hook for what is counted or measured: nothing of it is negative or NaN."""
    exactly = _exactly(*types)

    def check(value: Any, cls: Any) -> Any:
        if not 0 <= exactly(value, cls) <= MAX_SEED:
            msg = f"{value!r:.40} is out of range"
            raise ValueError(msg)
        return value

    return check


def _dict(value: Any, cls: Any) -> Any:
    """A structure hook for free-form entries; of facets and measured values, none is a list."""
    entries = _exactly(dict)(value, cls)
    kind = get_args(cls)[1]
    for entry in () if kind is Any else entries.values():
        is_huge = kind is float and type(entry) is int and abs(entry) > MAX_SEED
        if isinstance(entry, (list, dict)) or is_huge:
            msg = f"{entry!r:.40} is no value to group by or to average"
            raise ValueError(msg)
    return entries


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _is_free_form(cls: Any) -> bool:
    return get_origin(cls) is dict and get_args(cls)[1] in (Any, float, int | str)


def _describe(error: BaseException, cls: type | None) -> str:
    is_own = type(error) is ValueError
    return refusal_reason(error) if is_own else format_exception(error, cls)


_converter = cattrs.Converter(forbid_extra_keys=True)
for _type in (str, bool):
    _converter.register_structure_hook(_type, _exactly(_type))
_converter.register_structure_hook(int, _number(int))
_converter.register_structure_hook(float, _number(float, int))  # JSON has whole floats as integers
_converter.register_structure_hook_func(_is_free_form, _dict)
_converter.register_structure_hook_func(lambda cls: cls == int | str, _exactly(int, str))
