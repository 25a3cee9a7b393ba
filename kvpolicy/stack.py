"""A stack: the policies of a layer, what they read, what they promise, what they answer."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from kvpolicy import checks
from kvpolicy.cache import ATTN_SUMS, Slab
from kvpolicy.errors import PolicyLoadError
from kvpolicy.memory import Memory
from kvpolicy.registers import Registers
from kvpolicy.relay import Relay, Watcher
from kvpolicy.request import Waiting
from kvpolicy.rows import LayerRows

_COMPACTION_HOOKS = ("score", "select", "evict")


class Stack:
    """Policies in listed order: later ones are asked first and wrap earlier ones.

    Attributes:
        names: Names of the policies, in order.
        policies: The policies, in order.
        reads: Arguments that some policy names in a hook of a compaction.
        observes: Arguments that some policy names in `observe`.
        tracks: Names of the per-row numbers that travel with the rows.
        window_size: Queries to remember, 0 if nobody reads any.
        n_first: First tokens of a sequence that some policy promises to keep.
        n_last: Newest rows that some policy promises to keep.
        bounded: Whether the slab has a fixed size. A policy that lets rows grow without
            bound, as the full cache does, says ``bounded = False``; policies none of which
            is asked at a compaction keep every row, too.
    """

    def __init__(self, policies: Sequence[tuple[str, object]]) -> None:
        """Build the relay; raises `PolicyLoadError` if a policy does not fit the hook specs."""
        self.policies = [policy for _, policy in policies]
        self._relay = Relay(policies)
        self.names = self._relay.names
        self.reads = self._arguments_of(*_COMPACTION_HOOKS)
        self.observes = self._arguments_of("observe")
        reads_queries = self.reads & {"queries", "attn_weights"}
        sizes = [getattr(policy, "window_size", 1) for policy in self.policies]
        self.window_size: int = max(sizes) if reads_queries else 0
        promises = [getattr(policy, "protects", (0, 0)) for policy in self.policies]
        self.n_first = max((first for first, _ in promises), default=0)
        self.n_last = max((last for _, last in promises), default=0)
        self.tracks = self._declared_tracks()
        chooses = any(self.implements(hook) for hook in ("due", *_COMPACTION_HOOKS))
        self.bounded = chooses and all(getattr(one, "bounded", True) for one in self.policies)

    def _arguments_of(self, *hooks: str) -> frozenset[str]:
        impls = (impl for hook in hooks for impl in self._relay.impls(hook))
        return frozenset(argument for impl in impls for argument in impl.argnames)

    def _declared_tracks(self) -> tuple[str, ...]:
        declared = [ATTN_SUMS] if ATTN_SUMS in self.reads else []
        for name, policy in zip(self.names, self.policies, strict=True):
            for track in getattr(policy, "tracks", ()):
                if track in declared:
                    msg = f"policy '{name}' declares track '{track}', which the stack has already"
                    raise PolicyLoadError(msg)
                declared.append(track)
        return tuple(declared)

    def slab(self, capacity: int) -> Slab:
        """What a layer's cache must hold so that this stack gets what it reads."""
        return Slab(capacity, self.window_size, self.tracks)

    def implements(self, hook: str) -> bool:
        """Whether a policy of this stack, and not only the defaults, answers a hook."""
        return bool(self._relay.impls(hook))

    def watched_by(self, watcher: Watcher) -> AbstractContextManager[None]:
        """Let a watcher see all questions and answers in a block."""
        return self._relay.watched_by(watcher)

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
        return answer

    def score(self, rows: LayerRows, layer_idx: int, arguments: dict[str, Any]) -> Tensor:
        """Ask for scores, ``[B, H_kv, T]``, fp32."""
        shape = rows.positions.shape
        scores: Tensor = self._relay.ask(
            "score", layer_idx, lambda answer: checks.scores_problem(answer, shape), **arguments
        )
        return scores.float()

    def select(
        self, scores: Tensor, positions: Tensor, budget: int, layer_idx: int, memory: Memory
    ) -> Tensor:
        """Ask which rows stay, ``[B, H_kv, K]``, int64, rising."""
        keep: Tensor = self._relay.ask(
            "select",
            layer_idx,
            lambda answer: checks.keep_problem(answer, scores.shape, budget),
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
