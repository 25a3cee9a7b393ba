"""Shared types and sizes for tests of reports."""

from collections.abc import Callable

from chromium import Opened

Open = Callable[..., Opened]
DESKTOP = {"width": 1280, "height": 900}
