"""A prompt that goes on with stored blocks gets what it gets without a store."""

from typing import Any, ClassVar

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reuse_cases import NUM_LAYERS, CountsBack, asked, assert_same, llama, models, with_prompt
from strategies import SMALL_KNOBS, costly, plans
from tiny import shared_model, tiny_model, tiny_tokenizer
from torch import nn

from kvpolicy import Engine, Plan, PrefixStore, hookimpl
from kvpolicy.engine.reuse import nodes
from kvpolicy.errors import HookError, KVPolicyError

TIGHT = Plan.uniform("h2o", budget=12, buffer=4)
KEEPING = Plan.uniform("h2o", budget=12, buffer=4, prompt="keep")


@st.composite
def prompts_that_begin_alike(draw: st.DrawFn) -> list[list[int]]:
    """Prompts of which many share their first tokens, and two are equal."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    common = torch.randint(61, (draw(st.integers(1, 70)),), generator=rng).tolist()
    prompts = []
    for _ in range(draw(st.integers(2, 5))):
        shared = common[: draw(st.integers(0, len(common)))]
        own = torch.randint(61, (draw(st.integers(0, 20)),), generator=rng).tolist()
        prompts.append((shared + own) or [1])
    return [*prompts, prompts[draw(st.integers(0, len(prompts) - 1))]]


@pytest.mark.slow
@costly
@given(
    models,
    plans(num_layers=NUM_LAYERS),
    st.sampled_from(["evict", "keep"]),
    prompts_that_begin_alike(),
    st.data(),
)
def test_a_hit_equals_a_fresh_prefill(
    model: nn.Module, plan: Plan, prompt: Any, prompts: list[list[int]], data: st.DataObject
) -> None:
    compare(model, with_prompt(plan, prompt), prompts, data)


@pytest.mark.nightly
@given(
    st.sampled_from(["adakv", "h2o", "snapkv", "epicache"]),
    st.integers(12, 20),
    prompts_that_begin_alike(),
    st.data(),
)
def test_a_hit_equals_a_fresh_prefill_where_heads_share_their_rows(
    policy: str, budget: int, prompts: list[list[int]], data: st.DataObject
) -> None:
    knobs = data.draw(st.sampled_from(SMALL_KNOBS.get(policy, ({},))))
    plan = Plan.uniform(
        policy, budget=budget, buffer=data.draw(st.integers(1, 8)), knobs={policy: knobs}
    )
    compare(llama(), attrs.evolve(plan, heads="shared"), prompts, data)


def compare(model: nn.Module, plan: Plan, prompts: list[list[int]], data: st.DataObject) -> None:
    """Compare two rounds of requests with a store with those without."""
    tokenizer, requests = tiny_tokenizer(), asked(prompts, 12)
    options = {"slots": data.draw(st.integers(1, 3)), "eager": data.draw(st.booleans())}
    fresh = Engine(model, tokenizer, plan, **options).generate(requests).results()
    block, chunk = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 40))
    store = PrefixStore(2**30, block_tokens=block, conversations=False)
    engine = Engine(model, tokenizer, plan, chunk=chunk, prefix_store=store, **options)
    open_run = data.draw(st.booleans(), label="requests come while others are served")
    for _ in range(2):
        if open_run:
            run: Any = engine.open_run(max_len=120)
            results = []
            for request in requests:
                run.submit(request)
                results += run.step().results
            results += list(run)
            results.sort(key=lambda result: result.id)
        else:
            run = engine.generate(requests)
            results = run.results()
        for ours, theirs in zip(results, fresh, strict=True):
            assert_same(ours, theirs)
        assert run.report.reused_tokens == sum(one.reused_tokens for one in results)
    assert engine.prefixes is not None
    assert store.stats.hits > 0 or max(map(len, prompts)) <= engine.prefixes.stride


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["full", "streaming", "h2o", "snapkv", "rkv", "skipkv"])
def test_prompts_that_stay_are_computed_once(policy: str) -> None:
    """In one batch, too: requests wait for the block that another computes."""
    knobs = {"skipkv": {"delimiters": (3, 7)}} if policy == "skipkv" else {}
    plan = Plan.uniform(policy, budget=16, buffer=4, prompt="keep", knobs=knobs)
    store = PrefixStore(2**30, block_tokens=8)
    engine = Engine(llama(), plan=plan, slots=4, chunk=20, prefix_store=store)
    common = list(range(50))
    requests = asked([[*common, question, 3] for question in range(9)], 4)
    run = engine.generate(requests)
    results = run.results()
    fresh = Engine(llama(), plan=plan).generate(requests).results()
    for ours, theirs in zip(results, fresh, strict=True):
        assert_same(ours, theirs)
    assert sorted(one.reused_tokens for one in results) == [0] + [48] * 8
    report = run.report
    assert (report.prompt_tokens, report.reused_tokens) == (9 * 52, 8 * 48)
    assert report.computed_tokens == 52 + 8 * 4
    assert report.to_dict()["computed_tokens"] == report.computed_tokens
    assert (store.stats.hits, store.stats.misses) == (8 * 6, 6)
    assert store.stats.reused_tokens == 8 * 48


@pytest.mark.slow
def test_a_prompt_that_was_compacted_goes_on_from_its_last_state() -> None:
    """Once rows have left, each state has all rows of the slot, and few are stored."""
    store = PrefixStore(2**30, block_tokens=4, conversations=False)
    engine = Engine(llama(), plan=TIGHT, prefix_store=store)
    common = [token % 61 for token in range(100)]
    for question in range(3):
        prompt = [*common, question, 3]
        ours, theirs = (
            one.generate(asked([prompt])).results()[0]
            for one in (engine, Engine(llama(), plan=TIGHT))
        )
        assert_same(ours, theirs)
        assert ours.reused_tokens == (96 if question else 0)
    blocks_before, states_after = 4, 5
    assert store.stats.num_blocks == blocks_before + states_after


def test_rows_of_equal_beginnings_are_stored_once() -> None:
    sizes = []
    for num_questions in (1, 2):
        store = PrefixStore(2**30, block_tokens=8, conversations=False)
        engine = Engine(llama(), plan=Plan.uniform("full"), prefix_store=store)
        prompts = [[*range(48), *[question] * 9] for question in range(num_questions)]
        engine.generate(asked(prompts)).results()
        sizes.append(store.stats.num_bytes)
    row_bytes = NUM_LAYERS * 2 * (8 * 8 * 2 + 8)
    for num, size in zip((56, 64), sizes, strict=True):
        assert num * (row_bytes + 8) <= size <= num * (row_bytes + 8) + 2048


# What rows depend on


def test_another_engine_finds_nothing_of_another_model_plan_or_tokenizer() -> None:
    store = PrefixStore(2**30, block_tokens=4)

    def reused(differs: str = "") -> int:
        dtype = torch.float32 if differs == "dtype" else torch.float64
        model = shared_model(dtype=dtype, seed=int(differs == "weights"))
        tokenizer = tiny_tokenizer(50 if differs == "tokenizer" else 61)
        plan = attrs.evolve(KEEPING, budget=13) if differs == "plan" else KEEPING
        engine = Engine(model, tokenizer, plan, prefix_store=store)
        (result,) = engine.generate(asked([list(range(30))], 2)).results()
        return result.reused_tokens

    assert reused() == 0
    for differs in ("weights", "plan", "dtype", "tokenizer"):
        assert reused(differs) == 0, differs
    assert reused() == 28


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("plan", [TIGHT, KEEPING], ids=["compacts", "keeps prompts"])
def test_equal_hashes_are_no_proof(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are compared: here all hashes are equal, or one of seven."""
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(61, (5, 40), generator=rng).tolist()
    prompts += [[*prompts[0][:20], *one[:9]] for one in prompts]
    requests = asked(prompts, 4)
    fresh = Engine(llama(), plan=plan).generate(requests).results()
    hashed = nodes.chained
    for num_hashes in (1, 7):
        with monkeypatch.context() as patch:

            def few(before: bytes, token_ids: Any, num: int = num_hashes) -> bytes:
                return bytes([hashed(before, token_ids)[0] % num])

            patch.setattr(nodes, "chained", few)
            patch.setattr("kvpolicy.engine.extensions.prefix_reuse.chained", few)
            store = PrefixStore(2**30, block_tokens=4)
            engine = Engine(llama(), plan=plan, slots=2, prefix_store=store)
            for _ in range(2):
                for ours, theirs in zip(engine.generate(requests).results(), fresh, strict=True):
                    assert_same(ours, theirs)


# Policies whose state cannot be cut


@attrs.define(eq=False)
class Undeclared(CountsBack):
    """The same without a declaration."""

    cuts_prompts: ClassVar[bool] = True


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", [CountsBack, Undeclared])
def test_a_policy_that_knows_the_rest_of_a_prompt_shares_whole_prompts_only(policy: Any) -> None:
    plan = Plan.uniform(policy(), budget=9, buffer=3)
    store = PrefixStore(2**30, block_tokens=4, conversations=False)
    engine = Engine(llama(), plan=plan, prefix_store=store)
    prompts = [list(range(30)), list(range(25)), [*range(29), 7], list(range(30))]
    wrong, reused = 0, []
    for prompt in prompts:
        (ours,) = engine.generate(asked([prompt], 3)).results()
        (theirs,) = Engine(llama(), plan=plan).generate(asked([prompt], 3)).results()
        reused.append(ours.reused_tokens)
        try:
            assert_same(ours, theirs)
        except AssertionError:
            wrong += 1
    if policy is CountsBack:
        assert reused == [0, 0, 0, 29]
    assert (wrong > 0) is (policy is Undeclared)


def test_models_whose_rows_depend_on_the_length_share_whole_prompts_only() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = tiny_model(
        dtype=torch.float64, max_position_embeddings=16, rope_parameters=rope, num_layers=2
    )
    store = PrefixStore(2**30, block_tokens=4, conversations=False)
    engine = Engine(model, plan=Plan.uniform("full"), prefix_store=store)
    prompts = [list(range(20)), list(range(24)), list(range(20))]
    reused = []
    for prompt in prompts:
        (ours,) = engine.generate(asked([prompt], 3)).results()
        (theirs,) = Engine(model, plan=Plan.uniform("full")).generate(asked([prompt], 3)).results()
        assert_same(ours, theirs)
        reused.append(ours.reused_tokens)
    assert reused == [0, 0, 19]


# Errors


def test_plans_whose_sequences_cannot_be_copied_are_refused() -> None:
    plan = Plan.uniform("h2o", budget=12, buffer=4, padding="stored")
    with pytest.raises(KVPolicyError, match="pads"):
        Engine(llama(), plan=plan, prefix_store=PrefixStore(1000))
    with pytest.raises(KVPolicyError, match="PrefixStore"):
        Engine(llama(), plan=TIGHT, prefix_store=1000)


@attrs.define(eq=False)
class FailsAt:
    """Fails in compactions at and after some token."""

    at: int

    @hookimpl
    def score(self, positions: Any, seq_len: Any) -> Any:
        if int(seq_len.max()) >= self.at:
            msg = "too long"
            raise ValueError(msg)
        return positions.float()


def test_what_fails_in_one_request_does_not_hold_back_those_that_wait_for_it() -> None:
    plan = Plan.uniform(FailsAt(48), budget=12, buffer=4)
    store = PrefixStore(2**30, block_tokens=4)
    engine = Engine(llama(), plan=plan, slots=4, prefix_store=store, on_hook_error="answer")
    long, short = [token % 61 for token in range(60)], [token % 61 for token in range(30)]
    for prompts, well in (([long, long, short, long], [2]), ([long, long], [])):
        results = engine.generate(asked(prompts, 3)).results()
        assert [one.id for one in results if one.error is None] == well
        assert all("too long" in one.error for one in results if one.error)
    with pytest.raises(HookError, match="too long"):
        Engine(llama(), plan=plan, prefix_store=store).generate(asked([long])).results()
