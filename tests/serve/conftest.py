"""A server of a tiny model, and commands."""

from collections.abc import Iterator

import pytest
from commands import kvpolicy
from serving import Running, plans_of, serving

__all__ = ["kvpolicy", "server"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A tiny model under two plans, one of which evicts."""
    with serving(plans_of(full=0, h2o=12)) as running:
        yield running
