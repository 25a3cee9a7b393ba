"""What a server costs beside its engine: tokens per second of both, on the same prompts.

    python docs/benchmarks/serving_cost.py                 # shape 100m
    python docs/benchmarks/serving_cost.py --shape 5m --rounds 5 --json cost.json

Builds a model with random weights, generates for prompts of token ids with `Engine.generate`, and
has ``kvpolicy serve`` answer the same prompts, whole and streamed, to as many clients as it has
slots. In each round the three come in another order; a figure is the median of its rounds.
Processor time of the clients is reported and not counted.

Prints a table; with --json, writes the figures to a file.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import torch
from serving_load import PATH, PATIENCE_S, Served, server
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kvpolicy import Engine, Plan, Request
from kvpolicy.lab.bench.models import SHAPES, random_model

BUDGET, BUFFER = 64, 16
POLICY = "h2o"


def save(shape: str, folder: Path, positions: int) -> None:
    """Write a model with random weights, and a tokenizer that has a word for each token."""
    model = random_model(SHAPES[shape], 0, max_positions=positions)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(SHAPES[shape].vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


async def ask(url: str, prompts: list[list[int]], num_tokens: int, *, stream: bool) -> list[Any]:
    """Send all prompts at the same time, and wait for the answers."""
    limits = httpx2.Limits(max_connections=len(prompts))
    async with httpx2.AsyncClient(
        base_url=url, timeout=PATIENCE_S, limits=limits, trust_env=False
    ) as http:

        async def one(prompt: list[int]) -> int:
            body = {
                "model": "model",
                "prompt": prompt,
                "max_tokens": num_tokens,
                "temperature": 0,
                "stream": stream,
                "kvpolicy": {"stop_ids": []},
            }
            answer = await http.post(PATH, json=body)
            assert answer.status_code == 200, answer.text
            return len(answer.content)

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


def served_s(served: Served, prompts: list[list[int]], num_tokens: int, *, stream: bool) -> Any:
    """Seconds of a server for all prompts: on the clock, of its processor, of the clients'."""
    began, cpu, own = time.perf_counter(), served.cpu_s(), time.process_time()
    asyncio.run(ask(served.url, prompts, num_tokens, stream=stream))
    elapsed = time.perf_counter() - began
    return elapsed, served.cpu_s() - cpu, time.process_time() - own


def engine_s(engine: Engine, prompts: list[list[int]], num_tokens: int) -> Any:
    """Seconds of the engine alone: on the clock, and of the processor."""
    began, cpu = time.perf_counter(), time.process_time()
    requests = [Request(prompt, num_tokens, stop_ids=()) for prompt in prompts]
    results = engine.generate(requests).results()
    assert all(len(result.tokens) == num_tokens for result in results)
    return time.perf_counter() - began, time.process_time() - cpu, 0.0


def measure(shape: str, *, slots: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Run all rounds, and return their figures."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    high = SHAPES[shape].vocab_size
    prompts = torch.randint(high, (slots, 32), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "model"
        save(shape, folder, 32 + num_tokens)
        from kvpolicy import load_model

        model, tokenizer = load_model(folder)
        plan = Plan.uniform(POLICY, budget=BUDGET, buffer=BUFFER)
        engine = Engine(model, tokenizer, plan, slots=slots)
        options = ["--model", str(folder), "--policy", POLICY]
        options += ["--budget", str(BUDGET), "--buffer", str(BUFFER)]
        with server(slots, options) as served:
            jobs = {
                "engine": lambda: engine_s(engine, prompts, num_tokens),
                "whole": lambda: served_s(served, prompts, num_tokens, stream=False),
                "stream": lambda: served_s(served, prompts, num_tokens, stream=True),
            }
            for job in jobs.values():  # to warm up
                job()
            times: dict[str, list[Any]] = {name: [] for name in jobs}
            names = [*jobs]
            for number in range(rounds):
                for name in names[number % 3 :] + names[: number % 3]:
                    times[name].append(jobs[name]())
    tokens = slots * num_tokens
    found: dict[str, Any] = {"shape": shape, "slots": slots, "tokens": tokens, "rounds": rounds}
    for name, seconds in times.items():
        clock, cpu, clients = (median(column) for column in zip(*seconds, strict=True))
        found[name] = {"tokens_per_s": tokens / clock, "cpu_s": cpu, "clients_cpu_s": clients}
    return found


def table(found: dict[str, Any]) -> str:
    """The figures as a table of Markdown."""
    alone = found["engine"]
    lines = ["| | tokens/s | of the engine | processor time | of the engine | clients |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for name, words in (
        ("engine", "`Engine.generate`"),
        ("whole", "server, whole answers"),
        ("stream", "server, streams"),
    ):
        one = found[name]
        rate, cpu = one["tokens_per_s"], one["cpu_s"]
        lines.append(
            f"| {words} | {rate:.1f} | {rate / alone['tokens_per_s']:.2f} | {cpu:.2f} s "
            f"| {cpu / alone['cpu_s']:.2f} | {one['clients_cpu_s']:.2f} s |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure what the command line asks for, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[*SHAPES], default="100m")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given.shape, slots=given.slots, num_tokens=given.tokens, rounds=given.rounds)
    print(table(found))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
