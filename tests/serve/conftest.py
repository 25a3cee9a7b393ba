"""Servers of these tests listen on the loopback interface, which they may connect to."""

from collections.abc import Iterator

import pytest
from serving import Running, plans_of, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A tiny model under two plans, one of which evicts."""
    with serving(plans_of(full=0, h2o=12)) as running:
        yield running
