"""A stack: the policies of a layer, what they read, what they promise, what they answer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from kvpolicy import checks
from kvpolicy.cache import ATTN_SUMS, Slab
from kvpolicy.errors import PolicyLoadError
from kvpolicy.memory import Memory
from kvpolicy.parts import Parts, parts_of, refusal
from kvpolicy.registers import Registers
from kvpolicy.relay import Relay, Watcher
from kvpolicy.request import Waiting
from kvpolicy.rows import LayerRows

_COMPACTION_HOOKS = ("score", "select", "evict")


class Stack:
    """Policies in listed order: later ones are asked first and wrap earlier ones.

    A policy may be made of others, its `parts`. Each is held in a stack of its own, and what it
    reads, keeps and promises counts as if it were listed here.

    Attributes:
        names: Names of the policies, in order.
        policies: The policies, in order, and then the parts of those that have some.
        reads: Arguments that some policy names in a hook of a compaction.
        observes: Arguments that some policy names in `observe`.
        tracks: Names of the per-row numbers that travel with the rows.
        window_size: Queries to remember, 0 if nobody reads any.
        n_first: First tokens of a sequence that some policy promises to keep.
        n_last: Newest rows that some policy promises to keep.
        bounded: Whether the slab has a fixed size. A policy that lets rows grow without
            bound, as the full cache does, says ``bounded = False``; policies none of which
            is asked at a compaction keep every row, too.
        steering: Policies that steer, by name, each with the layers that it says it steers;
            ``None``: all that the stack serves.
    """

    def __init__(
        self, policies: Sequence[tuple[str, object]], *, owner: str = "", prefix: str = ""
    ) -> None:
        """Build the relay.

        Args:
            policies: Names and policies, in order.
            owner: Of the stack that holds a part: whose part it is, for messages.
            prefix: Of the same: what the names of its tracks begin with.

        Raises:
            PolicyLoadError: If a policy does not fit the hook specs, or cannot be a part.
        """
        self._relay = Relay(policies, owner)
        self._prefix = prefix
        self.names = self._relay.names
        own = [policy for _, policy in policies]
        # Keyed by identity, as memory is.
        self._parts = {id(policy): self._stacks_of(name, policy) for name, policy in policies}
        self._inner: list[Stack] = list(chain.from_iterable(self._parts.values()))
        self.policies: list[object] = [*own, *chain(*(part.policies for part in self._inner))]
        self.reads: frozenset[str] = self._arguments_of(*_COMPACTION_HOOKS).union(
            *(part.reads for part in self._inner)
        )
        self.observes: frozenset[str] = self._arguments_of("observe").union(
            *(part.observes for part in self._inner)
        )
        reads_queries = self.reads & {"queries", "attn_weights"}
        sizes = [getattr(policy, "window_size", 1) for policy in self.policies]
        self.window_size: int = max(sizes) if reads_queries else 0
        promises = [getattr(policy, "protects", (0, 0)) for policy in self.policies]
        self.n_first = max((first for first, _ in promises), default=0)
        self.n_last = max((last for _, last in promises), default=0)
        self.tracks = self._declared_tracks(own)
        chooses = any(self.implements(hook) for hook in ("due", *_COMPACTION_HOOKS))
        self.bounded = chooses and all(getattr(one, "bounded", True) for one in self.policies)
        self.steering = self._declared_steering()

    def _stacks_of(self, name: str, policy: object) -> "list[Stack]":
        """A stack for each part of a policy; their tracks are kept apart from all others."""
        stacks = []
        for place, part in enumerate(parts_of(policy)):
            owner = f" in '{name}'{self._relay.owner}"
            stack = Stack([part], owner=owner, prefix=f"{self._prefix}{name}.{place}.")
            problem = refusal(stack.implements)
            if problem is not None:
                msg = f"policy '{part[0]}'{owner} {problem}"
                raise PolicyLoadError(msg)
            stacks.append(stack)
        return stacks

    def _arguments_of(self, *hooks: str) -> frozenset[str]:
        impls = (impl for hook in hooks for impl in self._relay.impls(hook))
        return frozenset(argument for impl in impls for argument in impl.argnames)

    def _declared_tracks(self, own: Sequence[object]) -> tuple[str, ...]:
        named = [
            (name, self._prefix + track)
            for name, policy in zip(self.names, own, strict=True)
            for track in getattr(policy, "tracks", ())
        ]
        of_parts = [(part.names[0], track) for part in self._inner for track in part.tracks]
        declared = [ATTN_SUMS] if ATTN_SUMS in self.reads else []
        for name, track in named + [one for one in of_parts if one[1] != ATTN_SUMS]:
            if track in declared:
                msg = f"policy '{name}' declares track '{track}', which the stack has already"
                raise PolicyLoadError(msg)
            declared.append(track)
        return tuple(declared)

    def _declared_steering(self) -> list[tuple[str, Sequence[int] | None]]:
        own = [
            (impl.plugin_name, getattr(impl.plugin, "steers", None))
            for impl in self._relay.impls("steer")
        ]
        return own + [one for part in self._inner for one in part.steering]

    def is_steered(self, layer_idx: int) -> bool:
        """Whether a policy of this stack steers a layer that the stack serves."""
        return any(layers is None or layer_idx in layers for _, layers in self.steering)

    def slab(self, capacity: int) -> Slab:
        """What a layer's cache must hold so that this stack gets what it reads."""
        return Slab(capacity, self.window_size, self.tracks)

    def implements(self, hook: str) -> bool:
        """Whether a policy of this stack or a part, and not only the defaults, answers a hook."""
        return bool(self._relay.impls(hook)) or any(part.implements(hook) for part in self._inner)

    def allocate(
        self, layer_indices: Sequence[int], budget: int, floors: Sequence[int], num_layers: int
    ) -> list[int]:
        """Ask how layers share their rows; without an answer each has the budget."""
        total = budget * len(layer_indices)
        answer: Sequence[int] | None = self._relay.ask(
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

    @contextmanager
    def watched_by(self, watcher: Watcher) -> Iterator[None]:
        """Let a watcher see all questions and answers in a block, those of parts included."""
        with ExitStack() as watched:
            for stack in (self, *self._inner):
                watched.enter_context(stack._relay.watched_by(watcher))
            yield

    def schedule(
        self, waiting: Sequence[Waiting], num_free: int, num_active: int
    ) -> list[list[int]]:
        """Ask which requests are admitted next, in groups."""
        answer: list[list[int]] = self._relay.ask(
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
        self._relay.ask("observe", None, checks.observe_problem, **arguments)
        for part in self._inner:
            part.observe(**arguments)

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
        """Sum of all changes to the states entering a layer, ``[B, M]``; ``None`` for none."""

        def problem(answers: object) -> str | None:
            listed = answers if isinstance(answers, list) else [answers]
            found = (checks.steer_problem(answer, hidden_states) for answer in listed)
            return next(filter(None, found), None)

        changes: list[Tensor] = self._relay.ask(
            "steer",
            layer_idx,
            problem,
            hidden_states=hidden_states,
            token_ids=token_ids,
            tokenizer=tokenizer,
            registers=registers,
            memory=memory,
        )
        for part in self._inner:
            change = part.steer(
                layer_idx,
                hidden_states,
                token_ids,
                tokenizer=tokenizer,
                registers=registers,
                memory=memory,
            )
            changes += [] if change is None else [change]
        return sum(changes[1:], changes[0]) if changes else None

    def due(self, layer_idx: int, **state: Any) -> Tensor | None:
        """Ask which sequences are due, bool ``[B]``; ``None`` if no policy has an opinion."""
        num_sequences = state["num_rows"].shape[0]
        answer: Tensor | None = self._relay.ask(
            "due",
            layer_idx,
            lambda answer: checks.due_problem(answer, num_sequences),
            optional=True,
            **state,
        )
        parts = (part.due(layer_idx, **state) for part in self._inner)
        return next((one for one in parts if one is not None), None) if answer is None else answer

    def score(self, rows: LayerRows, layer_idx: int, arguments: dict[str, Any]) -> Tensor:
        """Ask for scores, ``[B, H_kv, T]``, fp32."""
        shape, device = rows.positions.shape, rows.positions.device

        def ask(part: Stack) -> Callable[[], Tensor]:
            return partial(part.score, rows, layer_idx, arguments)

        own = {
            "tracks": rows.tracks.within(self._prefix),
            "parts": Parts({key: list(map(ask, parts)) for key, parts in self._parts.items()}),
        }
        scores: Tensor = self._relay.ask(
            "score",
            layer_idx,
            lambda answer: checks.scores_problem(answer, shape, device),
            **(arguments | own),
        )
        return scores.float()

    def select(
        self, scores: Tensor, positions: Tensor, budget: int, layer_idx: int, memory: Memory
    ) -> Tensor:
        """Ask which rows stay, ``[B, H_kv, K]``, int64, rising."""
        keep: Tensor = self._relay.ask(
            "select",
            layer_idx,
            lambda answer: checks.keep_problem(answer, scores.shape, budget, scores.device),
            scores=scores,
            positions=positions,
            budget=budget,
            memory=memory,
        )
        return keep

    def evict(self, rows: LayerRows, keep: Tensor, layer_idx: int, memory: Memory) -> None:
        """Have the rows that leave done away with."""

        def problem(answer: object) -> str | None:
            if answer is not True:
                return f"answered with {answer!r}; True or None is wanted"
            if rows.kept is None or rows.kept.shape != keep.shape or (rows.kept != keep).any():
                return "says it is done, but did not call rows.keep() with the rows that stay"
            return None

        self._relay.ask("evict", layer_idx, problem, rows=rows, keep=keep, memory=memory)
