"""The grid of a sweep: settings, and the cells that run each setting under every plan.

A *setting* is a model, a task and a seed. A *cell* is a setting under one resolved plan. A
*sample* is one attempt at one example in a cell. In result files, the id of a setting is called
``group``.
"""

import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from statistics import fmean
from typing import Any

import attrs

import kvpolicy
from kvpolicy.engine.requests.request import Sampling
from kvpolicy.errors import PlanError
from kvpolicy.lab.models import ModelInfo, fingerprint_texts
from kvpolicy.lab.store.records import CellRecord, EvalSettingRecord, ItemRecord, sample_key
from kvpolicy.lab.sweep.sizes import Sizes, TooFewBytesError
from kvpolicy.lab.sweep.sweep_file import Series, Variant
from kvpolicy.lab.tasks.task import Example, Split, Task
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.plan.toml import Override, apply_override, policies_named, read_tables

# Names and titles do not change the samples, so they are not part of a setting's id.
_NOT_IN_ID = ("group", "model", "columns")

_BUFFERS = ("buffer", "prefill_buffer")


@attrs.frozen
class EvalSetting:
    """Everything that samples depend on, except the plan.

    Attributes:
        model: The model.
        task: Provides the examples and measures the samples.
        examples: The examples, each once per attempt.
        seed: Selects the examples.
        max_new_tokens: Generation limit of a sample.
        slots: Samples decoded together.
        split: The task's split that the examples are from.
        sampling: How tokens are sampled.
        id: 16 hexadecimal digits: a hash of everything that the samples depend on.
    """

    model: ModelInfo
    task: Task
    examples: Sequence[Example]
    seed: int
    max_new_tokens: int
    slots: int
    split: Split = "test"
    sampling: Sampling = attrs.field(factory=Sampling)
    id: str = attrs.field(init=False)

    @id.default
    def _hash(self) -> str:
        plain = attrs.asdict(self._record_with(""))
        return digest({key: value for key, value in plain.items() if key not in _NOT_IN_ID})

    @property
    def num_attempts(self) -> int:
        """Samples per example."""
        return 1 + max((example.attempt for example in self.examples), default=0)

    @property
    def num_examples(self) -> int:
        """Distinct examples."""
        return len({example.index for example in self.examples})

    @cached_property
    def record(self) -> EvalSettingRecord:
        """The setting as stored in the manifest."""
        return self._record_with(self.id)

    def example_records(self) -> list[ItemRecord]:
        """The examples, each once, as stored in the results folder."""
        return [
            ItemRecord(
                group=self.id,
                model=self.model.name,
                task=self.task.name,
                seed=self.seed,
                item=example.index,
                prompt=example.prompt,
                answer=example.answer,
                reference=example.reference,
                facets=dict(example.facets),
            )
            for example in self.examples
            if example.attempt == 0
        ]

    def key(self, plan: str, example: Example) -> str:
        """Return the key of a sample: a hash of everything that it depends on.

        Args:
            plan: Digest of the resolved plan.
            example: One attempt at one example of this setting.
        """
        return sample_key(
            self.record,
            plan,
            self._texts(example),
            item=example.index,
            attempt=example.attempt,
            version=kvpolicy.__version__,
        )

    def _record_with(self, id: str) -> EvalSettingRecord:
        return EvalSettingRecord(
            group=id,
            model=self.model.name,
            model_fingerprint=self.model.fingerprint,
            device=self.model.device,
            dtype=self.model.dtype,
            task=self.task.name,
            seed=self.seed,
            split=self.split,
            n=self.num_examples,
            attempts=self.num_attempts,
            prompt_hash=fingerprint_texts(
                [json.dumps(self._texts(example)) for example in self.examples]
            ),
            sampling=describe_sampling(self.sampling),
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            max_new_tokens=self.max_new_tokens,
            slots=self.slots,
            measure=self.task.metric.name,
            columns=tuple(column.info for column in self.task.metric.columns),
        )

    def _texts(self, example: Example) -> list[str | None]:
        """Return all texts of an example that its metric reads."""
        reference = example.reference if self.task.metric.reads_reference else None
        return [example.prompt, example.answer, reference]


@attrs.frozen
class Cell:
    """A setting under one plan.

    Attributes:
        series: Label of the series, with the knobs that the sweep varies.
        budget: Rows that stay after a compaction, the mean over the layers that compact;
            ``None`` if nothing is evicted.
        buffer: Rows that may join before the next compaction, likewise.
        resolved: The plan, resolved for the model.
        digest: Digest of the resolved plan.
        setting: Id of the setting; empty if the cell is not part of a sweep.
        knobs: The values that the sweep sets in this plan, by ``POLICY.KNOB``.
        bytes_per_sequence: Bytes that the cache allocates for each sequence; ``None``: not known.
        byte_limits: Bytes for each sequence that the sweep was given and within which this is the
            plan of its series; none if the sweep was given budgets.
    """

    series: str
    budget: float | None
    buffer: float | None
    resolved: ResolvedPlan
    digest: str
    setting: str = ""
    knobs: Mapping[str, Any] = attrs.field(factory=dict)
    bytes_per_sequence: int | None = None
    byte_limits: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        """The cell's name in all files, 16 hexadecimal digits."""
        return hashlib.sha256(f"{self.setting} {self.digest}".encode()).hexdigest()[:16]

    @property
    def record(self) -> CellRecord:
        """The cell as stored in the manifest."""
        return CellRecord(
            cell=self.id,
            group=self.setting,
            series=self.series,
            budget=self.budget,
            buffer=self.buffer,
            knobs=dict(self.knobs),
            plan=self.digest,
            resolved=self.resolved.to_dict(),
            bytes_per_sequence=self.bytes_per_sequence,
            byte_limits=self.byte_limits,
        )


@attrs.frozen
class Sweep:
    """All settings and cells of a sweep, as values: no model is loaded.

    Attributes:
        name: Name of the sweep.
        settings: The settings, in the order of the tables.
        cells: Every setting under each of its plans, in the order of the settings.
        record: Examples of each cell, from the first, whose kept rows are recorded. Samples do
            not depend on it.
    """

    name: str
    settings: Sequence[EvalSetting]
    cells: Sequence[Cell]
    record: int = 0

    @cached_property
    def _settings(self) -> dict[str, EvalSetting]:
        return {setting.id: setting for setting in self.settings}

    @cached_property
    def _cells(self) -> dict[str, Cell]:
        return {cell.id: cell for cell in self.cells}

    @property
    def num_samples(self) -> int:
        """Samples of all cells."""
        return sum(len(self.setting_of(cell).examples) for cell in self.cells)

    def cell(self, id: str) -> Cell:
        """Return a cell by its id."""
        return self._cells[id]

    def setting_of(self, cell: Cell) -> EvalSetting:
        """Return the setting of a cell."""
        return self._settings[cell.setting]

    def key(self, cell: Cell, example: Example) -> str:
        """Return the key of one sample of a cell."""
        return self.setting_of(cell).key(cell.digest, example)

    def remaining(self, cell: Cell, done: Container[str]) -> list[int]:
        """Return the indices, in the setting's ``examples``, of the samples still to do.

        Args:
            cell: The cell.
            done: Keys of the finished samples.
        """
        examples = self.setting_of(cell).examples
        return [
            index for index, example in enumerate(examples) if self.key(cell, example) not in done
        ]

    def num_remaining(self, done: Container[str]) -> int:
        """Count the samples still to do.

        Args:
            done: Keys of the finished samples.
        """
        return sum(len(self.remaining(cell, done)) for cell in self.cells)

    def recorded(self, cell: Cell) -> list[int]:
        """Return the indices of the recorded samples: first attempts at the first examples."""
        examples = self.setting_of(cell).examples
        return [index for index, example in enumerate(examples) if example.attempt == 0][
            : self.record
        ]

    def unrecorded(self, recorded: Container[str]) -> set[str]:
        """Return the keys of the samples that should have a record of kept rows but have none.

        Args:
            recorded: Keys of the recorded samples.
        """
        keys = (
            self.key(cell, self.setting_of(cell).examples[index])
            for cell in self.cells
            for index in self.recorded(cell)
        )
        return {key for key in keys if key not in recorded}

    def example_records(self) -> list[ItemRecord]:
        """The examples of all settings, as stored in the results folder."""
        return [record for setting in self.settings for record in setting.example_records()]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the manifest; it differs between any two sweeps."""
        return {
            "name": self.name,
            "version": kvpolicy.__version__,
            "groups": [attrs.asdict(setting.record) for setting in self.settings],
            "cells": [attrs.asdict(cell.record) for cell in self.cells],
        }


def build_cells(
    series: Sequence[Series],
    *,
    num_layers: int,
    attention: Sequence[int] | None = None,
    budgets: Sequence[int] = (),
    variants: Sequence[Variant] = (),
    buffer: int | None,
    prefill_buffer: int | None = None,
    overrides: Sequence[str] = (),
    sizes: Sizes | None = None,
) -> list[Cell]:
    """Resolve every series at every budget and variant.

    Args:
        series: The plans to compare.
        num_layers: Layers of the model.
        attention: Numbers of those that have attention; ``None``: all.
        budgets: Budgets of the plans that have none of their own. A plan that evicts nothing
            gives one cell.
        variants: Budgets with knobs; a knob applies to the plans that use its policy.
        buffer: Buffer of the plans that have none of their own.
        prefill_buffer: That of prompts that enter, likewise.
        overrides: ``--set`` strings; ``POLICY.KNOB=VALUE`` applies to the plans that use the
            policy.
        sizes: What plans allocate; needed by variants with bytes.

    Returns:
        The cells in order, each resolved plan once, without a setting.

    Raises:
        KVPolicyError: A plan is invalid or does not fit the model or the bytes, or an override or
            knob applies to none of the plans.
    """
    variants = [*map(Variant, budgets), *variants]
    _check_overrides(series, overrides)
    _check_knobs(series, variants, overrides)
    buffers = {"buffer": buffer, "prefill_buffer": prefill_buffer}
    given = {key: size for key, size in buffers.items() if size is not None}
    cells: dict[str, Cell] = {}
    refused: list[TooFewBytesError] = []
    for one in series:
        mine = [override for override in overrides if _applies(override, one)]
        without_budget: list[Mapping[str, Any]] = []  # knobs with which the plan uses no budget
        for variant in variants:
            knobs = {key: v for key, v in variant.knobs.items() if _applies(key, one)}
            if knobs in without_budget:
                continue
            tried = attrs.evolve(variant, knobs=knobs)
            try:
                cell = _build_cell(one, tried, num_layers, attention, given, mine, sizes)
            except TooFewBytesError as error:
                refused.append(error)
                continue
            limits: tuple[Variant, ...] = (variant,)
            if not cell.resolved.uses_default_budget:
                without_budget.append(knobs)
                limits = tuple(variants)
            known = cells.setdefault(cell.digest, cell)
            cells[cell.digest] = attrs.evolve(known, byte_limits=_limits(known, limits, sizes))
    if refused:  # the one that works for all
        raise max(refused, key=lambda error: error.least)
    return list(cells.values())


def sized(cell: Cell, sizes: Sizes) -> Cell:
    """A cell with the bytes that its plan allocates for each sequence."""
    return attrs.evolve(cell, bytes_per_sequence=sizes.bytes_of(cell.resolved))


def _limits(cell: Cell, variants: Iterable[Variant], sizes: Sizes | None) -> tuple[int, ...]:
    """Its limits, and those of the bytes of variants within which its plan is."""
    given = [one.bytes for one in variants if one.bytes is not None]
    if not given or sizes is None:
        return cell.byte_limits
    least = sizes.bytes_of(cell.resolved)
    found = {*cell.byte_limits, *(one for one in given if one >= least)}
    return tuple(sorted(found))


def _build_cell(
    series: Series,
    variant: Variant,
    num_layers: int,
    attention: Sequence[int] | None,
    given: Mapping[str, int],
    overrides: Sequence[str],
    sizes: Sizes | None,
) -> Cell:
    name = f"plan '{series.label}'"

    def resolve(
        given: Mapping[str, int], knobs: Mapping[str, Any], budget: int | None
    ) -> ResolvedPlan:
        raw = read_tables({**given, **series.plan}, name)
        tried = [_override(key, value) for key, value in knobs.items()]
        plan = Plan.from_dict(raw, [*tried, *overrides], name=name, options={"budget": "--budgets"})
        return plan.resolve(num_layers, default_budget=budget, attention=attention)

    knobs, budget = variant.knobs, variant.budget
    if variant.bytes is not None:
        assert sizes is not None
        budget = sizes.lengths.longest
    resolved = resolve(given, knobs, budget)
    if variant.bytes is not None and resolved.uses_default_budget:
        assert sizes is not None
        label = ", ".join([series.label, *format_knobs(knobs)])
        budget = sizes.largest_budget(
            label, lambda tried: resolve(given, variant.knobs, tried), variant.bytes
        )
        resolved = resolve(given, knobs, budget)
    if not any(layer.bounded for layer in resolved.layers):  # it ignores its buffers
        knobs = {key: value for key, value in knobs.items() if key not in _BUFFERS}
        resolved = resolve({}, knobs, budget)
    compacting = resolved.compacting_layers()
    return Cell(
        series=", ".join([series.label, *format_knobs(knobs)]),
        budget=_mean(layer.budget for layer in compacting),
        buffer=_mean(layer.buffer for layer in compacting),
        resolved=resolved,
        digest=resolved.digest(),
        knobs=knobs,
    )


def _mean(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _check_overrides(series: Sequence[Series], overrides: Sequence[str]) -> None:
    for override in overrides:
        if override.partition("=")[0].strip() == "budget":
            msg = f"--set {override!r} would set one budget in every cell; use --budgets instead."
            raise PlanError(msg)
        if not any(_applies(override, one) for one in series):
            # Raises with the names of the policies that the series use.
            Plan.from_dict(_all_policies(series), [override], name="the sweep")


def _check_knobs(
    series: Sequence[Series], variants: Sequence[Variant], overrides: Sequence[str]
) -> None:
    fixed = {_path(override) for override in overrides}
    for key, value in {key: v for one in variants for key, v in one.knobs.items()}.items():
        if key == "budget":
            msg = "'budget' is not a knob; list budgets with --budgets"
            raise PlanError(msg)
        if key in fixed:
            msg = f"knob '{key}' is varied by the sweep and fixed by --set; remove one of them"
            raise PlanError(msg)
        if not any(_applies(key, one) for one in series):
            apply_override(_all_policies(series), _override(key, value), "the sweep")


def _override(knob: str, value: Any) -> Override:
    return Override(knob, value, source=f"knob '{knob}'")


def _path(override: str) -> str:
    return ".".join(key.strip() for key in override.partition("=")[0].split("."))


def _applies(override: str, series: Series) -> bool:
    """Whether an override applies to a series: ``POLICY.KNOB`` needs the policy in the plan."""
    keys = _path(override).split(".")
    return len(keys) != 2 or keys[0] in policies_named(series.plan)


def _all_policies(series: Sequence[Series]) -> dict[str, Any]:
    names = dict.fromkeys(name for one in series for name in policies_named(one.plan))
    return {"stack": list(names)}


def format_knobs(knobs: Mapping[str, Any]) -> list[str]:
    """Format knob values for a label, such as ``mix_lambda=0.1``.

    Args:
        knobs: Values by ``POLICY.KNOB`` or entry name. The policy is left out where the knob's
            name is unique.
    """
    names = [key.rpartition(".")[2] for key in knobs]
    return [
        f"{name if names.count(name) == 1 else key}={_format(value)}"
        for name, (key, value) in zip(names, knobs.items(), strict=True)
    ]


def _format(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str)


def digest(data: object) -> str:
    """Hash plain data to 16 hexadecimal digits.

    Args:
        data: Anything that `json.dumps` accepts.
    """
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def describe_sampling(sampling: Sampling) -> str:
    """Describe how tokens are sampled, such as ``temperature 0.6, top-p 0.95``."""
    if sampling.greedy:
        return "greedy"
    top_p = "" if sampling.top_p == 1 else f", top-p {sampling.top_p:g}"
    return f"temperature {sampling.temperature:g}{top_p}"
