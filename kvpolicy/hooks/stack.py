"""`Stack`: the policies of a layer, what they declare, and their answers to every hook."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, pairwise
from typing import Any

import pluggy
import torch
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.cache.rows import HeldRows, LayerRows
from kvpolicy.cache.slab import Slab
from kvpolicy.errors import PolicyLoadError
from kvpolicy.hooks import checks
from kvpolicy.hooks.declarations import HOOKS, Declarations
from kvpolicy.hooks.late_checks import LateChecks
from kvpolicy.hooks.manager import Check, HookListener, HookManager
from kvpolicy.hooks.protection import protected_rows
from kvpolicy.state import Bound, LayerWeights, Memory, Parts, Probe, Registers, WaitingRequest

_COMPACTION_HOOKS = ("protect", "score", "select", "evict")

# A stack that implements one of these keeps no more rows than its budget.
_BOUNDING_HOOKS = ("allocate", "due", *_COMPACTION_HOOKS)

# Those that layers may be asked together.
_FOLDED_HOOKS = ("due", "protect", "score", "select")

# Those that see rows, which heads may hold in different numbers.
_ROW_HOOKS = _COMPACTION_HOOKS

# Hooks of which the first answer counts.
_ANSWERED_ONCE = ("score", "select", "evict")

_DEEPEST_PART = 4

# Hooks whose one answer is for the whole stack, so a part of a policy cannot give it.
_NOT_IN_PARTS = ("select", "evict", "schedule")


class Stack:
    """Policies in listed order: later ones are called first and wrap earlier ones.

    A policy may combine others, its `parts`. Each part gets a stack of its own, and what it
    declares counts as if it were listed in this stack.

    Attributes:
        names: Names of the policies, in order.
        policies: The policies in order, then the parts.
        declared: What each of them declares.
        reads: Arguments that some policy names in `protect`, `score`, `select` or `evict`.
        observes: Arguments that some policy names in `observe`.
        marks: Arguments that some policy names in `mark`.
        tracks: Names of the per-row numbers that move with the rows.
        window_size: Queries to remember; 0 if no policy reads them.
        n_first: First tokens of a sequence that the policies protect.
        n_last: Newest rows that the policies protect.
        bounded: Whether the slab has a fixed size. False if a policy sets ``bounded = False``
            or if no policy takes part in compactions.
        even_only: Names of the policies that read or choose rows and do not declare that KV heads
            may hold different numbers of them, parts included.
        mass_problem: Why the scores that a policy weighs rows by are no masses; ``None``: they
            are, or no policy does.
        implemented: The hooks that each policy implements, in order, without those of its parts.
        shadowed: Policies whose implementation of `score`, `select` or `evict`, no wrapper, is
            called only where a policy listed after them has no answer: hook, policy, the other.
        layers_alike: Whether every policy that implements `due`, `protect`, `score` or `select`
            declares that it treats layers alike, parts included, and none implements `bind`.
        probe_size: Tokens of a probe, at most; 0 if no policy probes.
        steering: Names of the policies that steer, each with its layers; ``None`` stands for
            all layers of the stack.
        marked_in_step: Tracks that policies mark within the decode step.
        marked_later: Tracks that policies mark after several decode steps.
    """

    def __init__(
        self,
        policies: Sequence[tuple[str, object]],
        *,
        owner: str = "",
        prefix: str = "",
        depth: int = 0,
    ) -> None:
        """Build a stack.

        Args:
            policies: Names and policies, in order.
            owner: For the stack of a part: suffix of its name in messages.
            prefix: For the stack of a part: prefix of the names of its tracks.
            depth: For the stack of a part: in how many others it is.

        Raises:
            PolicyLoadError: A policy does not fit the hook specs, or cannot be a part.
        """
        self._manager = HookManager(policies, owner)
        declared = self._manager.declared
        self._prefix, self._depth = prefix, depth
        self.names = self._manager.names
        own = [policy for _, policy in policies]
        self._parts: dict[int, list[Stack]] = {
            id(policy): self._part_stacks(name, declared[id(policy)].parts)
            for name, policy in policies
        }
        self._part_list = list(chain.from_iterable(self._parts.values()))
        self.policies: list[object] = [*own, *chain(*(part.policies for part in self._part_list))]
        self.reads: frozenset[str] = self._arguments_of(*_COMPACTION_HOOKS).union(
            *(part.reads for part in self._part_list)
        )
        self.observes: frozenset[str] = self._arguments_of("observe").union(
            *(part.observes for part in self._part_list)
        )
        self.marks: frozenset[str] = self._arguments_of("mark").union(
            *(part.marks for part in self._part_list)
        )
        reads_queries = self.reads & {"queries", "attn_weights"}
        self.declared: list[Declarations] = [
            *(declared[id(policy)] for policy in own),
            *chain(*(part.declared for part in self._part_list)),
        ]
        sizes = [one.window_size for one in self.declared]
        self.window_size: int = max(sizes) if reads_queries else 0
        self.n_first = max((one.protects[0] for one in self.declared), default=0)
        self.n_last = max((one.protects[1] for one in self.declared), default=0)
        self.tracks = self._declared_tracks(self.declared[: len(own)])
        protects = self.n_first + self.n_last > 0
        self._asks_protect = self.implements("protect")
        chooses = protects or any(self.implements(hook) for hook in _BOUNDING_HOOKS)
        self.bounded = chooses and all(one.bounded for one in self.declared)
        binds = bool(self._manager.impls("bind"))  # what is bound differs from layer to layer
        of_parts = all(part.layers_alike for part in self._part_list)
        asked = (impl for hook in _FOLDED_HOOKS for impl in self._manager.impls(hook))
        own_alike = all(declared[id(impl.plugin)].layers_alike for impl in asked)
        self.layers_alike: bool = own_alike and of_parts and not binds
        self.probe_size: int = self._probe_size()
        self.even_only: list[str] = [
            *dict.fromkeys(
                impl.plugin_name
                for hook in _ROW_HOOKS
                for impl in self._manager.impls(hook)
                if not declared[id(impl.plugin)].ragged
            ),
            *chain.from_iterable(part.even_only for part in self._part_list),
        ]
        self.mass_problem: str | None = self._mass_problem()
        self.implemented: list[frozenset[str]] = [
            frozenset(
                hook
                for hook in HOOKS
                if any(impl.plugin is policy for impl in self._manager.impls(hook))
            )
            for policy in own
        ]
        self.shadowed: list[tuple[str, str, str]] = [
            *self._shadowed(),
            *chain.from_iterable(part.shadowed for part in self._part_list),
        ]
        self.steering: list[tuple[str, Sequence[int] | None]] = [
            *(
                (impl.plugin_name, declared[id(impl.plugin)].steers)
                for impl in self._manager.impls("steer")
            ),
            *chain.from_iterable(part.steering for part in self._part_list),
        ]
        # Implementations of `mark`, by whether they are called within the decode step.
        self._marking: dict[bool, list[pluggy.HookImpl]] = {True: [], False: []}
        for impl in self._manager.impls("mark"):
            one = declared[id(impl.plugin)]
            if not one.tracks:
                msg = (
                    f"policy '{impl.plugin_name}'{owner} implements mark() and declares no tracks; "
                    'write tracks: ClassVar[tuple[str, ...]] = ("NAME",)'
                )
                raise PolicyLoadError(msg)
            self._marking[one.marks_in_step].append(impl)
        self.marked_in_step = self._marked(in_step=True)
        self.marked_later = self._marked(in_step=False)

    def _marked(self, *, in_step: bool) -> tuple[str, ...]:
        own = [
            self._prefix + track
            for impl in self._marking[in_step]
            for track in self._manager.declared[id(impl.plugin)].tracks
        ]
        of_parts = (
            part.marked_in_step if in_step else part.marked_later for part in self._part_list
        )
        return (*own, *chain.from_iterable(of_parts))

    def _part_stacks(self, name: str, parts: Sequence[tuple[str, object]]) -> list["Stack"]:
        """A stack for each part of a policy, with tracks of its own."""
        stacks = []
        for index, part in enumerate(parts):
            owner = f" in '{name}'{self._manager.owner}"
            if self._depth >= _DEEPEST_PART:
                msg = (
                    f"policy '{name}'{self._manager.owner} has parts, which may be nested "
                    f"{_DEEPEST_PART} deep; a policy cannot be a part of itself"
                )
                raise PolicyLoadError(msg)
            prefix = f"{self._prefix}{name}.{index}."
            stack = Stack([part], owner=owner, prefix=prefix, depth=self._depth + 1)
            problem = stack._part_problem()
            if problem is not None:
                msg = f"policy '{part[0]}'{owner} {problem}"
                raise PolicyLoadError(msg)
            stacks.append(stack)
        return stacks

    def _part_problem(self) -> str | None:
        """Why this policy cannot be a part of another, or ``None``."""
        for hook in _NOT_IN_PARTS:
            if self.implements(hook):
                return f"implements {hook}(), which is not called for parts; list it in the stack"
        if not self.implements("score"):
            return "implements no score(), so it cannot be a part of another policy"
        return None

    def _mass_problem(self) -> str | None:
        """Why a policy that needs masses gets other scores; of parts, too."""
        impls = self._manager.impls("score")  # wrappers first, as they are called
        for place, impl in enumerate(impls):
            if not self._manager.declared[id(impl.plugin)].needs_mass:
                continue
            who = f"policy '{impl.plugin_name}'{self._manager.owner}"
            needs = f"{who} needs scores that are masses, such as sums of attention weights"
            advice = "list it with a policy that scores and declares gives_mass = True"
            below = impls[place + 1 :]
            plain = [one for one in below if not (one.wrapper or one.hookwrapper)]
            if not plain:
                return f"{needs}, and no policy below it scores; {advice}"
            wrapping = [one for one in below if one.wrapper or one.hookwrapper]
            for one in (*wrapping, plain[0]):
                if not self._manager.declared[id(one.plugin)].gives_mass:
                    return f"{needs}, and those of '{one.plugin_name}' are not; {advice}"
        return next(filter(None, (part.mass_problem for part in self._part_list)), None)

    def _shadowed(self) -> Iterator[tuple[str, str, str]]:
        for hook in _ANSWERED_ONCE:
            plain = [
                impl for impl in self._manager.impls(hook) if not (impl.wrapper or impl.hookwrapper)
            ]
            for above, below in pairwise(plain):
                yield hook, below.plugin_name, above.plugin_name

    def _probe_size(self) -> int:
        sizes = [part.probe_size for part in self._part_list]
        for impl in self._manager.impls("probe"):
            size = self._manager.declared[id(impl.plugin)].probe_size
            if not size:
                msg = (
                    f"policy '{impl.plugin_name}'{self._manager.owner} implements probe() and "
                    "declares no probe_size; give it the most tokens of a probe, such as "
                    "probe_size: ClassVar[int] = 8"
                )
                raise PolicyLoadError(msg)
            sizes.append(size)
        return max(sizes, default=0)

    def _arguments_of(self, *hooks: str) -> frozenset[str]:
        impls = (impl for hook in hooks for impl in self._manager.impls(hook))
        return frozenset(argument for impl in impls for argument in impl.argnames)

    def _declared_tracks(self, own: Sequence[Declarations]) -> tuple[str, ...]:
        declared = [name for name in ACCUMULATORS if name in self.reads]
        owned = [
            (name, self._prefix + track)
            for name, one in zip(self.names, own, strict=True)
            for track in one.tracks
        ]
        of_parts = [(part.names[0], track) for part in self._part_list for track in part.tracks]
        for name, track in owned + [pair for pair in of_parts if pair[1] not in ACCUMULATORS]:
            if track in declared:
                msg = f"policy '{name}' declares track '{track}', which the stack has already"
                raise PolicyLoadError(msg)
            declared.append(track)
        return tuple(declared)

    def implements(self, hook: str) -> bool:
        """Whether a policy or part, and not only the defaults, implements a hook."""
        return bool(self._manager.impls(hook)) or any(
            part.implements(hook) for part in self._part_list
        )

    def arguments(self, hook: str) -> frozenset[str]:
        """Arguments that some policy or part names in a hook."""
        of_parts = (part.arguments(hook) for part in self._part_list)
        return self._arguments_of(hook).union(*of_parts)

    @property
    def folds(self) -> bool:
        """Whether layers may be asked together; not while calls are recorded layer by layer."""
        return self.layers_alike and not self.is_recorded

    @property
    def is_recorded(self) -> bool:
        """Whether a listener receives the hook calls."""
        return self._manager.is_recorded

    def is_steered(self, layer_idx: int) -> bool:
        """Whether a policy steers this layer."""
        return any(layers is None or layer_idx in layers for _, layers in self.steering)

    @property
    def is_marked(self) -> bool:
        """Whether a policy marks new rows."""
        return bool(self.marked_in_step or self.marked_later)

    def slab(self, capacity: int, room: int | None = None, heads: str = "own") -> Slab:
        """What the cache of a layer must hold for the policies of this stack; see `Slab`."""
        return Slab(
            capacity,
            self.window_size,
            self.tracks,
            room,
            ragged=heads == "shared",
        )

    @contextmanager
    def listening(self, listener: HookListener) -> Iterator[None]:
        """Pass every hook call, of parts too, to a listener inside a ``with`` block."""
        with ExitStack() as listeners:
            listeners.enter_context(self._manager.listening(listener))
            for part in self._part_list:
                listeners.enter_context(part.listening(listener))
            yield

    def allocate(
        self, layer_indices: Sequence[int], budget: int, floors: Sequence[int], num_layers: int
    ) -> list[int]:
        """Rows for each layer; ``budget`` for all of them if no policy answers."""
        total = budget * len(layer_indices)
        answer: Sequence[int] | None = self._manager.ask(
            "allocate",
            None,
            lambda answer: checks.allocate_problem(answer, total, floors),
            optional=True,
            layer_indices=layer_indices,
            budget=budget,
            total=total,
            floors=floors,
            num_layers=num_layers,
        )
        return [budget] * len(layer_indices) if answer is None else list(answer)

    def schedule(
        self, waiting: Sequence[WaitingRequest], num_free: int, num_active: int
    ) -> list[list[int]]:
        """Groups of request ids to admit next."""
        answer: list[list[int]] = self._manager.ask(
            "schedule",
            None,
            lambda answer: checks.schedule_problem(answer, waiting, num_free, num_active),
            waiting=waiting,
            num_free=num_free,
            num_active=num_active,
        )
        return answer

    def observe(self, **arguments: Any) -> None:
        """Show the policies the newest tokens of one sequence."""
        self._manager.ask("observe", None, checks.observe_problem, **arguments)
        for part in self._part_list:
            part.observe(**arguments)

    def bind(self, layer_idx: int, weights: LayerWeights) -> Bound:
        """What policies and parts make of the weights of a layer."""
        return Bound(self._bound(layer_idx, weights))

    def _bound(self, layer_idx: int, weights: LayerWeights) -> dict[int, Any]:
        impls = self._manager.impls("bind")
        answers = []
        if impls:
            check = checks.BindCheck(weights)
            asked = [(impl, check) for impl in impls]
            try:
                answers = self._manager.ask_each("bind", layer_idx, asked, weights=weights)
            finally:
                check(None)  # a policy that raises may have changed them, too
        bound = {id(impl.plugin): one for impl, one in zip(impls, answers, strict=True)}
        for part in self._part_list:
            bound |= part._bound(layer_idx, weights)
        return bound

    def mark(
        self, layer_idx: int, *, in_step: bool | None = None, **arguments: Any
    ) -> dict[str, Tensor]:
        """Numbers for new rows, ``[N, H_kv]``, by the names of tracks in the cache.

        Args:
            layer_idx: The layer.
            in_step: Ask only the policies that mark within the decode step, or only the others.
            arguments: The other arguments of the hook.
        """
        keys: Tensor = arguments["keys"]
        asked = [
            (impl, self._mark_check(impl.plugin, keys))
            for kind in ((True, False) if in_step is None else (in_step,))
            for impl in self._marking[kind]
        ]
        marks = {
            self._prefix + name: numbers
            for answer in self._manager.ask_each("mark", layer_idx, asked, **arguments)
            for name, numbers in (answer or {}).items()
        }
        for part in self._part_list:
            marks |= part.mark(layer_idx, in_step=in_step, **arguments)
        return marks

    def _mark_check(self, policy: object, keys: Tensor) -> Check:
        tracks, shape = self._manager.declared[id(policy)].tracks, keys.shape[:2]
        return lambda answer: checks.mark_problem(answer, tracks, shape, keys.device)

    def steer(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        token_ids: Tensor,
        *,
        tokenizer: object,
        registers: Registers,
        memory: Memory,
    ) -> Tensor | None:
        """Sum of all changes to the states that enter a layer, ``[B, M]``, or ``None``."""

        def check(answers: object) -> str | None:
            listed = answers if isinstance(answers, list) else [answers]
            problems = (checks.steer_problem(answer, hidden_states) for answer in listed)
            return next(filter(None, problems), None)

        arguments: dict[str, Any] = {
            "hidden_states": hidden_states,
            "token_ids": token_ids,
            "tokenizer": tokenizer,
            "registers": registers,
            "memory": memory,
        }
        changes: list[Tensor] = self._manager.ask("steer", layer_idx, check, **arguments)
        for part in self._part_list:
            change = part.steer(layer_idx, **arguments)
            changes += [] if change is None else [change]
        return sum(changes[1:], changes[0]) if changes else None

    def probe(self, vocab_size: int, **arguments: Any) -> Probe | None:
        """The probe of one sequence, or ``None`` if no policy answers."""
        answer: Probe | None = self._manager.ask(
            "probe",
            None,
            lambda answer: checks.probe_problem(answer, self.probe_size, vocab_size),
            optional=True,
            **arguments,
        )
        if answer is not None:
            return answer
        answers = (part.probe(vocab_size, **arguments) for part in self._part_list)
        return next((answer for answer in answers if answer is not None), None)

    def due(self, layer_idx: int, **arguments: Any) -> Tensor | None:
        """Which sequences are due, bool ``[B]``, or ``None`` if no policy answers."""
        num_sequences = arguments["num_rows"].shape[0]
        answer: Tensor | None = self._manager.ask(
            "due",
            layer_idx,
            lambda answer: checks.due_problem(answer, num_sequences),
            optional=True,
            **arguments,
        )
        if answer is not None:
            return answer
        answers = (part.due(layer_idx, **arguments) for part in self._part_list)
        return next((answer for answer in answers if answer is not None), None)

    def protected(
        self, layer_idx: int, positions: Tensor, budget: int, **arguments: Any
    ) -> Tensor | None:
        """Rows that stay in any case, bool ``[B, H_kv, T]``; ``None``: no row is protected.

        Args:
            layer_idx: The layer, or the first of several.
            positions: Position of each row's token, ``[B, H_kv, T]``.
            budget: Rows that stay.
            arguments: The other arguments of `protect`.
        """
        arguments |= {"positions": positions, "budget": budget}
        answers = self._protect(layer_idx, arguments) if self._asks_protect else []
        return protected_rows(positions, self.n_first, self.n_last, answers, budget)

    def _protect(self, layer_idx: int, arguments: dict[str, Any]) -> list[Tensor]:
        """The answers to `protect` of policies and parts."""
        positions = arguments["positions"]

        def check(answers: object) -> str | None:
            listed = answers if isinstance(answers, list) else [answers]
            problems = (checks.protect_problem(answer, positions) for answer in listed)
            return next(filter(None, problems), None)

        answers: list[Tensor] = self._manager.ask("protect", layer_idx, check, **arguments)
        of_parts = (part._protect(layer_idx, arguments) for part in self._part_list)
        return [*answers, *chain.from_iterable(of_parts)]

    def score(
        self,
        rows: HeldRows,
        layer_idx: int,
        arguments: dict[str, Any],
        late: LateChecks | None = None,
    ) -> Tensor:
        """Scores, ``[B, H_kv, T]``, fp32.

        Args:
            rows: The rows.
            layer_idx: The layer, or the first of several.
            arguments: The other arguments of the hook.
            late: Keeps answers whose values are checked later; ``None``: they are now.
        """
        shape, device = rows.positions.shape, rows.positions.device

        def caller(part: Stack) -> Callable[[], Tensor]:
            return partial(part.score, rows, layer_idx, arguments, late)

        parts = {key: [caller(part) for part in parts] for key, parts in self._parts.items()}
        scores: Tensor = self._manager.ask(
            "score",
            layer_idx,
            checks.scores_check(shape, device),
            late=late,
            **arguments | {"tracks": rows.tracks.within(self._prefix), "parts": Parts(parts)},
        )
        return scores.float()

    def select(self, layer_idx: int, late: LateChecks | None = None, **arguments: Any) -> Tensor:
        """Rows that stay, ``[B, H_kv, K]``, int64, rising once they are checked.

        Or bool ``[B, H_kv, T]``, if heads share their rows.
        """
        scores, budget = arguments["scores"], arguments["budget"]
        present = arguments["positions"] >= 0 if arguments["heads"] == "shared" else None
        check = checks.keep_check(scores.shape, budget, scores.device, present)
        keep: Tensor = self._manager.ask("select", layer_idx, check, late=late, **arguments)
        if late is None or keep.dtype == torch.bool:
            return keep
        # Until then no index may lead outside of these rows.
        return keep.clamp(0, scores.shape[2] - 1)

    def evict(
        self,
        rows: LayerRows,
        keep: Tensor,
        layer_idx: int,
        memory: Memory,
        late: LateChecks | None = None,
    ) -> None:
        """Remove the rows that do not stay."""
        self._manager.ask(
            "evict",
            layer_idx,
            checks.evict_check(rows, keep),
            late=late,
            rows=rows,
            keep=keep,
            memory=memory,
        )
