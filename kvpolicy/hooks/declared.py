"""What the policies of a stack read, keep and promise, as far as the engine has to know it."""

from collections.abc import Sequence
from itertools import chain
from typing import Self

from kvpolicy.cache.slab import ATTN_SUMS, Slab
from kvpolicy.errors import PolicyLoadError
from kvpolicy.hooks.manager import HookManager
from kvpolicy.hooks.parts import parts_of, refusal

_COMPACTION_HOOKS = ("score", "select", "evict")


class Declared:
    """Policies in listed order, and what they declare.

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
        self: Self, policies: Sequence[tuple[str, object]], *, owner: str = "", prefix: str = ""
    ) -> None:
        """Build the relay.

        Args:
            policies: Names and policies, in order.
            owner: Of the stack that holds a part: whose part it is, for messages.
            prefix: Of the same: what the names of its tracks begin with.

        Raises:
            PolicyLoadError: If a policy does not fit the hook specs, or cannot be a part.
        """
        self._manager = HookManager(policies, owner)
        self._prefix = prefix
        self.names = self._manager.names
        own = [policy for _, policy in policies]
        # Keyed by identity, as memory is.
        self._parts: dict[int, list[Self]] = {}
        for name, policy in policies:
            self._parts[id(policy)] = self._stacks_of(name, policy)
        self._inner: list[Self] = list(chain.from_iterable(self._parts.values()))
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

    def _stacks_of(self, name: str, policy: object) -> list[Self]:
        """A stack for each part of a policy; their tracks are kept apart from all others."""
        stacks = []
        for place, part in enumerate(parts_of(policy)):
            owner = f" in '{name}'{self._manager.owner}"
            stack = type(self)([part], owner=owner, prefix=f"{self._prefix}{name}.{place}.")
            problem = refusal(stack.implements)
            if problem is not None:
                msg = f"policy '{part[0]}'{owner} {problem}"
                raise PolicyLoadError(msg)
            stacks.append(stack)
        return stacks

    def _arguments_of(self, *hooks: str) -> frozenset[str]:
        impls = (impl for hook in hooks for impl in self._manager.impls(hook))
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
            for impl in self._manager.impls("steer")
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
        return bool(self._manager.impls(hook)) or any(part.implements(hook) for part in self._inner)
