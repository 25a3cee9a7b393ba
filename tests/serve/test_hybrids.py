"""A hybrid model behind the server: prompts that begin alike, streams, and clients that go away."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import attrs
import httpx2
import pytest
import torch
from hybrids import hybrid_model
from serving import PATH, PATIENCE_S, Running, metrics, of_plan, serving, until
from slow_share import share_of
from tiny import tiny_tokenizer
from transformers import PreTrainedModel

from kvpolicy import Engine, Plan, PrefixStore, Request, Sampling
from kvpolicy.compat import has_states

pytestmark = pytest.mark.skipif(not has_states(), reason="transformers has no cache for states")

NUM_CLIENTS = 12
CAPACITY = 32 << 10  # less than what is found again
CASES = [
    pytest.param("lfm2", 30, marks=pytest.mark.slow),
    pytest.param("lfm2", 200, marks=pytest.mark.nightly),
    pytest.param("qwen3_next", 200, marks=pytest.mark.nightly),
]
BEGINNINGS = [
    "1 + 2 = 3, and 3 + 4 = 7. now, 5 + 6 = 11.",
    "1 + 2 = 3, and 3 + 4 = 7. but: a b c d e f",
    "what is 7 * 8? it is 56. and 6 * 9? it is",
    "a",
]
KNOBS: dict[str, dict[str, Any]] = {
    "full": {},
    "h2o": {"n_recent": 3},
    "streaming": {},
    "snapkv": {"window_size": 3},
}
PLANS = {
    name: Plan.uniform(name, budget=12, buffer=4, knobs={name: knobs} if knobs else {})
    for name, knobs in KNOBS.items()
}


@attrs.frozen
class Asked:
    """One request of a client, who may go away after some pieces of a stream."""

    prompt: str
    plan: str
    num_tokens: int
    sampling: Sampling
    kind: str  # whole, stream or cancelled

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": f"tiny:{self.plan}",
            "prompt": self.prompt,
            "max_tokens": self.num_tokens,
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
            "stream": self.kind != "whole",
            "kvpolicy": {"token_ids": True},
        }


def drawn(num: int) -> list[Asked]:
    rng = random.Random(0)
    letters = "abcdefghij 0123456789"
    return [
        Asked(
            rng.choice(BEGINNINGS) + "".join(rng.choices(letters, k=rng.choice((0, 2, 9, 30)))),
            rng.choice([*PLANS]),
            rng.choice((2, 8, 20)),
            Sampling(temperature=rng.choice((0.0, 0.0, 0.8)), seed=rng.randrange(1000)),
            rng.choice(("whole", "whole", "stream", "stream", "cancelled")),
        )
        for _ in range(num)
    ]


async def tokens_of(http: httpx2.AsyncClient, asked: Asked) -> list[int]:
    """The tokens that a client gets; it leaves early if it is one that cancels."""
    if asked.kind == "whole":
        answer = await http.post(PATH, json=asked.body)
        (choice,) = answer.json()["choices"]
        return choice["token_ids"]
    tokens: list[int] = []
    async with http.stream("POST", PATH, json=asked.body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                tokens += choice.get("token_ids", [])
            if tokens and asked.kind == "cancelled":
                break
    return tokens


async def answers(running: Running, requests: list[Asked]) -> list[list[int]]:
    """The answers to all requests, of which many are open at a time."""
    turns = asyncio.Semaphore(NUM_CLIENTS)
    options: Any = {"base_url": running.url, "timeout": PATIENCE_S, "trust_env": False}
    async with httpx2.AsyncClient(**options) as http:

        async def ask(asked: Asked) -> list[int]:
            async with turns:
                return await tokens_of(http, asked)

        return await asyncio.gather(*map(ask, requests))


def alone(model: PreTrainedModel, requests: list[Asked]) -> list[list[int]]:
    """What an engine answers to each request by itself."""
    engines = {name: Engine(model, tiny_tokenizer(), plan, slots=1) for name, plan in PLANS.items()}
    found = []
    for asked in requests:
        request = Request(asked.prompt, asked.num_tokens, asked.sampling)
        (result,) = engines[asked.plan].generate([request]).results()
        found.append([*result.tokens])
    return found


@pytest.mark.parametrize(("family", "num"), CASES)
def test_every_request_is_answered_as_if_it_came_alone(
    family: str, num: int, tmp_path: Path
) -> None:
    """Prefixes leave memory for files, and come back from there, also after a restart."""
    model = hybrid_model(family, dtype=torch.float64)
    requests = drawn(max(share_of(num), 40) if num > 40 else num)
    expected = alone(model, requests)
    middle = len(requests) // 2
    for half in (slice(None, middle), slice(middle, None)):
        store = PrefixStore(CAPACITY, block_tokens=4, spill=tmp_path, conversations=False)
        with serving(PLANS, model=model, slots=4, prefix_store=store) as running:
            found = asyncio.run(answers(running, requests[half]))
            until(running.idle)
            counted = metrics(running)
        for asked, ours, theirs in zip(requests[half], found, expected[half], strict=True):
            assert ours == (theirs[: len(ours)] if asked.kind == "cancelled" else theirs), asked
            assert ours
        assert sum(counted["prefix_reused_tokens_total", of_plan(plan)] for plan in PLANS) > 0
        assert store.stats.num_bytes <= CAPACITY
    assert counted["prefix_spill_loads_total", ()] > 0, "of those that were written before"
