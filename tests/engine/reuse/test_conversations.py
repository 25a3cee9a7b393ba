"""A conversation that goes on from its stored end is one that was never interrupted."""

from typing import Any, ClassVar

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reuse_cases import NUM_LAYERS, assert_same, llama, models, with_prompt
from strategies import costly, plans, prompts
from tiny import tiny_tokenizer
from torch import Tensor, nn

from kvpolicy import Engine, Plan, PrefixStore, Request, Sampling, Tracks, hookimpl
from kvpolicy.engine.requests.results import Result

PLANS = {
    "compacts": Plan.uniform("h2o", budget=12, buffer=4),
    "full": Plan.uniform("full"),
    "keeps prompts": Plan.uniform("snapkv", budget=12, buffer=4, prompt="keep"),
}


@pytest.mark.slow
@costly
@given(
    models,
    plans(num_layers=NUM_LAYERS),
    st.sampled_from(["evict", "keep"]),
    prompts(count=2, max_len=30),
    prompts(count=4, max_len=20),
    st.integers(1, 12),
    st.sampled_from([1, 2]),
    st.data(),
)
def test_turns_equal_those_of_a_conversation_that_was_never_interrupted(
    model: nn.Module,
    plan: Plan,
    prompt: Any,
    starts: list[list[int]],
    more: list[list[int]],
    block: int,
    steps_per_read: int,
    data: st.DataObject,
) -> None:
    plan, tokenizer = with_prompt(plan, prompt), tiny_tokenizer()
    options = {"slots": data.draw(st.integers(1, 3)), "steps_per_read": steps_per_read}
    alone = Engine(model, tokenizer, plan, **options)
    store = PrefixStore(2**30, block_tokens=block)
    chunk = data.draw(st.integers(1, 40))
    engine = Engine(model, tokenizer, plan, chunk=chunk, prefix_store=store, **options)
    sampling = Sampling(data.draw(st.sampled_from([0, 1.5])), seed=data.draw(st.integers(0, 9)))

    def asked(text: Any, **resume: Any) -> Request:
        stop = data.draw(st.sampled_from([(), ("ab", "c")]))
        num_new = data.draw(st.integers(1, 20))
        return Request(text, num_new, sampling, stop, (4, 5), snapshot=True, **resume)

    def plainly(requests: list[Request]) -> list[Request]:
        """No snapshot is asked for: that brings up to date what waits for a later step."""
        return [attrs.evolve(request, snapshot=False) for request in requests]

    requests = [asked(start) for start in starts]
    uninterrupted = alone.generate(requests).results()
    results = engine.generate(plainly(requests)).results()
    assert [one.tokens for one in results] == [one.tokens for one in uninterrupted]
    for turn in (more[:2], more[2:]):
        before = [snapshot_of(result) for result in uninterrupted]
        turns = [asked(new, resume=one) for new, one in zip(turn, before, strict=True)]
        texts = [(*one.token_ids, *new) for new, one in zip(turn, before, strict=True)]
        pairs = zip(turns, texts, strict=True)
        whole = [attrs.evolve(asks, prompt=text, resume=None) for asks, text in pairs]
        uninterrupted = alone.generate(turns).results()
        results = engine.generate(plainly(whole)).results()
        assert [one.tokens for one in results] == [one.tokens for one in uninterrupted]
        for results in (engine.generate(whole).results(), engine.generate(whole).results()):
            for ours, theirs, one in zip(results, uninterrupted, before, strict=True):
                assert_same(ours, theirs)
                assert ours.reused_tokens == one.seq_len
                assert ours.prompt_len == len(one.token_ids) + theirs.prompt_len


def snapshot_of(result: Result) -> Any:
    assert result.snapshot is not None, result.error
    return result.snapshot


def engine_with(store: PrefixStore, plan: Plan, **options: Any) -> Engine:
    return Engine(llama(), tiny_tokenizer(), plan, prefix_store=store, **options)


def answer(engine: Engine, prompt: Any, num_new: int = 12, **options: Any) -> Result:
    (result,) = engine.generate([Request(prompt, num_new, stop_ids=(), **options)]).results()
    assert result.error is None
    return result


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_an_answer_may_be_asked_again_and_a_turn_may_be_said_in_another_way(plan: Plan) -> None:
    """A branch of a conversation does not change the others."""
    store = PrefixStore(2**30, block_tokens=4)
    engine, alone = engine_with(store, plan), Engine(llama(), tiny_tokenizer(), plan)
    first = answer(engine, range(20))
    start = [*range(20), *first.tokens]
    before = snapshot_of(answer(alone, range(20), snapshot=True))
    turns = [[7, 8, 9], [7, 8, 3], [7, 8, 9]]
    for turn in turns:
        expected = answer(alone, turn, resume=before)
        ours = answer(engine, [*start, *turn])
        assert ours.tokens == expected.tokens
        assert ours.reused_tokens == before.seq_len
    assert store.stats.turns == 3


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_another_answer_is_no_part_of_a_conversation(plan: Plan) -> None:
    store = PrefixStore(2**30, block_tokens=4)
    engine = engine_with(store, plan)
    first = answer(engine, range(20))
    other = [*range(20), *first.tokens[:-1], (first.tokens[-1] + 1) % 61, 7]
    assert answer(engine, other).tokens == answer(Engine(llama(), plan=plan), other).tokens
    assert store.stats.turns == 0
    assert answer(engine, [*range(20), *first.tokens]).error is None  # nothing goes on
    assert store.stats.turns == 0


def test_ends_share_the_rows_of_a_prompt_that_stays() -> None:
    model, sizes = llama(), {}
    for conversations in (False, True):
        plan = Plan.uniform("h2o", budget=12, buffer=4, prompt="keep")
        store = PrefixStore(2**30, block_tokens=8, conversations=conversations)
        engine = Engine(model, plan=plan, prefix_store=store)
        for question in range(2):
            answer(engine, [*range(60), *range(30), question], 30)
        sizes[conversations] = store.stats.num_bytes
    ends = sizes[True] - sizes[False]
    in_each_end = 16 + 8  # those of the answer, and of the block that is not whole
    row_bytes = NUM_LAYERS * 2 * (8 * 8 * 2 + 8)
    sums = NUM_LAYERS * 2 * 4 * (91 + 16)
    assert ends <= 2 * (in_each_end * row_bytes + sums + 1024)


def test_requests_that_resume_a_snapshot_are_kept_at_their_end() -> None:
    plan = PLANS["compacts"]
    store = PrefixStore(2**30, block_tokens=4)
    engine, alone = engine_with(store, plan), Engine(llama(), tiny_tokenizer(), plan)
    before = snapshot_of(answer(alone, range(20), snapshot=True))
    second = answer(engine, [7, 8], resume=before, snapshot=True)
    assert second.reused_tokens == 0
    third = answer(engine, [*snapshot_of(second).token_ids, 9])
    assert third.tokens == answer(alone, [9], resume=snapshot_of(second)).tokens
    assert third.reused_tokens == snapshot_of(second).seq_len


def test_without_conversations_a_text_that_goes_on_is_a_prompt_like_others() -> None:
    store = PrefixStore(2**30, block_tokens=4, conversations=False)
    engine, alone = engine_with(store, PLANS["compacts"]), Engine(llama(), plan=PLANS["compacts"])
    first = answer(engine, range(20))
    text = [*range(20), *first.tokens, 7]
    assert answer(engine, text).tokens == answer(alone, text).tokens
    assert (store.stats.turns, store.stats.hits > 0) == (0, True)


def test_cancelled_requests_are_not_kept() -> None:
    store = PrefixStore(2**30, block_tokens=4)
    run = engine_with(store, PLANS["full"]).generate([Request(range(20), 30, stop_ids=())])
    run.step()
    before = store.stats.num_blocks
    run.cancel(0)
    assert run.results()[0].finish_reason == "cancelled"
    assert store.stats.num_blocks == before


@attrs.define(eq=False)
class AnnotationsLater:
    """Rows stay by what enters the layer's attention, annotated for several tokens at a time."""

    tracks: ClassVar[tuple[str, ...]] = ("size",)

    @hookimpl
    def annotate(self, states: Tensor, keys: Tensor) -> dict[str, Tensor]:
        return {"size": states.norm(dim=1, keepdim=True).expand(-1, keys.shape[1])}

    @hookimpl
    def score(self, tracks: Tracks) -> Tensor:
        return tracks["size"]


def test_annotations_that_wait_for_a_later_step_are_part_of_an_end() -> None:
    plan = Plan.uniform(AnnotationsLater(), budget=12, buffer=9)
    engine, alone = (
        engine_with(PrefixStore(2**30, block_tokens=4), plan),
        Engine(llama(), plan=plan),
    )
    first = answer(alone, range(14), 12, snapshot=True)
    before = snapshot_of(first)
    assert answer(engine, range(14), 12).tokens == first.tokens
    expected = answer(alone, [7, 8], 30, resume=before, snapshot=True)
    ours = answer(engine, [*before.token_ids, 7, 8], 30, snapshot=True)
    assert ours.reused_tokens == before.seq_len
    assert_same(ours, expected)
