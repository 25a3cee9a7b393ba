"""observe() receives every token once, in order, with the model's last hidden state."""

from typing import Any, ClassVar

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import costly, prompts
from tiny import shared_model, tiny_tokenizer
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.engine.requests.request import Request
from kvpolicy.errors import HookResultError, PolicyLoadError
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.state import Memory, Registers

DOUBLE = {"dtype": torch.float64}


@attrs.define(eq=False)
class RecordsTokens:
    """Records the arguments of observe() per sequence."""

    seen: list[dict[str, Any]] = attrs.field(factory=list)

    @hookimpl
    def observe(
        self,
        token_ids: Tensor,
        hidden_states: Tensor,
        start: int,
        prompt_len: int,
        memory: Memory,
    ) -> None:
        (notes,) = memory.of(self)
        if start == 0:
            assert not notes
            notes.update(tokens=[], states=[], chunks=[], prompt_len=prompt_len)
            self.seen.append(notes)
        assert notes["prompt_len"] == prompt_len
        assert start == len(notes["tokens"])
        assert hidden_states.shape[:1] == token_ids.shape
        notes["tokens"] += token_ids.tolist()
        notes["states"].append(hidden_states.clone())
        notes["chunks"].append(len(token_ids))


def last_states(model: Any, tokens: list[int]) -> Tensor:
    """Decoder output of one plain forward over the whole text, ``[N, M]``."""
    with torch.inference_mode():
        return model.get_decoder()(torch.tensor([tokens])).last_hidden_state[0]


@costly
@given(prompts(count=4), st.integers(1, 3), st.integers(1, 9), st.integers(1, 12))
def test_observed_tokens_and_states_equal_a_plain_forward(
    prompts: list[list[int]], slots: int, buffer: int, chunk: int
) -> None:
    model, recorder = shared_model(**DOUBLE), RecordsTokens()
    plan = Plan.uniform("full", recorder, buffer=buffer)
    engine = Engine(model, plan=plan, slots=slots, chunk=chunk)
    results = engine.generate(prompts, max_new_tokens=11, stop_ids=[3, 28]).results()
    by_text = {
        (tuple(prompt), result.tokens) for prompt, result in zip(prompts, results, strict=True)
    }
    assert len(recorder.seen) == len(prompts)
    for notes in recorder.seen:
        observed, n = notes["tokens"], notes["prompt_len"]
        assert any(
            list(prompt) == observed[:n] and list(tokens[: len(observed) - n]) == observed[n:]
            for prompt, tokens in by_text
        )
        states = torch.cat(notes["states"])
        torch.testing.assert_close(states, last_states(model, observed), atol=1e-9, rtol=1e-9)
        in_decode = notes["chunks"][-(-n // chunk) :]
        assert all(size <= buffer for size in in_decode)


def test_observe_is_called_before_compaction() -> None:
    @attrs.define(eq=False)
    class Checks(RecordsTokens):
        @hookimpl
        def score(self, seq_len: Tensor, positions: Tensor, memory: Memory) -> None:
            for length, notes in zip(seq_len.tolist(), memory.of(self), strict=True):
                assert len(notes["tokens"]) == length

    policy = Checks()
    plan = Plan.uniform("h2o", policy, budget=16, buffer=5)
    run = Engine(shared_model(), plan=plan, slots=3).generate([[5] * 40, [1, 2]], max_new_tokens=50)
    assert all(result.compactions for result in run.results())


def test_observe_is_called_once_per_stack_not_per_layer() -> None:
    policy = RecordsTokens()
    plan = Plan.uniform("h2o", policy, budget=16, buffer=4)
    Engine(shared_model(num_layers=2), plan=plan).generate([[1, 2, 3]], max_new_tokens=8).results()
    (notes,) = policy.seen
    assert notes["chunks"] == [3, 4]


@attrs.define(eq=False)
class Counts:
    """Counts observed tokens in one register and steering calls in another."""

    registers: ClassVar[tuple[str, ...]] = ("observed", "steered")

    counts: dict[int, list[tuple[float, float]]] = attrs.field(factory=dict)

    @hookimpl
    def observe(self, token_ids: Tensor, registers: Registers, memory: Memory) -> None:
        memory.of(self)[0].setdefault("key", int(token_ids[0]))
        registers.of(self)["observed"] += len(token_ids)

    @hookimpl
    def steer(self, registers: Registers, memory: Memory) -> None:
        notes = registers.of(self)
        notes["steered"] += 1
        rows = zip(notes["observed"].tolist(), notes["steered"].tolist(), strict=True)
        for notes, row in zip(memory.of(self), rows, strict=True):
            self.counts.setdefault(notes["key"], []).append(row)


@pytest.mark.few(2)
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_registers_move_with_their_sequence_between_slots(slots: int) -> None:
    policy = Counts()
    plan = Plan(
        buffer=3,
        layers=(
            LayerGroup("0:1", (PolicySpec.of("full"), PolicySpec.of(policy))),
            LayerGroup("1:", (PolicySpec.of("full"),)),
        ),
    )
    requests = [Request([n] * (n + 1), max_new_tokens=20 - 3 * n) for n in range(1, 6)]
    Engine(shared_model(), plan=plan, slots=slots).generate(requests).results()
    assert set(policy.counts) == {1, 2, 3, 4, 5}
    for key, rows in policy.counts.items():
        steps = range(1, len(rows) + 1)
        assert rows == [(key + 1 + 3 * ((step - 1) // 3), step) for step in steps]


def test_undeclared_registers_raise() -> None:
    class Undeclared:
        @hookimpl
        def observe(self, registers: Registers) -> None:
            registers.of(self)

    with pytest.raises(PolicyLoadError, match="Undeclared"):
        Engine(shared_model(), plan=Plan.uniform("full", Undeclared())).generate([[1]]).results()


def test_observe_with_a_return_value_raises() -> None:
    class Returns:
        @hookimpl
        def observe(self) -> int:
            return 3

    engine = Engine(shared_model(), plan=Plan.uniform("full", Returns()))
    with pytest.raises(HookResultError, match=r"'returns' .*observe\(\)"):
        engine.generate([[1]]).results()


@attrs.define(eq=False)
class FailsAfterThePrompt:
    starts: list[int] = attrs.field(factory=list)

    @hookimpl
    def observe(self, start: int) -> None:
        self.starts.append(start)
        if start:
            msg = "it cannot read answers"
            raise ValueError(msg)


def test_what_has_failed_is_not_observed_again() -> None:
    """The tokens that wait from before a turn are shown before its prompt."""
    policy = FailsAfterThePrompt()
    plan = Plan.uniform("streaming", policy, budget=12, buffer=8)
    engine = Engine(shared_model(), plan=plan, on_hook_error="answer")
    (first,) = engine.generate([Request([3] * 5, 4, stop_ids=(), snapshot=True)]).results()
    assert first.snapshot is not None
    run = engine.generate([Request([1, 2], resume=first.snapshot)])
    assert [one.hook for one in run.step().failures] == ["observe"]
    assert policy.starts == [0, 5]


def test_hooks_receive_the_tokenizer_of_the_engine() -> None:
    seen = []

    class ReadsTokenizer:
        @hookimpl
        def observe(self, tokenizer: object) -> None:
            seen.append(tokenizer)

        @hookimpl
        def steer(self, tokenizer: object) -> None:
            seen.append(tokenizer)

    tokenizer = tiny_tokenizer()
    plan = Plan.uniform("full", ReadsTokenizer())
    Engine(shared_model(), tokenizer, plan).generate(["ab"], max_new_tokens=2).results()
    assert len(seen) > 1
    assert all(one is tokenizer for one in seen)


def test_unread_hidden_states_are_not_stored() -> None:
    class ReadsTokenIds:
        @hookimpl
        def observe(self, token_ids: Tensor) -> None:
            pass

    def held(*extra: object) -> int:
        plan = Plan.uniform("full", *extra, buffer=16)
        run = Engine(shared_model(), plan=plan, slots=2).generate([[1, 2]] * 2, max_new_tokens=9)
        run.results()
        return run.report.peak_kv_bytes

    assert held(ReadsTokenIds()) == held()
    # Two slots, 16 rows, a hidden state of 32 numbers of 4 bytes.
    assert held(RecordsTokens()) == held() + 2 * 16 * 32 * 4
