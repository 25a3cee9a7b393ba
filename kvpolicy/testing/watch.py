"""Looks over the shoulder of every hook call: what came in, what came out, what was touched.

A `Watch` stands between a stack and its relay. It asks in the engine's stead, holds the
answer against the contract, and keeps a trace of what stayed of each sequence.
"""

from collections import Counter
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import HookError, HookResultError, KVPolicyError
from kvpolicy.hooks.manager import Check, HookManager
from kvpolicy.hooks.stack import Stack
from kvpolicy.state import Memory, SequenceMemory
from kvpolicy.testing.clauses import ConformanceError
from kvpolicy.testing.lent import CopyingTracks, RowsSnapshot, clause_of, nan_in

_ASKS_FOR_MORE = "if the policy needs it, give check_policy a tokenizer, hidden_size or num_layers"


@attrs.frozen(eq=False)
class Kept:
    """What stayed of one sequence in one compaction of one layer.

    Attributes:
        layer_idx: Decoder layer, counted from 0.
        seq_len: Tokens the sequence had seen.
        positions: Positions of the rows that stayed, ``[H_kv, K]``.
        scores: Final scores of all rows, ``[H_kv, T]``, fp32.
        had: Positions of all rows, ``[H_kv, T]``.
    """

    layer_idx: int
    seq_len: int
    positions: Tensor
    scores: Tensor
    had: Tensor


class Watch:
    """Watches the stacks of one run of the engine.

    Attributes:
        policy: The policy under test; others are watched, and not counted.
        hooks: The hooks it implements.
        checked: How often each clause was checked.
    """

    def __init__(self, policy: object, hooks: frozenset[str], checked: Counter[str]) -> None:
        self.policy, self.hooks, self.checked = policy, hooks, checked

    @property
    def chooses(self) -> bool:
        """Whether the policy has a say in what stays."""
        return not self.hooks.isdisjoint(("due", "score", "select", "evict"))

    def over(self, stack: Stack) -> Stack:
        """Have every question to a stack go through the watch."""
        stack._manager = _Watched(stack._manager, stack, self)  # type: ignore[assignment]
        return stack

    def follow(self, memory: SequenceMemory) -> list[Kept]:
        """The trace of one sequence, which grows while it is served."""
        trace: list[Kept] = memory.of(self).setdefault("trace", [])
        return trace


class _Watched:
    """A relay that is watched; answers to all that a `HookManager` answers to."""

    def __init__(self, relay: HookManager, stack: Stack, watch: Watch) -> None:
        self._manager, self._stack, self._watch = relay, stack, watch
        self.names = relay.names
        self._named: dict[str, frozenset[str]] = {}
        self._seq_len = torch.zeros(0)
        is_under_test = any(policy is watch.policy for policy in stack.policies)
        self._hooks = watch.hooks if is_under_test else frozenset()
        self._chooses = is_under_test and watch.chooses

    def impls(self, hook: str) -> Any:
        return self._manager.impls(hook)

    def ask(
        self,
        hook: str,
        layer_idx: int | None,
        problem: Check,
        *,
        optional: bool = False,
        **arguments: Any,
    ) -> Any:
        if hook == "score":
            self._seq_len = arguments["seq_len"]
        named = self._names_in(hook)
        tracks = CopyingTracks(arguments["tracks"]) if "tracks" in named else None
        if tracks is not None:
            arguments["tracks"] = tracks
        lent = {
            name: (value, value.clone())
            for name, value in arguments.items()
            if name in named and isinstance(value, Tensor)
        }
        rows = None
        if hook == "evict" and named:
            rows = RowsSnapshot(arguments["rows"], arguments["keep"])
        answer = self._answer(hook, layer_idx, problem, optional, arguments)
        if named:
            self._check_untouched(hook, lent)
        counts = hook in self._hooks
        if tracks is not None:
            self._check("tracks", tracks.problem(), counts)
        if hook == "select":
            self._note_kept(layer_idx, answer, **arguments)
        if hook == "steer":
            self._check("nan", nan_in(answer), counts)
        if rows is not None:
            for clause, problem_ in rows.problems().items():
                self._check(clause, problem_, counts)
        return answer

    def _names_in(self, hook: str) -> frozenset[str]:
        if hook not in self._named:
            impls = self._manager.impls(hook)
            self._named[hook] = frozenset(name for impl in impls for name in impl.argnames)
        return self._named[hook]

    def _answer(
        self, hook: str, layer_idx: int | None, problem: Check, optional: bool, arguments: Any
    ) -> Any:
        said: list[object] = []

        def noting(answer: object) -> str | None:
            said.append(answer)
            return problem(answer)

        try:
            answer = self._manager.ask(hook, layer_idx, noting, optional=optional, **arguments)
        except HookResultError as error:
            clause = clause_of(hook, said[0], arguments)
            expected = "an answer as in docs/reference/hooks.md#" + hook
            raise ConformanceError(clause, expected, str(error)) from error
        except HookError as error:
            raise ConformanceError(
                clause="answers", expected="an answer", came=str(error)
            ) from error
        except ConformanceError:
            raise
        except KVPolicyError as error:
            came = f"{type(error).__name__} in {hook}(): {error}"
            expected = f"an answer; {_ASKS_FOR_MORE}"
            raise ConformanceError(clause="answers", expected=expected, came=came) from error
        if hook in self._hooks:
            also = {"score": ["nan"], "schedule": ["schedule"]}
            self._watch.checked.update(["answers", *also.get(hook, [])])
        return answer

    def _check(self, clause: str, problem: tuple[str, str] | None, counts: bool) -> None:
        self._watch.checked[clause] += counts
        if problem is not None:
            raise ConformanceError(clause, *problem)

    def _check_untouched(self, hook: str, lent: dict[str, tuple[Tensor, Tensor]]) -> None:
        self._watch.checked["read_only"] += hook in self._hooks
        for name, (now, before) in lent.items():
            if not torch.equal(now, before):
                num = int((now != before).sum())
                came = f"{hook}() changed {num} of {now.numel()} numbers of '{name}'"
                raise ConformanceError(
                    clause="read_only", expected=f"'{name}' as it was", came=came
                )

    def _note_kept(
        self,
        layer_idx: int | None,
        keep: Tensor,
        *,
        scores: Tensor,
        positions: Tensor,
        budget: int,
        memory: Memory,
        **_: Any,
    ) -> None:
        kept = positions.gather(2, keep)
        if self._chooses:
            self._watch.checked.update(["budget", "order"])
        self._check_protected(keep, kept, scores, positions, budget)
        assert layer_idx is not None
        for b, notes in enumerate(memory.of(self._watch)):
            if "trace" in notes:
                seq_len = int(self._seq_len[b])
                of_one = (kept[b].clone(), scores[b].clone(), positions[b].clone())
                notes["trace"].append(Kept(layer_idx, seq_len, *of_one))

    def _check_protected(
        self, keep: Tensor, kept: Tensor, scores: Tensor, positions: Tensor, budget: int
    ) -> None:
        stack, num_rows = self._stack, positions.shape[2]
        newest = torch.arange(num_rows) >= num_rows - stack.n_last
        promised = (positions < stack.n_first) | newest
        pinned = scores.isposinf()
        # More pins than rows that may stay: nobody can keep them all.
        pinned &= pinned.sum(dim=2, keepdim=True) <= budget
        must = promised | pinned
        if not must.any():
            return
        stays = torch.zeros_like(must).scatter(2, keep, True)
        missing = must & ~stays
        problem = None
        if missing.any():
            b, head, row = missing.nonzero()[0].tolist()
            why = "promised in protects" if promised[b, head, row] else "pinned with inf"
            expected = f"the row of position {int(positions[b, head, row])} stays; it is {why}"
            problem = (expected, f"KV head {head} kept the positions {kept[b, head].tolist()}")
        self._check("protected", problem, self._chooses)
