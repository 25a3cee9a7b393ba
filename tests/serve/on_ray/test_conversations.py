"""Requests of one conversation have one key, and no body makes trouble."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.serve.on_ray.conversations import conversation_of

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "What is 6 times 7?"}
MORE = [{"role": "assistant", "content": "42"}, {"role": "user", "content": "And 6 times 8?"}]


def key(*messages: Any, session: str | None = None, model: str = "m", **more: Any) -> str | None:
    body = {"model": model, "messages": list(messages), **more}
    return conversation_of(session, json.dumps(body).encode())


def test_a_conversation_keeps_its_key_while_it_goes_on() -> None:
    first = key(SYSTEM, FIRST)
    assert first is not None
    assert key(SYSTEM, FIRST, *MORE) == first
    assert key(SYSTEM, FIRST, *MORE, temperature=0.5, stream=True) == first


def test_other_beginnings_have_other_keys() -> None:
    other = {"role": "user", "content": "What is 6 times 9?"}
    keys = {
        key(SYSTEM, FIRST),
        key(FIRST),
        key(SYSTEM, other),
        key(SYSTEM, FIRST, model="m:h2o"),
        key(SYSTEM, FIRST, session="one"),
        key(SYSTEM, FIRST, session="two"),
    }
    assert len(keys) == 6
    assert None not in keys


def test_the_session_of_the_client_comes_first() -> None:
    assert key(FIRST, session="one") == key(SYSTEM, session="one")
    assert conversation_of("one", b"") == key(FIRST, session="one")
    assert conversation_of("one", b"") != "one", "what a client sends is no key in the logs"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"prompt": "a"}', b'{"messages": 3}', b'{"messages": [3, null]}', b"\xff"],
)
def test_without_a_message_of_a_user_there_is_no_key(body: bytes) -> None:
    assert conversation_of(None, body) is None
    assert conversation_of("", body) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "messages"]) | st.text(), inner)
    ),
)


@given(JSON | st.builds(lambda messages: {"messages": messages}, st.lists(JSON)))
def test_any_body_has_a_key_or_none(body: Any) -> None:
    found = conversation_of(None, json.dumps(body).encode())
    assert found is None or len(found) == 32
