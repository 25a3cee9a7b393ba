"""Clients that go away, queues that are full, and requests that take too long."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from serving import PATIENCE_S, Running, connection, plans_of, post_of, serving, until

from kvpolicy.serve.generation import PING_S

LONG = {"model": "tiny", "prompt": "a", "max_tokens": 500}


def outcomes(running: Running) -> dict[str, int]:
    """Requests by outcome, as the metrics have them."""
    with running.http() as http:
        lines = http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("kvpolicy_requests_total{")]
    return {
        line.split('outcome="')[1].split('"')[0]: int(float(line.split()[-1])) for line in found
    }


def until_all_are_gone(running: Running) -> None:
    """Wait until the server knows that its clients have gone, and has acted on it."""
    until(lambda: not running.server.server_state.connections)
    running.skip(0)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_when_its_client_goes_away(stream: bool) -> None:
    with serving() as running:
        with running.http() as http:
            if stream:
                running.gate.close(after=3)
                with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as got:
                    next(got.iter_lines())
                    assert running.plan.stats.report.num_requests == 0
            else:
                with connection(running) as sock:
                    running.gate.close()
                    sock.sendall(post_of(LONG))
                    until(lambda: running.num_open() == 1)
        until_all_are_gone(running)
        running.gate.open()
        until(running.idle)
        until(lambda: running.plan.stats.report.num_requests == 1)
        assert running.plan.stats.report.new_tokens <= 4
        until(lambda: outcomes(running) == {"cancelled": 1})


def test_the_stream_of_the_client_cancels_when_it_is_closed() -> None:
    with serving() as running:
        with running.gate.closed(after=3):
            stream = running.client().completions.create(**LONG, stream=True)
            next(iter(stream))
            stream.close()
            until_all_are_gone(running)
        until(running.idle)
        assert running.plan.stats.report.new_tokens <= 4


def test_all_choices_of_a_client_that_goes_away_end() -> None:
    with serving(slots=2) as running:
        with running.gate.closed(after=3):
            stream = running.client().completions.create(**LONG, n=5, stream=True)
            next(iter(stream))
            stream.close()
            until_all_are_gone(running)
        until(running.idle)
        until(lambda: running.plan.stats.report.num_requests == 5)
        assert running.plan.stats.report.new_tokens <= 2 * 4


def test_more_choices_than_can_ever_wait_are_refused_for_good() -> None:
    with serving(slots=2, max_waiting=3) as running:
        client = running.client()
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**LONG, n=6)
        assert caught.value.param == "n"
        assert client.completions.create(**{**LONG, "max_tokens": 1}, n=5).usage is not None


def test_a_full_queue_refuses_with_a_time_to_wait() -> None:
    with serving(slots=1, max_waiting=1) as running:
        client = running.client()
        with running.gate.closed():
            streams = [client.completions.create(**LONG, stream=True) for _ in range(2)]
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(**LONG)
            assert caught.value.code == "queue_full"
            assert caught.value.type == "rate_limit_error"
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        for stream in streams:
            stream.close()
        until(running.idle)
        assert client.completions.create(**{**LONG, "max_tokens": 2}).usage is not None


@pytest.mark.few(1)
@pytest.mark.parametrize(("seconds", "wait"), [(12.3, "13"), (0.01, "1"), (999.0, "60")])
def test_the_time_to_wait_is_that_of_recent_requests(seconds: float, wait: str) -> None:
    with serving(slots=1, max_waiting=0) as running:
        for _ in range(3):
            running.plan.note_duration(seconds)
        with running.gate.closed():
            stream = running.client().completions.create(**LONG, stream=True)
            with pytest.raises(openai.RateLimitError) as caught:
                running.client().completions.create(**LONG)
        stream.close()
        assert caught.value.response.headers["retry-after"] == wait


def test_choices_that_do_not_all_fit_leave_none_behind() -> None:
    with serving(slots=1, max_waiting=1) as running:
        client = running.client()
        with running.gate.closed(after=3):
            stream = client.completions.create(**LONG, stream=True)
            next(iter(stream))
            with pytest.raises(openai.RateLimitError):
                client.completions.create(**LONG, n=2)
            running.gate.close(after=3)
            until(lambda: running.num_open() == 1)
            stream.close()
        until(running.idle)


@pytest.mark.slow
def test_a_client_that_retries_is_served_when_there_is_room() -> None:
    with serving(slots=1, max_waiting=0) as running:
        running.gate.close()
        held = running.client().completions.create(**LONG, stream=True)
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(
                running.client(max_retries=9).completions.create, **{**LONG, "max_tokens": 2}
            )
            until(lambda: outcomes(running).get("refused"))
            held.close()
            running.gate.open()
            found = answer.result(PATIENCE_S)
        assert found.usage is not None
        assert found.usage.completion_tokens == 2


# No machine generates so many tokens within this time.
SHORT_S = 0.001


def test_a_request_that_takes_too_long_ends_with_a_timeout() -> None:
    with serving(slots=1, request_timeout_s=SHORT_S) as running:
        client = running.client()
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**LONG)
        assert (caught.value.status_code, caught.value.code) == (504, "request_timeout")
        with pytest.raises(openai.APIError) as caught_in_stream:
            list(client.completions.create(**LONG, stream=True))
        assert caught_in_stream.value.code == "request_timeout"
        until(lambda: outcomes(running) == {"timeout": 2})


def test_a_stream_that_fails_ends_with_an_error_event_and_not_with_done() -> None:
    with serving(slots=1, request_timeout_s=SHORT_S) as running, running.http() as http:
        answer = http.post("/v1/completions", json={**LONG, "stream": True})
        last = answer.text.strip().split("\n\n")[-1]
        error: Any = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "request_timeout"


def test_a_waiting_stream_is_kept_alive() -> None:
    with serving(plans_of(full=0), slots=1) as running, running.http() as http:
        with (
            running.gate.closed(),
            http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer,
        ):
            lines = answer.iter_lines()
            for _ in range(2):
                running.skip(PING_S)
                assert [next(lines), next(lines)] == [": ping", ""]
        found = running.client().completions.create(**{**LONG, "max_tokens": 3}, stream=True)
        assert len([*found]) >= 2
