"""In ``model.generate``, a `PolicyCache` gives the tokens of an engine with the same plan."""

from typing import Any

import attrs
import families
import pytest
import torch
from batches import generated_tokens, padded
from hypothesis import given
from hypothesis import strategies as st
from strategies import costly, plans, prompts, roomy_plans, seeds
from tiny import FAMILIES, shared_model, tiny_model
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

from kvpolicy import Engine, Plan, PolicyCache
from kvpolicy.compat import cache_argument, cache_in
from kvpolicy.devices import HAS_NUMBA
from kvpolicy.hf import policy_cache as policycache
from kvpolicy.model.adapter import ModelAdapter

NUM_LAYERS = 2
NEW_TOKENS = 13
ROOMY = 80  # rows: more than any prompt and its continuation
TIGHT = Plan.uniform("rkv", budget=12, buffer=4, knobs={"rkv": {"window_size": 4}})

# As in test_open_run.py: in double precision the order of additions does not matter.
models = st.builds(
    shared_model,
    st.sampled_from(FAMILIES),
    seed=st.integers(0, 3),
    num_layers=st.just(NUM_LAYERS),
    dtype=st.just(torch.float64),
)
batches = prompts(max_len=40)
chunks = st.sampled_from([1, 3, 7, 512])


def engine_tokens(
    model: nn.Module, prompts: list[list[int]], plan: Plan, num: int, **options: Any
) -> list[list[int]]:
    run = Engine(model, plan=plan, **options).generate(prompts, max_new_tokens=num)
    return [list(result.tokens) for result in run.results()]


@costly
@given(
    models,
    batches,
    plans(num_layers=NUM_LAYERS, max_budget=13),
    st.sampled_from(["keep", "evict"]),
    chunks,
)
def test_greedy_tokens_and_what_is_reported_equal_the_engine(
    model: nn.Module, prompts: list[list[int]], plan: Plan, prompt: Any, chunk: int
) -> None:
    plan = attrs.evolve(plan, prompt=prompt)
    cache = PolicyCache(model, plan, chunk=chunk)
    tokens = generated_tokens(model, prompts, NEW_TOKENS, past_key_values=cache)
    engine = Engine(model, plan=plan, slots=5, chunk=chunk)
    results = engine.generate(prompts, max_new_tokens=NEW_TOKENS).results()
    assert tokens == [list(result.tokens) for result in results]
    report = cache.report
    longest = max(map(len, prompts)) + NEW_TOKENS
    layers = plan.resolve(NUM_LAYERS).layers
    assert report.tokens == tuple(len(prompt) + NEW_TOKENS - 1 for prompt in prompts)
    longest_prompt = max(map(len, prompts))
    assert report.peak_rows <= max(layer.capacity(longest, longest_prompt) for layer in layers)
    assert max(report.rows) <= report.peak_rows
    # Neither compacts what the last token has made due.
    assert report.rows_evicted == sum(result.rows_evicted for result in results)


def test_in_a_conversation_the_rows_of_the_first_prompt_stay() -> None:
    """Later turns count towards the budget, so a slab never grows."""
    model = shared_model("llama", dtype=torch.float64)
    plan = Plan.uniform("streaming", budget=12, buffer=4, prompt="keep")
    texts = [[3, 9, 4] * 5, [7, 1]]
    cache, num_prompt = PolicyCache(model, plan), [len(text) for text in texts]
    for turn in ([], [5] * 40, [6, 2]):
        texts = [[*text, *turn] for text in texts]
        answers = generated_tokens(model, texts, NEW_TOKENS, past_key_values=cache)
        texts = [[*text, *answer] for text, answer in zip(texts, answers, strict=True)]
        assert cache.core is not None
        held = cache.core.cache
        assert held.capacity.tolist() == [15 + 16] * 2
        assert held.prompt_rows.tolist() == [num_prompt] * 2
        for layer in held.layers:
            for slot, num in enumerate(num_prompt):
                positions = layer.positions[slot, :, :num]
                assert torch.equal(positions, torch.arange(num).expand_as(positions))
    assert max(cache.report.rows) <= 31


@pytest.mark.nightly
@costly
@given(batches, plans(num_layers=NUM_LAYERS), st.integers(0, 3))
def test_greedy_tokens_equal_the_engine_in_single_precision(
    prompts: list[list[int]], plan: Plan, seed: int
) -> None:
    # The same forwards in the same batches, so rounding is equal too. Numba adds in another order,
    # and attends in static steps only.
    model = shared_model("qwen3", seed=seed, num_layers=NUM_LAYERS)
    tokens = generated_tokens(model, prompts, NEW_TOKENS, past_key_values=PolicyCache(model, plan))
    slots, eager = len(prompts), HAS_NUMBA
    assert tokens == engine_tokens(model, prompts, plan, NEW_TOKENS, slots=slots, eager=eager)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["full", "h2o"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_model_family_equals_the_engine(family: str, name: str) -> None:
    # Windows slide, and unbounded slabs grow from the size of the prompt.
    model = families.family_model(family)
    plan = Plan.uniform(name, budget=12, buffer=4)
    cache = PolicyCache(model, plan, chunk=5)
    batch = [[7, 3] * 10, [5, 6, 9]]
    tokens = generated_tokens(model, batch, NEW_TOKENS, past_key_values=cache)
    assert tokens == engine_tokens(model, batch, plan, NEW_TOKENS, slots=2, chunk=5)
    windows = [shape.sliding_window for shape in ModelAdapter(model).layer_shapes()]
    most = max(window or 16 for window in windows) if name == "h2o" else None
    assert most is None or cache.report.peak_rows <= most


@given(models, prompts(), roomy_plans(num_layers=NUM_LAYERS, rows=ROOMY), chunks)
def test_unexceeded_budget_equals_generate(
    model: nn.Module, prompts: list[list[int]], plan: Plan, chunk: int
) -> None:
    cache = PolicyCache(model, plan, chunk=chunk)
    tokens = generated_tokens(model, prompts, NEW_TOKENS, past_key_values=cache)
    assert tokens == generated_tokens(model, prompts, NEW_TOKENS)
    assert (cache.report.compactions, cache.report.rows_evicted) == (0, 0)


@costly
@given(models, prompts(), roomy_plans(num_layers=NUM_LAYERS, rows=ROOMY), seeds)
def test_sampled_tokens_equal_generate_with_unexceeded_budget(
    model: nn.Module, prompts: list[list[int]], plan: Plan, seed: int
) -> None:
    sampling_options = {"do_sample": True, "temperature": 0.9, "top_k": 30, "top_p": 0.95}
    answers = []
    for cache in (None, PolicyCache(model, plan)):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            answers.append(
                generated_tokens(model, prompts, 10, past_key_values=cache, **sampling_options)
            )
    assert answers[0] == answers[1]


@pytest.mark.nightly
@given(models, batches, plans(num_layers=NUM_LAYERS), seeds)
def test_sampling_under_eviction_is_reproducible(
    model: nn.Module, prompts: list[list[int]], plan: Plan, seed: int
) -> None:
    answers = []
    for _ in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            cache = PolicyCache(model, plan)
            answers.append(
                generated_tokens(model, prompts, 8, past_key_values=cache, do_sample=True)
            )
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_equals_generate(family: str) -> None:
    # bf16 logits are coarse and sums are ordered differently: one fixed example.
    model = tiny_model(family, dtype=torch.bfloat16, seed=1)
    prompts = [[5, 9, 40, 2, 2, 7, 11]]
    cache = PolicyCache(model, Plan.uniform("streaming", budget=64))
    assert generated_tokens(model, prompts, 6, past_key_values=cache) == generated_tokens(
        model, prompts, 6
    )


@costly
@given(models, prompts(count=3, max_len=30), plans(num_layers=NUM_LAYERS), st.integers(1, 12))
def test_row_that_ends_early_does_not_affect_others(
    model: nn.Module, prompts: list[list[int]], plan: Plan, stop_index: int
) -> None:
    """A finished row keeps receiving pads."""
    expected = engine_tokens(model, prompts, plan, NEW_TOKENS)
    stop = expected[0][stop_index]  # ends the first row early, and perhaps others
    cache = PolicyCache(model, plan)
    tokens = generated_tokens(model, prompts, NEW_TOKENS, past_key_values=cache, eos_token_id=stop)
    for row, whole in zip(tokens, expected, strict=True):
        end = whole.index(stop) + 1 if stop in whole else NEW_TOKENS
        assert row[:end] == whole[:end]
        assert set(row[end:]) <= {0}
    assert len(set(cache.report.tokens)) == len({len(prompt) for prompt in prompts})


@pytest.mark.nightly
def test_peak_memory_does_not_depend_on_length() -> None:
    model = shared_model(num_layers=NUM_LAYERS)
    cache = PolicyCache(model, TIGHT)
    generated_tokens(model, [[3, 1, 4] * 7], 30, past_key_values=cache)
    early = cache.report
    cache.reset()
    generated_tokens(model, [[3, 1, 4] * 40], 300, past_key_values=cache)
    late = cache.report
    assert late.peak_kv_bytes == early.peak_kv_bytes
    assert late.peak_rows == early.peak_rows == 16
    assert late.tokens == (419,)


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [("full",), ("streaming", "protect"), ("snapkv",)])
def test_slabs_grow_when_max_length_is_unknown(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policycache, "GROWTH", 8)
    model = shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)
    plan = Plan.uniform(
        *names,
        budget=40,
        buffer=5,
        knobs={"snapkv": {"phase": "prefill"}} if names == ("snapkv",) else None,
    )
    prompts = [[7, 8, 9, 1] * 5, [4, 4, 6]]
    growing, whole = PolicyCache(model, plan), PolicyCache(model, plan, max_length=90)
    sizes = []

    class Watch(BaseStreamer):
        def put(self, value: Tensor) -> None:
            sizes.append(growing.report.peak_kv_bytes)

        def end(self) -> None:
            pass

    inputs = padded(prompts[:1])
    growing_tokens = model.generate(
        **inputs, **cache_argument(growing), max_new_tokens=36, do_sample=False, streamer=Watch()
    )[0, 20:].tolist()
    assert [growing_tokens] == generated_tokens(model, prompts[:1], 36, past_key_values=whole)
    assert [growing_tokens] == engine_tokens(model, prompts[:1], plan, 36)
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 3


class Collect(BaseStreamer):
    """Collects the streamed tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streamers_receive_every_token() -> None:
    model, streamer = shared_model(num_layers=NUM_LAYERS), Collect()
    cache = PolicyCache(model, TIGHT)
    (tokens,) = generated_tokens(
        model, [[1, 2, 3] * 9], 25, past_key_values=cache, streamer=streamer
    )
    assert streamer.tokens == [*[1, 2, 3] * 9, *tokens]
    assert streamer.ended


def test_num_return_sequences_gives_equal_greedy_answers() -> None:
    model = shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)
    prompt = [2, 7, 1, 8, 2, 8] * 5
    expected = engine_tokens(model, [prompt], TIGHT, 12)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        cache = PolicyCache(model, TIGHT)
        answers = generated_tokens(
            model,
            [prompt],
            12,
            **cache_argument(cache),
            do_sample=True,
            top_k=1,
            num_return_sequences=3,
        )
    assert answers == expected * 3


def test_generate_returns_sequences_logits_and_the_cache() -> None:
    model = shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)
    prompts = [[1, 2, 3, 4], [9, 8]]
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "pad_token_id": 0,
        "repetition_penalty": 1.3,
    }
    cache = PolicyCache(model, Plan.uniform("full"))
    ours = model.generate(**padded(prompts), **cache_argument(cache), **options)
    plain = model.generate(**padded(prompts), **options)
    assert cache_in(ours) is cache
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(plain.logits))


def test_direct_model_call_returns_the_newest_logits() -> None:
    model = shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)
    inputs = padded([[1, 2, 3, 4, 5], [6, 7]])
    with torch.no_grad():
        ours = model(
            inputs["input_ids"],
            inputs["attention_mask"],
            **cache_argument(PolicyCache(model, Plan.uniform("full"))),
        ).logits
        alone = [model(torch.tensor([row])).logits[0, -1] for row in ([1, 2, 3, 4, 5], [6, 7])]
    assert ours.shape[:2] == (2, 1)
    torch.testing.assert_close(ours[:, 0], torch.stack(alone))


def test_what_an_engine_refuses_of_a_generation_config_is_left_to_generate() -> None:
    model = tiny_model()
    model.generation_config.num_beams = 2
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cache = cache_argument(PolicyCache(model, Plan.uniform("full")))
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **cache)
    assert found.tolist() == plain.tolist()
