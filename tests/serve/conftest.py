"""A server of a tiny model, and commands."""

import io
from collections.abc import Iterator

import pytest
from commands import kvpolicy
from serving import Running, plans_of, serving

from kvpolicy.serve import logs

__all__ = ["kvpolicy", "server"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A tiny model under two plans, one of which evicts."""
    with serving(plans_of(full=0, h2o=12)) as running:
        yield running


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """The log, as JSON lines."""
    stream = io.StringIO()
    with logs.logging_to(stream, as_json=True):
        yield stream
