"""What a client gets when replicas are lost or full: one whole answer, or an error."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import attrs
import pytest
from fastapi.sse import KEEPALIVE_COMMENT
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.on_ray.forwarding import REPLICA_HEADER, HttpCall, LostReplicaError, forward
from kvpolicy.serve.on_ray.router_metrics import RouterMetrics

CALL = HttpCall("POST", "/v1/completions", b"", (), b"{}")
PARTS = [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n", b""]
REFUSAL = b'{"error": {"message": "full"}}'


@attrs.frozen
class Script:
    """What a replica does with a request.

    Attributes:
        status: Status of its answer; other ones than 200 have one part.
        pings: Comments before the first part.
        lost_after: Messages, the start among them, after which it is lost; ``None``: never.
    """

    status: int = 200
    pings: int = 0
    lost_after: int | None = None

    def messages(self, name: str) -> list[Message]:
        headers = [(REPLICA_HEADER, name.encode())]
        start = {"type": "http.response.start", "status": self.status, "headers": headers}
        bodies = [*[KEEPALIVE_COMMENT] * self.pings, *PARTS] if self.status == 200 else [REFUSAL]
        parts = [
            {"type": "http.response.body", "body": body, "more_body": i + 1 < len(bodies)}
            for i, body in enumerate(bodies)
        ]
        return [start, *parts][: self.lost_after]


class Scripted:
    """Replicas that follow one script for each request; the last one answers what is left."""

    def __init__(self, scripts: Sequence[tuple[str, Script]]) -> None:
        self.scripts = list(scripts)
        self.asked: list[tuple[str, tuple[str, ...], str | None]] = []

    async def ask(
        self, call: HttpCall, conversation: str | None, tried: Sequence[str]
    ) -> AsyncGenerator[Message, None]:
        assert call == CALL
        name, script = self.scripts.pop(0) if self.scripts else ("last", Script())
        self.asked.append((name, tuple(tried), conversation))
        for message in script.messages(name):
            yield message
        if script.lost_after is not None:
            raise LostReplicaError

    async def each(self, method: str) -> list[Any]:
        raise AssertionError


def run(replicas: Any, timeout_s: float = 60.0) -> tuple[list[Message], RouterMetrics]:
    sent: list[Message] = []
    metrics = RouterMetrics()

    async def send(message: Message) -> None:
        sent.append(message)

    work = forward(replicas, CALL, "c", send, metrics, timeout_s=timeout_s, first_wait_s=0.0)
    asyncio.run(work)
    return sent, metrics


def counts(metrics: RouterMetrics) -> dict[str, float]:
    lines = metrics.text([]).decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {
        "lost": float(found['kvpolicy_router_retries_total{reason="lost"}']),
        "refused": float(found['kvpolicy_router_retries_total{reason="refused"}']),
        "broken": float(found["kvpolicy_router_broken_streams_total"]),
    }


def bodies(sent: Sequence[Message]) -> list[bytes]:
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert sent[0]["type"] == "http.response.start"
    assert [m.get("more_body", False) for m in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return [message["body"] for message in sent[1:]]


def error_of(event: bytes) -> dict[str, Any]:
    return json.loads(event.decode().removeprefix("data: ").strip())["error"]


def test_a_request_of_a_lost_replica_is_answered_by_another_one() -> None:
    replicas = Scripted([("a", Script(lost_after=0)), ("b", Script(lost_after=1)), ("c", Script())])
    sent, metrics = run(replicas)
    assert bodies(sent) == PARTS
    assert sent[0]["status"] == 200
    assert counts(metrics) == {"lost": 2, "refused": 0, "broken": 0}
    assert replicas.asked == [("a", (), "c"), ("b", (), "c"), ("c", (), "c")]


def test_a_stream_that_has_begun_ends_with_an_error() -> None:
    sent, metrics = run(Scripted([("a", Script(lost_after=3))]))
    *parts, event = bodies(sent)
    assert parts == PARTS[:2]
    assert error_of(event)["code"] == "replica_lost"
    assert error_of(event)["type"] == "server_error"
    assert counts(metrics) == {"lost": 0, "refused": 0, "broken": 1}


def test_a_stream_that_only_waited_goes_on_at_another_replica() -> None:
    sent, metrics = run(Scripted([("a", Script(pings=2, lost_after=3)), ("b", Script())]))
    assert bodies(sent) == [KEEPALIVE_COMMENT] * 2 + PARTS
    assert counts(metrics)["broken"] == 0


def test_a_stream_that_waited_and_is_then_refused_ends_with_that_error() -> None:
    refusals = [("b", Script(429))] * 2
    sent, metrics = run(Scripted([("a", Script(pings=1, lost_after=2)), *refusals]))
    ping, event = bodies(sent)
    assert ping == KEEPALIVE_COMMENT
    assert error_of(event)["message"] == "full"
    assert counts(metrics) == {"lost": 1, "refused": 1, "broken": 0}


@pytest.mark.parametrize("status", [429, 503])
def test_what_one_replica_refuses_another_one_answers(status: int) -> None:
    replicas = Scripted([("a", Script(status)), ("b", Script(status)), ("c", Script())])
    sent, metrics = run(replicas)
    assert bodies(sent) == PARTS
    assert [tried for _, tried, _ in replicas.asked] == [(), ("a",), ("a", "b")]
    assert counts(metrics)["refused"] == 2


def test_what_all_replicas_refuse_is_refused() -> None:
    replicas = Scripted([("a", Script(429)), ("b", Script(429)), ("a", Script(429))])
    sent, _ = run(replicas)
    assert (sent[0]["status"], bodies(sent)) == (429, [REFUSAL])


@pytest.mark.parametrize("status", [400, 404, 500, 504])
def test_other_errors_are_answers(status: int) -> None:
    replicas = Scripted([("a", Script(status))])
    sent, _ = run(replicas)
    assert (sent[0]["status"], bodies(sent), len(replicas.asked)) == (status, [REFUSAL], 1)


def test_when_the_time_is_over_no_further_replica_is_asked() -> None:
    replicas = Scripted([("a", Script(lost_after=0))] * 3)
    with pytest.raises(ApiError) as caught:
        run(replicas, timeout_s=-1)
    assert caught.value.status_code == 503
    assert caught.value.headers == {"Retry-After": "5"}
    assert len(replicas.asked) == 1
    sent, _ = run(Scripted([("a", Script(pings=1, lost_after=2))]), timeout_s=-1)
    assert error_of(bodies(sent)[-1])["code"] == "unavailable"


def test_a_full_queue_in_front_of_the_replicas_is_an_error() -> None:
    class Full(Scripted):
        async def ask(self, *_: Any) -> AsyncGenerator[Message, None]:
            raise ApiError(429, "full", headers={"Retry-After": "2"})
            yield {}

    with pytest.raises(ApiError, match="full"):
        run(Full([]))


SCRIPTS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.builds(
            Script,
            st.sampled_from([200, 200, 200, 429, 503, 400]),
            st.integers(0, 2),
            st.none() | st.integers(0, 6),
        ),
    ),
    max_size=6,
)


def expected(scripts: Sequence[tuple[str, Script]]) -> tuple[list[bytes], str]:
    """What a client has in the end, and how: by following the scripts one by one."""
    pings, tried = 0, set()
    for name, script in [*scripts, ("last", Script())]:
        messages = script.messages(name)
        if messages and script.status in (429, 503) and name not in tried:
            tried.add(name)
            continue
        found = [message["body"] for message in messages[1:]]
        real = [body for body in found if body != KEEPALIVE_COMMENT]
        is_whole = script.lost_after is None or script.lost_after > len(messages)
        if script.status == 200 and not real:
            pings += len(found)
            continue
        if script.status != 200 and not found:
            continue
        if script.status != 200:
            return [KEEPALIVE_COMMENT] * pings + [REFUSAL], "refused"
        begun = [KEEPALIVE_COMMENT] * (pings + len(found) - len(real)) + real
        return begun, "whole" if is_whole or real == PARTS else "broken"
    raise AssertionError


@given(SCRIPTS)
def test_no_answer_is_lost_doubled_or_mixed(scripts: list[tuple[str, Script]]) -> None:
    """Answers are whole and from one replica, or end with an error after what was sent."""
    found, how = expected(scripts)
    sent, metrics = run(Scripted(scripts))
    actual = bodies(sent)
    if how == "broken":
        assert actual[:-1] == found
        assert error_of(actual[-1])["code"] == "replica_lost"
    elif how == "refused" and len(found) > 1:
        assert actual[:-1] == found[:-1]
        assert error_of(actual[-1])["message"] == "full"
    else:
        assert actual == found
    assert counts(metrics)["broken"] == (how == "broken")
