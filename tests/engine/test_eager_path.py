"""The eager decode path computes what the static one does, and runs for models that need it."""

import pytest
import torch
from tiny import tiny_model

from kvpolicy import Engine, Plan, Request
from kvpolicy.engine.requests.request import Sampling

PROMPTS = [[5, 7, 9], [11, 3, 8, 2, 1] * 7, [100], [44, 45, 46, 47] * 3, [7] * 20]
PLANS = {
    "full": Plan.uniform("full"),
    "streaming": Plan.uniform("streaming", budget=12, buffer=5),
    "h2o": Plan.uniform("h2o", "protect", budget=12, buffer=5),
    "snapkv": Plan.uniform("snapkv", "protect", budget=16, buffer=4),
    "rkv": Plan.uniform("rkv", "protect", budget=16, buffer=4),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PLANS)
def test_the_eager_path_gives_the_same_tokens_and_rows(name: str) -> None:
    model = tiny_model(dtype=torch.float64)
    requests = [
        Request(prompt, 20 + 7 * number, Sampling(temperature=0.8 * (number % 2), seed=number))
        for number, prompt in enumerate(PROMPTS)
    ]
    seen = []
    for eager in (False, True):
        run = Engine(model, plan=PLANS[name], slots=3, eager=eager).generate(requests)
        results = run.results()
        seen.append([(one.tokens, one.rows_evicted, one.peak_rows) for one in results])
        assert run.report.path == ("eager: asked for" if eager else "static")
    assert seen[0] == seen[1]
