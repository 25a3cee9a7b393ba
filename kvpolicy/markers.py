"""The two decorators of the contract, importable without torch."""

import pluggy

PROJECT = "kvpolicy"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
