"""Plans: which policies look after which layers, with what budget and buffer.

Budget, defined once: the rows of a layer and KV head that stay after a compaction, sinks and
recent window included, buffer excluded. A slot never holds more than ``budget + buffer``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy import planfile
from kvpolicy.allocation import allocate
from kvpolicy.discovery import policy_names
from kvpolicy.errors import BudgetError, PlanError
from kvpolicy.planspec import LayerGroup, Padding, PolicySpec
from kvpolicy.resolved import LayerPlan, ResolvedPlan
from kvpolicy.stack import Stack

DEFAULT_BUFFER = 128


@attrs.frozen
class Plan:
    """What a file or a few lines of Python say; `resolve` makes it fit a model.

    Attributes:
        stack: Policies of all layers whose group names none.
        budget: Rows that stay after a compaction, per layer and KV head.
        buffer: Rows that may join before the next compaction.
        layers: Groups that cover every layer exactly once; none means one group of all.
        schedule: Policies that are asked for the order of admission only.
        padding: ``"none"``: pads are never stored. ``"stored"``, for study: a sequence has as
            many rows less as its prompt is shorter than the longest it is prefilled with, as
            where batches are padded and pads kept (SkipKV, eq. 12: ``B' = B - (N_max - N)``).
        name: Where the plan came from, for messages.
    """

    stack: tuple[PolicySpec, ...] = ()
    budget: int | None = None
    buffer: int = DEFAULT_BUFFER
    layers: tuple[LayerGroup, ...] = ()
    schedule: tuple[PolicySpec, ...] = ()
    padding: Padding = "none"
    name: str = attrs.field(default="the plan", eq=False)

    @classmethod
    def uniform(
        cls,
        *stack: object,
        budget: int | None = None,
        buffer: int = DEFAULT_BUFFER,
        knobs: Mapping[str, Mapping[str, Any]] | None = None,
        schedule: Sequence[object] = (),
        padding: Padding = "none",
    ) -> "Plan":
        """The same stack, budget and buffer in every layer.

        Args:
            stack: Names of policies, or policy objects, the later wrapping the earlier.
            budget: Rows that stay after a compaction, per layer and KV head.
            buffer: Rows that may join before the next compaction.
            knobs: Knobs by policy name and knob name.
            schedule: Policies for the order of admission.
            padding: ``"none"``, or ``"stored"`` to study padded batches.

        Raises:
            PlanError: If knobs are given for a policy that is not in the stack.
        """
        knobs = knobs or {}
        listed = [*stack, *schedule]
        specs = tuple(
            PolicySpec.of(policy, knobs.get(policy) if isinstance(policy, str) else None)
            for policy in listed
        )
        unused = set(knobs) - {spec.policy for spec in specs}
        if unused:
            msg = f"knobs are given for '{min(unused)}', which is not in the stack {listed}"
            raise PlanError(msg)
        num = len(stack)
        return cls(specs[:num], budget, buffer, schedule=specs[num:], padding=padding)

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> "Plan":
        """Read a TOML plan.

        Args:
            path: The file, or the name of a plan that an installed package brings along.
            overrides: Changes such as ``"budget=96"``, ``"layers.0.buffer=8"`` or
                ``"rkv.mix_lambda=0.5"`` (in every stack that names the policy).

        Raises:
            PlanError: If the file cannot be read, is no TOML, or says something unknown.
        """
        return cls.from_dict(planfile.read(path), overrides, name=f"plan '{path}'")

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], overrides: Sequence[str] = (), *, name: str = "the plan"
    ) -> "Plan":
        """Build a plan from what its TOML file would hold; see `load`."""
        return planfile.structure(cls, data, overrides, name)

    def resolve(self, num_layers: int) -> ResolvedPlan:
        """Spell out what each layer of a model will do.

        Raises:
            PlanError: If a layer is covered twice or not at all, or a policy cannot be built.
            BudgetError: If a budget is missing, or below what the policies protect.
            HookResultError: If a policy does not share a group's rows as `allocate` wants.
        """
        layers: list[LayerPlan | None] = [None] * num_layers
        for group in self.layers or (LayerGroup(),):
            stack = self._stack_of(group)
            chosen = self._layers_of(group, num_layers)
            for layer_idx in chosen:
                if layers[layer_idx] is not None:
                    msg = f"{self.name} covers layer {layer_idx} twice, again in {group.where!r}"
                    raise PlanError(msg)
                layers[layer_idx] = self._resolve_layer(layer_idx, group, stack)
            alike = [layer for layer in layers if layer and layer.layer_idx in chosen]
            for layer in allocate(alike, num_layers):
                layers[layer.layer_idx] = layer
        return ResolvedPlan(
            tuple(self._covered(layers)),
            _resolve_specs(self.schedule),
            self.padding,
            name=self.name,
        )

    def _stack_of(self, group: LayerGroup) -> tuple[PolicySpec, ...]:
        stack = self.stack if group.stack is None else group.stack
        if not stack:
            msg = (
                f"{self.name} names no policy for layers {group.where!r}; "
                f'write stack = ["NAME"], NAME being one of {", ".join(policy_names())}'
            )
            raise PlanError(msg)
        return _resolve_specs(stack)

    def _layers_of(self, group: LayerGroup, num_layers: int) -> list[int]:
        where = group.where
        if isinstance(where, str):
            chosen = planfile.slice_of(where, self.name)
            found = list(range(num_layers))[chosen]
        else:
            outside = [layer for layer in where if not -num_layers <= layer < num_layers]
            if outside:
                msg = (
                    f"{self.name} names layer {outside[0]}; the model has layers 0 to "
                    f"{num_layers - 1}"
                )
                raise PlanError(msg)
            found = [layer % num_layers for layer in where]
        if not found:
            msg = f"{self.name}: {where!r} covers none of the model's {num_layers} layers"
            raise PlanError(msg)
        return found

    def _resolve_layer(
        self, layer_idx: int, group: LayerGroup, stack: tuple[PolicySpec, ...]
    ) -> LayerPlan:
        budget = self.budget if group.budget is None else group.budget
        buffer = self.buffer if group.buffer is None else group.buffer
        for what, value in (("budget", budget), ("buffer", buffer)):
            if value is not None and value < 1:
                msg = (
                    f"{self.name} gives layer {layer_idx} a {what} of {value}; at least 1 row "
                    "is needed"
                )
                raise BudgetError(msg)
        built = Stack([(spec.policy, spec.build()) for spec in stack])
        self._check_budget(layer_idx, built, budget)
        return LayerPlan(
            layer_idx,
            stack,
            budget,
            buffer,
            bounded=built.bounded,
            num_protected=built.n_first + built.n_last,
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
        for layer_idx, layer in enumerate(layers):
            if layer is None:
                msg = f"{self.name} does not cover layer {layer_idx} of 0 to {len(layers) - 1}"
                raise PlanError(msg)
        return [layer for layer in layers if layer is not None]


def _resolve_specs(specs: Sequence[PolicySpec]) -> tuple[PolicySpec, ...]:
    """The same policies with all knobs spelled out."""
    return tuple(_resolve_spec(spec) for spec in specs)


def _resolve_spec(spec: PolicySpec) -> PolicySpec:
    policy = spec.build()
    fields: tuple[attrs.Attribute[object], ...] = getattr(type(policy), "__attrs_attrs__", ())
    if not fields:
        return spec
    knobs = {field.name: getattr(policy, field.name) for field in fields if field.init}
    return attrs.evolve(spec, knobs=knobs)
