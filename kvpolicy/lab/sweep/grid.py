"""The cells of a comparison: every series at every budget, each with its resolved plan."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import attrs

from kvpolicy.errors import PlanError
from kvpolicy.lab.sweep.sweep import Setting, in_words
from kvpolicy.lab.sweep.sweep_file import Series
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.plan.toml import policies_named, read_tables, set_entry


@attrs.frozen
class Cell:
    """One plan to be measured.

    Attributes:
        series: Which line of the plot it is a point of.
        budget: Rows that stay after a compaction, the mean over the layers that compact;
            ``None`` if nothing ever leaves.
        buffer: Rows that may join before the next compaction; ``None`` likewise.
        resolved: The plan to run, resolved for the model.
        digest: Digest of the resolved plan.
        group: Id of the group that is run under this plan; empty outside of runs.
        knobs: What a grid of knobs sets in this plan, by ``POLICY.KNOB``.
    """

    series: str
    budget: float | None
    buffer: float | None
    resolved: ResolvedPlan
    digest: str
    group: str = ""
    knobs: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def id(self) -> str:
        """The cell's name in all files, 16 hexadecimal digits."""
        return hashlib.sha256(f"{self.group} {self.digest}".encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the manifest."""
        return {
            "cell": self.id,
            "group": self.group,
            "series": self.series,
            "budget": self.budget,
            "buffer": self.buffer,
            "knobs": dict(self.knobs),
            "plan": self.digest,
            "resolved": self.resolved.to_dict(),
        }


def build_cells(
    series: Sequence[Series],
    *,
    num_layers: int,
    budgets: Sequence[int],
    buffer: int | None,
    overrides: Sequence[str] = (),
) -> list[Cell]:
    """Resolve every series at every budget, as `cells_at` does.

    Args:
        series: What is compared.
        num_layers: Layers of the model.
        budgets: Budgets for the series whose plan leaves it open.
        buffer: Buffer for the plans that leave it open.
        overrides: ``--set`` strings.

    Returns:
        The cells in order, each resolved plan once.
    """
    settings = [Setting(budget) for budget in budgets]
    return cells_at(series, settings, num_layers=num_layers, buffer=buffer, overrides=overrides)


def cells_at(
    series: Sequence[Series],
    settings: Sequence[Setting],
    *,
    num_layers: int,
    buffer: int | None,
    overrides: Sequence[str] = (),
    group: str = "",
) -> list[Cell]:
    """Resolve every series at every setting.

    Args:
        series: What is compared.
        settings: Budgets for the series whose plan leaves it open, and knobs for those that
            name the policy. A plan that nothing ever leaves, like the full cache, gives one
            cell.
        num_layers: Layers of the model.
        buffer: Buffer for the plans that leave it open.
        overrides: ``--set`` strings; ``POLICY.KNOB=VALUE`` goes to the plans that name it.
        group: Id of the group that the cells belong to.

    Returns:
        The cells in order, each resolved plan once.

    Raises:
        KVPolicyError: A plan is wrong or does not fit the model, or an override or a knob fits
            none.
    """
    _check_overrides(series, overrides)
    _check_knobs(series, settings, overrides)
    cells: dict[str, Cell] = {}
    for one in series:
        mine = [override for override in overrides if _concerns(one, override)]
        fixed: list[Mapping[str, Any]] = []  # knobs under which no budget of a setting is used
        for setting in settings:
            knobs = {key: v for key, v in setting.knobs.items() if _concerns(one, key)}
            if knobs in fixed:
                continue
            cell = _cell(one, Setting(setting.budget, knobs), num_layers, buffer, mine)
            cells.setdefault(cell.digest, attrs.evolve(cell, group=group))
            if not cell.resolved.uses_default_budget:
                fixed.append(knobs)
    return list(cells.values())


def _cell(
    series: Series,
    setting: Setting,
    num_layers: int,
    buffer: int | None,
    overrides: Sequence[str],
) -> Cell:
    plan = _plan(series, setting.knobs, buffer, overrides)
    resolved = plan.resolve(num_layers, default_budget=setting.budget)
    compacting = resolved.compacting_layers()
    is_bounded = any(layer.bounded for layer in resolved.layers)
    # A cache that grows has no buffer: whatever is said of one changes nothing.
    knobs = {key: v for key, v in setting.knobs.items() if key != "buffer" or is_bounded}
    return Cell(
        series=", ".join([series.label, *in_words(knobs)]),
        budget=_mean(layer.budget for layer in compacting),
        buffer=_mean(layer.buffer for layer in compacting),
        resolved=resolved,
        digest=resolved.digest(),
        knobs=knobs,
    )


def _plan(
    series: Series,
    knobs: Mapping[str, Any],
    buffer: int | None,
    overrides: Sequence[str],
) -> Plan:
    given = {} if buffer is None else {"buffer": buffer}
    name = f"plan '{series.label}'"
    raw = read_tables(given | series.plan, name)
    for key, value in knobs.items():
        set_entry(raw, key, value, name, source=f"knob '{key}'")
    return Plan.from_dict(raw, overrides, name=name)


def _mean(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _check_overrides(series: Sequence[Series], overrides: Sequence[str]) -> None:
    for override in overrides:
        if override.partition("=")[0].strip() == "budget":
            msg = f"--set {override!r} would give every cell one budget; use --budgets for that."
            raise PlanError(msg)
        if not any(_concerns(one, override) for one in series):
            # The plan's own message names the policies it knows.
            Plan.from_dict(_all_stacks(series), [override], name="the comparison")


def _check_knobs(
    series: Sequence[Series], settings: Sequence[Setting], overrides: Sequence[str]
) -> None:
    fixed = {_key(override) for override in overrides}
    for key, value in {key: v for one in settings for key, v in one.knobs.items()}.items():
        if key == "budget":
            msg = "knob 'budget' is no knob of a policy; list the budgets with --budgets"
            raise PlanError(msg)
        if key in fixed:
            msg = f"knob '{key}' is given values to try and is fixed by --set; take one out"
            raise PlanError(msg)
        if not any(_concerns(one, key) for one in series):
            set_entry(_all_stacks(series), key, value, "the comparison", source=f"knob '{key}'")


def _key(override: str) -> str:
    return ".".join(key.strip() for key in override.partition("=")[0].split("."))


def _concerns(series: Series, override: str) -> bool:
    """Whether an override says something about this series: it does unless it names a policy."""
    keys = _key(override).split(".")
    return len(keys) != 2 or keys[0] in policies_named(series.plan)


def _all_stacks(series: Sequence[Series]) -> dict[str, Any]:
    return {
        "stack": list(dict.fromkeys(name for one in series for name in policies_named(one.plan)))
    }
