"""What a security review of a server would try: refused in one sentence, without an effect."""

import json
import socket
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import BODY, PATH, PATIENCE_S, Running, answer_to, connection, error_of

CHAT_PATH = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _serves_afterwards(server: Running) -> Any:
    """After every attack the server is idle and answers."""
    yield
    with server.http() as http:
        assert http.post(PATH, json=BODY).status_code == 200
        assert http.get("/health/live").status_code == 200


def post(server: Running, content: bytes, path: str = PATH) -> Any:
    with server.http(headers={"Content-Type": "application/json"}) as http:
        return http.post(path, content=content)


def with_field(name: str, value: str) -> bytes:
    """A body whose field has a value that Python's json would not write."""
    body: dict[str, Any] = {**BODY, name: "@"}
    return json.dumps(body).replace('"@"', value).encode()


MALFORMED = {
    "empty": b"",
    "no JSON": b"hello",
    "half": b'{"model": "tiny", "prompt": "a"',
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "deep and whole": b'{"model":"tiny","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "deep field": with_field("kvpolicy", "[" * 90 + "]" * 90),
    "no UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "UTF-16": '{"model": "tiny", "prompt": "a"}'.encode("utf-16"),
    "half a character": with_field("prompt", '"a\\ud800"'),
    "half a character in a model": with_field("model", '"tiny\\udfff"'),
    "half a character in a key": b'{"\\ud800": 1, "model": "tiny", "prompt": "a"}',
    "half a character in a stop": with_field("stop", '"\\ud800"'),
    "NUL": with_field("prompt", '"a\\u0000b"'),
    "NUL in a stop": with_field("stop", '["\\u0000"]'),
    "a bare control character": b'{"model": "tiny", "prompt": "a\nb"}',
    "NaN": with_field("temperature", "NaN"),
    "infinity": with_field("temperature", "-Infinity"),
    "a huge float": with_field("temperature", "1e999"),
    "a float for a count": with_field("max_tokens", "1.5"),
    "a huge number": with_field("max_tokens", "9" * 400),
    "too many digits": with_field("seed", "9" * 5000),
    "a negative number": with_field("n", "-1"),
    "huge token ids": with_field("prompt", f"[{10**30}]"),
    "a key twice": b'{"model": "tiny", "prompt": "a", "prompt": "b"}',
    "a text for a list": with_field("stop", "{}"),
    "an object for a text": with_field("model", "{}"),
    "a prototype": b'{"model": "tiny", "prompt": "a", "__proto__": {"n": 5}}',
    "a dunder": b'{"model": "tiny", "prompt": "a", "__class__": "x", "model_config": {}}',
    "an old plan": with_field("model", '"tiny:../../etc/passwd"'),
    "a plan with a path": with_field("model", '"tiny:/etc/passwd"'),
    "a plan with a scheme": with_field("model", '"file:///etc/passwd"'),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_body_is_refused_in_one_sentence(server: Running, name: str) -> None:
    answer = post(server, MALFORMED[name])
    assert answer.status_code in (400, 404)
    message = error_of(answer)["message"]
    assert len(message) < 700
    assert "Traceback" not in message
    assert message.isprintable()


def many(inner: str) -> bytes:
    return ("{" + inner + '"model":"tiny","prompt":"a"}').encode()


COSTLY = {
    "many keys": many("".join(f'"k{i}":0,' for i in range(150_000))),
    "the last key twice": many("".join(f'"k{i}":0,' for i in range(150_000)) + '"z":0,"z":0,'),
    "many lists": with_field("prompt", json.dumps([[]] * 400_000)),
    "many wrong prompts": with_field("prompt", json.dumps([{}] * 150_000)),
    "many wrong stop ids": b'{"model":"tiny","prompt":"a","kvpolicy":{"stop_ids":[%s""]}}'
    % (b'"a",' * 150_000),
    "many token ids": with_field("prompt", json.dumps([1] * 500_000)),
    "many messages": json.dumps({"model": "tiny", "messages": [{}] * 150_000}).encode(),
    "a long text": with_field("prompt", json.dumps("a" * 1_500_000)),
    "a long message": json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "a" * 1_500_000}]}
    ).encode(),
    "a long model": with_field("model", json.dumps("a" * 1_500_000)),
    "a long key": with_field("a" * 1_500_000, "0"),
}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", COSTLY)
def test_a_body_that_could_cost_much_is_refused_soon(server: Running, name: str) -> None:
    body = COSTLY[name]
    path = CHAT_PATH if b"messages" in body[:60] else PATH
    began = time.monotonic()
    answer = post(server, body, path)
    assert answer.status_code == 400, answer.text[:300]
    assert len(error_of(answer)["message"]) < 700
    assert time.monotonic() - began < PATIENCE_S


# Bytes that are no HTTP, or HTTP that readers understand differently

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
RAW = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "an old request": b"GET /\r\n\r\n",
    "a line that ends badly": b"GET /health HTTP/1.1\nHost: localhost\r\rX: 1\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    "a length and chunks": HEAD
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a strange encoding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n",
    "a length that is none": HEAD + b"Content-Length: 1e3\r\n\r\n",
    "a chunk that is none": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a space in a name": b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "a folded header": b"GET /health HTTP/1.1\r\nHost: localhost\r\n evil\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
    "a NUL in a header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
    "a line break in a path": b"GET /health\r\nX: y HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no path": b"GET  HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", RAW)
def test_what_is_no_proper_http_is_refused(server: Running, name: str) -> None:
    with connection(server) as sock:
        sock.sendall(RAW[name])
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    if name == "a length and chunks":  # h11 goes by the chunks, as the standard says
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1
    else:
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 ", b"HTTP/1.1 421 "))


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/../metrics", 404),
        ("/v1/%2e%2e/metrics", 404),
        ("//metrics", 404),
        ("/metrics/", 404),
        ("/metrics%00", 404),
        ("/health/../v1/models", 404),
        ("/assets/../../settings.py", 404),
        ("/assets/%2e%2e/settings.py", 404),
        ("/assets/..%5c..%5csettings.py", 404),
        ("/assets//etc/passwd", 404),
        ("/v1/models/../../metrics", 404),
        ("/v1/models/%00", 404),
        ("/v1/models/tiny%3A..%2Ffull", 404),
        ("/v1/models/tiny:full", 200),
        ("/%ff%fe", 404),
        ("/" + "a" * 8000, 404),
        ("/v1/completions?model=tiny", 405),
        ("http://evil.example/health", 404),
        ("*", 404),
    ],
)
def test_paths_lead_nowhere_else(server: Running, path: str, status: int) -> None:
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = answer_to(server, head.encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    if status == 404:
        body = json.loads(answer.split(b"\r\n\r\n", 1)[1])
        assert body["error"]["code"] in ("not_found", "model_not_found")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "X"])
def test_other_methods_are_refused(server: Running, method: str) -> None:
    head = f"{method} {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert answer_to(server, head.encode()).startswith((b"HTTP/1.1 405 ", b"HTTP/1.1 404 "))


def test_headers_of_proxies_change_nothing(server: Running) -> None:
    forged = {
        "X-Forwarded-For": "10.0.0.1",
        "X-Forwarded-Host": "evil.example",
        "X-Forwarded-Proto": "https",
        "Forwarded": "for=10.0.0.1;host=evil.example",
        "X-Original-URL": "/metrics",
        "X-HTTP-Method-Override": "DELETE",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
    }
    with server.http(headers=forged) as http:
        answer = http.post(PATH, json=BODY)
    assert answer.status_code == 200
    assert "evil" not in str(answer.headers)


def test_a_request_id_of_a_client_is_one_or_is_replaced(server: Running) -> None:
    with server.http() as http:
        given = http.get("/health", headers={"X-Request-Id": "job-7.a_b"})
        assert given.headers["x-request-id"] == "job-7.a_b"
        for evil in ["a b", "a" * 65, "<script>", 'a"b', "", "ä"]:
            answer = http.get("/health", headers={"X-Request-Id": evil.encode("latin-1")})  # type: ignore[dict-item]
            assert answer.headers["x-request-id"].startswith("req-")


@pytest.mark.few(2)
@pytest.mark.parametrize("path", [PATH, "/none", "/health", "/v1/models"])
def test_a_body_that_never_ends_is_not_read_for_ever(server: Running, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with connection(server) as sock:
        sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe
            sock.sendall(chunk * 4000)  # 256 MiB


def test_requests_on_one_connection_are_answered_in_order(server: Running) -> None:
    one = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /none HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = answer_to(server, one * 30 + last)
    assert answer.count(b"HTTP/1.1 200 ") == 30
    assert answer.count(b"HTTP/1.1 404 ") == 1


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = [
    *("model", "prompt", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream"),
    *("stream_options", "user", "kvpolicy", "logprobs", "messages", "tools", "echo", "role"),
]


@settings(max_examples=20)
@given(
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=3), st.sampled_from([PATH, CHAT_PATH])
)
def test_no_value_of_any_field_breaks_the_server(
    server: Running, changes: dict[str, Any], path: str
) -> None:
    content = {"prompt": "a"} if path == PATH else {"messages": [{"role": "user", "content": "a"}]}
    body = {"model": "tiny", **content, "max_tokens": 1, **changes}
    answer = post(server, json.dumps(body).encode(), path)
    assert answer.status_code in (200, 400, 404)
    if answer.status_code != 200:
        error_of(answer)


@settings(max_examples=20)
@given(st.binary(max_size=60))
def test_no_bytes_break_the_server(server: Running, content: bytes) -> None:
    answer = post(server, content)
    assert answer.status_code == 400
    error_of(answer)
