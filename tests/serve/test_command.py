"""``kvpolicy serve`` as a user starts and stops it."""

import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest
from served_command import served_command
from serving import plans_of, serving
from shell import Shell, refusal
from tiny import tiny_model, tiny_tokenizer

from kvpolicy.serve import command
from kvpolicy.serve.command import KEYS
from kvpolicy.serve.example import example_completion, example_request

KEY = "s3cret-key"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.needs_reasoner
def test_without_options_the_bundled_reasoner_is_served_and_the_line_to_try_works(
    tmp_path: Path,
) -> None:
    with served_command(tmp_path, "--log-format", "json") as served:
        assert served.out[0].startswith("reasoner is served at http://127.0.0.1:")
        assert "8 sequences of 2,048 tokens" in served.out[1]
        if shutil.which("curl"):
            done = subprocess.run(
                ["bash", "-c", f"{served.curl} -sS"], capture_output=True, text=True, check=True
            )
            answer: Any = json.loads(done.stdout)
            assert "\\boxed{" in answer["choices"][0]["message"]["content"]
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["usage"]["kvpolicy"]["rows_evicted"] > 0, "the default plan evicts"
        with served.http() as http:
            chat = {"role": "user", "content": "oak is 9. fig = oak - 2. What is fig?"}
            body = {"model": "reasoner", "messages": [chat], "max_tokens": 200}
            answer = http.post("/v1/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"].endswith("\\boxed{7}")
        assert served.end() == 0
        events = [json.loads(line) for line in served.log]
        assert events[-1]["event"] == "stopping"
        assert {event["event"] for event in events[:-1]} == {"request"}


@pytest.mark.slow
def test_the_example_does_not_cut_its_own_answer_off() -> None:
    with serving(plans_of(full=0)) as running:
        path, body = example_request(running.model)
        assert path == "/v1/chat/completions"
        assert "max_tokens" not in body, "what is left is the default of chats"
        with running.http() as http:
            assert http.post(path, json=body).status_code == 200
        running.model.tokenizer.chat_template = None
        path, body = example_request(running.model)
        assert (path, "max_tokens" in body) == ("/v1/completions", False)


@pytest.mark.needs_reasoner
def test_an_example_completion_of_a_problem_has_room_for_its_answer() -> None:
    _, body = example_completion("reasoner")
    assert body["max_tokens"] > 428, "tokens of the answer under the full cache"
    assert example_completion("reasoner", 64)[1]["max_tokens"] == 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a user has it, with two plans beside."""
    base = tmp_path_factory.mktemp("serve")
    tiny_model().save_pretrained(base / "mine")
    tiny_tokenizer().save_pretrained(base / "mine")
    for name, policy in (("small", "h2o"), ("other", "rkv")):
        (base / f"{name}.toml").write_text(f'stack = ["{policy}"]\nbudget = 16\nbuffer = 8\n')
    return base


@pytest.mark.nightly
def test_a_folder_is_served_by_its_name_under_plans_of_files_and_policies(
    folder: Path, tmp_path: Path
) -> None:
    env = {KEYS: f"other-key {KEY}"}
    options: tuple[object, ...] = ("--plan", f"first={folder}/small.toml")
    options += ("--plan", folder / "other.toml")
    options = ("--model", folder / "mine", *options, "--slots", 3)
    with served_command(tmp_path, *options, env=env) as served:
        with served.http() as http:
            assert http.get("/v1/models").status_code == 401
        with served.http(headers={"Authorization": f"Bearer {KEY}"}) as http:
            models = http.get("/v1/models").json()["data"]
            assert [one["id"] for one in models] == ["mine", "mine:first", "mine:other"]
            assert models[0]["kvpolicy"] == models[1]["kvpolicy"]
            assert models[0]["kvpolicy"]["slots"] == 3
            body = {"model": "mine:other", "prompt": "a", "max_tokens": 3}
            assert http.post("/v1/completions", json=body).status_code == 200
        assert f'"Authorization: Bearer ${KEYS}"' in served.curl
        text = "\n".join([*served.out, *served.log])
        assert KEY not in text
        assert str(folder) not in text
        assert served.end(signal.SIGINT) == 0


LONG = {"model": "mine", "prompt": "a", "max_tokens": 400, "stream": True}


@pytest.mark.nightly
def test_a_request_that_runs_when_the_server_is_told_to_stop_is_answered(
    folder: Path, tmp_path: Path
) -> None:
    options = ("--model", folder / "mine", "--policy", "h2o", "--budget", 16)
    with served_command(tmp_path, *options) as served, served.http() as http:
        with http.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.send(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert served.wait() == 0


@pytest.mark.slow
def test_a_killed_server_breaks_its_streams_and_serves_at_once_when_it_is_started_again(
    folder: Path, tmp_path: Path
) -> None:
    options = ("--model", folder / "mine", "--log-format", "json")
    with served_command(tmp_path, *options) as served, served.http() as http:
        port = int(served.url.rsplit(":", 1)[1])
        with http.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.child.kill()
            with pytest.raises(httpx2.RemoteProtocolError):
                list(lines)
    with served_command(tmp_path, *options, port=port) as again, again.http() as http:
        answer = http.post("/v1/completions", json={**LONG, "stream": False})
        assert answer.json()["usage"]["completion_tokens"] == 400
        assert again.end() == 0
        assert json.loads(again.log[-1])["event"] == "stopping"


# What the sentence names.
REFUSED: dict[str, str] = {
    "--slots 2 --kv-memory 1GiB": "--kv-memory",
    "--kv-memory 8G": "'8G'",
    "--max-body 0B": "'0B'",
    "--plan none.toml": "none.toml",
    "--plan a=small.toml --plan a=other.toml": "'a'",
    "--plan small.toml --plan small.toml": "'small'",
    "--plan ./a/b/small": "name",
    "--plan a=small.toml --policy h2o": "--policy",
    "--policy h2o": "budget",
    "--budget 9": "--budget 9",
    "--api-key é": "key",
    "--host no.such.host.example": "'no.such.host.example'",
    "--host 203.0.113.1": "'203.0.113.1'",
    "--model none": "'none'",
    "--port 70000": "--port",
    "--model mine --plan small.toml --kv-memory 1kB": "kv_memory",
    "--model mine --plan small.toml --device nothing": "'nothing'",
}


def test_what_cannot_be_served_is_refused_in_one_sentence(
    kvpolicy: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    wrong = {}
    for options, named in REFUSED.items():
        given = options.split()
        model = [] if "--model" in given else ["--model", "mine"]
        port = [] if "--port" in given else ["--port", "0"]
        sentence = refusal(kvpolicy("serve", *model, *port, *given))
        if named not in sentence:
            wrong[options] = sentence
    assert not wrong


def test_a_port_that_is_taken_is_found_before_the_model_is_loaded(kvpolicy: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = refusal(kvpolicy("serve", "--model", "mine/none", "--port", port))
    assert f"port {port}" in sentence


@pytest.mark.needs_reasoner
def test_without_the_extra_the_command_names_it(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert "uvicorn" in refusal(kvpolicy("serve"))


def test_a_server_for_everybody_is_warned_of(
    kvpolicy: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy.serve.launch.serve_model", lambda *_: 0)
    monkeypatch.delenv(KEYS, raising=False)
    given = ("serve", "--model", folder / "mine", "--policy", "full", "--port", 0)
    assert "everybody" in kvpolicy(*given, "--host", "0.0.0.0").err
    assert "everybody" not in kvpolicy(*given).err
    assert "everybody" not in kvpolicy(*given, "--host", "0.0.0.0", "--api-key", KEY).err


def test_requests_that_were_cancelled_at_the_end_are_told_by_the_status(
    kvpolicy: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy.serve.launch.serve_model", lambda *_: 2)
    given = ("serve", "--model", folder / "mine", "--policy", "full", "--port", 0)
    assert kvpolicy(*given).status == 1
