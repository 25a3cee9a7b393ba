"""Plans: which policies look after which layers, with what budget and buffer.

Budget, defined once: the rows of a layer and KV head that stay after a compaction, sinks and
recent window included, buffer excluded. A slot never holds more than ``budget + buffer``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.errors import BudgetError, PlanError
from kvpolicy.hooks.discovery import policy_names
from kvpolicy.hooks.stack import Stack
from kvpolicy.plan import budget as planbudget
from kvpolicy.plan import extends
from kvpolicy.plan import toml as planfile
from kvpolicy.plan.allocation import allocate
from kvpolicy.plan.budget import Budget
from kvpolicy.plan.layercover import covered_twice, gap_errors, layers_of
from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan
from kvpolicy.plan.spec import (
    LayerGroup,
    Padding,
    PolicySpec,
    checked_with,
    groups_of,
    knobs_of,
    padding_of,
    specs_of,
)
from kvpolicy.plan.steered import check_steered

DEFAULT_BUFFER = 128


@attrs.frozen
class Plan:
    """What a file or a few lines of Python say; `resolve` makes it fit a model.

    Attributes:
        stack: Policies of all layers whose group names none.
        budget: Rows that stay after a compaction, per layer and KV head, or a share of
            ``length`` such as ``"25%"``.
        buffer: Rows that may join before the next compaction.
        layers: Groups that cover every layer exactly once; none means one group of all.
        schedule: Policies that are asked for the order of admission only.
        padding: ``"none"``: pads are never stored. ``"stored"``, for study: a sequence has as
            many rows less as its prompt is shorter than the longest it is prefilled with, as
            where batches are padded and pads kept (SkipKV, eq. 12: ``B' = B - (N_max - N)``).
        length: Tokens that budgets given as shares are shares of.
        name: Where the plan came from, for messages.
    """

    stack: tuple[PolicySpec, ...] = attrs.field(default=(), converter=specs_of)
    budget: Budget | None = attrs.field(default=None, validator=checked_with(planbudget.budget))
    buffer: int = attrs.field(default=DEFAULT_BUFFER, validator=checked_with(planbudget.whole))
    layers: tuple[LayerGroup, ...] = attrs.field(default=(), converter=groups_of)
    schedule: tuple[PolicySpec, ...] = attrs.field(default=(), converter=specs_of)
    padding: Padding = attrs.field(default="none", validator=checked_with(padding_of))
    length: int | None = attrs.field(default=None, validator=checked_with(planbudget.whole))
    name: str = attrs.field(default="the plan", eq=False)

    @classmethod
    def uniform(
        cls,
        *stack: object,
        budget: Budget | None = None,
        buffer: int = DEFAULT_BUFFER,
        knobs: Mapping[str, Mapping[str, Any]] | None = None,
        schedule: Sequence[object] = (),
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
            length: Tokens that a budget given as a share is a share of.

        Raises:
            PlanError: If knobs are given for a policy that is not in the stack.
        """
        given, listed = knobs_of(knobs), [*stack, *specs_of(schedule)]
        specs = tuple(PolicySpec.of(policy) for policy in listed)
        unused = set(given) - {spec.policy for spec in specs if spec.instance is None}
        if unused:
            msg = f"knobs are given for '{min(unused)}', which is not in the stack {listed}"
            raise PlanError(msg)
        specs = tuple(
            attrs.evolve(spec, knobs=spec.knobs | given.get(spec.policy, {})) for spec in specs
        )
        num = len(stack)
        return cls(
            specs[:num], budget, buffer, schedule=specs[num:], padding=padding, length=length
        )

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> "Plan":
        """Read a TOML plan.

        Args:
            path: The file, or the name of a plan that an installed package brings along.
            overrides: Changes such as ``"budget=96"``, ``"layers.0.buffer=8"`` or
                ``"rkv.mix_lambda=0.5"`` (wherever the plan names the policy). They change
                what the plan and all it extends come to.

        Raises:
            PlanError: If the file cannot be read, is no TOML, or says something unknown.
        """
        return cls.from_dict(extends.read(path), overrides, name=f"plan '{path}'")

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], overrides: Sequence[str] = (), *, name: str = "the plan"
    ) -> "Plan":
        """Build a plan from what its TOML file would hold; see `load`."""
        return planfile.structure(cls, data, overrides, name)

    def resolve(self, num_layers: int) -> ResolvedPlan:
        """Spell out what each layer of a model will do.

        Raises:
            CoverageError: If a layer is covered twice or not at all.
            BudgetError: If a budget is missing, or below what the policies protect.
            HookResultError: If a policy does not share a group's rows as `allocate` wants.
            PlanError: If something else does not fit, a policy cannot be built, or one steers a
                layer that it does not serve.
        """
        if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
            msg = (
                f"{self.name} is to be resolved for {num_layers!r:.60} layers; at least 1 is needed"
            )
            raise PlanError(msg)
        layers: list[LayerPlan | None] = [None] * num_layers
        for group in self.layers or (LayerGroup(),):
            stack = self._stack_of(group)
            built = Stack([(spec.policy, spec.build()) for spec in stack])
            chosen = layers_of(group.where, num_layers, self.name)
            for layer_idx in chosen:
                if layers[layer_idx] is not None:
                    raise covered_twice([layer_idx], group, self.name)
                layers[layer_idx] = self._resolve_layer(layer_idx, group, stack, built)
            alike = [layer for layer in layers if layer and layer.layer_idx in chosen]
            for layer in allocate(alike, num_layers):
                layers[layer.layer_idx] = layer
        resolved = ResolvedPlan(
            tuple(self._covered(layers)),
            _resolve_specs(self.schedule),
            self.padding,
            name=self.name,
        )
        check_steered(resolved)
        return resolved

    def _stack_of(self, group: LayerGroup) -> tuple[PolicySpec, ...]:
        stack = self.stack if group.stack is None else group.stack
        if not stack:
            msg = (
                f"{self.name} names no policy for layers {group.where!r}; "
                f'write stack = ["NAME"], NAME being one of {", ".join(policy_names())}'
            )
            raise PlanError(msg)
        return _resolve_specs(stack)

    def _resolve_layer(
        self, layer_idx: int, group: LayerGroup, stack: tuple[PolicySpec, ...], built: Stack
    ) -> LayerPlan:
        given = self.budget if group.budget is None else group.budget
        buffer = self.buffer if group.buffer is None else group.buffer
        budget, share = (
            (None, None) if given is None else planbudget.rows_of(given, self.length, self.name)
        )
        for what, value in (("budget", budget), ("buffer", buffer)):
            if value is not None and value < 1:
                msg = (
                    f"{self.name} gives layer {layer_idx} a {what} of {value}; at least 1 row "
                    "is needed"
                )
                raise BudgetError(msg)
        self._check_budget(layer_idx, built, budget)
        return LayerPlan(
            layer_idx,
            stack,
            budget,
            buffer,
            bounded=built.bounded,
            num_protected=built.n_first + built.n_last,
            budget_from=share,
        )

    def _check_budget(self, layer_idx: int, stack: Stack, budget: int | None) -> None:
        names = ", ".join(stack.names)
        if budget is None:
            if stack.bounded or stack.implements("score") or stack.implements("select"):
                msg = (
                    f"{self.name} gives layer {layer_idx} ({names}) no budget; write for "
                    "example budget = 128"
                )
                raise BudgetError(msg)
            return
        protected = stack.n_first + stack.n_last
        if budget < protected:
            msg = (
                f"{self.name} gives layer {layer_idx} a budget of {budget}, but its policies "
                f"({names}) protect {protected} rows: {stack.n_first} first and "
                f"{stack.n_last} newest; raise the budget or lower their knobs"
            )
            raise BudgetError(msg)

    def _covered(self, layers: Sequence[LayerPlan | None]) -> list[LayerPlan]:
        found = [layer for layer in layers if layer is not None]
        for error in gap_errors({layer.layer_idx for layer in found}, len(layers), self.name):
            raise error
        return found


def _resolve_specs(specs: Sequence[PolicySpec]) -> tuple[PolicySpec, ...]:
    """The same policies with all knobs spelled out."""
    return tuple(_resolve_spec(spec) for spec in specs)


def _resolve_spec(spec: PolicySpec) -> PolicySpec:
    policy = spec.build()
    fields: tuple[attrs.Attribute[object], ...] = getattr(type(policy), "__attrs_attrs__", ())
    if not fields:
        return spec
    knobs = {str(field.alias): getattr(policy, field.name) for field in fields if field.init}
    return attrs.evolve(spec, knobs=knobs)
