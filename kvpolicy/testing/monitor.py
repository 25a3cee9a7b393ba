"""Checks every hook call of an engine: arguments, answers, and what was modified.

A `Monitor` replaces the hook manager of a stack. It calls the hooks in the manager's place, checks
the contract, and records which rows of each sequence stay.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import pluggy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvpolicy.cache.rows import LayerRows, Tracks
from kvpolicy.errors import HookError, HookResultError, KVPolicyError
from kvpolicy.hooks.checks import mask_of
from kvpolicy.hooks.late_checks import LateChecks
from kvpolicy.hooks.manager import Check, HookManager
from kvpolicy.hooks.stack import Stack
from kvpolicy.state import Memory, SequenceMemory
from kvpolicy.testing.clauses import ConformanceError

# Annotations of a token that differ by less are equal: sums over other sizes are rounded in other
# ways.
_ROUNDING = 1e-9

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
}

_HINT = "if the policy needs it, give check_policy a tokenizer, hidden_size or num_layers"

# Expected and actual behaviour; None if they agree.
Problem = tuple[str, str] | None


@attrs.frozen(eq=False)
class CompactedRows:
    """The rows that stay of one sequence in one compaction of one layer.

    Attributes:
        layer_idx: Decoder layer, counted from 0.
        seq_len: Tokens of the sequence so far.
        positions: Positions of the rows that stay, ``[H_kv, K]``; if heads share their rows, those
            of the fullest head, and -1 before those of the others.
        scores: Final scores of all rows, ``[H_kv, T]``, fp32.
        before: Positions of all rows, ``[H_kv, T]``.
    """

    layer_idx: int
    seq_len: int
    positions: Tensor
    scores: Tensor
    before: Tensor


class Monitor:
    """Monitors the stacks of one engine.

    Attributes:
        policy: The policy under test; hook calls of others are checked, but not counted.
        hooks: The hooks that it implements.
        checked: Counts the checks of each clause.
        has_folded: Whether the policy was asked about several layers together.
    """

    def __init__(self, policy: object, hooks: frozenset[str], checked: Counter[str]) -> None:
        self.policy, self.hooks, self.checked = policy, hooks, checked
        self.has_folded = False

    @property
    def chooses(self) -> bool:
        """Whether the policy chooses which rows stay."""
        hooks = ("due", "protect", "score", "select", "evict")
        declares = any(getattr(self.policy, "protects", ()))
        return declares or not self.hooks.isdisjoint(hooks)

    def attach(self, stack: Stack) -> None:
        """Monitor all hook calls of a stack."""
        stack._manager = _MonitoredManager(stack._manager, stack, self)  # type: ignore[assignment]

    def follow(self, memory: SequenceMemory, images: Sequence[int] = ()) -> list[CompactedRows]:
        """The compactions of one sequence; the list grows with the sequence.

        Args:
            memory: What policies remember of it.
            images: Positions of its tokens of images.
        """
        notes = memory.of(self)
        notes["images"] = torch.tensor(images, dtype=torch.int64)
        compactions: list[CompactedRows] = notes.setdefault("compactions", [])
        return compactions


class _MonitoredManager:
    """Has the interface of the `HookManager` that it calls."""

    def __init__(self, manager: HookManager, stack: Stack, monitor: Monitor) -> None:
        self._manager, self._stack, self._monitor = manager, stack, monitor
        self.names = manager.names
        self._argument_names: dict[str, frozenset[str]] = {}
        self._seq_len = torch.zeros(0)
        self._layers: Sequence[int] = ()  # of the entries of the batch axis
        is_under_test = any(policy is monitor.policy for policy in stack.policies)
        self._hooks = monitor.hooks if is_under_test else frozenset()
        self._chooses = is_under_test and monitor.chooses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def ask(
        self,
        hook: str,
        layer_idx: int | None,
        check: Check,
        *,
        optional: bool = False,
        late: LateChecks | None = None,
        **arguments: Any,
    ) -> Any:
        """Call a hook and check what it did; see `HookManager.ask`."""
        assert late is None, "a monitored engine reads every answer at once"
        counts = hook in self._hooks
        self._check_images(arguments)
        if hook == "score":
            self._seq_len, self._layers = arguments["seq_len"], arguments["tracks"].layers
            self._monitor.has_folded |= counts and len(set(self._layers)) > 1
        named = self._arguments_of(hook)
        tracks = CopyingTracks(arguments["tracks"]) if "tracks" in named else None
        if tracks is not None:
            arguments["tracks"] = tracks
        tensors = {
            name: (value, value.clone())
            for name, value in arguments.items()
            if name in named and isinstance(value, Tensor)
        }
        is_evicting = hook == "evict" and bool(named)
        rows = RowsSnapshot(arguments["rows"], arguments["keep"]) if is_evicting else None
        try:
            answer = self._call(hook, layer_idx, check, optional, arguments)
        finally:
            if named:
                self._report("read_only", _modified(hook, tensors), counts)
        if tracks is not None:
            self._report("tracks", tracks.problem(), counts)
        if hook == "select":
            self._record(answer, **arguments)
        if hook == "steer":
            self._report("nan", _nan_in(answer, hook), counts)
        if rows is not None:
            for clause, problem in rows.problems().items():
                self._report(clause, problem, counts)
        return answer

    def ask_each(
        self,
        hook: str,
        layer_idx: int | None,
        checks: Sequence[tuple[pluggy.HookImpl, Check]],
        **arguments: Any,
    ) -> list[Any]:
        """Call a hook of several policies and check what it did; see `HookManager.ask_each`."""
        answers: list[Any] = []
        for impl, check in checks:
            counts = hook in self._hooks and impl.plugin is self._monitor.policy
            tensors = {
                name: (value, value.clone())
                for name, value in arguments.items()
                if name in impl.argnames and isinstance(value, Tensor)
            }
            seen: list[object] = []
            ask = partial(
                self._manager.ask_each,
                hook,
                layer_idx,
                [(impl, _noting(check, seen))],
                **arguments,
            )
            try:
                answers += self._blaming(hook, seen, arguments, ask)
            finally:
                self._report("read_only", _modified(hook, tensors), counts)
            if counts:
                self._monitor.checked["answers"] += 1
            if hook == "annotate" and seen[-1] is not None:
                told = arguments | {"layer_idx": layer_idx}
                self._check_annotations(impl, seen[-1], told, counts)
        return answers

    def _check_images(self, arguments: dict[str, Any]) -> None:
        """Check that policies are told of the rows of images, and of no others."""
        is_image = arguments.get("is_image")
        if is_image is None:
            return
        for b, notes in enumerate(arguments["memory"].of(self._monitor)):
            positions, images = arguments["positions"][b], notes.get("images")
            if images is not None and not is_image[b].equal(torch.isin(positions, images)):
                expected = f"is_image is true for the positions {images.tolist()}"
                came = f"for {positions[is_image[b]].unique().tolist()}"
                raise ConformanceError(clause="images", expected=expected, came=came)

    def _check_annotations(
        self, impl: pluggy.HookImpl, annotations: Any, arguments: dict[str, Any], counts: bool
    ) -> None:
        """Ask for the annotations again, in halves and in a mode that forbids reading."""
        self._report("nan", _nan_in([*annotations.values()], "annotate"), counts)
        first = arguments["states"]
        if self._manager.declared[id(impl.plugin)].annotates_in_step:
            self._report("in_step", _reads(partial(_of_tokens, impl, arguments)), counts)
        # With less precision, rounding differs between products of other sizes.
        if len(first) > 1 and first.dtype == torch.float64:
            problems = (
                _other_annotations(name, numbers, half, again.get(name))
                for half in (slice(0, len(first) // 2), slice(len(first) // 2, None))
                for again in [_of_tokens(impl, arguments, half) or {}]
                for name, numbers in annotations.items()
            )
            self._report("annotations", next(filter(None, problems), None), counts)

    def _arguments_of(self, hook: str) -> frozenset[str]:
        """The arguments that implementations of a hook name."""
        if hook not in self._argument_names:
            impls = self._manager.impls(hook)
            names = frozenset(name for impl in impls for name in impl.argnames)
            self._argument_names[hook] = names
        return self._argument_names[hook]

    def _call(
        self, hook: str, layer_idx: int | None, check: Check, optional: bool, arguments: Any
    ) -> Any:
        seen: list[object] = []
        ask = partial(
            self._manager.ask,
            hook,
            layer_idx,
            _noting(check, seen),
            optional=optional,
            **arguments,
        )
        answer = self._blaming(hook, seen, arguments, ask)
        if hook in self._hooks:
            more = {"score": ["nan"], "schedule": ["schedule"], "lookahead": ["lookahead"]}
            self._monitor.checked.update(["answers", *more.get(hook, [])])
        return answer

    def _blaming(
        self, hook: str, seen: list[object], arguments: dict[str, Any], ask: Callable[[], Any]
    ) -> Any:
        """Call a hook; an error names the clause that is broken.

        ``seen`` receives the answers that are checked.
        """
        expected = "an answer"
        try:
            return ask()
        except HookResultError as error:
            clause = _clause_of(hook, seen[0] if seen else None, arguments)
            expected = f"an answer as in docs/reference/hooks.md#{hook}"
            raise ConformanceError(clause, expected, str(error)) from error
        except HookError as error:
            raise ConformanceError(clause="answers", expected=expected, came=str(error)) from error
        except ConformanceError:
            raise
        except KVPolicyError as error:
            came = f"{type(error).__name__} in {hook}(): {error}"
            expected = f"{expected}; {_HINT}"
            raise ConformanceError(clause="answers", expected=expected, came=came) from error

    def _report(self, clause: str, problem: Problem, counts: bool) -> None:
        self._monitor.checked[clause] += counts
        if problem is not None:
            raise ConformanceError(clause, *problem)

    def _record(
        self,
        keep: Tensor,
        *,
        scores: Tensor,
        positions: Tensor,
        budget: int,
        heads: str,
        memory: Memory,
        **_: Any,
    ) -> None:
        """Check and record an answer to `select`."""
        kept = _kept_positions(positions, keep)
        if self._chooses:
            self._monitor.checked.update(["budget", "order"])
            self._monitor.checked["shared"] += heads == "shared"
        must = _must_stay(self._stack, scores, positions, budget)
        if must.any():
            problem = _lost(must, keep, kept, scores, positions)
            self._report("protected", problem, self._chooses)
        for b, notes in enumerate(memory.of(self._monitor)):
            if "compactions" in notes:
                is_row = (kept[b] >= 0).any(dim=0)  # in some head
                of_one = (kept[b][:, is_row], scores[b].clone(), positions[b].clone())
                seq_len = int(self._seq_len[b])
                notes["compactions"].append(CompactedRows(self._layers[b], seq_len, *of_one))


def _must_stay(stack: Stack, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
    """Rows that are protected or score inf, bool ``[B, H_kv, T]``."""
    num_rows = positions.shape[2]
    newest = torch.arange(num_rows) >= num_rows - stack.n_last
    pinned = scores.isposinf()
    # The engine protects no more rows than the budget; a policy may give more of them inf.
    pinned &= pinned.sum(dim=2, keepdim=True) <= budget
    return ((positions < stack.n_first) | newest | pinned) & (positions >= 0)


def _kept_positions(positions: Tensor, keep: Tensor) -> Tensor:
    """Positions of the rows that stay, ``[B, H_kv, K]``; -1 comes first where a head has fewer."""
    if keep.dtype != torch.bool:
        return positions.gather(2, keep)
    most = int(keep.sum(dim=2).max())
    kept, _ = positions.masked_fill(~keep, -1).sort(dim=2)
    return kept[:, :, kept.shape[2] - most :]


def _lost(must: Tensor, keep: Tensor, kept: Tensor, scores: Tensor, positions: Tensor) -> Problem:
    missing = must & ~mask_of(keep, must)
    if not missing.any():
        return None
    b, head, row = missing.nonzero()[0].tolist()
    expected = f"the row of position {int(positions[b, head, row])} stays; it is protected"
    return expected, f"KV head {head} kept the positions {kept[b, head].tolist()}"


def _modified(hook: str, tensors: dict[str, tuple[Tensor, Tensor]]) -> Problem:
    for name, (now, before) in tensors.items():
        if not torch.equal(now, before):
            num = int((now != before).sum())
            came = f"{hook}() changed {num} of {now.numel()} numbers of '{name}'"
            return f"'{name}' as it was", came
    return None


def _nan_in(answer: Tensor | list[Tensor] | None, hook: str) -> Problem:
    answers = answer if isinstance(answer, list) else [answer]
    has_nan = any(one is not None and bool(one.isnan().any()) for one in answers)
    return ("an answer without NaN", f"NaN in the answer to {hook}()") if has_nan else None


def _noting(check: Check, seen: list[object]) -> Check:
    """A check that notes the answers."""

    def noting(answer: object) -> str | None:
        seen.append(answer)
        return check(answer)

    return noting


def _of_tokens(
    impl: pluggy.HookImpl, arguments: dict[str, Any], tokens: slice = slice(None)
) -> Any:
    """The answer of one policy to `annotate` for some of the tokens."""
    some = {
        name: value[tokens] if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    return impl.function(*(some[name] for name in impl.argnames))


def _other_annotations(name: str, numbers: Tensor, half: slice, again: Tensor | None) -> Problem:
    """How the annotations of half of the tokens differ where these are asked about alone."""
    expected = numbers[half]
    if again is not None and torch.allclose(
        again.double(), expected.double(), rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True
    ):
        return None
    came = "none" if again is None else again.tolist()
    return (
        f"annotations '{name}' {expected.tolist()} of {len(expected)} tokens, as of {len(numbers)}",
        f"{came} when these are asked about alone",
    )


def _reads(call: Callable[[], object]) -> Problem:
    """The operation by which a call reads a value of a tensor."""
    with _ReadMode() as mode:
        call()
    if mode.found is None:
        return None
    return "pure tensor work in annotate()", f"{mode.found}, which reads a value"


class _ReadMode(TorchDispatchMode):
    """Notes the first operation whose result the host must know before it can go on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.found is None and func in _READS:
            self.found = str(func)
        return func(*args, **(kwargs or {}))


def _clause_of(hook: str, answer: object, arguments: dict[str, Any]) -> str:
    """The clause that a wrong answer breaks."""
    if hook in ("schedule", "lookahead"):
        return hook
    if hook == "evict":
        return "eviction"
    if not issubclass(type(answer), Tensor):  # `isinstance` would ask the answer
        return "answers"
    assert isinstance(answer, Tensor)
    if hook == "score" and answer.is_floating_point():
        has_shape = answer.shape == arguments["positions"].shape
        return "nan" if has_shape and bool(answer.isnan().any()) else "answers"
    if hook == "select" and answer.dtype == torch.bool:
        is_mask = arguments["heads"] == "shared" and answer.shape == arguments["scores"].shape
        return "shared" if is_mask else "answers"
    if hook == "select" and answer.dtype == torch.int64:
        scores = arguments["scores"]
        if answer.ndim == 3 and answer.shape[:2] == scores.shape[:2]:
            if answer.shape[2] > min(arguments["budget"], scores.shape[2]):
                return "budget"
            is_rising = bool((answer.diff(dim=2) > 0).all())
            is_within = bool((answer >= 0).all() and (answer < scores.shape[2]).all())
            if arguments["heads"] == "shared" and is_rising and is_within:
                return "shared"
            return "answers" if is_rising else "order"
    return "answers"


class CopyingTracks:
    """Tracks that return copies, so that changes in place are detected."""

    def __init__(self, tracks: Tracks) -> None:
        self._tracks = tracks
        self._copies: list[tuple[str, Tensor, Tensor]] = []
        self._assigned: set[str] = set()

    @property
    def layers(self) -> Sequence[int]:
        """Layers of the entries."""
        return self._tracks.layers

    def __getitem__(self, name: str) -> Tensor:
        numbers = self._tracks[name].clone()
        self._copies.append((name, numbers, numbers.clone()))
        return numbers

    def __setitem__(self, name: str, values: Tensor) -> None:
        self._assigned.add(name)
        self._tracks[name] = values

    def problem(self) -> Problem:
        """A track that was changed in place and not assigned to."""
        for name, now, before in self._copies:
            if name not in self._assigned and not torch.equal(now, before):
                came = f'tracks["{name}"] was changed in place, which is lost for some batches'
                return f'tracks["{name}"] = NEW', came
        return None


class RowsSnapshot:
    """The rows of a compaction before `evict`.

    Tracks are copied when the policy calls `LayerRows.keep`: before that, it may change them.
    """

    def __init__(self, rows: LayerRows, keep: Tensor) -> None:
        self._rows, self._keep = rows, keep
        self._positions = _kept_positions(rows.positions, keep)
        self._tracks: dict[str, list[Tensor]] = {}
        self._keep_rows = rows.keep
        rows.keep = self._copy_tracks_and_keep  # type: ignore[method-assign]

    def _copy_tracks_and_keep(self, keep: Tensor, **replaced: Tensor | None) -> None:
        names = self._rows._arena.tracks
        self._tracks = {name: self._kept_numbers(self._rows.track(name)) for name in names}
        self._keep_rows(keep, **replaced)

    def _kept_numbers(self, numbers: Tensor) -> list[Tensor]:
        """Numbers of the rows that stay, one tensor for each sequence and head."""
        mask = mask_of(self._keep, numbers)
        return [
            one[kept] for one, kept in zip(numbers.flatten(0, 1), mask.flatten(0, 1), strict=True)
        ]

    def _numbers_now(self, numbers: Tensor) -> list[Tensor]:
        """The same after `evict`: the first rows, or the last ones of heads that share them."""
        counts = mask_of(self._keep, numbers).sum(dim=2).flatten().tolist()
        lists = zip(numbers.flatten(0, 1), counts, strict=True)
        if self._rows.absent is None:
            return [one[:num].clone() for one, num in lists]
        return [one[len(one) - num :].clone() for one, num in lists]

    def problems(self) -> dict[str, Problem]:
        """What is wrong after `evict`, by clause."""
        rows, num = self._rows, self._positions.shape[2]
        problems: dict[str, Problem] = {"eviction": None}
        now = rows.positions
        now = now[:, :, :num] if rows.absent is None else now[:, :, now.shape[2] - num :]
        if not torch.equal(now, self._positions):
            expected = f"positions {self._positions[0].tolist()} after evict()"
            problems["eviction"] = (expected, f"{now[0].tolist()}")
        elif not (rows.keys.isfinite().all() and rows.values.isfinite().all()):
            problems["nan"] = ("finite keys and values after evict()", "NaN or inf among them")
        for name, before in self._tracks.items():
            after = self._numbers_now(rows.track(name))
            problem = None
            for one, other in zip(before, after, strict=True):
                if problem is None and not torch.equal(one, other):
                    expected = f"track '{name}' {one.tolist()} after evict(), as before keep()"
                    problem = (expected, f"{other.tolist()}")
            problems["tracks"] = problems.get("tracks") or problem
        return problems
