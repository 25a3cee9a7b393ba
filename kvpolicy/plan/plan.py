"""Plans: the policies, budget and buffer of every layer, and resolving them for a model.

Budget: the rows of a layer and KV head that stay after a compaction, including sinks and the
recent window, not the buffer. A slot never holds more than ``budget + buffer`` rows, and those of
its prompt if the plan keeps prompts. ``prefill_buffer`` is the buffer of a prompt that enters; what
is more than ``buffer`` lies beside the slots.
Where heads share the rows of a layer, both are those of a head in the mean.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import cattrs

from kvpolicy.entry_points import default_name
from kvpolicy.errors import BudgetError, CoverageError, KVPolicyError, PlanError, shown
from kvpolicy.hooks.discovery import policy_names
from kvpolicy.hooks.stack import Stack
from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan, StackBuilder, needs_budget
from kvpolicy.plan.spec import (
    BUDGET,
    COUNT,
    GROUPS,
    HEADS,
    PADDING,
    PLAIN_ROWS,
    PROMPT,
    ROWS,
    STACK,
    Budget,
    Heads,
    LayerGroup,
    Location,
    Padding,
    PolicySpec,
    Problem,
    PromptRows,
    RowFormats,
    plan_field,
    problems_of,
    read_table,
    rows_of,
)
from kvpolicy.plan.toml import Override, apply_override, read_file, read_tables

LARGEST_DEFAULT_BUFFER = 128  # that of R-KV and SkipKV, whose budgets begin at 1,024
LARGEST_DEFAULT_PREFILL_BUFFER = 1024
LEAST_STAGED_BUDGET = 256
_USUAL_BUFFER = 32
_BUDGET_PER_BUFFER = 8


def default_buffer(budget: int | None) -> int:
    """The buffer of a plan that names none.

    An eighth of the budget, at least 32 rows but no more than the budget, and at most 128.

    Args:
        budget: Rows that stay after a compaction; ``None`` if all stay.
    """
    if budget is None:
        return LARGEST_DEFAULT_BUFFER
    least = min(_USUAL_BUFFER, budget)
    return min(max(budget // _BUDGET_PER_BUFFER, least), LARGEST_DEFAULT_BUFFER)


def default_prefill_buffer(budget: int, buffer: int) -> int:
    """The ``prefill_buffer`` of a plan that names none, where prompts can have rows beside slabs.

    As many rows as the budget from a budget of 256 on, at most 1,024, and at least the buffer.
    Where a few queries at the end of a chunk say what stays, larger ones cost quality, and with
    less than 256 rows there is little time to be gained: see docs/explanation/budgets.md.

    Args:
        budget: Rows that stay after a compaction.
        buffer: Rows that may join before the next compaction later.
    """
    if budget < LEAST_STAGED_BUDGET:
        return buffer
    return max(buffer, min(budget, LARGEST_DEFAULT_PREFILL_BUFFER))


@attrs.frozen
class Plan:
    """The contents of a plan file, or of a few lines of Python; resolve makes it fit a model.

    Attributes:
        stack: Policies of all layers whose group names none.
        budget: Rows that stay after a compaction, per layer and KV head, or a share of
            ``length`` such as ``"25%"``.
        buffer: Rows that may join before the next compaction; by default an eighth of the
            budget, from 32 to 128 and no more than the budget.
        layers: Groups that cover every layer exactly once; none means one group of all.
        schedule: Policies called only for the order of admission.
        padding: ``"none"``: pads are never stored. ``"stored"``, for research: the budget of a
            sequence is reduced by the pads it would have in its prefill group, as in
            implementations that store them (SkipKV, eq. 12: ``B' = B - (N_max - N)``).
        length: Tokens that budgets given as shares refer to.
        prompt: ``"evict"``: rows of prompts are evicted like others. ``"keep"``: they stay;
            budgets count the rows behind them, and policies choose from those.
        heads: ``"own"``: each KV head has the budget for itself. ``"shared"``: it is the mean over
            the heads of a layer, and policies may choose how many rows of each stay.
        prefill_buffer: Rows that may join before the next compaction while a prompt enters, at
            least as many as ``buffer``; by default `default_prefill_buffer`. They take memory once,
            not in every slot.
        rows: How rows are stored: ``"model"``, in the model's precision; ``"int8"`` or ``"int4"``,
            in integers; or a table of these for ``keys`` and ``values``, where ``exact`` says how
            many newest tokens of what has 4 bits stay exact.
        name: Where the plan came from, for messages.
        sources: How the user gave entries that are not in the plan's file, by their keys and
            indices, for messages: ``{("budget",): "--budget 96"}``.
        options: Options of the command line that give an entry, by its key, for messages:
            ``{"budget": "--budget"}``.
    """

    stack: tuple[PolicySpec, ...] = plan_field(STACK, ())
    budget: Budget | None = plan_field(BUDGET, None)
    buffer: int | None = plan_field(COUNT, None)
    layers: tuple[LayerGroup, ...] = plan_field(GROUPS, ())
    schedule: tuple[PolicySpec, ...] = plan_field(STACK, ())
    padding: Padding = plan_field(PADDING, "none")
    length: int | None = plan_field(COUNT, None)
    prompt: PromptRows = plan_field(PROMPT, "evict")
    heads: Heads = plan_field(HEADS, "own")
    prefill_buffer: int | None = plan_field(COUNT, None)
    rows: RowFormats = plan_field(ROWS, PLAIN_ROWS)
    name: str = attrs.field(default="the plan", eq=False)
    sources: Mapping[Location, str] = attrs.field(factory=dict, eq=False, repr=False)
    options: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)

    @classmethod
    def full_cache(cls, overrides: Sequence[str | Override] = ()) -> "Plan":
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
        buffer: int | None = None,
        knobs: Mapping[str, Mapping[str, Any]] | None = None,
        schedule: Iterable[object] = (),
        padding: Padding = "none",
        length: int | None = None,
        prompt: PromptRows = "evict",
        heads: Heads = "own",
        prefill_buffer: int | None = None,
        rows: str | Mapping[str, str] | RowFormats = PLAIN_ROWS,
    ) -> "Plan":
        """The same stack, budget and buffer in every layer.

        Args:
            stack: Names of policies, or policy objects, the later wrapping the earlier.
            budget: Rows that stay after a compaction, per layer and KV head, or a share of
                ``length`` such as ``"25%"``.
            buffer: Rows that may join before the next compaction; by default an eighth of the
                budget, see `default_buffer`.
            knobs: Knobs by policy name and knob name.
            schedule: Policies for the order of admission.
            padding: ``"none"``, or ``"stored"`` to study padded batches.
            length: Tokens that a budget given as a share refers to.
            prompt: ``"keep"``: rows of prompts stay, and the budget counts the rows behind them.
            heads: ``"own"``, or ``"shared"``: the budget is the mean over the KV heads of a layer.
            prefill_buffer: Rows that may join before the next compaction while a prompt enters; by
                default `default_prefill_buffer`.
            rows: How rows are stored: ``"model"``, ``"int8"``, or for example ``{"keys": "int8",
                "values": "int4"}``.

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
            prompt=prompt,
            heads=heads,
            prefill_buffer=prefill_buffer,
            rows=rows,  # type: ignore[arg-type]
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
    def load(
        cls,
        path: str | Path,
        overrides: Sequence[str | Override] = (),
        *,
        options: Mapping[str, str] | None = None,
    ) -> "Plan":
        """Read a TOML plan.

        Args:
            path: The file, or the name of a plan installed with a package.
            overrides: Changes such as ``"budget=96"``, ``"layers.0.buffer=8"`` or
                ``"rkv.mix_lambda=0.5"`` (wherever the plan names the policy), applied after
                the plan is merged with the plans that it extends.
            options: Options of the command line that give an entry, for messages.

        Raises:
            PlanError: If the file cannot be read, is not TOML, or is not a plan.
        """
        return cls.from_dict(read_file(path), overrides, name=f"plan '{path}'", options=options)

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        overrides: Sequence[str | Override] = (),
        *,
        name: str = "the plan",
        options: Mapping[str, str] | None = None,
    ) -> "Plan":
        """Build a plan from the contents of its TOML file; see `load`."""
        if isinstance(overrides, str) or not isinstance(overrides, Iterable):
            kind = "one text, " if isinstance(overrides, str) else ""
            msg = f"overrides of {name} were given as {kind}{overrides!r:.60}; give a list"
            raise PlanError(msg)
        raw = read_tables(data, name)
        read = [Override.read(override) for override in overrides]
        for override in read:
            apply_override(raw, override, name)
        plan, problems = _read_plan(raw, name, read)
        if problems:
            raise _plan_error(problems[0], name)
        return attrs.evolve(plan, options=options or {})

    def resolve(
        self,
        num_layers: int,
        *,
        default_budget: int | None = None,
        attention: Sequence[int] | None = None,
    ) -> ResolvedPlan:
        """Work out what each layer of a model does.

        Args:
            num_layers: Decoder layers of the model.
            default_budget: Budget of a plan that leaves one open: if a layer that compacts has
                no budget, all layers without one take this one.
            attention: Numbers of the layers that have attention, in order; ``None``: all. The
                others hold no rows, and no policy is asked about them.

        Raises:
            CoverageError: If a layer is covered twice or not at all.
            BudgetError: If a budget is missing, or below what the policies protect.
            HookResultError: If a policy does not share a group's rows as `allocate` requires.
            PlanError: If something else does not fit, a policy cannot be built, or one steers
                a layer that is not in its group.
        """
        if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
            msg = f"{self.name} cannot be resolved for {shown(num_layers)} layers; give at least 1"
            raise PlanError(msg)
        resolution = _Resolution(self, attention=attention)
        resolved = resolution.resolve(num_layers, default_budget)
        if resolved is None:
            raise resolution.problems[0]
        return resolved


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
    overrides: Sequence[str | Override] = (),
    *,
    num_layers: int | None = None,
    attention: Sequence[int] | None = None,
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
        attention: Numbers of the layers that have attention, as of `Plan.resolve`.
        name: Name of the plan, for messages.
    """
    problems: list[KVPolicyError] = []
    try:
        raw = read_tables(data, name)
    except KVPolicyError as error:
        return PlanCheck((error,))
    applied = []
    for override in overrides:
        try:
            applied.append(Override.read(override))
            apply_override(raw, applied[-1], name)
        except KVPolicyError as error:
            problems.append(error)
    plan, malformed = _read_plan(raw, name, applied)
    problems += [_plan_error(problem, name) for problem in malformed]
    resolution = _Resolution(plan, malformed, attention=attention)
    resolved = resolution.resolve(num_layers)
    problems += resolution.problems
    distinct = {str(problem): problem for problem in problems}
    return PlanCheck(tuple(distinct.values()), None if problems else resolved)


def _read_plan(
    raw: Mapping[str, Any], name: str, overrides: Sequence[Override]
) -> tuple[Plan, list[Problem]]:
    """Read the tables of a plan: the plan without its malformed entries, and all problems."""
    sources = {override.keys: override.source for override in overrides}
    try:
        return attrs.evolve(read_table(Plan, raw), name=name, sources=sources), []
    except cattrs.BaseValidationError as error:
        problems = problems_of(error)
    sound = read_tables(raw, name)
    for problem in reversed(problems):  # from the last entry of a list to the first
        _remove(sound, problem.location)
    plan = attrs.evolve(read_table(Plan, sound), name=name, sources=sources)
    return plan, [attrs.evolve(one, source=_source(sources, one.location)) for one in problems]


def _source(sources: Mapping[Location, str], location: Location) -> str | None:
    """How the user gave an entry, or a table that the entry is in."""
    given = (sources.get(location[:length]) for length in range(len(location), 0, -1))
    return next((source for source in given if source is not None), None)


def _plan_error(problem: Problem, name: str) -> PlanError:
    return PlanError(str(problem) if problem.source else f"{name}: {problem}")


def _remove(tables: Any, location: Location) -> None:
    for step in location[:-1]:
        tables = tables[step]
    if len(location) == 2 and location[0] == "layers":
        tables[location[1]] = {}  # the other groups keep their numbers
    else:
        del tables[location[-1]]


class _Resolution:
    """One attempt to resolve a plan, which collects every problem once.

    What depends on a malformed value, or on a stack that cannot be built, is not checked.

    Attributes:
        problems: What is wrong with the plan, besides its malformed values.
    """

    def __init__(
        self,
        plan: Plan,
        malformed: Sequence[Problem] = (),
        *,
        attention: Sequence[int] | None = None,
    ) -> None:
        """Begin.

        Args:
            plan: The plan.
            malformed: Its malformed values, which are missing in the plan.
            attention: Numbers of the layers that have attention; ``None``: all.
        """
        self.problems: list[KVPolicyError] = []
        self._plan = plan
        self._groups = plan.layers or (LayerGroup(),)
        self._malformed = {_key_of(problem.location) for problem in malformed}
        self._builder = StackBuilder()
        self._attention = attention

    def resolve(
        self, num_layers: int | None, default_budget: int | None = None
    ) -> ResolvedPlan | None:
        """Build all policies, and work out what each layer does if the model is known.

        Args:
            num_layers: Layers of the model, if known.
            default_budget: See `Plan.resolve`.

        Returns:
            The result; ``None`` if the plan has problems or the model is not known.
        """
        plan = self._plan
        schedule = self._build_policies(plan.schedule, ("schedule",))
        own = self._build_stack(None, plan.stack)
        stacks = [
            own if group.stack is None else self._build_stack(i, group.stack)
            for i, group in enumerate(self._groups)
        ]
        if num_layers is None:
            return None
        members = self._cover(num_layers)
        is_open = plan.budget is None and any(
            built is not None and group.budget is None and needs_budget(built.stack)
            for group, built in zip(self._groups, stacks, strict=True)
        )
        default = default_budget if is_open else None
        layers: list[LayerPlan] = []
        for i, of_group in members.items():
            with self._collecting():
                layers += self._resolve_group(i, of_group, stacks[i], default, num_layers)
        if self.problems or self._malformed:
            return None
        held = {layer.layer_idx for layer in layers}
        layers += [LayerPlan.without_rows(i) for i in range(num_layers) if i not in held]
        layers.sort(key=lambda layer: layer.layer_idx)
        resolved = ResolvedPlan(
            tuple(layers),
            tuple(spec for spec, _ in schedule),
            plan.padding,
            name=plan.name,
            uses_default_budget=default is not None,
            stacks=tuple(self._builder.build(layer.stack) for layer in layers),
        )
        with self._collecting():
            _check_steering(resolved)
            _check_padding(resolved)
        return None if self.problems else resolved

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        try:
            yield
        except KVPolicyError as error:
            self.problems.append(error)

    def _build_policies(
        self, specs: Sequence[PolicySpec], location: Location
    ) -> list[tuple[PolicySpec, object]]:
        """Build policies; each with its spec, all knobs spelled out."""
        built = []
        for spec in specs:
            with self._collecting(), self._naming_source(spec, location):
                policy = spec.build()
                built.append((spec.spell_out(policy), policy))
        return built

    @contextmanager
    def _naming_source(self, spec: PolicySpec, location: Location) -> Iterator[None]:
        """Name the option that an error of a policy comes from, if it comes from one."""
        try:
            yield
        except KVPolicyError as error:
            sources = self._plan.sources
            typed = [knob for knob in spec.knobs if (spec.policy, knob) in sources]
            wrong = next((knob for knob in typed if _builds_without(spec, knob)), None)
            source = _source(sources, location) if wrong is None else sources[spec.policy, wrong]
            if source is None:
                raise
            msg = f"{source}: {error}"
            raise type(error)(msg) from error

    def _build_stack(self, group: int | None, specs: Sequence[PolicySpec]) -> "_BuiltStack | None":
        location = ("stack",) if group is None else ("layers", group, "stack")
        built = self._build_policies(specs, location)
        if not specs or len(built) < len(specs) or (group, "stack") in self._malformed:
            return None
        named = tuple(spec for spec, _ in built)
        with self._collecting():
            return _BuiltStack(named, self._builder.build(named, [policy for _, policy in built]))
        return None

    def _cover(self, num_layers: int) -> dict[int, list[int]]:
        """The layers of each group; collects all problems with their coverage.

        Gaps are not reported if a group names layers that do not exist: it may be meant to
        fill them.
        """
        if (None, "layers") in self._malformed:
            return {}
        name = self._plan.name
        members: dict[int, list[int]] = {}
        covered: set[int] = set()
        for i, group in enumerate(self._groups):
            if (i, "where") in self._malformed:
                continue
            with self._collecting():
                layers = members[i] = group.layers(num_layers, name, self._attention)
                twice = [one for k, one in enumerate(layers) if one in covered.union(layers[:k])]
                covered.update(layers)
                if twice:
                    msg = f"{name} covers {format_layers(twice)} twice, again in {group.where!r}"
                    raise CoverageError(msg)
        if len(members) == len(self._groups):
            attention = range(num_layers) if self._attention is None else self._attention
            for gap in _runs(set(attention) - covered):
                msg = f"{name} does not cover {format_layers(gap)} of 0 to {num_layers - 1}"
                self.problems.append(CoverageError(msg))
        return members

    def _resolve_group(
        self,
        i: int,
        members: Sequence[int],
        built: "_BuiltStack | None",
        default_budget: int | None,
        num_layers: int,
    ) -> list[LayerPlan]:
        """The layers of one group; none if it depends on a malformed value."""
        group, plan = self._groups[i], self._plan
        own = ("stack", "budget", "buffer", "prompt", "heads", "prefill_buffer", "rows")
        inherited = [key for key in own if getattr(group, key) is None]
        depends = {(i, key) for key in own} | {(None, key) for key in (*inherited, "length")}
        if depends & self._malformed:
            return []
        if not (plan.stack if group.stack is None else group.stack):
            names = ", ".join(policy_names())
            msg = (
                f"{plan.name} names no policy for layers {group.where!r}; "
                f'write stack = ["NAME"], NAME being one of {names}'
            )
            raise PlanError(msg)
        if built is None:
            return []  # its policies are reported already
        given = plan.budget if group.budget is None else group.budget
        location = ("budget",) if group.budget is None else ("layers", i, "budget")
        giver = _source(plan.sources, location) or plan.name
        given = default_budget if given is None else given
        budget, share = None, None
        if given is not None:
            budget, share = rows_of(
                given, plan.length, giver, to_give_a_length=_to_give_a_length(plan.options)
            )
        if built.stack.mass_problem is not None:
            msg = f"{plan.name} cannot be used: {built.stack.mass_problem}"
            raise PlanError(msg)
        protected = _check_budget(giver, members[0], built.stack, budget, plan.options)
        buffer = plan.buffer if group.buffer is None else group.buffer
        buffer = default_buffer(budget) if buffer is None else buffer
        prompt = plan.prompt if group.prompt is None else group.prompt
        heads = plan.heads if group.heads is None else group.heads
        if not needs_budget(built.stack):
            heads = "own"  # all rows stay
        if heads == "shared":
            _check_shared(plan.name, members[0], built.stack, prompt)
        prefill_buffer = group.prefill_buffer or plan.prefill_buffer
        is_default = prefill_buffer is None
        if budget is not None and built.stack.bounded:
            if prefill_buffer is not None:
                _check_prefill_buffer(plan.name, members[0], prefill_buffer, buffer, prompt, heads)
            else:
                is_staged = built.stack.stages_prompts and plan.padding == "none"
                is_staged = is_staged and heads == "own" and prompt == "evict"
                prefill_buffer = default_prefill_buffer(budget, buffer) if is_staged else None
        members = sorted(members)
        budgets: Sequence[int | None] = [budget] * len(members)
        if budget is not None:
            # The policies of a group may distribute its rows among its layers.
            floors = [max(protected, 1)] * len(members)
            budgets = built.stack.allocate(members, budget, floors, num_layers)
        return [
            LayerPlan(
                layer_idx,
                built.specs,
                rows,
                buffer,
                bounded=built.stack.bounded,
                num_protected=protected,
                prompt=prompt,
                heads=heads,
                budget_from=share,
                prefill_buffer=None if prefill_buffer == buffer else prefill_buffer,
                prefill_by_default=is_default,
                rows=plan.rows if group.rows is None else group.rows,
            )
            for layer_idx, rows in zip(members, budgets, strict=True)
        ]


@attrs.frozen
class _BuiltStack:
    """A stack with the specs of its policies, all knobs spelled out."""

    specs: tuple[PolicySpec, ...]
    stack: Stack


def _key_of(location: Location) -> tuple[int | None, str]:
    """The group, or None, and the key that a malformed value belongs to."""
    if location[0] == "layers" and len(location) > 1 and isinstance(location[1], int):
        return location[1], str(location[2]) if len(location) > 2 else "where"
    return None, str(location[0])


def _builds_without(spec: PolicySpec, knob: str) -> bool:
    knobs = {name: value for name, value in spec.knobs.items() if name != knob}
    try:
        attrs.evolve(spec, knobs=knobs).build()
    except KVPolicyError:
        return False
    return True


def _to_give_a_length(options: Mapping[str, str]) -> str:
    if "length" in options:
        return f"give {options['length']} TOKENS"
    return "write length = TOKENS into the plan, or --set length=TOKENS"


def _check_budget(
    name: str, layer_idx: int, stack: Stack, budget: int | None, options: Mapping[str, str]
) -> int:
    """Check that a layer has a budget if it needs one; returns the rows that it protects."""
    policies = ", ".join(stack.names)
    protected = stack.n_first + stack.n_last
    if budget is None and needs_budget(stack):
        option = options.get("budget")
        hint = f"give for example {option} 128" if option else "write for example budget = 128"
        msg = f"{name} gives layer {layer_idx} ({policies}) no budget; {hint}"
        raise BudgetError(msg)
    if budget is not None and budget < protected:
        msg = (
            f"{name} gives layer {layer_idx} a budget of {budget}, but its policies "
            f"({policies}) protect {protected} rows: {stack.n_first} first and "
            f"{stack.n_last} newest; raise the budget or lower their knobs"
        )
        raise BudgetError(msg)
    return protected


def _check_shared(name: str, layer_idx: int, stack: Stack, prompt: PromptRows) -> None:
    """Refuse policies that need equally many rows in all heads, where heads share the rows."""
    if prompt == "keep":
        msg = (
            f"{name} lets the KV heads of layer {layer_idx} share its rows and keeps those of "
            'prompts, which is not possible together; write heads = "own" or prompt = "evict" for '
            "this layer"
        )
        raise PlanError(msg)
    if stack.even_only:
        msg = (
            f"{name} lets the KV heads of layer {layer_idx} share its rows, but policy "
            f"'{stack.even_only[0]}' does not declare ragged = True, which says that it works with "
            'heads that hold different numbers of rows; write heads = "own" for this layer'
        )
        raise PlanError(msg)


def _check_prefill_buffer(
    name: str, layer_idx: int, prefill_buffer: int, buffer: int, prompt: PromptRows, heads: Heads
) -> None:
    """Refuse rows beside the slabs where they cannot be held."""
    reason = None
    if prefill_buffer < buffer:
        reason = f"its buffer is {buffer}; give at least as many"
    elif prefill_buffer > buffer and heads == "shared":
        reason = 'its KV heads share their rows; write heads = "own"'
    elif prefill_buffer > buffer and prompt == "keep":
        reason = 'the rows of its prompts stay; write prompt = "evict"'
    if reason is not None:
        msg = (
            f"{name} gives layer {layer_idx} a prefill_buffer of {prefill_buffer}, and {reason}, "
            "or leave it out"
        )
        raise PlanError(msg)


def _check_steering(plan: ResolvedPlan) -> None:
    """Refuse policies that steer layers whose stack they are not in: nothing would happen."""
    stacks = plan.stacks()
    for stack in dict.fromkeys(stacks):
        own = [layer_idx for layer_idx, other in enumerate(stacks) if other is stack]
        for policy, layers in stack.steering:
            missed = sorted(set(layers or ()) - set(own))
            if missed:
                msg = (
                    f"{plan.name}: policy '{policy}' steers layer {missed[0]}, but its stack is "
                    f"that of {format_layers(own)} only, of {len(stacks)} layers counted from 0; "
                    "steer one of those, or list the policy there"
                )
                raise PlanError(msg)


def _check_padding(plan: ResolvedPlan) -> None:
    """Refuse pads that take the budget of a prompt whose rows have none."""
    if plan.padding == "stored" and plan.keeps_prompts:
        msg = (
            f'{plan.name}: padding = "stored" subtracts pads from the budget that a prompt shares, '
            'and with prompt = "keep" the rows of prompts are not in it; leave out one of them'
        )
        raise PlanError(msg)
    if plan.padding == "stored" and plan.stages:
        msg = (
            f'{plan.name}: padding = "stored" subtracts pads from the rows of a slab, and with a '
            "prefill_buffer larger than the buffer a prompt has more than these; leave out one of "
            "them"
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
