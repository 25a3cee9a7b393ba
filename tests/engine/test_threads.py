"""Engines, caches and plain `generate` in threads on one model: same tokens as alone."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_state import state_of
from slow_share import share_of
from tiny import greedy_tokens, tiny_model

from kvpolicy import Engine, Plan, PolicyCache
from kvpolicy.compat import cache_argument

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 16]
NUM_TOKENS = 8


def engine_job(model: Any, policy: str) -> Callable[[], Any]:
    plan = Plan.uniform(policy, budget=12, buffer=4)

    def run() -> Any:
        engine = Engine(model, plan=plan, slots=2, chunk=7)
        results = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS).results()
        return [(result.tokens, result.rows_evicted) for result in results]

    return run


def cache_job(model: Any) -> Callable[[], Any]:
    def run() -> Any:
        cache = PolicyCache(model, Plan.uniform("h2o", budget=12, buffer=4))
        ids = torch.tensor([PROMPTS[2]])
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **cache_argument(cache),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        return answer[0].tolist(), cache.report.rows_evicted

    return run


def plain_job(model: Any) -> Callable[[], Any]:
    return lambda: [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def repeat(job: Callable[[], Any], num: int, found: list[Any], begin: threading.Barrier) -> None:
    begin.wait()
    for _ in range(num):
        found.append(job())


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, pytest.param(share_of(100), marks=pytest.mark.nightly)])
def test_concurrent_runs_equal_sequential_runs(num: int) -> None:
    model = tiny_model(dtype=torch.float64)
    jobs = [
        engine_job(model, "h2o"),
        engine_job(model, "snapkv"),
        cache_job(model),
        plain_job(model),
    ]
    before = state_of(model)
    alone = [job() for job in jobs]
    found: list[list[Any]] = [[] for _ in jobs]
    begin = threading.Barrier(len(jobs))
    threads = [
        threading.Thread(target=repeat, args=(job, num, into, begin))
        for job, into in zip(jobs, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, results in zip(alone, found, strict=True):
        assert results == [expected] * num
    assert state_of(model) == before
