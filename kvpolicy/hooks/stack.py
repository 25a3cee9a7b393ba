"""`Stack`: the policies of a layer, what they declare, and their answers to every hook."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import pluggy
import torch
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.cache.rows import HeldRows, LayerRows
from kvpolicy.cache.shape import Slab
from kvpolicy.errors import PolicyLoadError
from kvpolicy.hooks import checks
from kvpolicy.hooks.declarations import HOOKS, Declarations
from kvpolicy.hooks.late_checks import LateChecks
from kvpolicy.hooks.manager import Check, HookListener, HookManager
from kvpolicy.hooks.protection import protected_rows
from kvpolicy.state import Bound, LayerWeights, Lookahead, Memory, Parts, Registers, WaitingRequest

# Those that see rows, which heads may hold in different numbers.
_COMPACTION_HOOKS = ("protect", "score", "select", "evict")

# A stack that implements one of these keeps no more rows than its budget.
_BOUNDING_HOOKS = ("allocate", "due", *_COMPACTION_HOOKS)

# Hooks that may be asked for several layers at once, and the arguments by which a policy can tell
# layers apart.
_FOLDED_HOOKS = ("due", "protect", "score", "select")
_OF_A_LAYER = frozenset({"layer_idx", "bound"})

# Hooks of which the first answer counts: in each stack, or with the parts after the stack.
_ANSWERED_ONCE = ("score", "select", "evict")
_ANSWERED_BY_PARTS = ("allocate", "due", "lookahead")

_DEEPEST_PART = 4

# Hooks that every stack answers, if only by the defaults, so a part of a policy is never asked.
_NOT_IN_PARTS = ("select", "evict", "schedule")


class Stack:
    """Policies in listed order: later ones are called first and wrap earlier ones.

    A policy may combine others, its `parts`. Each part gets a stack of its own, and what it
    declares counts as if it were listed in this stack.

    Attributes:
        names: Names of the policies, in order.
        tracks: Names of the per-row numbers that move with the rows.
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
        self._prefix, self._depth = prefix, depth
        self._own = [policy for _, policy in policies]
        self.names = self._manager.names
        self._parts: dict[int, list[Stack]] = {
            id(policy): self._part_stacks(name, self._manager.declared[id(policy)].parts)
            for name, policy in policies
        }
        # This one, and those of all parts, however deep.
        self._stacks: list[Stack] = [
            self,
            *(stack for parts in self._parts.values() for part in parts for stack in part._stacks),
        ]
        self.tracks = self._all_tracks()

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

    def _all_tracks(self) -> tuple[str, ...]:
        """Names of the tracks of the stack and its parts; raises if there is one twice."""
        tracks = [name for name in ACCUMULATORS if name in self.reads]
        for stack in self._stacks:
            for name, policy in zip(stack.names, stack._own, strict=True):
                for track in stack._tracks_of(policy):
                    if track in tracks:
                        msg = (
                            f"policy '{name}' declares track '{track}', which the stack has already"
                        )
                        raise PolicyLoadError(msg)
                    tracks.append(track)
        return tuple(tracks)

    def _tracks_of(self, policy: object) -> list[str]:
        """Names in the cache of the tracks that a policy of this stack declares."""
        return [self._prefix + track for track in self._manager.declared[id(policy)].tracks]

    # What the policies are

    @cached_property
    def policies(self) -> list[object]:
        """The policies in order, then the parts."""
        return [policy for stack in self._stacks for policy in stack._own]

    @cached_property
    def declared(self) -> list[Declarations]:
        """What each of `policies` declares."""
        return [
            stack._manager.declared[id(policy)] for stack in self._stacks for policy in stack._own
        ]

    @cached_property
    def implemented(self) -> list[frozenset[str]]:
        """The hooks that each policy of the stack implements, in order, without its parts."""
        impls = {hook: self._manager.impls(hook) for hook in HOOKS}
        return [
            frozenset(
                hook for hook, of_hook in impls.items() if any(i.plugin is policy for i in of_hook)
            )
            for policy in self._own
        ]

    def implements(self, *hooks: str) -> bool:
        """Whether a policy or part, and not only the defaults, implements one of the hooks."""
        return any(stack._manager.impls(hook) for stack in self._stacks for hook in hooks)

    def arguments(self, *hooks: str) -> frozenset[str]:
        """Arguments that some policy or part names in one of the hooks."""
        return frozenset(name for impl, _ in self._impls(*hooks) for name in impl.argnames)

    def _impls(self, *hooks: str) -> Iterator[tuple[pluggy.HookImpl, Declarations]]:
        """Implementations of hooks, and what their policies declare; those of parts come last."""
        for stack in self._stacks:
            for hook in hooks:
                for impl in stack._manager.impls(hook):
                    yield impl, stack._declared_of(impl)

    def _declared_of(self, impl: pluggy.HookImpl) -> Declarations:
        return self._manager.declared[id(impl.plugin)]

    # What they ask for

    @cached_property
    def reads(self) -> frozenset[str]:
        """Arguments that some policy names in `protect`, `score`, `select` or `evict`."""
        return self.arguments(*_COMPACTION_HOOKS)

    @cached_property
    def observes(self) -> frozenset[str]:
        """Arguments that some policy names in `observe`."""
        return self.arguments("observe")

    @cached_property
    def annotates(self) -> frozenset[str]:
        """Arguments that some policy names in `annotate`."""
        return self.arguments("annotate")

    @cached_property
    def window_size(self) -> int:
        """Queries to remember; 0 if no policy reads them."""
        if not self.reads & {"queries", "attn_weights"}:
            return 0
        return max(one.window_size for one in self.declared)

    @cached_property
    def lookahead_size(self) -> int:
        """Tokens of a lookahead, at most; 0 if no policy looks ahead."""
        return max((one.lookahead_size for _, one in self._impls("lookahead")), default=0)

    def slab(self, capacity: int, room: int | None = None, heads: str = "own") -> Slab:
        """What the cache of a layer must hold for the policies of this stack; see `Slab`."""
        return Slab(
            capacity,
            self.window_size,
            self.tracks,
            room,
            ragged=heads == "shared",
        )

    # What they promise

    @cached_property
    def n_first(self) -> int:
        """First tokens of a sequence that the policies protect."""
        return max((one.protects[0] for one in self.declared), default=0)

    @cached_property
    def n_last(self) -> int:
        """Newest rows that the policies protect."""
        return max((one.protects[1] for one in self.declared), default=0)

    @cached_property
    def bounded(self) -> bool:
        """Whether the slab has a fixed size.

        False if a policy sets ``bounded = False`` or if no policy takes part in compactions.
        """
        chooses = self.n_first + self.n_last > 0 or self.implements(*_BOUNDING_HOOKS)
        return chooses and all(one.bounded for one in self.declared)

    @cached_property
    def stages_prompts(self) -> bool:
        """Whether prompts enter in larger chunks than the buffer, unless a plan says otherwise."""
        return all(one.stages_prompts for one in self.declared)

    @cached_property
    def layers_alike(self) -> bool:
        """Whether no policy can tell layers apart where it chooses rows, parts included."""
        return not self.arguments(*_FOLDED_HOOKS) & _OF_A_LAYER

    @property
    def folds(self) -> bool:
        """Whether layers may be asked together; not while calls are recorded layer by layer."""
        return self.layers_alike and not self.is_recorded

    @cached_property
    def even_only(self) -> list[str]:
        """Names of the policies that read or choose rows, and need as many in each KV head.

        Those that do not declare `ragged`, parts included.
        """
        impls = self._impls(*_COMPACTION_HOOKS)
        return [*dict.fromkeys(impl.plugin_name for impl, one in impls if not one.ragged)]

    @cached_property
    def mass_problem(self) -> str | None:
        """Why the scores that a policy weighs rows by are no masses.

        ``None``: they are, or no policy does.
        """
        return next(filter(None, (stack._mass_problem() for stack in self._stacks)), None)

    def _mass_problem(self) -> str | None:
        """The same for the policies of this stack alone."""
        impls = self._manager.impls("score")  # wrappers first, as they are called
        for place, impl in enumerate(impls):
            if not self._declared_of(impl).needs_mass:
                continue
            who = f"policy '{impl.plugin_name}'{self._manager.owner}"
            needs = f"{who} needs scores that are masses, such as sums of attention weights"
            advice = "list it with a policy that scores and declares gives_mass = True"
            below = impls[place + 1 :]
            plain = [one for one in below if not one.wrapper]
            if not plain:
                return f"{needs}, and no policy below it scores; {advice}"
            wrapping = [one for one in below if one.wrapper]
            for one in (*wrapping, plain[0]):
                if not self._declared_of(one).gives_mass:
                    return f"{needs}, and those of '{one.plugin_name}' are not; {advice}"
        return None

    @cached_property
    def shadowed(self) -> list[tuple[str, str, str]]:
        """Policies of which a hook, no wrapper, has its turn only sometimes.

        That is where a policy that is asked first has no answer: hook, policy, the other, as in
        ``"'h2o' in 'mix'"``.
        """
        asked = [(hook, [stack]) for stack in self._stacks for hook in _ANSWERED_ONCE]
        asked += [(hook, self._stacks) for hook in _ANSWERED_BY_PARTS]
        return [
            (hook, below, above)
            for hook, stacks in asked
            for above, below in pairwise(
                f"'{impl.plugin_name}'{stack._manager.owner}"
                for stack in stacks
                for impl in stack._manager.impls(hook)
                if not impl.wrapper
            )
        ]

    # Which of them act within the decode step

    @cached_property
    def steering(self) -> list[tuple[str, Sequence[int] | None]]:
        """Names of the policies that steer, each with its layers; ``None``: all of the stack."""
        return [(impl.plugin_name, one.steers) for impl, one in self._impls("steer")]

    def is_steered(self, layer_idx: int) -> bool:
        """Whether a policy steers this layer."""
        return any(stack._steering(layer_idx) for stack in self._stacks)

    def _steering(self, layer_idx: int) -> list[pluggy.HookImpl]:
        """Own implementations of `steer` that are called in a layer."""
        return [
            impl
            for impl in self._manager.impls("steer")
            if (layers := self._declared_of(impl).steers) is None or layer_idx in layers
        ]

    @cached_property
    def annotated_in_step(self) -> tuple[str, ...]:
        """Tracks that policies annotate within the decode step."""
        return self._annotated(in_step=True)

    @cached_property
    def annotated_later(self) -> tuple[str, ...]:
        """Tracks that policies annotate after several decode steps."""
        return self._annotated(in_step=False)

    def _annotated(self, *, in_step: bool) -> tuple[str, ...]:
        return tuple(
            track
            for stack in self._stacks
            for impl in stack._annotating(in_step)
            for track in stack._tracks_of(impl.plugin)
        )

    def _annotating(self, in_step: bool | None) -> list[pluggy.HookImpl]:
        """Own implementations of `annotate`, all or by whether they are called within the step."""
        impls = self._manager.impls("annotate")
        return [
            impl
            for impl in impls
            if in_step is None or self._declared_of(impl).annotates_in_step is in_step
        ]

    @property
    def is_annotated(self) -> bool:
        """Whether a policy annotates new rows."""
        return self.implements("annotate")

    # Recording

    @property
    def is_recorded(self) -> bool:
        """Whether a listener receives the hook calls."""
        return self._manager.is_recorded

    @contextmanager
    def listening(self, listener: HookListener) -> Iterator[None]:
        """Pass every hook call, of parts too, to a listener inside a ``with`` block."""
        with ExitStack() as listeners:
            for stack in self._stacks:
                listeners.enter_context(stack._manager.listening(listener))
            yield

    # Asking them

    def _stacks_with(self, hook: str) -> Iterator["Stack"]:
        """This stack and those of parts, where a policy implements a hook."""
        return (stack for stack in self._stacks if stack._manager.impls(hook))

    def allocate(
        self, layer_indices: Sequence[int], budget: int, floors: Sequence[int], num_layers: int
    ) -> list[int]:
        """Rows for each layer; ``budget`` for all of them if no policy or part answers."""
        total = budget * len(layer_indices)
        answer: Sequence[int] | None = self._first_answer(
            "allocate",
            None,
            lambda _, answer: checks.allocate_problem(answer, total, floors),
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
        for stack in self._stacks_with("observe"):
            stack._manager.ask("observe", None, checks.observe_problem, **arguments)

    def bind(self, layer_idx: int, weights: LayerWeights) -> Bound:
        """What policies and parts make of the weights of a layer."""
        bound: dict[int, Any] = {}
        for stack in self._stacks_with("bind"):
            impls, check = stack._manager.impls("bind"), checks.BindCheck(weights)
            asked = [(impl, check) for impl in impls]
            try:
                answers = stack._manager.ask_each("bind", layer_idx, asked, weights=weights)
            finally:
                check(None)  # a policy that raises may have changed them, too
            bound |= {id(impl.plugin): one for impl, one in zip(impls, answers, strict=True)}
        return Bound(bound)

    def annotate(
        self, layer_idx: int, *, in_step: bool | None = None, **arguments: Any
    ) -> dict[str, Tensor]:
        """Numbers for new rows, ``[N, H_kv]``, by the names of tracks in the cache.

        Args:
            layer_idx: The layer.
            in_step: Ask only the policies that annotate within the decode step, or only the others.
            arguments: The other arguments of the hook.
        """
        keys: Tensor = arguments["keys"]
        annotations = {}
        for stack in self._stacks_with("annotate"):
            asked = [
                (impl, stack._annotation_check(impl, keys)) for impl in stack._annotating(in_step)
            ]
            for answer in stack._manager.ask_each("annotate", layer_idx, asked, **arguments):
                for name, numbers in (answer or {}).items():
                    annotations[stack._prefix + name] = numbers
        return annotations

    def _annotation_check(self, impl: pluggy.HookImpl, keys: Tensor) -> Check:
        tracks, shape = self._declared_of(impl).tracks, keys.shape[:2]
        return lambda answer: checks.annotation_problem(answer, tracks, shape, keys.device)

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
        check = _each(lambda answer: checks.steer_problem(answer, hidden_states))
        changes: list[Tensor] = []
        for stack in self._stacks:
            impls = stack._steering(layer_idx)
            if not impls:
                continue
            changes += stack._manager.ask(
                "steer",
                layer_idx,
                check,
                impls=impls,
                hidden_states=hidden_states,
                token_ids=token_ids,
                tokenizer=tokenizer,
                registers=registers,
                memory=memory,
            )
        return sum(changes[1:], changes[0]) if changes else None

    def lookahead(self, vocab_size: int, **arguments: Any) -> Lookahead | None:
        """The lookahead of one sequence, or ``None`` if no policy or part answers."""
        answer: Lookahead | None = self._first_answer(
            "lookahead",
            None,
            lambda stack, answer: checks.lookahead_problem(
                answer, stack.lookahead_size, vocab_size
            ),
            **arguments,
        )
        return answer

    def due(self, layer_idx: int, **arguments: Any) -> Tensor | None:
        """Which sequences are due, bool ``[B]``, or ``None`` if no policy or part answers."""
        num_sequences = arguments["num_rows"].shape[0]
        answer: Tensor | None = self._first_answer(
            "due",
            layer_idx,
            lambda _, answer: checks.due_problem(answer, num_sequences),
            **arguments,
        )
        return answer

    def _first_answer(
        self,
        hook: str,
        layer_idx: int | None,
        check: Callable[["Stack", object], str | None],
        **arguments: Any,
    ) -> Any:
        """The answer of the policies of this stack, or else of the first part that has one."""
        for stack in self._stacks_with(hook):
            answer = stack._manager.ask(
                hook, layer_idx, partial(check, stack), optional=True, **arguments
            )
            if answer is not None:
                return answer
        return None

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
        check = _each(lambda answer: checks.protect_problem(answer, positions))
        answers: list[Tensor] = []
        for stack in self._stacks_with("protect"):
            answers += stack._manager.ask(
                "protect", layer_idx, check, positions=positions, budget=budget, **arguments
            )
        return protected_rows(positions, self.n_first, self.n_last, answers, budget)

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

        def caller(part: Stack) -> Callable[[], Tensor]:
            return partial(part.score, rows, layer_idx, arguments, late)

        parts = {key: [caller(part) for part in parts] for key, parts in self._parts.items()}
        own = {"tracks": rows.tracks.within(self._prefix), "parts": Parts(parts)}
        positions: Tensor = arguments["positions"]  # those of the rows, which may be a new copy
        check = checks.scores_check(positions.shape, positions.device)
        scores: Tensor = self._manager.ask("score", layer_idx, check, late=late, **arguments | own)
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
        check = checks.evict_check(rows, keep)
        self._manager.ask("evict", layer_idx, check, late=late, rows=rows, keep=keep, memory=memory)


def _each(check: Check) -> Check:
    """The check of each of the answers of a hook that all policies answer."""

    def problem(answers: object) -> str | None:
        listed = answers if isinstance(answers, list) else [answers]
        return next(filter(None, map(check, listed)), None)

    return problem
