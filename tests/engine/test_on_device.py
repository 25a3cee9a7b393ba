"""What must hold wherever a model is, `--device cuda` included: the engine beside its oracles."""

import pytest
import torch
from list_reference import reference_tokens
from rated import Rated, list_layers
from tiny import greedy_tokens, tiny_model

from kvpolicy import Engine, Plan

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 9]
NEW_TOKENS = 12
EVICTING = [("h2o",), ("snapkv",), ("rkv", "protect"), ("streaming", "rerotate"), ("h2o", "merge")]


def model_on(device: torch.device) -> torch.nn.Module:
    # Kernels of GPUs multiply blocks of at least 16 numbers.
    return tiny_model("qwen3", head_dim=16).to(device)


@pytest.mark.few(1)
@pytest.mark.parametrize("eager", [True, False])
def test_full_cache_equals_generate(device: torch.device, eager: bool) -> None:
    engine = Engine(model_on(device), plan=Plan.uniform("full"), slots=2, eager=eager)
    results = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS).results()
    reference = model_on(torch.device("cpu"))
    expected = [greedy_tokens(reference, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert [list(result.tokens) for result in results] == expected


@pytest.mark.slow
def test_eviction_equals_the_list_reference(device: torch.device) -> None:
    plan = Plan.uniform(Rated(), budget=6, buffer=3)
    engine = Engine(model_on(device), plan=plan, slots=2)
    results = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS).results()
    for prompt, result in zip(PROMPTS, results, strict=True):
        layers = list_layers(engine, 6, 3)
        reference = model_on(torch.device("cpu"))
        assert list(result.tokens) == reference_tokens(reference, layers, prompt, NEW_TOKENS)


@pytest.mark.few(1)
@pytest.mark.parametrize("stack", EVICTING, ids="+".join)
def test_batched_sequence_equals_sequence_alone(
    device: torch.device, stack: tuple[str, ...]
) -> None:
    """In any read of tokens, too, and on either path of steps."""
    plan = Plan.uniform(*stack, budget=16, buffer=4)
    model = model_on(device)
    batch = Engine(model, plan=plan, slots=3, steps_per_read=2)
    alone = Engine(model, plan=plan, slots=1, steps_per_read=1, eager=True)
    expected = [alone.generate([one], max_new_tokens=30).results()[0] for one in PROMPTS]
    found = batch.generate(PROMPTS, max_new_tokens=30).results()
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.rows_evicted for one in found] == [one.rows_evicted for one in expected]


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["streaming", "h2o", "snapkv", "rkv"])
def test_long_prompts_are_replayed_on_a_gpu(device: torch.device, policy: str) -> None:
    """Chunks that repeat others leave what they leave if each is run."""
    prompts = [[(7 * place + seed) % 59 + 1 for place in range(400)] for seed in range(3)]
    plan = Plan.uniform(policy, budget=24, buffer=8, prefill_buffer=24)
    model = model_on(device)
    batch = Engine(model, plan=plan, slots=2).generate(prompts, max_new_tokens=16)
    alone = Engine(model, plan=plan, slots=1, eager=True)
    expected = [alone.generate([one], max_new_tokens=16).results()[0] for one in prompts]
    assert [one.tokens for one in batch.results()] == [one.tokens for one in expected]
    assert ("prompts replayed" in batch.report.path) == (device.type == "cuda")


def test_steps_are_static_and_in_graphs_on_a_gpu(device: torch.device) -> None:
    run = Engine(model_on(device), plan=Plan.uniform("h2o", budget=8, buffer=4)).generate(
        PROMPTS, max_new_tokens=6
    )
    run.results()
    assert run.report.path == ("static, fused, in graphs" if device.type == "cuda" else "static")
