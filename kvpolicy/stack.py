"""A stack: the policies of a layer behind one relay of hooks.

pluggy asks the policy that was registered last first, and a wrapper runs around those
registered before it. So in ``["h2o", "protect"]`` protect wraps h2o, and the defaults, which
are registered before all, are asked when nobody else has answered.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pluggy
from torch import Tensor

from kvpolicy import checks, hookspecs
from kvpolicy.cache import ATTN_SUMS, Slab
from kvpolicy.defaults import Defaults
from kvpolicy.errors import HookError, HookResultError, KVPolicyError, PolicyLoadError
from kvpolicy.markers import PROJECT
from kvpolicy.memory import Memory
from kvpolicy.request import Waiting
from kvpolicy.rows import LayerRows

Problem = Callable[[object], str | None]
_COMPACTION_HOOKS = ("score", "select", "evict")
_REFERENCE = "docs/reference/hooks.md"


class Stack:
    """Policies in listed order: later ones are asked first and wrap earlier ones.

    Attributes:
        names: Names of the policies, in order.
        reads: Arguments that some policy names in a hook of a compaction.
        tracks: Names of the per-row numbers that travel with the rows.
        window_size: Queries to remember, 0 if nobody reads any.
        n_first: First tokens of a sequence that some policy promises to keep.
        n_last: Newest rows that some policy promises to keep.
        bounded: Whether the slab has a fixed size. A policy that lets rows grow without
            bound, as the full cache does, says ``bounded = False``.
    """

    def __init__(self, policies: Sequence[tuple[str, object]]) -> None:
        """Build the relay; raises `PolicyLoadError` if a policy does not fit the hook specs."""
        self.names = [name for name, _ in policies]
        self.policies = [policy for _, policy in policies]
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._manager.register(Defaults(), "the defaults")
        for place, (name, policy) in enumerate(policies):
            taken = self._manager.has_plugin(name)
            self._register(f"{name}#{place}" if taken else name, policy)
        self.reads = frozenset(
            argument
            for hook in _COMPACTION_HOOKS
            for impl in self._impls(hook)
            for argument in impl.argnames
        )
        reads_queries = self.reads & {"queries", "attn_weights"}
        sizes = [getattr(policy, "window_size", 1) for policy in self.policies]
        self.window_size: int = max(sizes) if reads_queries else 0
        promises = [getattr(policy, "protects", (0, 0)) for policy in self.policies]
        self.n_first = max((first for first, _ in promises), default=0)
        self.n_last = max((last for _, last in promises), default=0)
        self.tracks = self._declared_tracks()
        self.bounded = all(getattr(policy, "bounded", True) for policy in self.policies)

    def _register(self, name: str, policy: object) -> None:
        if type(policy).__eq__ is not object.__eq__:
            # pluggy looks policies up with ==, and tensors have no single truth value.
            msg = (
                f"policy '{name}' is compared by value; a policy is compared by identity, "
                "write @attrs.define(eq=False)"
            )
            raise PolicyLoadError(msg)
        try:
            self._manager.register(policy, name)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            msg = f"policy '{name}' does not fit the hook specs: {_one_line(error)}"
            raise PolicyLoadError(msg) from error
        if not self._manager.get_hookcallers(policy):
            msg = (
                f"policy '{name}' implements no hook; decorate at least one method with "
                f"@kvpolicy.hookimpl, see {_REFERENCE}"
            )
            raise PolicyLoadError(msg)

    def _declared_tracks(self) -> tuple[str, ...]:
        declared = [ATTN_SUMS] if ATTN_SUMS in self.reads else []
        for name, policy in zip(self.names, self.policies, strict=True):
            for track in getattr(policy, "tracks", ()):
                if track in declared:
                    msg = f"policy '{name}' declares track '{track}', which the stack has already"
                    raise PolicyLoadError(msg)
                declared.append(track)
        return tuple(declared)

    def _impls(self, hook: str) -> list[pluggy.HookImpl]:
        """Implementations of a hook in the order they are called, defaults left out."""
        impls = getattr(self._manager.hook, hook).get_hookimpls()
        return [impl for impl in reversed(impls) if not isinstance(impl.plugin, Defaults)]

    def slab(self, capacity: int) -> Slab:
        """What a layer's cache must hold so that this stack gets what it reads."""
        return Slab(capacity, self.window_size, self.tracks)

    def implements(self, hook: str) -> bool:
        """Whether a policy of this stack, and not only the defaults, answers a hook."""
        return bool(self._impls(hook))

    def due(self, layer_idx: int, **state: Any) -> Tensor | None:
        """Ask which sequences are due, bool ``[B]``; ``None`` if no policy has an opinion."""
        num_sequences = state["num_rows"].shape[0]
        return self._ask(
            "due",
            layer_idx,
            lambda answer: checks.due_problem(answer, num_sequences),
            optional=True,
            **state,
        )

    def score(self, rows: LayerRows, layer_idx: int, arguments: dict[str, Any]) -> Tensor:
        """Ask for scores, ``[B, H_kv, T]``, fp32."""
        shape = rows.positions.shape
        scores: Tensor = self._ask(
            "score", layer_idx, lambda answer: checks.scores_problem(answer, shape), **arguments
        )
        return scores.float()

    def select(
        self, scores: Tensor, positions: Tensor, budget: int, layer_idx: int, memory: Memory
    ) -> Tensor:
        """Ask which rows stay, ``[B, H_kv, K]``, int64, rising."""
        return self._ask(
            "select",
            layer_idx,
            lambda answer: checks.keep_problem(answer, scores.shape, budget),
            scores=scores,
            positions=positions,
            budget=budget,
            memory=memory,
        )

    def evict(self, rows: LayerRows, keep: Tensor, layer_idx: int, memory: Memory) -> None:
        """Have the rows that leave done away with."""

        def problem(answer: object) -> str | None:
            if answer is not True:
                return f"answered with {answer!r}; True or None is wanted"
            if rows.kept is None or rows.kept.shape != keep.shape or (rows.kept != keep).any():
                return "says it is done, but did not call rows.keep() with the rows that stay"
            return None

        self._ask("evict", layer_idx, problem, rows=rows, keep=keep, memory=memory)

    def schedule(self, waiting: Sequence[Waiting], num_free: int) -> list[list[int]]:
        """Ask which requests are admitted next, in groups."""
        return self._ask(
            "schedule",
            None,
            lambda answer: checks.schedule_problem(answer, waiting, num_free),
            waiting=waiting,
            num_free=num_free,
        )

    def steer(
        self, layer_idx: int, hidden_states: Tensor, token_ids: Tensor, memory: Memory
    ) -> Tensor:
        """Sum of all changes to the states entering a layer, ``[B, M]``."""

        def problem(answers: object) -> str | None:
            listed = answers if isinstance(answers, list) else [answers]
            found = (checks.steer_problem(answer, hidden_states) for answer in listed)
            return next(filter(None, found), None)

        changes = self._ask(
            "steer",
            layer_idx,
            problem,
            hidden_states=hidden_states,
            token_ids=token_ids,
            memory=memory,
        )
        return sum(changes) if changes else hidden_states.new_zeros(hidden_states.shape)

    def _ask(
        self,
        hook: str,
        layer_idx: int | None,
        problem: Problem,
        *,
        optional: bool = False,
        **arguments: Any,
    ) -> Any:
        if layer_idx is not None:
            arguments["layer_idx"] = layer_idx
        where = "" if layer_idx is None else f" at layer {layer_idx}"
        try:
            answer = getattr(self._manager.hook, hook)(**arguments)
        except KVPolicyError:
            raise
        except Exception as error:
            guilty = self._who_raised(hook, error)
            msg = (
                f"policy '{guilty}' raised {type(error).__name__} in {hook}(){where}: "
                f"{_one_line(error)}"
            )
            raise HookError(msg) from error
        if optional and answer is None:
            return None
        wrong = problem(answer)
        if wrong is None:
            return answer
        guilty = self._who_answered(hook, problem, arguments)
        msg = f"policy '{guilty}' {wrong}, in {hook}(){where}. See {_REFERENCE}#{hook}"
        raise HookResultError(msg)

    def _who_raised(self, hook: str, error: BaseException) -> str:
        """The policy whose code the error went through."""
        codes = {inspect.unwrap(impl.function).__code__: impl for impl in self._impls(hook)}
        trace, guilty = error.__traceback__, "/".join(self.names)
        while trace is not None:
            impl = codes.get(trace.tb_frame.f_code)
            guilty = impl.plugin_name if impl is not None else guilty
            trace = trace.tb_next
        return guilty

    def _who_answered(self, hook: str, problem: Problem, arguments: dict[str, Any]) -> str:
        """The policy whose own answer is wrong, or else the outermost wrapper.

        Asks the policies once more, one by one: the run is lost already, and only now does
        it matter who said what.
        """
        impls = self._impls(hook)
        for impl in impls:
            if not (impl.wrapper or impl.hookwrapper):
                answer = impl.function(*(arguments[name] for name in impl.argnames))
                if answer is not None and problem(answer) is not None:
                    return impl.plugin_name
        wrappers = [impl.plugin_name for impl in impls if impl.wrapper or impl.hookwrapper]
        return wrappers[0] if wrappers else "/".join(self.names)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
