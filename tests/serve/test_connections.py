"""Which connections stay open behind an answer."""

from collections.abc import Iterator

import pytest
from serving import BODY, PATH, Running, serving


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
