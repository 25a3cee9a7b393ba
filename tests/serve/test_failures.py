"""What an operator sees of policies that fail and engines that break."""

import io
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import BODY, Running, break_engine, plans_of, serving, until

from kvpolicy.hooks import discovery

SECRET = "xq7zw"  # in what a policy or a library raises; it could be a part of a prompt
LONG = {"model": "tiny:failing", "prompt": "a" * 40}  # is compacted
PLANS = plans_of(full=0, failing=12)

POLICY = """
from torch import Tensor
from kvpolicy import hookimpl

class Failing:
    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        {fail}
"""


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    return tmp_path / "failing.py"


def install(file: Path, fail: str) -> None:
    """Make a policy `failing` that does something in `score`."""
    file.write_text(POLICY.format(fail=fail))
    discovery.load_policy_file(file)


def events(lines: io.StringIO, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    return [one for one in found if one["event"] == name]


def answers(running: Running) -> dict[str, tuple[int, dict[str, Any]]]:
    """Status and body of what tells health, none of which needs a key."""
    with running.http() as http:
        found = {name: http.get(f"/health/{name}") for name in ("live", "ready")}
    return {name: (answer.status_code, answer.json()) for name, answer in found.items()}


# An engine that breaks


def test_a_server_with_a_broken_engine_is_not_live_before_any_request(lines: io.StringIO) -> None:
    with serving(plans_of(full=0, h2o=12), api_keys=("key",)) as running:
        assert answers(running) == {"live": (200, {"live": True}), "ready": (200, {"ready": True})}
        running.wait_for(break_engine(running.model.plans[1], RuntimeError(SECRET)))
        until(lambda: running.health() == (503, 503))
        why = (
            "the engine of plan 'h2o' has broken: RuntimeError; the process must be started again."
        )
        assert answers(running) == {
            "live": (503, {"live": False, "problem": why}),
            "ready": (503, {"ready": False, "problem": why}),
        }
        until(lambda: events(lines, "engine_broken"))
        # Requests of other plans are served; those of this one are refused, and change nothing.
        client = running.client(api_key="key")
        assert client.completions.create(**BODY).usage is not None
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**{**BODY, "model": "tiny:h2o"})
        assert caught.value.status_code == 503
        assert running.health() == (503, 503)
    (broken,) = events(lines, "engine_broken")
    assert (broken["level"], broken["plan"], broken["error"]) == ("error", "h2o", "RuntimeError")
    assert broken["message"] == why.removesuffix(".")
    assert "serving.py" in broken["at"][-1], "where it was raised"
    assert SECRET not in lines.getvalue()


def test_a_lack_of_memory_in_a_policy_breaks_the_engine_and_names_it(
    lines: io.StringIO, policy_file: Path
) -> None:
    install(policy_file, f"raise MemoryError({SECRET!r})")
    with serving(PLANS) as running:
        stream = running.client().completions.create(**LONG, stream=True)
        with pytest.raises(openai.APIError, match="MemoryError"):
            list(stream)
        status, body = answers(running)["live"]
        assert status == 503
        until(lambda: events(lines, "request"))
    (broken,) = events(lines, "engine_broken")
    what = "policy 'failing' raised MemoryError in score() at layer 0"
    assert what in broken["message"]
    assert what in body["problem"]
    assert broken["error"] == "MemoryError"
    assert broken["at"][-1].startswith(f"{policy_file}:")
    assert not events(lines, "hook_failed")
    assert SECRET not in lines.getvalue() + str(body)


def test_a_server_that_shuts_down_is_live_and_says_why_it_is_not_ready() -> None:
    with serving(slots=1) as running, running.gate.closed():
        running.client().completions.create(**BODY, stream=True)
        running.server.stop()
        until(lambda: running.health() == (200, 503))
        why = {"ready": False, "problem": "the server is shutting down."}
        assert answers(running)["ready"] == (503, why)


# A policy that fails


def test_a_failing_hook_call_is_one_line_with_the_requests_that_it_ended(
    lines: io.StringIO, policy_file: Path
) -> None:
    install(policy_file, f"raise ValueError({SECRET!r})")
    with serving(PLANS, slots=4) as running:
        client = running.client()
        with running.gates["failing"].closed():
            streams = [
                client.completions.create(
                    **LONG, n=n, stream=True, extra_headers={"X-Request-Id": name}
                )
                for name, n in (("one", 1), ("two", 2))
            ]
        for stream in streams:
            # The client is told everything: it is its own request.
            with pytest.raises(openai.APIError, match=f"in score.. at layer 0: {SECRET}"):
                list(stream)
        until(lambda: len(events(lines, "request")) == 2)
        assert running.health() == (200, 200)
    (call,) = events(lines, "hook_failed")  # for three choices
    del call["time"]
    assert call.pop("at")[-1].startswith(f"{policy_file}:")
    assert call == {
        "level": "warning",
        "event": "hook_failed",
        "plan": "failing",
        "request_ids": ["one", "two"],
        "policy": "failing",
        "hook": "score",
        "layer": 0,
        "message": "policy 'failing' raised ValueError in score() at layer 0",
        "error": "ValueError",
    }
    requests = [one for one in events(lines, "request") if one["method"] == "POST"]
    assert [one["outcome"] for one in requests] == ["failed", "failed"]
    assert SECRET not in lines.getvalue()


def test_an_answer_that_breaks_the_contract_is_logged_without_it(
    lines: io.StringIO, policy_file: Path
) -> None:
    install(policy_file, f"return {SECRET!r}")
    with serving(PLANS) as running:
        headers = {"X-Request-Id": "one"}
        with pytest.raises(openai.InternalServerError, match="'failing'"):
            running.client().completions.create(**LONG, n=2, extra_headers=headers)
        until(lambda: events(lines, "request"))
    (call,) = events(lines, "hook_failed")
    assert call["request_ids"] == ["one"]
    assert call["message"] == "policy 'failing' gave an invalid answer in score() at layer 0"
    assert call["error"] == "HookResultError"
    assert SECRET not in lines.getvalue()
