"""Ways to confine programs, for tests: skipped where the machine has none, unless CI needs it."""

import os
from functools import cache

import pytest

from kvpolicy.errors import TaskError
from kvpolicy.lab.sandbox import run
from kvpolicy.lab.sandbox.walls import Wall

# The second way: all attacks with the slow tests, the rest at night.
WAYS = ("bubblewrap", pytest.param("Landlock", marks=pytest.mark.nightly))
NEEDED = "KVPOLICY_NEEDS_SANDBOX"  # 1: a missing way is a failure, as in CI


@pytest.fixture
def any_wall() -> Wall:
    """The way that a user of this machine gets."""
    return _wall("")


@pytest.fixture(params=WAYS)
def wall(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wall:
    """Each way; programs run in it during the test."""
    found = _wall(request.param)
    monkeypatch.setattr(run, "find_wall", lambda: found)
    return found


def _wall(way: str) -> Wall:
    found = _found(way)
    reason = found if isinstance(found, str) else f"this machine has no {way}"
    if isinstance(found, Wall) and way in found.name:
        return found
    if os.environ.get(NEEDED) == "1":
        pytest.fail(f"{reason}, and {NEEDED}=1 requires it")
    pytest.skip(reason)


@cache
def _found(way: str) -> Wall | str:
    """What a user gets, or why nothing; with bubblewrap hidden, if the way is Landlock."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "Landlock":
            patch.setenv("PATH", "/nonexistent")
        run.find_wall.cache_clear()
        try:
            return run.find_wall()
        except TaskError as error:
            return str(error)
        finally:
            run.find_wall.cache_clear()
