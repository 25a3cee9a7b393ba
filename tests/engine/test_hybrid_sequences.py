"""What a sequence of a hybrid model holds leaves its slot with it: snapshots, prefixes, copies."""

from pathlib import Path

import pytest
import torch
from hybrids import hybrid_model
from tiny import greedy_tokens

from kvpolicy import Engine, Plan, PolicyCache, PrefixStore, Request, SequenceSnapshot
from kvpolicy.compat import cache_argument, has_states

pytestmark = pytest.mark.skipif(not has_states(), reason="transformers has no cache for states")

QUICK = ["lfm2"]
FAMILIES = [
    *QUICK,
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_next", "jamba", "falcon_h1")),
]
PROMPT = [5, 9, 40, 2, 2, 7, 11, 30, 8, 16, 22, 3]


def plan() -> Plan:
    return Plan.uniform("h2o", budget=10, buffer=4, knobs={"h2o": {"n_recent": 3}})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_goes_on_from_a_snapshot_in_a_file(family: str, tmp_path: Path) -> None:
    model = hybrid_model(family, dtype=torch.float64)
    engine = Engine(model, plan=plan(), slots=2, chunk=5)
    (whole,) = engine.generate([PROMPT], max_new_tokens=12).results()
    half = Request(PROMPT, max_new_tokens=5, snapshot=True)
    (first,) = engine.generate([half]).results()
    assert first.snapshot is not None
    first.snapshot.save(tmp_path / "one.safetensors")
    taken = SequenceSnapshot.load(tmp_path / "one.safetensors")
    assert taken.num_bytes == first.snapshot.num_bytes
    again = engine.generate([Request(resume=taken, max_new_tokens=7)] * 2).results()
    for result in again:
        assert [*first.tokens, *result.tokens] == list(whole.tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_prompts_that_begin_alike_equal_themselves_alone(
    family: str, policy: str, tmp_path: Path
) -> None:
    """From memory and from files; what is found ends exactly where a state was stored."""
    model = hybrid_model(family, dtype=torch.float64)
    used = plan() if policy == "h2o" else Plan.uniform("full")
    prompts = [[*PROMPT * 2, last] for last in (1, 2, 3)] + [PROMPT[:7], [*PROMPT, 4, 4]]
    alone = [
        Engine(model, plan=used).generate([one], max_new_tokens=6).results()[0].tokens
        for one in prompts
    ]
    capacity = 1 << 20
    for number in range(2):
        store = PrefixStore(capacity, block_tokens=4, spill=tmp_path / str(number))
        engine = Engine(model, plan=used, slots=2, prefix_store=store)
        for _ in range(2):
            run = engine.generate(prompts, max_new_tokens=6)
            assert [result.tokens for result in run.results()] == alone
        assert store.stats.reused_tokens > 0
        capacity = store.stats.num_bytes * 2 // 3  # so that blocks leave for files, and come back


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_a_result_are_those_of_rows_and_states(family: str) -> None:
    model = hybrid_model(family, dtype=torch.float64)
    num_tokens, by_plan = len(PROMPT) + 11, {}  # the last token has no row
    for used in (Plan.uniform("full"), plan()):
        run = Engine(model, plan=used, slots=1).generate([PROMPT], max_new_tokens=12)
        (result,) = run.results()
        held = [tensor for layer in run.cache.states.values() for tensor in layer.states.values()]
        of_states = sum(tensor.nbytes for tensor in held)
        layers = [layer for layer in run.cache.layers if layer.shape.has_rows]
        rows = num_tokens if used.budget is None else 10 + 4
        assert result.peak_rows == rows
        of_rows = [2 * layer.keys[0, :, 0].nbytes for layer in layers]
        assert result.peak_bytes == rows * sum(of_rows) + of_states
        assert result.full_bytes == num_tokens * sum(of_rows) + of_states
        assert run.report.saved_share == 1 - result.peak_bytes / result.full_bytes
        by_plan[rows] = of_states
    assert min(by_plan.values()) > 0
    assert len(by_plan) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_where_it_ended(family: str) -> None:
    model = hybrid_model(family, dtype=torch.float64)
    store = PrefixStore(1 << 20, block_tokens=4)
    engine = Engine(model, plan=Plan.uniform("full"), prefix_store=store)
    (first,) = engine.generate([PROMPT], max_new_tokens=5).results()
    longer = [*PROMPT, *first.tokens, 6, 7]
    (second,) = engine.generate([longer], max_new_tokens=6).results()
    assert store.stats.turns == 1
    (alone,) = (
        Engine(model, plan=Plan.uniform("full")).generate([longer], max_new_tokens=6).results()
    )
    assert second.tokens == alone.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_that_is_cancelled_leaves_nothing_in_its_slot(family: str) -> None:
    model = hybrid_model(family, dtype=torch.float64)
    engine = Engine(model, plan=plan(), slots=1)
    (alone,) = engine.generate([PROMPT], max_new_tokens=6).results()
    run = engine.open_run(max_len=64)
    first = run.submit(Request([3, 8] * 9, max_new_tokens=30))
    second = run.submit(Request(PROMPT, max_new_tokens=6))
    for _ in range(4):
        run.step()
    run.cancel(first)
    ended = []
    while len(ended) < 2:
        ended += run.step().results
    (result,) = [one for one in ended if one.id == second]
    assert result.tokens == alone.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_with_a_policy_cache_equals_the_engine(family: str) -> None:
    model = hybrid_model(family)
    prompts = [PROMPT, PROMPT[:5]]
    padded = torch.tensor([prompts[0], [0] * 7 + prompts[1]])
    mask = torch.tensor([[1] * 12, [0] * 7 + [1] * 5])
    cache = PolicyCache(model, Plan.uniform("full"))
    with torch.no_grad():
        output = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
            **cache_argument(cache),
        )
    assert output[:, 12:].tolist() == [greedy_tokens(model, prompt, 6) for prompt in prompts]
