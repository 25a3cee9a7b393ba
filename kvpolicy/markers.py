"""The decorators `hookspec` and `hookimpl`, importable without torch."""

import pluggy

PROJECT = "kvpolicy"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
