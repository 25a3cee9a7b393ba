"""Failures, cancelling, snapshots and prefix stores together: each request equals itself alone.

The plans are mixed: stacks, budgets and heads that share rows differ between layers, and a policy
last in each stack fails in one hook for the requests whose prompts begin with a mark.
"""

from collections.abc import Generator
from typing import Any, ClassVar

import attrs
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from ragged_policies import LongKeysAlike
from reuse_cases import llama
from strategies import costly
from torch import Tensor

from kvpolicy import (
    Engine,
    Plan,
    PrefixStore,
    Request,
    Result,
    Sampling,
    hookimpl,
)
from kvpolicy.errors import SnapshotError
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.state import Memory

NUM_LAYERS = 2
MAX_LEN = 80
MARK = 60
HOOKS = ("observe", "score", "select", "evict")

STACKS: tuple[tuple[Any, ...], ...] = (
    ("streaming",),
    ("h2o", "protect"),
    (PolicySpec("rkv", {"window_size": 4}),),
    (PolicySpec("tova", {"every": 3}),),
    (PolicySpec("h2o", {"n_recent": 2}), "caote"),
    ("keydiff", "merge"),
    ("expected_attention",),
    (PolicySpec.of(LongKeysAlike()),),
)


@attrs.define(eq=False)
class Fails:
    """Fails in one hook for marked sequences, from some token on."""

    ragged: ClassVar[bool] = True

    hook: str = ""
    after: int = 0

    def _fail(self, hook: str, memory: Memory) -> None:
        found = any(own["marked"] and own["seen"] >= self.after for own in memory.of(self))
        if hook == self.hook and found:
            msg = "marked"
            raise LookupError(msg)

    @hookimpl
    def observe(self, token_ids: Tensor, start: int, memory: Memory) -> None:
        (own,) = memory.of(self)
        if start == 0:
            own["marked"] = int(token_ids[0]) == MARK
        own["seen"] = start + len(token_ids)
        if start:
            self._fail("observe", memory)

    @hookimpl(wrapper=True)
    def score(self, memory: Memory) -> Generator[None, Any, Any]:
        answer = yield
        self._fail("score", memory)
        return answer

    @hookimpl
    def select(self, memory: Memory) -> None:
        self._fail("select", memory)

    @hookimpl
    def evict(self, memory: Memory) -> None:
        self._fail("evict", memory)


@st.composite
def mixed(draw: st.DrawFn) -> list[LayerGroup]:
    """A group for each layer, without the policy that fails."""
    groups = []
    for number in range(NUM_LAYERS):
        stack, budget = draw(st.sampled_from(STACKS)), draw(st.integers(12, 16))
        buffer, prompt = draw(st.integers(1, 6)), draw(st.sampled_from(["evict", "keep"]))
        group = LayerGroup([number], stack, budget, buffer, prompt=prompt)
        if prompt == "evict":
            more = draw(st.sampled_from([9, 0, 1]))
            group = attrs.evolve(group, prefill_buffer=buffer + more)
        groups.append(group)
    return groups


def with_last(groups: list[LayerGroup], policy: Fails) -> Plan:
    last = PolicySpec.of(policy)
    return Plan(layers=[attrs.evolve(one, stack=(*one.stack, last)) for one in groups])


# Prompts with equal beginnings, so that a store has something to reuse. What is simplest, and drawn
# first, is not least here, but what brings most of the engine into play.
prompts = st.builds(
    lambda start, length, last: [*((start + 7 * i) % MARK for i in range(length)), last],
    st.sampled_from([1, 2]),
    st.sampled_from([21, 9, 30, 8, 1]),
    st.integers(0, 5),
)
lengths = st.sampled_from([24, 9, 17, 1])  # of what is generated
samplings = st.sampled_from([Sampling(), Sampling(temperature=0.8, seed=1)])


class Combinations(RuleBasedStateMachine):
    """An open run, and what each request is alone."""

    @initialize(
        groups=mixed(),
        hook=st.sampled_from(HOOKS),
        after=st.sampled_from([30, 0, 12, 40]),
        slots=st.sampled_from([3, 1, 4]),
        chunk=st.sampled_from([512, 3, 16]),
        capacity=st.sampled_from([2**30, 20_000, None]),
        first=st.lists(st.tuples(prompts, lengths), min_size=4, max_size=4),
        num_steps=st.sampled_from([12, 0, 5]),
    )
    def begin(
        self,
        groups: list[LayerGroup],
        hook: str,
        after: int,
        slots: int,
        chunk: int,
        capacity: int | None,
        first: list[tuple[list[int], int]],
        num_steps: int,
    ) -> None:
        self.store = capacity and PrefixStore(capacity, block_tokens=4, conversations=False)
        self.healthy = Engine(llama(), plan=with_last(groups, Fails()), slots=1)
        engine = Engine(
            llama(),
            plan=with_last(groups, Fails(hook, after)),
            slots=slots,
            chunk=chunk,
            prefix_store=self.store or None,
            on_hook_error="answer",
        )
        self.run = engine.open_run(max_len=MAX_LEN)
        # Of each request: itself uncut, and its tokens before the snapshot that it goes on from.
        self.asked: list[tuple[Request, tuple[int, ...]]] = []
        self.results: dict[int, Result] = {}
        self.cancelled: set[int] = set()
        self.failed: set[int] = set()
        for number, (prompt, num_new) in enumerate(first):
            self.submit(prompt, num_new, Sampling(), number == 1)
        self.step(num_steps)
        for number in [seq.id for seq in self.run.scheduler.decodable][:1]:
            self._resume_a_copy(number)

    @rule(prompt=prompts, num_new=lengths, sampling=samplings, is_marked=st.booleans())
    def submit(self, prompt: list[int], num_new: int, sampling: Sampling, is_marked: bool) -> None:
        prompt = [MARK, *prompt[1:]] if is_marked else prompt
        request = Request(prompt, num_new, sampling, stop_ids=(), snapshot=True)
        assert self.run.submit(request) == len(self.asked)
        self.asked.append((request, ()))

    @rule(num=st.sampled_from([9, 1, 25]))
    def step(self, num: int) -> None:
        for _ in range(num):
            events = self.run.step()
            self.results |= {one.id: one for one in events.results}
            self.failed |= {number for one in events.failures for number in one.requests}

    @precondition(lambda self: not self.cancelled)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.asked) - 1))
        self.run.cancel(number)
        self.cancelled.add(number)

    @precondition(lambda self: self.run.scheduler.decodable)
    @rule(data=st.data())
    def resume_a_copy(self, data: st.DataObject) -> None:
        """A copy of a sequence goes on beside it."""
        self._resume_a_copy(
            data.draw(st.sampled_from([seq.id for seq in self.run.scheduler.decodable]))
        )

    def _resume_a_copy(self, number: int) -> None:
        request, _ = self.asked[number]
        try:
            snapshot = self.run.snapshot(number)
        except SnapshotError:  # a policy has failed
            return
        before = snapshot.tokens  # of the answer from its beginning
        left = request.max_new_tokens - len(before)
        if left < 1:
            return
        rest = attrs.evolve(request, prompt=(), max_new_tokens=left, resume=snapshot)
        assert self.run.submit(rest) == len(self.asked)
        self.asked.append((request, before))

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        self.run.close()
        while not self.run.done:
            self.step(1)
        assert sorted(self.results) == list(range(len(self.asked)))
        alone: dict[int, Result] = {}
        for number, (request, before) in enumerate(self.asked):
            if id(request) not in alone:
                (alone[id(request)],) = self.healthy.generate([request]).results()
            self._check(number, before, alone[id(request)])
        self._check_nothing_is_left()

    def _check(self, number: int, before: tuple[int, ...], theirs: Result) -> None:
        ours = self.results[number]
        tokens = (*before, *ours.tokens)
        assert tokens == theirs.tokens[: len(tokens)]
        # A hook may fail for a request that has its last token: it has ended without an error.
        if ours.finish_reason == "error":
            assert number in self.failed
            assert "'fails' raised LookupError" in (ours.error or "")
            return
        if ours.finish_reason == "cancelled":
            assert number in self.cancelled
            return
        assert (tokens, ours.finish_reason) == (theirs.tokens, theirs.finish_reason)
        for figure in ("compactions", "rows_evicted", "peak_rows", "peak_bytes"):
            if not before:
                assert getattr(ours, figure) == getattr(theirs, figure)
        assert ours.snapshot is not None
        assert theirs.snapshot is not None
        layers = ours.snapshot.contents.layers, theirs.snapshot.contents.layers
        for own, other in zip(*layers, strict=True):
            assert (own.rows, own.prompt_rows) == (other.rows, other.prompt_rows)
            assert torch.equal(own.positions, other.positions)
            for mine, yours in zip(own.tensors, other.tensors, strict=True):
                torch.testing.assert_close(mine, yours, rtol=1e-3, atol=1e-4)

    def _check_nothing_is_left(self) -> None:
        cache = self.run.cache
        assert self.run.scheduler.slots.num_free == cache.num_slots
        assert not cache.rows.any()
        assert not cache.seq_len.any()
        for layer in cache.layers:
            assert (layer.positions == -1).all()
            assert not any(tensor.any() for tensor in (layer.keys, layer.values))
        if self.store:
            stats = self.store.stats
            assert stats.problem is None
            assert stats.num_bytes <= stats.capacity


# Steps of a script: a failing one is shrunk to a few.
Combinations.TestCase.settings = settings(costly, stateful_step_count=12)
TestCombinations = Combinations.TestCase
