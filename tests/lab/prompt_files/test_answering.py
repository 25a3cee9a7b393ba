"""Answers are those of each prompt alone, and slots are never free while prompts wait."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from commands import model_folder
from folders import save_tiny_model

from kvpolicy.engine.engine import Engine
from kvpolicy.engine.requests.request import Request, Sampling
from kvpolicy.engine.reuse.store import PrefixStore
from kvpolicy.errors import KVPolicyError, RequestError
from kvpolicy.lab.models import ModelCache
from kvpolicy.lab.prompt_files.answering import (
    Answering,
    Longest,
    PromptAnswered,
    Shard,
    ShardFinished,
    answer_shard,
    answers,
)
from kvpolicy.plan.plan import Plan
from kvpolicy.prompts import Chat, Prompt

__all__ = ["model_folder"]

SLOTS = 3
PLANS = {
    "h2o": Plan.uniform("h2o", budget=12, buffer=4),
    "snapkv": Plan.uniform("snapkv", budget=12, buffer=4, knobs={"snapkv": {"window_size": 4}}),
    "full": Plan.full_cache(),
}


@pytest.fixture(scope="module")
def models() -> ModelCache:
    return ModelCache()


@pytest.fixture(scope="module")
def double_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in double precision. In fp32, rounding that differs with a batch may turn a draw."""
    return save_tiny_model(tmp_path_factory.mktemp("double"), dtype=torch.float64)


@pytest.fixture(params=["h2o", "full"])
def answering(request: pytest.FixtureRequest, double_folder: Path, models: ModelCache) -> Answering:
    info, _ = models.describe(str(double_folder))
    resolved = PLANS[request.param].resolve(info.num_layers)
    defaults = Request(max_new_tokens=20, sampling=Sampling(0.9, seed=3))
    return Answering(info, resolved, resolved.digest(), defaults, chat=Chat(), slots=SLOTS)


@pytest.fixture
def engine(answering: Answering, models: ModelCache) -> Engine:
    return answering.engine(models.open(answering.model.name))


def prompts(num: int = 17) -> list[Prompt]:
    """Of several lengths, some with limits of their own, and two that cannot be answered."""
    found = [Prompt(f"q{i}", [3 + i] * (1 + 7 * i % 30)) for i in range(num)]
    found[2] = attrs.evolve(found[2], own={"max_new_tokens": 3})
    found[5] = attrs.evolve(found[5], own={"temperature": 0})
    found[7] = attrs.evolve(found[7], content=[10**6])
    found[8] = attrs.evolve(found[8], content=" tea is 3.", own={"seed": 5, "stop": ["\n"]})
    found[9] = attrs.evolve(found[9], content="\ud800")
    return found


def run(answering: Answering, engine: Engine, given: list[Prompt]) -> dict[int, dict[str, Any]]:
    longest = Longest.of(answering, engine, given)
    found: dict[int, dict[str, Any]] = {}
    for ended in answers(answering, engine, longest, enumerate(given)):
        assert not found.keys() & {one.index for one in ended}
        found |= {one.index: one.answer for one in ended}
    return found


@pytest.mark.slow
@pytest.mark.few(1)
def test_each_answer_is_that_of_the_prompt_alone(answering: Answering, engine: Engine) -> None:
    check_alone(answering, engine)


@pytest.mark.slow
@pytest.mark.few(1)
def test_each_greedy_answer_in_fp32_is_that_of_the_prompt_alone(
    answering: Answering, model_folder: Path
) -> None:
    loaded = ModelCache().open(str(model_folder))
    greedy = attrs.evolve(answering, defaults=Request(max_new_tokens=20))
    check_alone(greedy, greedy.engine(loaded))


def check_alone(answering: Answering, engine: Engine) -> None:
    given = prompts()
    if answering.defaults.sampling == Sampling():
        given = [attrs.evolve(prompt, own={}) for prompt in given]
    found = run(answering, engine, given)
    assert found.keys() == {*range(len(given))}
    for number, prompt in enumerate(given):
        (alone,) = engine.generate([prompt.request(answering.defaults)]).results()
        answer = found[number]
        assert (answer["id"], answer["text"]) == (prompt.id, alone.text or "")
        assert (answer["finish_reason"], answer.get("error")) == (alone.finish_reason, alone.error)
        for key in ("prompt_len", "compactions", "rows_evicted", "peak_rows", "peak_bytes"):
            assert answer[key] == getattr(alone, key)
        assert answer["num_tokens"] == len(alone.tokens)


@attrs.frozen
class Watched:
    """An engine, or its run, that tells how many slots were used in each step."""

    inside: Any
    note: Callable[[int], None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    def open_run(self, **sizes: int) -> "Watched":
        return Watched(self.inside.open_run(**sizes), self.note)

    def step(self) -> Any:
        events = self.inside.step()
        self.note(self.inside.stats.running + len(events.results))
        return events


@pytest.mark.slow
@pytest.mark.few(1)
def test_no_slot_is_free_while_prompts_wait_and_few_prompts_are_read_ahead(
    answering: Answering, engine: Engine
) -> None:
    served: list[tuple[int, int]] = []
    read = ended = 0

    def reading() -> Iterator[tuple[int, Prompt]]:
        nonlocal read
        for number, prompt in enumerate(prompts(30)):
            read += 1
            assert read - ended <= 3 * SLOTS
            yield number, prompt

    watched: Any = Watched(engine, lambda num: served.append((num, read)))
    longest = Longest.of(answering, engine, prompts(30))
    for some in answers(answering, watched, longest, reading()):
        ended += len(some)
    assert ended == 30
    assert all(num >= SLOTS for num, so_far in served if so_far < 30)


@pytest.mark.slow
def test_the_longest_are_found_and_what_cannot_be_answered_does_not_count(
    answering: Answering, engine: Engine
) -> None:
    given = [
        Prompt(0, [5] * 9, own={"max_new_tokens": 90}),
        Prompt(1, [5] * 40),
        Prompt(2, [5] * 10**5),
        Prompt(3, [10**6] * 50),
    ]
    assert Longest.of(answering, engine, given) == Longest(40, 99)
    assert Longest.of(answering, engine, given[2:]) == Longest(1, 2)
    errors = run(answering, engine, given[2:])
    beside = run(answering, engine, given)
    assert [beside[2], beside[3]] == [errors[0], errors[1]], "whatever is answered beside it"
    assert ["positions" in errors[0]["error"], "10000" in errors[1]["error"]] == [True, True]
    endless = [Prompt(0, [5] * 9, own={"max_new_tokens": 10**6})]
    most = engine.adapter.max_positions
    assert Longest.of(answering, engine, endless) == Longest(9, most)


@pytest.mark.slow
def test_a_shard_gives_the_same_answers(answering: Answering, engine: Engine) -> None:
    given = prompts()
    numbers = (1, 7, 2, 16)
    *events, last = answer_shard(answering, Shard.of(given, numbers), engine)
    assert isinstance(last, ShardFinished)
    found = {one.index: one.answer for one in events if isinstance(one, PromptAnswered)}
    whole = run(answering, engine, given)
    assert found == {number: whole[number] for number in numbers}
    assert last.store is None


# With a prefix store


def alike(num: int = 12) -> list[Prompt]:
    """A system prompt longer than a budget, and questions of several lengths."""
    system = [3 + i * i % 40 for i in range(30)]
    return [Prompt(i, [*system, *([5 + i] * (1 + 5 * i % 8))]) for i in range(num)]


@pytest.mark.nightly
@pytest.mark.parametrize("answering", PLANS, indirect=True)
def test_answers_with_a_prefix_store_are_those_without(
    answering: Answering, models: ModelCache
) -> None:
    loaded, given = models.open(answering.model.name), [*prompts(10), *alike(6), *alike(3)]
    expected = run(answering, answering.engine(loaded), given)
    store = PrefixStore(1 << 22, block_tokens=4, conversations=False)
    for _ in range(2):  # with what was found there before, too
        assert run(answering, answering.engine(loaded, store), given) == expected
    assert store.stats.reused_tokens > 24 * (6 + 3)
    assert store.stats.turns == 0


def test_a_plan_whose_prompts_cannot_be_stored_is_refused(
    answering: Answering, models: ModelCache
) -> None:
    plan = attrs.evolve(Plan.full_cache(), padding="stored").resolve(answering.model.num_layers)
    padded = attrs.evolve(answering, plan=plan)
    with pytest.raises(KVPolicyError, match="prefix store"):
        padded.engine(models.open(answering.model.name), PrefixStore(1 << 20))


@pytest.mark.slow
def test_a_shard_goes_on_with_what_was_stored_for_another(
    answering: Answering, models: ModelCache
) -> None:
    store = PrefixStore(1 << 22, block_tokens=4, conversations=False)
    engine, given = answering.engine(models.open(answering.model.name), store), alike()
    reused: dict[int, int] = {}
    for numbers in ((0, 1, 2), (3, 4)):
        *events, last = answer_shard(answering, Shard.of(given, numbers), engine)
        reused |= {
            one.index: one.reused_tokens for one in events if isinstance(one, PromptAnswered)
        }
        assert isinstance(last, ShardFinished)
        assert last.store == store.stats
    assert [reused[number] >= 16 for number in range(5)] == [False, True, True, True, True]
    assert sum(reused.values()) == store.stats.reused_tokens


def test_the_identity_names_what_answers_depend_on(answering: Answering) -> None:
    base = answering.identity()
    greedy = attrs.evolve(answering, defaults=Request(max_new_tokens=20))
    others = [
        attrs.evolve(answering, defaults=Request(max_new_tokens=21, sampling=Sampling(0.9))),
        attrs.evolve(answering, chat=Chat(raw=True)),
        attrs.evolve(answering, chat=Chat(system="Be short.")),
        attrs.evolve(answering, plan_digest="other"),
        attrs.evolve(answering, model=attrs.evolve(answering.model, fingerprint="other")),
        greedy,
    ]
    assert all(other.identity() != base for other in others)
    assert attrs.evolve(answering, slots=9, on_hook_error="answer").identity() == base
    seeded = attrs.evolve(greedy, defaults=Request(max_new_tokens=20, sampling=Sampling(seed=4)))
    assert seeded.identity() != greedy.identity(), "a line may have a temperature of its own"


def test_a_request_that_cannot_be_served_is_an_error_of_its_own(
    answering: Answering, engine: Engine
) -> None:
    with pytest.raises(RequestError, match="ud800"):
        answering.sequence(Prompt(0, "\ud800"), engine)
