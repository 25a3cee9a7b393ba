"""A server on a cluster of two nodes: one is killed, an engine breaks, replicas are updated."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import httpx2
import openai
import pytest
import torch
from folders import save_tiny_model
from sweeps_on_ray import PATIENCE_S, Nodes, needs_ray, wait_until

from kvpolicy import Engine, Plan
from kvpolicy.engine.requests.request import Request, Sampling
from kvpolicy.hooks import discovery
from kvpolicy.hooks.discovery import load_policy_file
from kvpolicy.model.loading import load_model

pytestmark = [pytest.mark.slow, needs_ray]

PROMPTS = [[5, 9, 40, 7], [3] * 20, [11, 12, 13, 14, 15], [8], [30, 20, 10] * 5, [2, 4, 6, 8]]
LENGTH = 60  # tokens of each answer
WITH_IDS: dict[str, Any] = {"extra_body": {"kvpolicy": {"token_ids": True}}}

SLOW = '''
import time
from pathlib import Path

import attrs
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False)
class Slow:
    """Keep the newest rows; be slow while a file exists, break the engine that finds another."""

    breaks: bool = False

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        if Path({file!r}).exists():
            time.sleep(0.03)
        if Path({breaking!r}).exists():
            Path({breaking!r}).unlink()
            self.breaks = True
        if self.breaks:
            raise MemoryError
        return positions.float()
'''


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In double precision, so that sampled tokens do not depend on what else is computed."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", torch.float64)


@attrs.define(eq=False)
class Served:
    """A server on the cluster.

    Attributes:
        folder: Has the policy and the plans.
        url: Address of the server.
        nodes: The cluster.
        model: The model's folder.
        process: The command.
    """

    folder: Path
    url: str
    nodes: Nodes
    model: Path
    process: "subprocess.Popen[str]"
    client: openai.OpenAI

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(f"{self.url}{path}", timeout=30, trust_env=False, verify=False)

    def replicas(self) -> dict[str, Any]:
        """What each replica that is ready does."""
        return self.get("/health").json().get("replicas", {})

    def metric(self, begin: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(begin))

    def be_slow(self) -> None:
        (self.folder / "slow").touch()

    def be_fast(self) -> None:
        (self.folder / "slow").unlink(missing_ok=True)


def command(folder: Path, model: Path, port: int, *more: object) -> list[str]:
    plugin, plan = folder / "slow.py", folder / "slow.toml"
    files = {"file": str(folder / "slow"), "breaking": str(folder / "breaking")}
    plugin.write_text(SLOW.format(**files), encoding="utf-8")
    plan.write_text('stack = ["slow"]\nbudget = 12\nbuffer = 4\n', encoding="utf-8")
    words = ["serve", "--model", model, "--plan", plan, "--plugin", plugin, "--port", port]
    return [sys.executable, "-m", "kvpolicy", *(str(word) for word in [*words, *more])]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, nodes: Nodes
) -> Iterator[Served]:
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    on_ray = ("--on", "ray", "--ray-address", nodes.address, "--replicas", 2)
    more = ("--slots", 4, "--prefix-cache", "4MiB", "--prefix-block", 4, *on_ray)
    with (folder / "err").open("w") as err:
        process = subprocess.Popen(
            command(folder, model_folder, port, *more, "--shutdown-timeout", 20),
            stdout=subprocess.PIPE,
            stderr=err,
            env=nodes.env,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert f"is served at http://127.0.0.1:{port}" in first, (folder / "err").read_text(
                "utf-8"
            )
            url = f"http://127.0.0.1:{port}"
            given = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S}
            with openai.OpenAI(base_url=f"{url}/v1", **given) as client:
                yield Served(folder, url, nodes, model_folder, process, client)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, (folder / "err").read_text("utf-8")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def sampling_of(number: int) -> dict[str, Any]:
    """Every other request is sampled, with a seed."""
    return {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}


@pytest.fixture(scope="module")
def expected(served: Served) -> list[tuple[int, ...]]:
    """Tokens of each request from an engine alone."""
    discovery.forget_files()
    load_policy_file(served.folder / "slow.py")
    model, tokenizer = load_model(str(served.model))
    engine = Engine(model, tokenizer, Plan.load(served.folder / "slow.toml"), slots=2)
    requests = [
        Request(PROMPTS[number % len(PROMPTS)], LENGTH, Sampling(**sampling_of(number)))
        for number in range(24)
    ]
    return [result.tokens for result in engine.generate(requests).results()]


def ask(served: Served, number: int, *, session: str | None = None, **more: Any) -> Any:
    headers = {} if session is None else {"X-Session-Id": session}
    return served.client.completions.with_raw_response.create(
        **{
            "model": served.model.name,
            "prompt": PROMPTS[number % len(PROMPTS)],
            "max_tokens": LENGTH,
            "extra_headers": headers,
            **WITH_IDS,
            **sampling_of(number),
            **more,
        }
    )


def tokens_of(served: Served, number: int, *, stream: bool) -> tuple[list[int], str | None]:
    """The tokens that a client gets, and the code of the error with which its stream ends."""
    if not stream:
        found = ask(served, number).parse()
        return list(found.choices[0].model_extra["token_ids"]), None
    tokens: list[int] = []
    try:
        for piece in ask(served, number, stream=True).parse():
            tokens += piece.choices[0].model_extra.get("token_ids", [])
    except openai.APIError as error:
        return tokens, error.code
    return tokens, None


def test_requests_of_a_session_go_to_one_replica_and_sessions_to_all(served: Served) -> None:
    by_session = defaultdict(set)
    for session in "abcdefghijkl":
        for number in range(3):
            answer = ask(served, number, session=session, max_tokens=2)
            by_session[session].add(answer.headers["x-kvpolicy-replica"])
    assert {len(replicas) for replicas in by_session.values()} == {1}
    assert set.union(*by_session.values()) == set(served.replicas())
    assert len(served.replicas()) == 2
    assert served.metric("kvpolicy_router_retries_total") == 0


def test_a_session_finds_in_its_replica_what_it_has_computed(served: Served) -> None:
    prompt = [7, 8] * 10  # more tokens than the plan has rows, and no other test's
    first, second = (ask(served, 0, prompt=prompt, session="again").parse() for _ in range(2))
    assert first.choices[0].model_extra["token_ids"] == second.choices[0].model_extra["token_ids"]
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 16


def test_with_a_node_killed_under_load_every_request_ends_once(
    served: Served, expected: list[tuple[int, ...]]
) -> None:
    wait_until(lambda: len(served.replicas()) == 2)
    assert tokens_of(served, 0, stream=False)[0] == list(expected[0])
    before = set(served.replicas())
    served.be_slow()

    def both_run() -> bool:
        found = served.replicas().values()
        running = [plan["running"] for one in found for plan in one["plans"].values()]
        return len(running) == 2 and min(running) >= 3

    with ThreadPoolExecutor(len(expected)) as clients:
        jobs = [
            clients.submit(tokens_of, served, number, stream=number % 3 == 0)
            for number in range(len(expected))
        ]
        wait_until(both_run)
        served.nodes.kill(1)
        served.be_fast()
        found = [job.result(PATIENCE_S) for job in jobs]
    codes = Counter(code for _, code in found)
    for number, (tokens, code) in enumerate(found):
        wanted = list(expected[number])
        assert tokens == (wanted if code is None else wanted[: len(tokens)])
        assert code is None or number % 3 == 0, "only streams that have begun may break"
    assert set(codes) <= {None, "replica_lost"}
    assert codes["replica_lost"] == served.metric("kvpolicy_router_broken_streams_total")
    assert served.metric('kvpolicy_router_retries_total{reason="lost"}') >= 1
    assert served.metric('kvpolicy_router_responses_total{status="5') == 0
    for session in "abcdef":  # also those of the lost replica
        assert ask(served, 0, session=session, max_tokens=2).headers["x-kvpolicy-replica"]
    wait_until(lambda: len(served.replicas()) == 2)
    assert len(set(served.replicas()) & before) == 1, "another one has taken its place"


@pytest.mark.nightly
def test_a_replica_whose_engine_has_broken_is_replaced(
    served: Served, expected: list[tuple[int, ...]]
) -> None:
    wait_until(lambda: len(served.replicas()) == 2)
    before = set(served.replicas())
    (served.folder / "breaking").touch()
    with pytest.raises(openai.InternalServerError, match="the engine has broken"):
        ask(served, 0)
    assert len(set(served.replicas()) & before) == 1, "it is not ready, before another request"
    for number in range(4):
        assert tokens_of(served, number, stream=False)[0] == list(expected[number])
    wait_until(lambda: len(served.replicas()) == 2)
    assert len(set(served.replicas()) & before) == 1, "another one has taken its place"


def one_request_at_a_time(served: Served, folder: Path) -> list[str | Path]:
    """The command that updates the deployment: each replica takes one request."""
    file, port = folder / "deployment.yaml", int(served.url.rpartition(":")[2])
    options = ("--slots", 1, "--replicas", 2, "--requests-per-replica", 1, "--max-waiting", 1)
    words = command(served.folder, served.model, port, "--write-deployment", file, *options)
    subprocess.run(words, check=True, capture_output=True, text=True)
    program = (sys.executable, "-m", "ray.serve.scripts", "run", str(file))
    return [*program, "--address", served.nodes.address, "--non-blocking"]


def update(served: Served, words: list[str | Path]) -> None:
    """Update the deployment, and wait until all replicas are new."""
    before = set(served.replicas())
    env = served.nodes.env
    subprocess.run(words, check=True, capture_output=True, env=env, timeout=PATIENCE_S)
    wait_until(lambda: len(served.replicas()) == 2 and not before & set(served.replicas()))


def slots_of(served: Served) -> int:
    slots: int = served.get("/v1/models").json()["data"][0]["kvpolicy"]["slots"]
    return slots


@pytest.mark.nightly
def test_an_updated_deployment_file_replaces_replicas_one_by_one_and_no_request_fails(
    served: Served, tmp_path: Path
) -> None:
    wait_until(lambda: len(served.replicas()) == 2)
    words = one_request_at_a_time(served, tmp_path)
    is_over, answered, failed = threading.Event(), [], []

    def keep_asking(number: int) -> None:
        while not is_over.is_set():
            try:
                answered.append(tokens_of(served, number, stream=False))
            except openai.APIError as error:
                failed.append(error)

    with ThreadPoolExecutor(2) as clients:
        jobs = [clients.submit(keep_asking, number) for number in range(2)]
        wait_until(lambda: len(answered) > 4)
        try:
            update(served, words)
        finally:
            is_over.set()
        for job in jobs:
            job.result()
    assert not failed
    assert {len(tokens) for tokens, _ in answered} == {LENGTH}
    assert slots_of(served) == 1


@pytest.mark.nightly
def test_when_all_replicas_and_the_queue_are_full_requests_are_refused(
    served: Served, tmp_path: Path
) -> None:
    if slots_of(served) != 1:
        update(served, one_request_at_a_time(served, tmp_path))
    served.be_slow()
    with ThreadPoolExecutor(8) as clients:
        jobs = [clients.submit(tokens_of, served, number, stream=False) for number in range(8)]
        errors = [error for job in jobs if (error := job.exception(PATIENCE_S)) is not None]
    served.be_fast()
    assert 1 <= len(errors) <= 6
    for error in errors:
        assert isinstance(error, openai.RateLimitError)
        assert int(error.response.headers["retry-after"]) >= 1
        assert error.code == "queue_full"
    patient = served.client.with_options(max_retries=9)
    asked = {"model": served.model.name, "prompt": [3], "max_tokens": 2}
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda _: patient.completions.create(**asked), range(8)))
    assert all(one.usage.completion_tokens == 2 for one in found)
