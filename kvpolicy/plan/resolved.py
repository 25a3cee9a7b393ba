"""A plan resolved for one model: what each layer does, as plain data with a digest."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import attrs

from kvpolicy.cache.shape import UNLIMITED, Slab, Staging
from kvpolicy.errors import PlanError
from kvpolicy.hooks.stack import Stack
from kvpolicy.plan.plain import as_plain
from kvpolicy.plan.spec import PLAIN_ROWS, Heads, Padding, PolicySpec, PromptRows, RowFormats

# Rows beside the slabs may be one in so many of all slots.
_STAGED_SHARE = 4


@attrs.frozen
class LayerPlan:
    """What one layer does.

    Attributes:
        layer_idx: Decoder layer, counted from 0.
        stack: Its policies with all their knobs; none if it holds no rows: it has no attention,
            or attends to the rows of another layer.
        budget: Rows that stay after a compaction; ``None``: everything stays. Rows of a prompt
            that stays do not count.
        buffer: Rows that may join before the next compaction.
        bounded: Whether its slabs have a fixed size; if not, they are as long as the longest
            sequence may become.
        num_protected: Rows that its policies promise to keep.
        prompt: ``"keep"``: the rows of prompts stay, and policies choose from those behind them.
        heads: ``"own"``, or ``"shared"``: ``budget`` is the mean over the KV heads.
        prefill_buffer: Rows that may join before the next compaction while a prompt enters;
            ``None``: as many as later.
        prefill_by_default: Whether the plan left that open. It is not part of the digest.
        rows: How rows are stored.
        budget_from: The calculation of a budget that the plan gives as a share, as text. It
            is not part of the digest: the plan equals one with the same number of rows.
    """

    layer_idx: int
    stack: tuple[PolicySpec, ...]
    budget: int | None
    buffer: int
    bounded: bool
    num_protected: int = 0
    prompt: PromptRows = "evict"
    heads: Heads = "own"
    budget_from: str | None = attrs.field(default=None, eq=False)
    prefill_buffer: int | None = None
    prefill_by_default: bool = attrs.field(default=False, eq=False)
    rows: RowFormats = PLAIN_ROWS

    @classmethod
    def without_rows(cls, layer_idx: int) -> "LayerPlan":
        """That of a layer that holds no rows."""
        return cls(layer_idx, (), budget=None, buffer=1, bounded=False)

    @property
    def has_rows(self) -> bool:
        """Whether the layer holds rows."""
        return bool(self.stack)

    @property
    def evicts(self) -> bool:
        """Whether it has slabs of a fixed size, which rows leave."""
        return self.bounded and self.budget is not None

    @property
    def num_spare_rows(self) -> int:
        """Rows that stored pads may take, so that protected rows and at least one row stay."""
        if not self.bounded or self.budget is None:
            return 0
        return self.budget - max(self.num_protected, 1)

    @property
    def keeps_prompt(self) -> bool:
        """Whether the rows of prompts stay although it has a budget."""
        return self.prompt == "keep" and self.budget is not None

    @property
    def stages(self) -> bool:
        """Whether prompts may have rows beside their slabs."""
        return self.evicts and self.prefill_buffer is not None

    def capacity(self, longest: int, longest_prompt: int | None = None) -> int:
        """Rows to allocate for each slot.

        Args:
            longest: Tokens of the longest sequence.
            longest_prompt: Tokens of the longest prompt, if they are known to be fewer; they
                matter where the rows of prompts stay.
        """
        if not self.bounded or self.budget is None:
            return longest
        staying = 0
        if self.keeps_prompt:
            staying = longest if longest_prompt is None else longest_prompt
        return min(staying + self.budget + self.buffer, longest)

    def slab(
        self,
        stack: Stack,
        longest: int,
        longest_prompt: int | None = None,
        longest_entering: int | None = None,
        num_staged: int = 1,
    ) -> Slab:
        """What the cache of this layer holds for each slot; see `capacity`.

        Args:
            stack: The layer's policies.
            longest: Tokens of the longest sequence.
            longest_prompt: Tokens of the longest prompt.
            longest_entering: The most tokens that a sequence has when its first token is drawn,
                if they are known to be fewer; they matter where prompts have rows beside slabs.
            num_staged: Prompts that have rows beside the slabs at a time.
        """
        room: int | None = None
        if self.keeps_prompt:
            assert self.budget is not None
            room = self.budget + self.buffer if self.bounded else UNLIMITED
        slab = attrs.evolve(
            stack.slab(self.capacity(longest, longest_prompt), room, self.heads),
            key_bits=self.rows.key_bits,
            value_bits=self.rows.value_bits,
            exact=self.rows.exact,
        )
        rows = self.num_staged_rows(longest, longest_entering)
        return attrs.evolve(slab, staging=Staging(rows, num_staged)) if rows else slab

    def num_staged_rows(self, longest: int, longest_entering: int | None = None) -> int:
        """Rows that a prompt may have beside its slab; see `slab`."""
        if not self.stages:
            return 0
        assert self.budget is not None
        assert self.prefill_buffer is not None
        entering = longest if longest_entering is None else longest_entering
        most = min(self.budget + self.prefill_buffer, entering)
        return max(most - self.capacity(longest), 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON gives it back."""
        data = {
            "layer": self.layer_idx,
            "stack": [spec.to_dict() for spec in self.stack],
            "budget": self.budget if self.bounded else None,
            "buffer": self.buffer if self.bounded else None,
            # Only if it is not the default, so that digests of older results stay valid.
            **({} if self.prompt == "evict" else {"prompt": self.prompt}),
            **({} if self.heads == "own" else {"heads": self.heads}),
            **({"prefill_buffer": self.prefill_buffer} if self.stages else {}),
            **({} if self.rows == PLAIN_ROWS else {"rows": self.rows.to_plain()}),
            # Policies whose slabs grow may still compact: their budget has a key of its own.
            **({} if self.bounded else {"prefill_budget": self.budget}),
            **({} if self.budget_from is None else {"budget_from": self.budget_from}),
        }
        return as_plain(data)


@attrs.frozen
class ResolvedPlan:
    """What every layer of one model does.

    Attributes:
        layers: One plan for each layer, in order.
        schedule: Policies for the order of admission.
        padding: ``"none"``, or ``"stored"``: pads of a prefill group take up budget.
        name: Where the plan came from, for messages.
        uses_default_budget: Whether layers take the default budget given to `Plan.resolve`.
    """

    layers: tuple[LayerPlan, ...]
    schedule: tuple[PolicySpec, ...] = ()
    padding: Padding = "none"
    name: str = attrs.field(default="the plan", eq=False)
    uses_default_budget: bool = attrs.field(default=False, eq=False)
    _stacks: tuple[Stack, ...] | None = attrs.field(default=None, eq=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """All fields but the stacks, which are built again when needed."""
        names = (field.name for field in attrs.fields(type(self)) if field.name != "_stacks")
        return {name: getattr(self, name) for name in names} | {"_stacks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def resolve(self, num_layers: int, *, attention: Sequence[int] | None = None) -> "ResolvedPlan":
        """This plan, for callers that accept plans in both forms.

        Raises:
            PlanError: If it is resolved for another number of layers, or for others that have
                attention.
        """
        if num_layers != len(self.layers):
            msg = f"{self.name} is resolved for {len(self.layers)} layers, not for {num_layers}"
            raise PlanError(msg)
        wanted = list(range(num_layers) if attention is None else attention)
        if wanted != self.attention:
            msg = (
                f"{self.name} is resolved for a model with rows in layers "
                f"{', '.join(map(str, self.attention))}, and this one has them in "
                f"{', '.join(map(str, wanted))}; give the plan itself, or "
                "resolve(NUM_LAYERS, attention=[...])"
            )
            raise PlanError(msg)
        return self

    @property
    def attention(self) -> list[int]:
        """Numbers of the layers that hold rows, those with attention of their own."""
        return [layer.layer_idx for layer in self.layers if layer.has_rows]

    def stacks(self) -> tuple[Stack, ...]:
        """The stacks of the layers, built once; layers with equal policies share theirs."""
        if self._stacks is None:
            builder = StackBuilder()
            stacks = tuple(builder.build(layer.stack) for layer in self.layers)
            object.__setattr__(self, "_stacks", stacks)
        assert self._stacks is not None
        return self._stacks

    def scheduling_stack(self) -> Stack:
        """Build the stack whose `schedule` decides the order of admission."""
        return Stack([(spec.policy, spec.build()) for spec in self.schedule])

    @property
    def keeps_prompts(self) -> bool:
        """Whether the rows of prompts stay in any layer although it has a budget."""
        return any(layer.keeps_prompt for layer in self.layers)

    @property
    def stages(self) -> bool:
        """Whether prompts may have rows beside their slabs in any layer."""
        return any(layer.stages for layer in self.layers)

    def num_staged(
        self,
        num_slots: int,
        max_tokens_per_forward: int,
        longest: int,
        longest_entering: int | None = None,
    ) -> int:
        """Prompts that have rows beside their slabs at a time; 0 if none needs any.

        As many as enter in one forward and take, with these rows, no more than a quarter of the
        memory of the slots; at least one.

        Args:
            num_slots: Sequences.
            max_tokens_per_forward: The most prompt tokens of all sequences in one forward.
            longest: Tokens of the longest sequence.
            longest_entering: See `LayerPlan.slab`.
        """
        rows = [layer.num_staged_rows(longest, longest_entering) for layer in self.layers]
        staged = [layer for layer, num in zip(self.layers, rows, strict=True) if num]
        if not staged:
            return 0
        entering = longest if longest_entering is None else longest_entering
        widest = max(min(layer.prefill_buffer or 1, entering) for layer in staged)
        of_slots = num_slots * sum(layer.capacity(longest) for layer in staged)
        most = min(max_tokens_per_forward // widest, of_slots // (_STAGED_SHARE * sum(rows)))
        return min(num_slots, max(most, 1))

    def compacting_layers(self) -> list[LayerPlan]:
        """The layers from which a compaction may remove rows."""
        pairs = zip(self.layers, self.stacks(), strict=True)
        return [layer for layer, stack in pairs if needs_budget(stack)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON gives it back."""
        data = {
            "layers": [layer.to_dict() for layer in self.layers],
            "schedule": [spec.to_dict() for spec in self.schedule],
            # Only if it is not the default, so that digests of older results stay valid.
            **({} if self.padding == "none" else {"padding": self.padding}),
            **({"code": self._code} if self._code else {}),
            **({"files": self._files} if self._files else {}),
        }
        return as_plain(data)

    def digest(self) -> str:
        """A stable hash of the whole plan, 16 hexadecimal digits."""
        return self._digest

    def identity(self) -> dict[str, Any]:
        """What the digest is a hash of, as JSON gives it back."""
        identity: dict[str, Any] = json.loads(self._identity)
        return identity

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self._identity.encode()).hexdigest()[:16]

    @cached_property
    def _identity(self) -> str:
        data = self.to_dict()
        for layer in data["layers"]:
            layer.pop("budget_from", None)
        return json.dumps(data, sort_keys=True)

    @cached_property
    def _code(self) -> dict[str, str]:
        """Hashes of the code of policies that are not kvpolicy's own."""
        named = {spec.policy: spec for spec in self._specs}
        codes = {name: spec.code() for name, spec in sorted(named.items())}
        return {name: code for name, code in codes.items() if code is not None}

    @property
    def _files(self) -> dict[str, str]:
        """Hashes of the files that knobs name."""
        return dict(sorted(pair for spec in self._specs for pair in spec.files.items()))

    @property
    def _specs(self) -> list[PolicySpec]:
        return [*chain.from_iterable(layer.stack for layer in self.layers), *self.schedule]


def needs_budget(stack: Stack) -> bool:
    """Whether the policies of a stack may remove rows at a compaction."""
    return stack.bounded or stack.implements("score") or stack.implements("select")


class StackBuilder:
    """Builds stacks; equal specs get the same policy objects in the same stack."""

    def __init__(self) -> None:
        self._built: dict[str, Stack] = {}

    def build(self, specs: Sequence[PolicySpec], policies: Sequence[object] | None = None) -> Stack:
        """The stack of some policies.

        Args:
            specs: The policies with all their knobs.
            policies: The policies themselves, if they are built already.
        """
        identity = [[spec.policy, id(spec.instance), spec.knobs] for spec in specs]
        key = json.dumps(identity, default=repr)
        if key not in self._built:
            built = [spec.build() for spec in specs] if policies is None else policies
            names = [spec.policy for spec in specs]
            self._built[key] = Stack(list(zip(names, built, strict=True)))
        return self._built[key]
