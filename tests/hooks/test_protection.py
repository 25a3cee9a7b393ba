"""Protected rows stay, whatever they score, and wrappers see the scores that policies gave them."""

from collections.abc import Callable, Generator
from typing import Any, ClassVar

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder import Recorder, Scores
from strategies import Drawn, caches, costly
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Memory, Parts, Plan, hookimpl
from kvpolicy.errors import HookResultError
from kvpolicy.hooks.protection import protected_rows
from kvpolicy.testing import keep_rows


@attrs.define(eq=False)
class Protects:
    """Protects what a function of the arguments says."""

    answer: Callable[..., Any]
    protects: tuple[int, int] = (0, 0)

    @hookimpl
    def protect(self, positions: Tensor, seq_len: Tensor, prompt_len: Tensor, budget: int) -> Any:
        return self.answer(positions, seq_len, prompt_len, budget)


def protecting(answer: Callable[..., Any], **declared: Any) -> Protects:
    return Protects(lambda *arguments: answer(arguments[0]), **declared)


# Which rows


def expected_rows(
    positions: list[int], first: int, newest: int, wanted: list[bool], budget: int
) -> list[int]:
    """The rows of one head that stay in any case, one after another."""
    num_rows = len(positions)
    stay = [t for t in range(num_rows) if positions[t] < first or t >= num_rows - newest]
    for t in reversed(range(num_rows)):
        if wanted[t] and t not in stay and len(stay) < budget:
            stay.append(t)
    return sorted(stay)


@given(st.data())
def test_protected_rows_equal_the_oracle(data: st.DataObject) -> None:
    shape = num_sequences, num_heads, num_rows = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 12)),
    )
    budget = data.draw(st.integers(1, num_rows))
    first = data.draw(st.integers(0, budget))
    newest = data.draw(st.integers(0, budget - first))
    seed = data.draw(st.integers(0, 99))
    rng = torch.Generator().manual_seed(seed)
    positions = (torch.randint(1, 4, shape, generator=rng).cumsum(2)) - 1
    answers = [torch.rand(shape, generator=rng) < 0.4 for _ in range(data.draw(st.integers(0, 3)))]
    answer = protected_rows(positions, first, newest, answers, budget)
    for b in range(num_sequences):
        for head in range(num_heads):
            wanted = [any(bool(one[b, head, t]) for one in answers) for t in range(num_rows)]
            rows = expected_rows(positions[b, head].tolist(), first, newest, wanted, budget)
            came = [] if answer is None else answer[b, head].nonzero()[:, 0].tolist()
            assert came == rows
            assert len(rows) <= budget
    assert (answer is None) == (not first and not newest and not answers)


@given(caches(batch=2, min_rows=8), st.integers(0, 3))
def test_rows_of_any_policy_or_part_stay(drawn: Drawn, every: int) -> None:
    """One policy protects some rows, a part of another some more; all scores are against them."""

    def some(positions: Tensor) -> Tensor:
        return positions % 4 == every

    @attrs.define(eq=False)
    class Whole:
        parts: Any

        @hookimpl
        def score(self, parts: Parts) -> Tensor:
            return parts.of(self)[0]

    @attrs.define(eq=False)
    class Part:
        @hookimpl
        def protect(self, positions: Tensor) -> Tensor:
            return positions == 1

        @hookimpl
        def score(self, positions: Tensor) -> Tensor:
            return -((positions % 4 == every) | (positions == 1)).double()

    stack = [Whole([("part", Part())]), protecting(some, protects=(0, 1))]
    budget = drawn.num_rows // 2 + 1
    kept = keep_rows(stack, drawn.keys, drawn.values, drawn.queries, budget=budget)
    must = {1, drawn.num_rows - 1, *(t for t in range(drawn.num_rows) if t % 4 == every)}
    for head in kept.flatten(0, 1).tolist():
        assert must <= set(head)


@costly
@given(st.integers(0, 3), st.sampled_from([False, True]))
def test_a_budget_dependent_protection_holds_in_every_compaction(seed: int, eager: bool) -> None:
    """The newest half of the budget stays in runs with prefill in chunks, and folded layers."""

    def newest_half(positions: Tensor, seq_len: Tensor, prompt_len: Tensor, budget: int) -> Tensor:
        assert len(seq_len) == len(prompt_len) == len(positions)
        num_rows = positions.shape[2]
        return (torch.arange(num_rows) >= num_rows - budget // 2).expand(positions.shape)

    recorder = Recorder()
    oldest = Scores(lambda positions: -positions.double())
    plan = Plan.uniform(oldest, Protects(newest_half), recorder, budget=8, buffer=3)
    engine = Engine(shared_model(num_layers=2), plan=plan, slots=2, chunk=4, eager=eager)
    prompts = [[4], [1, 2, 3 + seed] * 5, [7] * 30]
    engine.generate(prompts, max_new_tokens=20).results()
    compactions = [one for record in recorder.records for one in record.compactions]
    assert len(compactions) > 10
    for one in compactions:
        expected = torch.cat([one.positions[:, :4], one.positions[:, -4:]], dim=1)
        assert torch.equal(one.kept, expected)


def test_a_policy_that_only_declares_what_it_protects_needs_no_hook() -> None:
    class Ends:
        protects = (2, 3)

    keys = torch.ones(1, 2, 12, 2)
    oldest = Scores(lambda positions: -((positions - 5).abs()).double())
    kept = keep_rows([oldest, Ends()], keys, keys, keys[:, :, :1], budget=6)
    assert kept.tolist() == [[[0, 1, 5, 9, 10, 11]] * 2]


# What others see


@attrs.define(eq=False)
class OutputError:
    """Re-ranks rows by the change of the attention output that removing each makes.

    CAOTE's formula over any score that has a mass: ``h / (1 - h) * |X - v|``, with ``h`` the
    scores divided by their sum, over all rows, and ``X`` the values weighted by ``h``.
    """

    seen: list[tuple[Tensor, Tensor, Tensor]] = attrs.field(factory=list)

    @hookimpl(wrapper=True)
    def score(self, values: Tensor, protected: Tensor) -> Generator[None, Tensor, Tensor]:
        scores = yield
        share = (scores / scores.sum(dim=2, keepdim=True)).double()
        output = share[:, :, None] @ values.double()
        errors = share / (1 - share) * (values.double() - output).norm(dim=-1)
        self.seen.append((share, errors, protected))
        return errors


@given(caches(batch=1, min_rows=6, num_kv_heads=2, group=1, num_queries=1))
def test_a_wrapper_over_protected_rows_is_exact(drawn: Drawn) -> None:
    """Errors equal those of attention computed again without the row, protected ones included."""

    @attrs.define(eq=False)
    class LastQuery:
        protects: ClassVar[tuple[int, int]] = (1, 2)

        @hookimpl
        def score(self, attn_weights: Tensor) -> Tensor:
            return attn_weights[:, :, -1]

    wrapper = OutputError()
    kept = keep_rows([LastQuery(), wrapper], drawn.keys, drawn.values, drawn.queries, budget=4)
    ((_, errors, protected),) = wrapper.seen
    num_rows = drawn.num_rows
    logits = (drawn.queries.double() @ drawn.keys.double().mT) * drawn.keys.shape[3] ** -0.5
    full = logits.softmax(-1) @ drawn.values.double()
    for row in range(num_rows):
        rest = [t for t in range(num_rows) if t != row]
        without = logits[..., rest].softmax(-1) @ drawn.values.double()[:, :, rest]
        brute = (without - full).norm(dim=-1)[:, :, 0]
        torch.testing.assert_close(errors[:, :, row], brute, atol=1e-4, rtol=1e-3)
    assert protected.tolist() == [[[t < 1 or t >= num_rows - 2 for t in range(num_rows)]] * 2]
    for head in kept.flatten(0, 1).tolist():
        assert {0, num_rows - 2, num_rows - 1} <= set(head)


def test_protected_is_all_false_where_nothing_is_protected() -> None:
    wrapper = OutputError()
    keys = torch.ones(1, 1, 5, 2)
    keep_rows([Scores(lambda p: p + 1.0), wrapper], keys, keys, keys[:, :, :1], budget=3)
    assert wrapper.seen[0][2].shape == (1, 1, 5)
    assert not wrapper.seen[0][2].any()


# Answers


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda p: p < 3, None),
        (lambda p: None, None),
        (lambda p: p, "int64"),
        (lambda p: p[:, :, 1:] < 3, r"\[1, 1, 5\]"),
        (lambda p: (p < 3).tolist(), "list"),
    ],
    ids=["mask", "none", "dtype", "shape", "list"],
)
def test_an_invalid_answer_names_the_policy(answer: Any, expected: str | None) -> None:
    keys = torch.ones(1, 1, 6, 2)
    stack = [Scores(lambda p: p.double()), protecting(lambda p: p < 1), protecting(answer)]
    if expected is None:
        keep_rows(stack, keys, keys, keys[:, :, :1], budget=3)
        return
    with pytest.raises(HookResultError, match=f"'protects#2'.*{expected}.*protect"):
        keep_rows(stack, keys, keys, keys[:, :, :1], budget=3)


def test_memory_is_that_of_each_sequence() -> None:
    seen = []

    @attrs.define(eq=False)
    class Remembers:
        @hookimpl
        def protect(self, layer_idx: int, positions: Tensor, memory: Memory) -> Tensor:
            for own in memory.of(self):
                own["calls"] = own.get("calls", 0) + 1
                seen.append((layer_idx, own["calls"]))
            return positions < 1

    plan = Plan.uniform(Remembers(), budget=4, buffer=2)
    engine = Engine(shared_model(num_layers=2), plan=plan, slots=1)
    engine.generate([[1, 2], [3, 4]], max_new_tokens=9).results()
    assert seen == [(0, 1), (1, 2), (0, 3), (1, 4)] * 2
