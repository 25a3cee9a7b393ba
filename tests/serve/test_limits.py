"""Limits on what a client sends and how slowly, and whom a server answers."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from serving import (
    BODY,
    PATH,
    Running,
    answer_to,
    connection,
    error_of,
    head_of,
    plans_of,
    post_of,
    rest_of,
    serving,
    until,
)

from kvpolicy import KVPolicyError
from kvpolicy.serve.launch import hosts_of
from kvpolicy.serve.server import LINGER_S

HEAD_S = 8.0

# The body


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    # Less than the time for which a connection may be idle.
    with serving(max_body=2000, head_timeout_s=HEAD_S, api_keys=()) as running:
        yield running


def test_a_body_that_is_too_large_is_refused_before_it_is_read(small: Running) -> None:
    with small.http() as http:
        answer = http.post(PATH, json={**BODY, "user": "a" * 3000})
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "body_too_large"
    answer = answer_to(small, head_of(10**15, "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_client_that_sends_all_of_a_body_that_is_too_large_reads_why(small: Running) -> None:
    answer = answer_to(small, head_of(4 << 20) + b" " * (4 << 20))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.endswith(b"}")


def test_a_client_that_goes_on_sending_a_body_that_was_refused_loses_its_connection(
    small: Running,
) -> None:
    with only_connection(small) as sock:
        sock.sendall(head_of(10**15))
        answer = rest_of(sock)
        assert answer.startswith(b"HTTP/1.1 413 ")
        sock.sendall(b"a")
        small.skip(LINGER_S)
        until(lambda: not small.server.server_state.connections)


def test_a_body_without_an_end_is_refused_when_it_is_too_large(small: Running) -> None:
    def without_end() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(40):
            yield b"a" * 100

    with small.http() as http:
        answer = http.post(
            PATH, content=without_end(), headers={"Content-Type": "application/json"}
        )
    assert answer.status_code == 413


def test_a_body_of_exactly_the_limit_is_read(small: Running) -> None:
    body = json.dumps(BODY).encode()
    with small.http() as http:
        headers = {"Content-Type": "application/json"}
        padded = body + b" " * (2000 - len(body))
        assert http.post(PATH, content=padded, headers=headers).status_code == 200
        assert http.post(PATH, content=padded + b" ", headers=headers).status_code == 413


def test_a_body_that_does_not_come_in_time_is_refused(small: Running) -> None:
    with connection(small) as sock:
        sock.sendall(head_of(100) + b"{")
        until(lambda: small.server.server_state.tasks)
        small.skip(30)
        answer = rest_of(sock)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_too_slow"' in answer
    assert b"\r\nconnection: close\r\n" in answer.lower()


@contextmanager
def only_connection(server: Running) -> Iterator[socket.socket]:
    """A connection that the server has accepted, and no other."""
    until(lambda: not server.server.server_state.connections)
    with connection(server) as sock:
        until(lambda: server.server.server_state.connections)
        yield sock


@pytest.mark.parametrize("head", [b"", b"GET /health HTTP/1.1\r\nHost: local"])
def test_a_head_that_does_not_come_in_time_ends_the_connection(small: Running, head: bytes) -> None:
    with only_connection(small) as sock:
        sock.sendall(head)
        small.skip(HEAD_S)
        assert is_ended(sock)


def test_a_head_that_comes_byte_by_byte_ends_the_connection(small: Running) -> None:
    with only_connection(small) as sock:
        for byte in b"GET ":
            sock.sendall(bytes([byte]))
            small.skip(HEAD_S / 4)
        assert is_ended(sock)


def test_a_second_head_on_a_connection_must_come_in_time_too(small: Running) -> None:
    first = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with only_connection(small) as sock:
        sock.sendall(first + b"GET /health/live HT")
        answer = b""
        while not answer.endswith(b'{"live":true}'):
            answer += sock.recv(65536)
        small.skip(HEAD_S)
        assert is_ended(sock)
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_head_that_is_too_large_is_refused(small: Running) -> None:
    for size in (70_000, 2 << 20):
        answer = answer_to(small, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * size)
        assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_slow_client_is_not_in_the_way_of_others(small: Running) -> None:
    with connection(small) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: local")
        with small.http() as http:
            assert http.post(PATH, json=BODY).status_code == 200


@pytest.mark.slow
def test_a_client_that_reads_nothing_loses_its_connection() -> None:
    with (
        serving(send_buffer=4096) as running,
        socket.socket() as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.connect(("127.0.0.1", running.port))
        sock.sendall(post_of({**BODY, "max_tokens": 500, "logprobs": 20, "stream": True}))
        until(lambda: running.plan.stats.running == 1)
        until(lambda: running.skip(30) or not running.server.server_state.connections)
        until(running.idle)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "application/jsonx"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "identity"}, 200),
    ],
)
def test_only_plain_json_is_read(small: Running, headers: dict[str, str], status: int) -> None:
    with small.http() as http:
        answer = http.post(PATH, content=json.dumps(BODY), headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert error_of(answer)["code"] == "unsupported_media_type"


def test_more_requests_than_allowed_are_refused_but_not_questions_about_health() -> None:
    with serving(max_requests=2) as running, running.http() as http:
        with running.gate.closed():
            client = running.client()
            streams = [client.completions.create(**BODY, stream=True) for _ in range(2)]
            answer = http.get("/v1/models")
            assert answer.status_code == 429
            assert error_of(answer)["code"] == "too_many_requests"
            assert answer.headers["retry-after"] == "1"
            assert http.get("/health").status_code == 200
        for stream in streams:
            list(stream)
        until(lambda: http.get("/v1/models").status_code == 200)


def is_ended(sock: socket.socket) -> bool:
    """Whether a server has closed a connection, or does so, without a word more."""
    try:
        return rest_of(sock) == b""
    except ConnectionResetError:
        return True


# Tokens


def test_a_server_may_allow_fewer_tokens_than_the_model_has_positions_for() -> None:
    with serving(max_prompt_tokens=20, max_new_tokens=30) as running, running.http() as http:
        assert running.plan.max_len == 50
        answer = http.post(PATH, json={**BODY, "prompt": "a" * 21})
        assert error_of(answer)["param"] == "prompt"
        assert error_of(answer)["code"] == "context_length_exceeded"
        answer = http.post(PATH, json={**BODY, "max_tokens": 31})
        assert error_of(answer)["param"] == "max_tokens"
        answer = http.post(PATH, json={**BODY, "prompt": "a" * 1000})
        assert error_of(answer)["param"] == "prompt"
        answer = http.post(PATH, json={**BODY, "prompt": "a" * 20, "max_tokens": 30})
        assert answer.json()["usage"]["total_tokens"] == 50
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        answer = http.post("/v1/chat/completions", json=chat)
        assert answer.json()["usage"]["completion_tokens"] == 30


def test_a_limit_of_prompts_alone_leaves_the_rest_of_the_positions() -> None:
    with serving(max_prompt_tokens=20) as running:
        assert (running.plan.max_len, running.plan.max_prompt_len) == (512, 20)


def test_memory_for_the_cache_says_how_many_slots_there_are() -> None:
    plans = plans_of(full=0, h2o=12)
    with serving(plans, kv_memory=4 << 20) as running, running.http() as http:
        slots = {plan.name: plan.stats.slots for plan in running.model.plans}
        assert slots["h2o"] > slots["full"] >= 1
        jobs = [http.post(PATH, json={**BODY, "model": f"tiny:{name}"}) for name in slots]
        assert [job.status_code for job in jobs] == [200, 200]
        most = [plan.stats.report.peak_kv_bytes for plan in running.model.plans]
        assert max(most) <= 2 << 20
    with pytest.raises(KVPolicyError, match="kv_memory"), serving(plans, kv_memory=1000):
        pass


def test_a_cache_that_no_memory_can_hold_is_refused_with_what_makes_it_smaller() -> None:
    with pytest.raises(KVPolicyError, match="--max-prompt-tokens"), serving(slots=10**9):
        pass


# Keys and hosts

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with serving(api_keys=KEYS) as running:
        yield running


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_the_server(locked: Running, key: str) -> None:
    assert locked.client(api_key=key).completions.create(**BODY).usage is not None


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-keyy"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"Authorization": "Bearer first-key,second-key"},
        {"Api-Key": "first-key"},
    ],
    ids=str,
)
def test_without_a_key_nothing_is_answered(locked: Running, headers: dict[str, str]) -> None:
    with locked.http(headers=headers) as http:
        for answer in (
            http.post(PATH, json=BODY),
            http.get("/v1/models"),
            http.get("/metrics"),
            http.get("/openapi.json"),
            http.get("/none"),
        ):
            assert answer.status_code == 401
            assert error_of(answer)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"


def test_two_keys_in_two_headers_are_refused(locked: Running) -> None:
    key = b"Authorization: Bearer first-key\r\n"
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    assert answer_to(locked, head + key + b"\r\n").startswith(b"HTTP/1.1 200 ")
    assert answer_to(locked, head + key + key + b"\r\n").startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_health_needs_no_key(locked: Running, path: str) -> None:
    with locked.http() as http:
        assert http.get(path).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:1234", 200),
        ("LOCALHOST", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:80", 421),
        ("evil.example:127.0.0.1", 421),
        ("localhost@evil.example", 421),
        ("", 421),
    ],
)
def test_a_server_of_this_machine_answers_to_its_names_only(
    small: Running, host: str, status: int
) -> None:
    with small.http() as http:
        answer = http.get("/health", headers={"Host": host})
    assert answer.status_code == status


def test_a_request_without_a_host_is_refused(small: Running) -> None:
    assert answer_to(small, b"GET /health HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert answer_to(small, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 421 ")


def test_hosts_follow_from_the_interface_unless_they_are_given() -> None:
    assert hosts_of("127.0.0.2", []) == {"localhost", "127.0.0.1", "[::1]", "127.0.0.2"}
    assert hosts_of("::1", []) == hosts_of("localhost", []) == {"localhost", "127.0.0.1", "[::1]"}
    assert hosts_of("0.0.0.0", []) is hosts_of("example.com", []) is None
    assert hosts_of("0.0.0.0", ["LLM.example"]) == {"llm.example"}


def test_no_other_origin_may_read_an_answer(small: Running) -> None:
    origin = {"Origin": "http://evil.example"}
    with small.http(headers=origin) as http:
        answers = [
            http.post(PATH, json=BODY),
            http.get("/v1/models"),
            http.options(PATH, headers={"Access-Control-Request-Method": "POST"}),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 405]
    for answer in answers:
        assert not any(name.startswith("access-control") for name in answer.headers)
