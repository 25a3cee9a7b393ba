"""Which connections stay open behind an answer."""

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from serving import (
    BODY,
    PATH,
    PATIENCE_S,
    Running,
    answer_to,
    connection,
    head_of,
    post_of,
    rest_of,
    serving,
    until,
)

from kvpolicy.files import parse_json
from kvpolicy.serve import json_request
from kvpolicy.serve.settings import most_connections


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(max_body=2000) as found:
        yield found


def test_a_connection_stays_open_unless_a_body_was_left_unread(running: Running) -> None:
    with running.http() as http:
        assert "connection" not in http.get("/health/live").headers
        assert "connection" not in http.post(PATH, json=BODY).headers
        refused = http.post(PATH, json={**BODY, "user": "a" * 3000})
        assert (refused.status_code, refused.headers["connection"]) == (413, "close")


def get_of(path: str, *lines: str) -> bytes:
    head = (f"GET {path} HTTP/1.1", "Host: localhost", *lines, "", "")
    return "\r\n".join(head).encode()


def test_idle_connections_give_way_to_new_ones_and_requests_do_not() -> None:
    with serving(max_connections=4) as full, ExitStack() as stack:
        full.gate.close()
        asking = stack.enter_context(connection(full))
        asking.sendall(post_of(BODY))
        until(lambda: full.num_open() == 1)
        idle = [stack.enter_context(connection(full)) for _ in range(20)]
        assert answer_to(full, get_of("/health", "Connection: close")).startswith(b"HTTP/1.1 200 ")
        assert idle[0].recv(1) == b""
        full.gate.open()
        assert asking.recv(100).startswith(b"HTTP/1.1 200 ")


def test_when_every_connection_has_a_request_the_next_one_is_closed() -> None:
    with serving(max_connections=1) as full, connection(full) as asking:
        full.gate.close()
        asking.sendall(post_of(BODY))
        until(lambda: full.num_open() == 1)
        with connection(full) as more:
            assert more.recv(1) == b""
        full.gate.open()
        assert asking.recv(100).startswith(b"HTTP/1.1 200 ")


def test_connections_are_fewer_than_files_may_be_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit in (16, 200, 400):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            assert 0 < most_connections() < limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("path", ["/health", "/health/live", "/metrics", "/v1/models", "/"])
def test_head_is_answered_as_get_without_a_body(running: Running, path: str) -> None:
    with running.http() as http:
        got, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
        assert http.head(PATH).status_code == 405


def test_a_client_that_has_closed_its_side_reads_the_answer(running: Running) -> None:
    for request in (get_of("/health"), post_of(BODY)):
        with connection(running) as sock:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            assert rest_of(sock).startswith(b"HTTP/1.1 200 ")


def test_a_body_of_two_lengths_is_refused(running: Running) -> None:
    head = head_of(5, "Transfer-Encoding: chunked") + b"0\r\n\r\nGET /health HTTP/1.1\r\n"
    answer = answer_to(running, head)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"\r\nconnection: close\r\n" in answer.lower()


def test_others_are_answered_while_a_long_body_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go_on = threading.Event()

    def parse(content: bytes) -> object:
        assert may_go_on.wait(PATIENCE_S)
        return parse_json(content)

    monkeypatch.setattr(json_request, "parse_json", parse)
    with serving() as running, connection(running) as asking:
        asking.sendall(post_of({**BODY, "user": "a" * 100_000}))
        until(lambda: running.server.server_state.tasks)
        with running.http() as http:
            assert http.get("/health").status_code == 200
        may_go_on.set()
        assert asking.recv(100).startswith(b"HTTP/1.1 200 ")
