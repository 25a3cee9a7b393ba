"""Plans: the policies, budget and buffer of every layer, and resolving them for a model.

Budget: the rows of a layer and KV head that stay after a compaction, including sinks and the
recent window, not the buffer. A slot never holds more than ``budget + buffer`` rows.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import cattrs

from kvpolicy.entry_points import default_name
from kvpolicy.errors import BudgetError, CoverageError, KVPolicyError, PlanError
from kvpolicy.hooks.discovery import policy_names
from kvpolicy.hooks.stack import Stack
from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan, StackBuilder, needs_budget
from kvpolicy.plan.spec import (
    BUDGET,
    COUNT,
    GROUPS,
    PADDING,
    STACK,
    Budget,
    LayerGroup,
    Padding,
    PolicySpec,
    Problem,
    plan_field,
    problems_of,
    rows_of,
    structure,
)
from kvpolicy.plan.toml import apply_override, read_file, read_tables

DEFAULT_BUFFER = 128


@attrs.frozen
class Plan:
    """The contents of a plan file, or of a few lines of Python; resolve makes it fit a model.

    Attributes:
        stack: Policies of all layers whose group names none.
        budget: Rows that stay after a compaction, per layer and KV head, or a share of
            ``length`` such as ``"25%"``.
        buffer: Rows that may join before the next compaction.
        layers: Groups that cover every layer exactly once; none means one group of all.
        schedule: Policies called only for the order of admission.
        padding: ``"none"``: pads are never stored. ``"stored"``, for research: the budget of a
            sequence is reduced by the pads it would have in its prefill group, as in
            implementations that store them (SkipKV, eq. 12: ``B' = B - (N_max - N)``).
        length: Tokens that budgets given as shares refer to.
        name: Where the plan came from, for messages.
    """

    stack: tuple[PolicySpec, ...] = plan_field(STACK, ())
    budget: Budget | None = plan_field(BUDGET, None)
    buffer: int = plan_field(COUNT, DEFAULT_BUFFER)
    layers: tuple[LayerGroup, ...] = plan_field(GROUPS, ())
    schedule: tuple[PolicySpec, ...] = plan_field(STACK, ())
    padding: Padding = plan_field(PADDING, "none")
    length: int | None = plan_field(COUNT, None)
    name: str = attrs.field(default="the plan", eq=False)

    @classmethod
    def full_cache(cls, overrides: Sequence[str] = ()) -> "Plan":
        """The plan in which no row is evicted.

        Args:
            overrides: ``KEY=VALUE``, as for `from_dict`.

        Raises:
            PlanError: No installed package names a policy for it.
        """
        policy = default_name("policy")
        if policy is None:
            msg = "no installed package names the policy of a full cache; name a policy"
            raise PlanError(msg)
        return cls.from_dict({"stack": [policy]}, overrides, name="plan 'full cache'")

    @classmethod
    def uniform(
        cls,
        *stack: object,
        budget: Budget | None = None,
        buffer: int = DEFAULT_BUFFER,
        knobs: Mapping[str, Mapping[str, Any]] | None = None,
        schedule: Iterable[object] = (),
        padding: Padding = "none",
        length: int | None = None,
    ) -> "Plan":
        """The same stack, budget and buffer in every layer.

        Args:
            stack: Names of policies, or policy objects, the later wrapping the earlier.
            budget: Rows that stay after a compaction, per layer and KV head, or a share of
                ``length`` such as ``"25%"``.
            buffer: Rows that may join before the next compaction.
            knobs: Knobs by policy name and knob name.
            schedule: Policies for the order of admission.
            padding: ``"none"``, or ``"stored"`` to study padded batches.
            length: Tokens that a budget given as a share refers to.

        Raises:
            PlanError: If a value is malformed, or knobs are given for a policy that is not in
                the stack.
        """
        given = {} if knobs is None else knobs
        is_nested = isinstance(given, Mapping) and all(
            isinstance(of_policy, Mapping) for of_policy in given.values()
        )
        if not is_nested:
            msg = f'knobs were given as {knobs!r:.60}; write {{"POLICY": {{"KNOB": VALUE}}}}'
            raise PlanError(msg)
        plan = cls(
            stack,  # type: ignore[arg-type] # converted by its rule
            budget,
            buffer,
            schedule=schedule,  # type: ignore[arg-type]
            padding=padding,
            length=length,
        )
        specs = [*plan.stack, *plan.schedule]
        names = [spec.policy for spec in specs]
        unused = set(given) - {spec.policy for spec in specs if spec.instance is None}
        if unused:
            msg = f"knobs are given for {min(unused)!r}, which is not in the stack {names}"
            raise PlanError(msg)

        def with_knobs(specs: tuple[PolicySpec, ...]) -> tuple[PolicySpec, ...]:
            return tuple(
                attrs.evolve(spec, knobs=spec.knobs | dict(given.get(spec.policy, {})))
                for spec in specs
            )

        return attrs.evolve(plan, stack=with_knobs(plan.stack), schedule=with_knobs(plan.schedule))

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> "Plan":
        """Read a TOML plan.

        Args:
            path: The file, or the name of a plan installed with a package.
            overrides: Changes such as ``"budget=96"``, ``"layers.0.buffer=8"`` or
                ``"rkv.mix_lambda=0.5"`` (wherever the plan names the policy), applied after
                the plan is merged with the plans that it extends.

        Raises:
            PlanError: If the file cannot be read, is not TOML, or is not a plan.
        """
        return cls.from_dict(read_file(path), overrides, name=f"plan '{path}'")

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], overrides: Sequence[str] = (), *, name: str = "the plan"
    ) -> "Plan":
        """Build a plan from the contents of its TOML file; see `load`."""
        if isinstance(overrides, str):
            msg = f"overrides of {name} were given as one text, {overrides!r:.60}; give a list"
            raise PlanError(msg)
        raw = read_tables(data, name)
        for override in overrides:
            apply_override(raw, override, name)
        plan, problems = _read_plan(raw, name)
        if problems:
            msg = f"{name}: {problems[0]}"
            raise PlanError(msg)
        return plan

    def resolve(self, num_layers: int, *, default_budget: int | None = None) -> ResolvedPlan:
        """Work out what each layer of a model does.

        Args:
            num_layers: Decoder layers of the model.
            default_budget: Budget of a plan that leaves one open: if a layer that compacts has
                no budget, all layers without one take this one.

        Raises:
            CoverageError: If a layer is covered twice or not at all.
            BudgetError: If a budget is missing, or below what the policies protect.
            HookResultError: If a policy does not share a group's rows as `allocate` requires.
            PlanError: If something else does not fit, a policy cannot be built, or one steers
                a layer that is not in its group.
        """
        resolution = _Resolution(self, num_layers, default_budget=default_budget)
        if resolution.problems:
            raise resolution.problems[0]
        assert resolution.resolved is not None
        return resolution.resolved


@attrs.frozen
class PlanCheck:
    """The result of `check_plan`.

    Attributes:
        problems: Everything that is wrong with the plan, each problem once.
        resolved: What each layer does, if nothing is wrong and the model is known.
    """

    problems: tuple[KVPolicyError, ...]
    resolved: ResolvedPlan | None = None


def check_plan(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    num_layers: int | None = None,
    name: str = "the plan",
) -> PlanCheck:
    """Find everything that is wrong with a plan.

    Values that depend on a malformed value are not checked, so that each mistake is reported
    once.

    Args:
        data: The contents of the TOML file.
        overrides: Changes, as in `Plan.load`.
        num_layers: Layers of the model; ``None`` if it is not known: coverage of the layers
            and budgets are not checked then.
        name: Name of the plan, for messages.
    """
    problems: list[KVPolicyError] = []
    try:
        raw = read_tables(data, name)
    except KVPolicyError as error:
        return PlanCheck((error,))
    for override in overrides:
        try:
            apply_override(raw, override, name)
        except KVPolicyError as error:
            problems.append(error)
    plan, malformed = _read_plan(raw, name)
    problems += [PlanError(f"{name}: {problem}") for problem in malformed]
    resolution = _Resolution(plan, num_layers, malformed=malformed)
    problems += resolution.problems
    distinct = {str(problem): problem for problem in problems}
    return PlanCheck(tuple(distinct.values()), None if problems else resolution.resolved)


def _read_plan(raw: Mapping[str, Any], name: str) -> tuple[Plan, list[Problem]]:
    """Read the tables of a plan: the plan without its malformed entries, and all problems."""
    try:
        return attrs.evolve(structure(Plan, raw), name=name), []
    except cattrs.BaseValidationError as error:
        problems = problems_of(error)
    sound = read_tables(raw, name)
    for problem in reversed(problems):  # from the last entry of a list to the first
        _remove(sound, problem)
    return attrs.evolve(structure(Plan, sound), name=name), problems


def _remove(tables: Any, problem: Problem) -> None:
    path = problem.path if problem.key is None else (*problem.path, problem.key)
    for step in path[:-1]:
        tables = tables[step]
    if len(path) == 2 and path[0] == "layers":
        tables[path[1]] = {}  # the other groups keep their numbers
    else:
        del tables[path[-1]]


class _Resolution:
    """One attempt to resolve a plan; every problem is collected.

    Attributes:
        problems: What is wrong with the plan.
        resolved: The result; ``None`` if there are problems or the model is not known.
    """

    def __init__(
        self,
        plan: Plan,
        num_layers: int | None,
        *,
        default_budget: int | None = None,
        malformed: Sequence[Problem] = (),
    ) -> None:
        """Resolve a plan.

        Args:
            plan: The plan.
            num_layers: Layers of the model; ``None`` to build the policies only.
            default_budget: See `Plan.resolve`.
            malformed: Entries that are missing in the plan because they cannot be read.
        """
        self.problems: list[KVPolicyError] = []
        self.resolved: ResolvedPlan | None = None
        self._plan, self._builder = plan, StackBuilder()
        # Keys with a problem, as (group or None, key): what depends on them is not checked.
        self._broken: set[tuple[int | None, str]] = {_key_of(one) for one in malformed}
        schedule = self._build_policies(None, "schedule", plan.schedule)
        own = self._build_stack(None, plan.stack)
        self._groups = plan.layers or (LayerGroup(),)
        self._stacks = [
            own if group.stack is None else self._build_stack(i, group.stack)
            for i, group in enumerate(self._groups)
        ]
        if num_layers is None:
            return
        if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
            msg = f"{plan.name} cannot be resolved for {num_layers!r:.60} layers; give at least 1"
            self.problems.append(PlanError(msg))
            return
        self._num_layers = num_layers
        members = self._cover()
        opens = [i for i, stack in enumerate(self._stacks) if self._leaves_budget_open(i, stack)]
        self._default_budget = default_budget if opens else None
        layers = [layer for i in members for layer in self._resolve_group(i, members[i])]
        if not self.problems and not self._broken:
            self._finish(layers, [spec for spec, _ in schedule])

    def _build_policies(
        self, group: int | None, key: str, specs: Sequence[PolicySpec]
    ) -> list[tuple[PolicySpec, object]]:
        """Build policies; each with its spec, all knobs spelled out."""
        built = []
        for spec in specs:
            try:
                policy = spec.build()
                built.append((spec.spell_out(policy), policy))
            except KVPolicyError as error:
                self._report(error, group, key)
        return built

    def _build_stack(self, group: int | None, specs: Sequence[PolicySpec]) -> "_BuiltStack | None":
        built = self._build_policies(group, "stack", specs)
        if not built or (group, "stack") in self._broken:
            return None
        named = tuple(spec for spec, _ in built)
        try:
            return _BuiltStack(named, self._builder.build(named, [policy for _, policy in built]))
        except KVPolicyError as error:
            self._report(error, group, "stack")
            return None

    def _report(self, error: KVPolicyError, group: int | None, key: str) -> None:
        self.problems.append(error)
        self._broken.add((group, key))

    def _cover(self) -> dict[int, list[int]]:
        """The layers of each group, and all problems with their coverage.

        Gaps are not reported if a group names layers that do not exist: it may be meant to
        fill them.
        """
        members: dict[int, list[int]] = {}
        covered: set[int] = set()
        name = self._plan.name
        if (None, "layers") in self._broken:
            return {}
        for i, group in enumerate(self._groups):
            if (i, "where") in self._broken:
                continue
            try:
                layers = group.layers(self._num_layers, name)
            except PlanError as error:
                self._report(error, i, "where")
                continue
            twice = [one for k, one in enumerate(layers) if one in covered.union(layers[:k])]
            if twice:
                msg = f"{name} covers {format_layers(twice)} twice, again in {group.where!r}"
                self.problems.append(CoverageError(msg))
            covered.update(layers)
            members[i] = layers
        if len(members) == len(self._groups):
            for gap in _runs(set(range(self._num_layers)) - covered):
                last = self._num_layers - 1
                msg = f"{name} does not cover {format_layers(gap)} of 0 to {last}"
                self.problems.append(CoverageError(msg))
        return members

    def _leaves_budget_open(self, i: int, stack: "_BuiltStack | None") -> bool:
        has_budget = self._groups[i].budget is not None or self._plan.budget is not None
        return stack is not None and not has_budget and needs_budget(stack.stack)

    def _resolve_group(self, i: int, members: Sequence[int]) -> list[LayerPlan]:
        """The layers of one group; none if it has problems."""
        group, plan, built = self._groups[i], self._plan, self._stacks[i]
        own = ("stack", "budget", "buffer")
        depends = {(None if getattr(group, key) is None else i, key) for key in own}
        depends |= {(i, key) for key in own} | {(None, "length")}
        if depends & self._broken:
            return []
        if built is None:
            names = ", ".join(policy_names())
            msg = (
                f"{plan.name} names no policy for layers {group.where!r}; "
                f'write stack = ["NAME"], NAME being one of {names}'
            )
            self.problems.append(PlanError(msg))
            return []
        given = plan.budget if group.budget is None else group.budget
        given = self._default_budget if given is None else given
        try:
            budget, share = (
                (None, None) if given is None else rows_of(given, plan.length, plan.name)
            )
            layers = [
                self._resolve_layer(layer_idx, group, built, budget, share) for layer_idx in members
            ]
            return _allocate(layers, built.stack, self._num_layers)
        except KVPolicyError as error:
            self.problems.append(error)
            return []

    def _resolve_layer(
        self,
        layer_idx: int,
        group: LayerGroup,
        built: "_BuiltStack",
        budget: int | None,
        share: str | None,
    ) -> LayerPlan:
        stack, name = built.stack, self._plan.name
        policies = ", ".join(stack.names)
        protected = stack.n_first + stack.n_last
        if budget is None and needs_budget(stack):
            msg = (
                f"{name} gives layer {layer_idx} ({policies}) no budget; write for example "
                "budget = 128"
            )
            raise BudgetError(msg)
        if budget is not None and budget < protected:
            msg = (
                f"{name} gives layer {layer_idx} a budget of {budget}, but its policies "
                f"({policies}) protect {protected} rows: {stack.n_first} first and "
                f"{stack.n_last} newest; raise the budget or lower their knobs"
            )
            raise BudgetError(msg)
        return LayerPlan(
            layer_idx,
            built.specs,
            budget,
            self._plan.buffer if group.buffer is None else group.buffer,
            bounded=stack.bounded,
            num_protected=protected,
            budget_from=share,
        )

    def _finish(self, layers: Iterable[LayerPlan], schedule: Iterable[PolicySpec]) -> None:
        layers = tuple(sorted(layers, key=lambda layer: layer.layer_idx))
        stacks = tuple(self._builder.build(layer.stack) for layer in layers)
        plan = self._plan
        try:
            _check_steering(stacks, plan.name)
        except PlanError as error:
            self.problems.append(error)
            return
        self.resolved = ResolvedPlan(
            layers,
            tuple(schedule),
            plan.padding,
            name=plan.name,
            uses_default_budget=self._default_budget is not None,
            stacks=stacks,
        )


@attrs.frozen
class _BuiltStack:
    """A stack with the specs of its policies, all knobs spelled out."""

    specs: tuple[PolicySpec, ...]
    stack: Stack


def _key_of(problem: Problem) -> tuple[int | None, str]:
    """The group, or None, and the key that a malformed entry belongs to."""
    path = problem.path if problem.key is None else (*problem.path, problem.key)
    if path[0] == "layers" and len(path) > 1 and isinstance(path[1], int):
        return path[1], str(path[2]) if len(path) > 2 else "where"
    return None, str(path[0])


def _allocate(group: Sequence[LayerPlan], stack: Stack, num_layers: int) -> list[LayerPlan]:
    """Let the policies of a group distribute its rows among its layers; the sum is unchanged."""
    group = sorted(group, key=lambda layer: layer.layer_idx)
    budget = group[0].budget
    if budget is None:
        return group
    floors = [max(layer.num_protected, 1) for layer in group]
    budgets = stack.allocate([layer.layer_idx for layer in group], budget, floors, num_layers)
    return [attrs.evolve(layer, budget=rows) for layer, rows in zip(group, budgets, strict=True)]


def _check_steering(stacks: Sequence[Stack], name: str) -> None:
    """Refuse policies that steer layers whose stack they are not in: nothing would happen."""
    for stack in dict.fromkeys(stacks):
        own = [layer_idx for layer_idx, other in enumerate(stacks) if other is stack]
        for policy, layers in stack.steering:
            missed = sorted(set(layers or ()) - set(own))
            if missed:
                msg = (
                    f"{name}: policy '{policy}' steers layer {missed[0]}, but its stack is "
                    f"that of {format_layers(own)} only, of {len(stacks)} layers counted from 0; "
                    "steer one of those, or list the policy there"
                )
                raise PlanError(msg)


def _runs(layers: Collection[int]) -> list[list[int]]:
    """Groups of consecutive layers."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def format_layers(layers: Sequence[int]) -> str:
    """``[0, 1, 2]`` as "layers 0 to 2"."""
    first, last = layers[0], layers[-1]
    if first == last:
        return f"layer {first}"
    if list(layers) == list(range(first, last + 1)):
        return f"layers {first} to {last}"
    return f"layers {', '.join(map(str, layers))}"
