"""Long runs of many requests through few slots."""

import pytest
import torch
from recorder import Recorder
from slow_share import share_of
from strategies import BASES, REWRITING, STEERING
from tiny import FAMILIES, greedy_tokens, shared_model

from kvpolicy import Engine, Plan, Request, Sampling, installed_policies

pytestmark = pytest.mark.nightly
NAMES = [policy.name for policy in installed_policies() if policy.name not in STEERING]


def requests_of(seed: int, num: int) -> list[Request]:
    rng = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    return [
        Request(
            torch.randint(61, (number(1, 150),), generator=rng).tolist(),
            max_new_tokens=number(1, 120),
            sampling=Sampling(temperature=number(0, 2) * 0.8, top_p=0.95, seed=i),
            stop_ids=(number(0, 61),),
        )
        for i in range(num)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES)
def test_long_run_equals_each_request_alone(name: str, family: str) -> None:
    recorder = Recorder(follows=name not in REWRITING)
    stack = (
        (name, recorder) if name == "protect" else (*BASES.get(name, ()), name, "protect", recorder)
    )
    # The engine has no tokenizer here: texts are token ids, and many sentences are similar. The
    # window of lazy_eviction must fit into the budget.
    knobs = {
        "skipkv": {"delimiters": list(range(0, 61, 7)), "tau": 0.3},
        "epicache": {"prompt": [3, 7, 5]},
        "lazy_eviction": {"window_size": 4},
    }
    chosen = {policy: knobs[policy] for policy in knobs if policy in stack}
    plan = Plan.uniform(*stack, budget=24, buffer=9, knobs=chosen)
    model = shared_model(family, seed=1, num_layers=3, dtype=torch.float64)
    engine = Engine(model, plan=plan, slots=4, chunk=16)
    requests = requests_of(len(name), 6 + share_of(8))
    for request, result in zip(requests, engine.generate(requests).results(), strict=True):
        (alone,) = engine.generate([request]).results()
        assert result.tokens == alone.tokens
        assert result.compactions == alone.compactions
        if name != "full":
            # Some layers may hold more than 24 rows if others hold fewer.
            assert result.peak_rows <= max(layer.budget for layer in engine.plan.layers) + 9
    assert recorder.records or name == "full"


@pytest.mark.parametrize("family", FAMILIES)
def test_long_run_without_eviction_equals_generate(family: str) -> None:
    model = shared_model(family, seed=2, num_layers=3)
    plan = Plan.uniform("h2o", "protect", budget=400, buffer=5)
    prompts = [list(request.prompt) for request in requests_of(5, 8)]
    results = Engine(model, plan=plan, slots=3, chunk=7).generate(prompts, max_new_tokens=200)
    for prompt, result in zip(prompts, results.results(), strict=True):
        assert list(result.tokens) == greedy_tokens(model, prompt, 200)
