"""Servers beside the engine alone: `docs/benchmarks/serving_throughput.py` and its processes."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import psutil
import pytest
from scripts import load_script
from transformers import AutoTokenizer

from kvpolicy import Plan, Request
from kvpolicy.errors import KVPolicyError

SCRIPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "serving_throughput.py"
# Echoes lines after it has used some processor time.
WORKER = """
import json, os, sys, time
for line in sys.stdin:
    ends_at = time.process_time() + 0.2
    while time.process_time() < ends_at: pass
    cores = sorted(os.sched_getaffinity(0))
    print(json.dumps({"got": json.loads(line), "cores": cores}), flush=True)
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/serving_throughput.py")


@pytest.fixture(scope="module")
def clients() -> ModuleType:
    return load_script("benchmarks/serving_clients.py")


@pytest.fixture(scope="module")
def model(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    assert script.save_model(folder, script.QUICK) == 512
    return folder


# Requests


def test_rounds_differ_in_words_and_not_in_lengths(script: ModuleType, model: Path) -> None:
    load = script.QUICK
    rounds = [load.requests_of(number, 512) for number in range(3)]
    assert rounds[0] == load.requests_of(0, 512)
    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = [
        [(len(tokenizer(one["prompt"])["input_ids"]), one["max_tokens"]) for one in requests]
        for requests in rounds
    ]
    assert sizes[0] == sizes[1] == sizes[2]
    assert len(set(sizes[0])) > 1
    for num_prompt, num_new in sizes[0]:
        assert load.prompt[0] <= num_prompt <= load.prompt[1]
        assert load.new[0] <= num_new <= load.new[1]
    prompts = [one["prompt"] for requests in rounds for one in requests]
    assert len(set(prompts)) == len(prompts)


def test_every_token_is_a_word_and_none_ends_a_text(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = list(range(len(tokenizer)))
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(text.split()) == len(tokens) == 512
    assert tokenizer(text)["input_ids"] == tokens
    assert tokenizer.eos_token is None
    for name in ("config.json", "generation_config.json"):
        assert json.loads((model / name).read_text()).get("eos_token_id") is None


# The engine


def test_the_engine_gives_each_token_a_time_and_the_tokens_of_each_request_alone(
    script: ModuleType, model: Path, tmp_path: Path
) -> None:
    engine_script = load_script("benchmarks/serving_engine.py")
    plan = script.plan_files([], script.PLANS, tmp_path)["full"]
    engine = engine_script.load(str(model), plan, slots=2, cpu_weights="plain")
    requests = script.QUICK.requests_of(0, 512)
    found = engine_script.generate(engine, requests)
    assert len(found["answers"]) == len(requests)
    tokens = set()
    for request, answer in zip(requests, found["answers"], strict=True):
        (alone,) = engine.generate([Request(request["prompt"], request["max_tokens"])]).results()
        assert answer["text"] == alone.text
        tokens |= {*alone.tokens}
        assert len(answer["times"]) == request["max_tokens"] == len(alone.tokens)
        assert answer["times"] == sorted(answer["times"])
        assert answer["times"][-1] <= found["elapsed_s"]
    assert len(tokens) > 2 * len(requests), "answers repeat their tokens"


# Clients


class Handler(BaseHTTPRequestHandler):
    """A server that answers with as many words as are wanted, the first two in one piece.

    The prompt ``refused`` is refused, and that of ``broken`` gets one word and an error.
    """

    lock = threading.Lock()
    running = most_running = 0
    prompts: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions"
        assert body["stream"] is True
        assert body["temperature"] == 0
        with self.lock:
            self.prompts.append(body["prompt"])
            Handler.running += 1
            Handler.most_running = max(Handler.running, Handler.most_running)
        time.sleep(0.02)
        refused = body["prompt"] == "refused"
        self.send_response(400 if refused else 200)
        self.send_header("Content-Type", "application/json" if refused else "text/event-stream")
        self.end_headers()
        if refused:
            self._write('{"error": {"message": "no"}}')
        elif body["prompt"] == "broken":
            self._event({"choices": [{"index": 0, "text": "w0"}]})
            self._event({"error": {"message": "it broke"}})
        else:
            words = [f" w{number}" for number in range(body["max_tokens"])]
            for piece in ["".join(words[:2]), *words[2:], ""]:
                self._event({"choices": [{"index": 0, "text": piece}]})
            self._event({"choices": [], "usage": {"completion_tokens": len(words)}})
            self._write("data: [DONE]\n\n")
        with self.lock:
            Handler.running -= 1

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _event(self, data: dict[str, Any]) -> None:
        self._write(f"data: {json.dumps({'id': 'x', 'object': 'text_completion', **data})}\n\n")

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        Handler.most_running = 0
        Handler.prompts.clear()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_clients_send_one_request_after_another_and_time_every_word(
    clients: ModuleType, url: str
) -> None:
    requests = [{"prompt": f"p{number}", "max_tokens": 3 + number} for number in range(8)]
    found = asyncio.run(clients.measure(url, "m", 3, requests))
    assert Handler.most_running == 3
    assert sorted(Handler.prompts) == [one["prompt"] for one in requests]
    for request, answer in zip(requests, found["answers"], strict=True):
        assert answer["error"] is None
        num_words = request["max_tokens"]
        assert answer["text"].split() == [f"w{number}" for number in range(num_words)]
        assert len(answer["times"]) == num_words
        assert answer["times"][0] == answer["times"][1]
        assert answer["sent_s"] < answer["times"][0] <= answer["times"][-1] <= found["elapsed_s"]


def test_clients_tell_errors_and_go_on(clients: ModuleType, url: str) -> None:
    requests = [{"prompt": prompt, "max_tokens": 4} for prompt in ("refused", "broken", "whole")]
    refused, broken, whole = asyncio.run(clients.measure(url, "m", 1, requests))["answers"]
    assert "no" in refused["error"]
    assert refused["times"] == []
    assert "it broke" in broken["error"]
    assert broken["text"] == "w0"
    assert whole["error"] is None
    assert len(whole["times"]) == 4


# Processes


@pytest.fixture
def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def test_a_process_runs_on_its_cores_and_is_measured_and_stopped(
    script: ModuleType, cores: list[int], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WORKER]
    child = script.Child(
        command, cores[:1], tmp_path / "worker.log", environment={}, is_server=False
    )
    try:
        assert sorted(os.sched_getaffinity(0)) == cores
        assert child.ask(word="é") == {"got": {"word": "é"}, "cores": cores[:1]}
        before = child.cpu_s
        child.ask()
        assert child.cpu_s - before >= 0.15  # counted in hundredths
        child.reset_peak()
        assert 2**20 < child.peak_bytes < 2**28
        (process,) = child._processes()
        child.stop()
        wait_until(process, is_stopped=True)
        child.resume()
        wait_until(process, is_stopped=False)
        child.check_running()
        child.stop()
    finally:
        child.close()
    assert not process.is_running()


def wait_until(process: psutil.Process, *, is_stopped: bool) -> None:
    """Wait until a signal has arrived."""
    ends_at = time.monotonic() + 10
    while (process.status() == psutil.STATUS_STOPPED) != is_stopped:
        assert time.monotonic() < ends_at, f"it is {process.status()}"


def test_a_process_that_ends_is_told_with_its_last_line(
    script: ModuleType, cores: list[int], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such thing')"]
    log = tmp_path / "a server.log"
    child = script.Child(command, cores, log, environment={}, is_server=True)
    message = "the process of a server has ended; its last line: no such thing"
    try:
        with pytest.raises(KVPolicyError, match=message):
            child.wait_until_healthy("http://127.0.0.1:9")
    finally:
        child.close()
    with pytest.raises(KVPolicyError, match="no-such-python"):
        script.Child(["no-such-python"], cores, log, environment={}, is_server=True)


def test_servers_and_clients_have_cores_of_their_own(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    assert script.choose_cores(None, None) == ([0, 1], [5])
    assert script.choose_cores([1, 5], None) == ([1, 5], [0])
    assert script.choose_cores(None, [0]) == ([1, 5], [0])
    for servers, those in (([0, 1, 5], None), ([0], [0]), ([7], [0])):
        with pytest.raises(KVPolicyError, match="--server-cores"):
            script.choose_cores(servers, those)


def test_plans_are_files_that_were_given_or_the_usual_ones(
    script: ModuleType, tmp_path: Path
) -> None:
    given = ["a.toml", "b=c.toml", "adakv"]
    expected = {"a": "a.toml", "b": "c.toml", "adakv": "adakv"}
    assert script.plan_files(given, script.PLANS, tmp_path) == expected
    files = script.plan_files([], script.PLANS, tmp_path)
    assert {name: Plan.load(Path(file)).budget for name, file in files.items()} == {
        "full": None,
        "snapkv": 128,
    }


# Results


def turn(script: ModuleType, number: int, name: str, elapsed_s: float, **changes: Any) -> Any:
    """Two answers of two tokens: the first after 10 ms, the second 30 ms later."""
    answer = script.Answer(1.0, [1.01, 1.04], "w1 w2", None)
    given = {
        "wanted": [2, 2],
        "answers": [answer, answer],
        "cpu_s": 0.5,
        "clients_cpu_s": None,
        "peak_bytes": 2**30,
    }
    return script.Turn(round=number, name=name, elapsed_s=elapsed_s, **(given | changes))


def test_a_server_is_compared_with_the_engine_of_its_round(script: ModuleType) -> None:
    turns = [
        turn(script, number, name, elapsed_s, clients_cpu_s=clients_cpu_s)
        for name, clients_cpu_s, elapsed in (
            ("engine", None, (1.0, 2.0, 4.0)),
            ("server", 0.25, (2.0, 2.0, 5.0)),
        )
        for number, elapsed_s in enumerate(elapsed)
    ]
    speeds, costs = script.tables(turns, {"engine": "engine", "server": "engine"}).split("\n\n")
    rows = cells(speeds)
    assert rows["engine"][:4] == ["2.0", "1.0", "-", "4.0"]
    assert rows["server"][:4] == ["2.0", "0.8", "-", "2.0"]
    assert rows["server"][4:8] == ["0.800", "0.500", "-", "1.000"]
    assert rows["server"][8:] == ["6", "of", "6"] * 2
    rows = cells(costs)
    times = ["10.0", "ms", "10.0", "ms", "30.0", "ms", "30.0", "ms"]
    assert rows["server"] == [*times, "0.5", "0.25", "1.0", "GiB"]
    assert rows["engine"][:2] == ["-", "-"]


def cells(table: str) -> dict[str, list[str]]:
    """The words of each row behind its name."""
    return {line.split()[0]: line.split()[1:] for line in table.splitlines()[2:]}


def test_wrong_answers_are_counted_and_told(script: ModuleType) -> None:
    short = script.Answer(0.0, [0.1], "w1", None)
    failed = script.Answer(0.0, [], "", "APIError: it broke")
    turns = [
        turn(script, 0, "engine", 1.0),
        turn(script, 0, "server", 1.0, answers=[short, failed], clients_cpu_s=0.1),
    ]
    speeds, _ = script.tables(turns, {"engine": "engine", "server": "engine"}).split("\n\n")
    assert cells(speeds)["server"][8:] == ["0", "of", "2"] * 2
    assert script.problems(turns) == [
        "server: 2 answers are wrong, the first one: 1 tokens where 2 were wanted"
    ]
    assert turns[1].tok_s == 1.0


@pytest.mark.nightly
def test_the_quick_benchmark_measures_the_server_beside_the_engine(tmp_path: Path) -> None:
    file, plot = tmp_path / "found.json", tmp_path / "plot.png"
    command = [sys.executable, SCRIPT, "--quick", "--json", file, "--plot", plot]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert len(found["turns"]) == 4
    assert "12 of 12" in done.stdout
    texts = {(one["round"], one["name"]): _texts(one) for one in found["turns"]}
    for number in range(2):
        alone = texts[number, "Engine.generate, full"]
        assert texts[number, "kvpolicy serve, full"] == alone
    assert plot.stat().st_size > 1000


def _texts(one: dict[str, Any]) -> list[str]:
    return [answer["text"] for answer in one["answers"]]
