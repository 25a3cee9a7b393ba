"""Every token is shown once, in order, with the model's own last hidden state."""

from typing import Any, ClassVar

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import prompts
from tiny import shared_model, tiny_tokenizer
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.engine.request import Request
from kvpolicy.errors import HookResultError, PolicyLoadError
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.state import Memory, Registers

DOUBLE = {"dtype": torch.float64}


@attrs.define(eq=False)
class Looks:
    """Notes what it is shown, per sequence."""

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
        (mine,) = memory.of(self)
        if start == 0:
            assert not mine
            mine.update(tokens=[], states=[], chunks=[], prompt_len=prompt_len)
            self.seen.append(mine)
        assert mine["prompt_len"] == prompt_len
        assert start == len(mine["tokens"])
        assert hidden_states.shape[:1] == token_ids.shape
        mine["tokens"] += token_ids.tolist()
        mine["states"].append(hidden_states.clone())
        mine["chunks"].append(len(token_ids))


def last_states(model: Any, tokens: list[int]) -> Tensor:
    """What the decoder gives to the head, by a plain forward over the whole text, ``[N, M]``."""
    with torch.inference_mode():
        return model.get_decoder()(torch.tensor([tokens])).last_hidden_state[0]


@given(prompts(count=4), st.integers(1, 3), st.integers(1, 9), st.integers(1, 12))
def test_tokens_and_states_are_those_of_the_sequence(
    prompts: list[list[int]], slots: int, buffer: int, chunk: int
) -> None:
    model, looks = shared_model(**DOUBLE), Looks()
    plan = Plan.uniform("full", looks, buffer=buffer)
    engine = Engine(model, plan=plan, slots=slots, chunk=chunk)
    results = engine.generate(prompts, max_new_tokens=11, stop_ids=[3, 28]).results()
    by_text = {
        (tuple(prompt), result.tokens) for prompt, result in zip(prompts, results, strict=True)
    }
    assert len(looks.seen) == len(prompts)
    for mine in looks.seen:
        shown, n = mine["tokens"], mine["prompt_len"]
        assert any(
            list(prompt) == shown[:n] and list(tokens[: len(shown) - n]) == shown[n:]
            for prompt, tokens in by_text
        )
        states = torch.cat(mine["states"])
        torch.testing.assert_close(states, last_states(model, shown), atol=1e-9, rtol=1e-9)
        in_decode = mine["chunks"][-(-n // chunk) :]
        assert all(size <= buffer for size in in_decode)


def test_a_sequence_is_shown_before_it_is_compacted() -> None:
    @attrs.define(eq=False)
    class Checks(Looks):
        @hookimpl
        def score(self, seq_len: Tensor, positions: Tensor, memory: Memory) -> None:
            for length, mine in zip(seq_len.tolist(), memory.of(self), strict=True):
                assert len(mine["tokens"]) == length

    policy = Checks()
    plan = Plan.uniform("h2o", policy, budget=16, buffer=5)
    run = Engine(shared_model(), plan=plan, slots=3).generate([[5] * 40, [1, 2]], max_new_tokens=50)
    assert all(result.compactions for result in run.results())


def test_layers_with_one_stack_are_shown_everything_once() -> None:
    policy = Looks()
    plan = Plan.uniform("h2o", policy, budget=16, buffer=4)
    Engine(shared_model(num_layers=2), plan=plan).generate([[1, 2, 3]], max_new_tokens=8).results()
    (mine,) = policy.seen
    assert mine["chunks"] == [3, 4]


@attrs.define(eq=False)
class Counts:
    """A register counts what was shown, and another what was steered."""

    registers: ClassVar[tuple[str, ...]] = ("shown", "steered")

    told: dict[int, list[tuple[float, float]]] = attrs.field(factory=dict)

    @hookimpl
    def observe(self, token_ids: Tensor, registers: Registers, memory: Memory) -> None:
        memory.of(self)[0].setdefault("key", int(token_ids[0]))
        registers.of(self)["shown"] += len(token_ids)

    @hookimpl
    def steer(self, registers: Registers, memory: Memory) -> None:
        mine = registers.of(self)
        mine["steered"] += 1
        rows = zip(mine["shown"].tolist(), mine["steered"].tolist(), strict=True)
        for notes, row in zip(memory.of(self), rows, strict=True):
            self.told.setdefault(notes["key"], []).append(row)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_registers_follow_their_sequence_from_slot_to_slot(slots: int) -> None:
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
    assert set(policy.told) == {1, 2, 3, 4, 5}
    for key, rows in policy.told.items():
        steps = range(1, len(rows) + 1)
        assert rows == [(key + 1 + 3 * ((step - 1) // 3), step) for step in steps]


def test_registers_nobody_declared_are_refused() -> None:
    class Forgets:
        @hookimpl
        def observe(self, registers: Registers) -> None:
            registers.of(self)

    with pytest.raises(PolicyLoadError, match=r"Forgets .*declares none"):
        Engine(shared_model(), plan=Plan.uniform("full", Forgets())).generate([[1]]).results()


def test_an_answer_is_refused() -> None:
    class Talks:
        @hookimpl
        def observe(self) -> int:
            return 3

    engine = Engine(shared_model(), plan=Plan.uniform("full", Talks()))
    with pytest.raises(HookResultError, match=r"'talks' returned .*observe\(\)"):
        engine.generate([[1]]).results()


def test_the_tokenizer_is_the_engines() -> None:
    seen = []

    class Asks:
        @hookimpl
        def observe(self, tokenizer: object) -> None:
            seen.append(tokenizer)

        @hookimpl
        def steer(self, tokenizer: object) -> None:
            seen.append(tokenizer)

    tokenizer = tiny_tokenizer()
    plan = Plan.uniform("full", Asks())
    Engine(shared_model(), tokenizer, plan).generate(["ab"], max_new_tokens=2).results()
    assert len(seen) > 1
    assert all(one is tokenizer for one in seen)


def test_states_nobody_reads_cost_nothing() -> None:
    class Reads:
        @hookimpl
        def observe(self, token_ids: Tensor) -> None:
            pass

    def held(*extra: object) -> int:
        plan = Plan.uniform("full", *extra, buffer=16)
        run = Engine(shared_model(), plan=plan, slots=2).generate([[1, 2]] * 2, max_new_tokens=9)
        run.results()
        return run.report.peak_kv_bytes

    assert held(Reads()) == held()
    # Two slots, 16 rows, a hidden state of 32 numbers of 4 bytes.
    assert held(Looks()) == held() + 2 * 16 * 32 * 4
