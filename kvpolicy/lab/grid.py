"""The cells of a comparison: every series at every budget, each with its resolved plan."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs

from kvpolicy.errors import BudgetError, PlanError
from kvpolicy.extends import read as read_plan
from kvpolicy.lab.presets import Series
from kvpolicy.overrides import policies_named
from kvpolicy.plan import Plan
from kvpolicy.resolved import LayerPlan, ResolvedPlan


@attrs.frozen
class Cell:
    """One plan to be measured.

    Attributes:
        series: Which line of the plot it is a point of.
        budget: Rows that stay after a compaction, the mean over the layers that compact;
            ``None`` if nothing ever leaves.
        buffer: Rows that may join before the next compaction; ``None`` likewise.
        plan: What to run.
        resolved: The same, spelled out for the model.
        digest: Digest of the resolved plan.
        group: Id of the group that is run under this plan; empty outside of runs.
        knobs: What a grid of knobs sets in this plan, by ``POLICY.KNOB``.
    """

    series: str
    budget: float | None
    buffer: float | None
    plan: Plan
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


def series_of_stack(stack: str) -> Series:
    """Make a series of what the user typed.

    Args:
        stack: Names of policies joined by ``+``, the later ones wrapping the earlier ones.

    Returns:
        A series labelled as typed.
    """
    return Series(label=stack, plan={"stack": [name.strip() for name in stack.split("+")]})


def series_of_file(path: Path) -> Series:
    """Make a series of a plan file, labelled by the name of the file.

    Args:
        path: A TOML plan.

    Returns:
        The series.

    Raises:
        PlanError: The file cannot be read or is no TOML.
    """
    return Series(label=path.stem, plan=read_plan(path))


def build_cells(
    series: Sequence[Series],
    *,
    num_layers: int,
    budgets: Sequence[int],
    buffer: int | None,
    overrides: Sequence[str] = (),
    group: str = "",
) -> list[Cell]:
    """Resolve every series at every budget.

    Args:
        series: What is compared.
        num_layers: Layers of the model.
        budgets: Budgets for the series whose plan leaves it open. A plan that nothing ever
            leaves, like the full cache, gives one cell.
        buffer: Buffer for the plans that leave it open.
        overrides: ``--set`` strings; ``POLICY.KNOB=VALUE`` goes to the plans that name it.
        group: Id of the group that the cells belong to.

    Returns:
        The cells in order, each resolved plan once.

    Raises:
        KVPolicyError: A plan is wrong or does not fit the model, or an override fits none.
    """
    _check_overrides(series, overrides)
    cells: dict[str, Cell] = {}
    for one in series:
        mine = [override for override in overrides if _concerns(one, override)]
        is_open = _leaves_budget_open(one, num_layers, buffer, mine)
        for budget in budgets if is_open else (None,):
            cell = attrs.evolve(_cell(one, num_layers, budget, buffer, mine), group=group)
            cells.setdefault(cell.digest, cell)
    return list(cells.values())


def _cell(
    series: Series,
    num_layers: int,
    budget: int | None,
    buffer: int | None,
    overrides: Sequence[str],
) -> Cell:
    plan = _plan(series, budget, buffer, overrides)
    resolved = plan.resolve(num_layers)
    compacting = _compacting(resolved)
    return Cell(
        series=series.label,
        budget=_mean(layer.budget for layer in compacting),
        buffer=_mean(layer.buffer for layer in compacting),
        plan=plan,
        resolved=resolved,
        digest=resolved.digest(),
    )


def _plan(series: Series, budget: int | None, buffer: int | None, overrides: Sequence[str]) -> Plan:
    open_fields = {"budget": budget, "buffer": buffer}
    given = {key: value for key, value in open_fields.items() if value is not None}
    return Plan.from_dict(given | series.plan, overrides, name=f"plan '{series.label}'")


def _leaves_budget_open(
    series: Series, num_layers: int, buffer: int | None, overrides: Sequence[str]
) -> bool:
    """Whether a layer that compacts waits to be told its budget."""
    try:
        resolved = _plan(series, None, buffer, overrides).resolve(num_layers)
    except BudgetError:
        return True
    return any(layer.budget is None for layer in _compacting(resolved))


def _compacting(resolved: ResolvedPlan) -> list[LayerPlan]:
    """The layers from which rows ever leave."""
    return [
        layer
        for layer, stack in zip(resolved.layers, resolved.stacks(), strict=True)
        if stack.bounded or stack.implements("score") or stack.implements("select")
    ]


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


def _concerns(series: Series, override: str) -> bool:
    """Whether an override says something about this series: it does unless it names a policy."""
    keys = override.partition("=")[0].strip().split(".")
    return len(keys) != 2 or keys[0] in policies_named(series.plan)


def _all_stacks(series: Sequence[Series]) -> dict[str, Any]:
    return {
        "stack": list(dict.fromkeys(name for one in series for name in policies_named(one.plan)))
    }
