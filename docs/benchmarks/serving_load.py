"""Load on a server: many clients, some of which go away or send nonsense; nobody may be forgotten.

    python docs/benchmarks/serving_load.py                      # 64 clients, five minutes
    python docs/benchmarks/serving_load.py --seconds 20 --json load.json

Starts ``kvpolicy serve`` with the bundled reasoner on a free port of the loopback interface. Each
client sends one request after the other: problems of several lengths, asked for in streams and
whole answers. A tenth is cancelled after some tokens, and a tenth is malformed. Every request must
be answered once, the server must count as many of each kind as the clients, and its memory must
stay flat. Some answers are generated again afterwards by `Engine.generate` alone, and must have
the same tokens.

Prints a table; with --json, writes the figures to a file.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx2
import numpy as np
import torch
from kvpolicy_reasoner.task import make_problems
from prometheus_client.parser import text_string_to_metric_families

from kvpolicy import Engine, Plan, Request, Sampling, load_model

PATH = "/v1/completions"
MODEL = "reasoner"
PLAN = "reasoner-mix"
LENGTHS = (8, 32, 100, 250)  # of answers
MALFORMED: list[bytes] = [
    b"{",
    b'{"model": "reasoner"}',
    b'{"model": "none", "prompt": "a"}',
    b'{"model": "reasoner", "prompt": "a", "max_tokens": -1}',
    b'{"model": "reasoner", "prompt": "a", "tools": [{}]}',
    b'{"model": "reasoner", "prompt": "\\ud800"}',
    b'{"model": "reasoner", "prompt": "' + b" tea" * 3000 + b'"}',
    b"[" * 5000,
]
PATIENCE_S = 120.0


@attrs.frozen
class Job:
    """One request of a client.

    Attributes:
        kind: ``"stream"``, ``"whole"``, ``"cancelled"`` or ``"malformed"``.
        prompt: The prompt.
        num_tokens: The most tokens of the answer.
        temperature: 0 or above.
        seed: Seed of the answer.
        content: The body, if it is malformed.
    """

    kind: str
    prompt: str = ""
    num_tokens: int = 1
    temperature: float = 0.0
    seed: int = 0
    content: bytes = b""

    def body(self) -> dict[str, Any]:
        """The body of the request."""
        return {
            "model": MODEL,
            "prompt": self.prompt,
            "max_tokens": self.num_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": self.kind != "whole",
            "kvpolicy": {"token_ids": True},
        }


@attrs.define
class Load:
    """What the clients have seen.

    Attributes:
        sent: Requests by kind.
        answered: Requests by what came of them.
        first_token_s: Seconds to the first token of each stream.
        per_token_s: Seconds for each further token, in the mean of a stream.
        tokens: Tokens of answers.
        drawn: Requests with whole answers, and their tokens.
        problems: What must not happen.
    """

    sent: Counter[str] = attrs.field(factory=Counter)
    answered: Counter[str] = attrs.field(factory=Counter)
    first_token_s: list[float] = attrs.field(factory=list)
    per_token_s: list[float] = attrs.field(factory=list)
    tokens: int = 0
    drawn: list[tuple[Job, list[int]]] = attrs.field(factory=list)
    problems: list[str] = attrs.field(factory=list)


def draw(rng: random.Random, prompts: Sequence[str]) -> Job:
    """The next request of a client."""
    chance = rng.random()
    if chance < 0.1:
        return Job("malformed", content=rng.choice(MALFORMED))
    kind = "cancelled" if chance < 0.2 else rng.choice(("stream", "whole"))
    temperature = rng.choice((0.0, 0.0, 0.8))
    length = rng.choice(LENGTHS)
    return Job(kind, rng.choice(prompts), length, temperature, rng.randrange(2**31))


async def client(
    http: httpx2.AsyncClient, number: int, until: float, prompts: Sequence[str], load: Load
) -> None:
    """Send one request after the other until a time."""
    rng = random.Random(number)
    while time.monotonic() < until:
        job = draw(rng, prompts)
        load.sent[job.kind] += 1
        try:
            await send(http, job, load, rng)
        except httpx2.HTTPError as error:
            load.problems.append(f"{job.kind}: {type(error).__name__} {error}")


async def send(http: httpx2.AsyncClient, job: Job, load: Load, rng: random.Random) -> None:
    """Send one request, and check what comes."""
    if job.kind == "malformed":
        headers = {"Content-Type": "application/json"}
        answer = await http.post(PATH, content=job.content, headers=headers)
        is_error = answer.status_code in (400, 404) and answer.json().keys() == {"error"}
        note(load, "refused" if is_error else f"malformed got {answer.status_code}")
        return
    if job.kind == "whole":
        answer = await http.post(PATH, json=job.body())
        if answer.status_code != 200:
            note(load, f"whole got {answer.status_code}")
            return
        (choice,) = answer.json()["choices"]
        finish(load, job, choice["token_ids"])
        return
    leaves_at = rng.randrange(1, 20) if job.kind == "cancelled" else None
    began = time.monotonic()
    async with http.stream("POST", PATH, json=job.body()) as answer:
        if answer.status_code != 200:
            note(load, f"stream got {answer.status_code}")
            return
        tokens: list[int] = []
        first = last = began
        ends = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ends += 1
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            came = choice.get("token_ids", [])
            if came:
                first = time.monotonic() if not tokens else first
                last = time.monotonic()
                tokens += came
            if leaves_at is not None and len(tokens) >= leaves_at:
                note(load, "left")
                return
    if ends != 1:
        note(load, f"stream ended {ends} times")
        return
    load.first_token_s.append(first - began)
    if len(tokens) > 1:
        load.per_token_s.append((last - first) / (len(tokens) - 1))
    finish(load, job, tokens)


def finish(load: Load, job: Job, tokens: list[int]) -> None:
    """Count an answer."""
    note(load, "answered")
    load.tokens += len(tokens)
    load.drawn.append((job, tokens))


def note(load: Load, what: str) -> None:
    """Count what came of a request."""
    load.answered[what] += 1
    if what not in ("answered", "refused", "left"):
        load.problems.append(what)


@attrs.define(eq=False)
class Served:
    """A server in a process of its own.

    Attributes:
        process: The process.
        url: Its address.
        rss: Its resident memory so far, in bytes, once a second.
    """

    process: "subprocess.Popen[str]"
    url: str
    rss: list[int] = attrs.field(factory=list)

    def cpu_s(self) -> float:
        """Processor time of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def watch(self) -> None:
        """Note the resident memory once a second."""
        while True:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            self.rss.append(pages * os.sysconf("SC_PAGE_SIZE"))
            await asyncio.sleep(1)


@contextmanager
def server(slots: int, options: Sequence[str] = ("--plan", PLAN)) -> Iterator[Served]:
    """Run a server until the block ends; it must end well."""
    command = [sys.executable, "-m", "kvpolicy", "serve", "--port", "0", *options]
    command += ["--slots", str(slots), "--max-waiting", "1000", "--log-format", "json"]
    # For so small a model, a second thread costs time.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": env}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stderr=log, **pipes) as process,
    ):
        try:
            assert process.stdout is not None
            yield Served(process, process.stdout.readline().split()[-1])
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0, "the server has not ended well"


async def run(served: Served, clients: int, seconds: float) -> tuple[Load, dict[str, float]]:
    """Let clients send requests for a time."""
    load = Load()
    prompts = [problem.prompt for problem in make_problems(200, seed=5)]
    limits = httpx2.Limits(max_connections=clients)
    async with httpx2.AsyncClient(
        base_url=served.url, timeout=PATIENCE_S, limits=limits, trust_env=False
    ) as http:
        watching = asyncio.create_task(served.watch())
        until = time.monotonic() + seconds
        await asyncio.gather(
            *(client(http, number, until, prompts, load) for number in range(clients))
        )
        metrics = await settled(http)
        watching.cancel()
    return load, metrics


async def settled(http: httpx2.AsyncClient) -> dict[str, float]:
    """Requests by outcome as the server counts them, once nothing runs any more."""
    for _ in range(100):
        text = (await http.get("/metrics")).text
        samples = [one for fam in text_string_to_metric_families(text) for one in fam.samples]
        if not any(
            one.value
            for one in samples
            if one.name in ("kvpolicy_requests_running", "kvpolicy_requests_waiting")
        ):
            break
        await asyncio.sleep(0.1)
    found: Counter[str] = Counter()
    for one in samples:
        if one.name == "kvpolicy_requests_total":
            found[one.labels["outcome"]] += int(one.value)
    return dict(found)


def compare(load: Load, num: int) -> int:
    """Generate some answers again, alone; how many were compared. Differences are problems."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(MODEL)
    engine = Engine(model, tokenizer, Plan.load(Path(PLAN)), slots=1)
    drawn = random.Random(0).sample(load.drawn, min(num, len(load.drawn)))
    for job, tokens in drawn:
        sampling = Sampling(temperature=job.temperature, seed=job.seed)
        (alone,) = engine.generate([Request(job.prompt, job.num_tokens, sampling)]).results()
        if list(alone.tokens) != tokens:
            load.problems.append(f"tokens of {job} differ from those alone")
    return len(drawn)


def figures(
    load: Load, served: Served, counted: dict[str, float], seconds: float, cpu: tuple[float, float]
) -> dict[str, Any]:
    """What was measured, as plain data."""
    third = max(len(served.rss) // 3, 1)
    tokens_s = load.tokens / seconds
    return {
        "seconds": seconds,
        "sent": dict(load.sent),
        "came": dict(load.answered),
        "counted_by_server": counted,
        "tokens_per_s": tokens_s,
        "first_token_s": quantiles(load.first_token_s),
        "per_token_s": quantiles(load.per_token_s),
        "rss_mib": {
            "after_a_third": mean_mib(served.rss[third : 2 * third]),
            "at_the_end": mean_mib(served.rss[-third:]),
            "most": max(served.rss) / 2**20,
        },
        "server_cpu_s": cpu[0],
        "clients_cpu_s": cpu[1],
        "problems": load.problems,
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    p50, p95 = np.percentile(seconds, [50, 95]).tolist()
    return {"p50": p50, "p95": p95}


def mean_mib(sizes: Sequence[int]) -> float:
    """A mean of bytes, in MiB."""
    return float(np.mean(sizes)) / 2**20 if sizes else 0.0


def check(found: dict[str, Any]) -> None:
    """Add to the problems what the figures show."""
    sent, came, counted = found["sent"], found["came"], found["counted_by_server"]
    if sum(sent.values()) != sum(came.values()):
        found["problems"].append(f"{sum(sent.values())} sent, {sum(came.values())} came")
    if counted.get("invalid", 0) != came.get("refused", 0):
        found["problems"].append("the server has counted other numbers of malformed requests")
    # A client that leaves may have been sent everything already.
    left = came.get("left", 0)
    ended = counted.get("completed", 0) + counted.get("cancelled", 0)
    if ended != came.get("answered", 0) + left or counted.get("cancelled", 0) > left:
        found["problems"].append("the server has counted other numbers of answers")


def table(found: dict[str, Any]) -> str:
    """The figures as a table of Markdown."""
    sent, came, rss = found["sent"], found["came"], found["rss_mib"]
    first, token = found["first_token_s"], found["per_token_s"]
    rows = [
        ("requests sent", f"{sum(sent.values()):,}"),
        ("answered / cancelled / malformed", " / ".join(f"{came.get(k, 0):,}" for k in KINDS)),
        ("tokens per second", f"{found['tokens_per_s']:.0f}"),
        ("first token, p50 / p95", f"{first['p50']:.2f} s / {first['p95']:.2f} s"),
        ("each further token, p50 / p95", f"{token['p50']:.4f} s / {token['p95']:.4f} s"),
        (
            "resident memory in the second third, in the last, most",
            f"{rss['after_a_third']:.0f} / {rss['at_the_end']:.0f} / {rss['most']:.0f} MiB",
        ),
        (
            "processor time of server / clients",
            f"{found['server_cpu_s']:.0f} s / {found['clients_cpu_s']:.0f} s",
        ),
        ("compared with the engine alone", f"{found['compared']}"),
        ("problems", f"{len(found['problems'])}"),
    ]
    return "\n".join(["| | |", "|---|--:|", *(f"| {name} | {value} |" for name, value in rows)])


KINDS = ("answered", "left", "refused")


def measure(clients: int, seconds: float, *, slots: int = 8, compared: int = 200) -> dict[str, Any]:
    """Run the load, and return its figures."""
    with server(slots) as served:
        before = served.cpu_s()
        used = resource.getrusage(resource.RUSAGE_SELF)
        began = time.monotonic()
        load, counted = asyncio.run(run(served, clients, seconds))
        elapsed = time.monotonic() - began
        now = resource.getrusage(resource.RUSAGE_SELF)
        own = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        found = figures(load, served, counted, elapsed, (served.cpu_s() - before, own))
    check(found)
    found["compared"] = compare(load, compared)
    return found


def main() -> int:
    """Run the load of the command line, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--compare", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given.clients, given.seconds, slots=given.slots, compared=given.compare)
    print(table(found))
    for problem in found["problems"][:10]:
        print(problem)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2))
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
