"""KV-cache eviction policies as plugins.

Importing this package patches nothing, reads no environment variable, loads no plugin and
does not import torch: each public name is fetched from its home when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvpolicy.markers import hookimpl

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine
    from kvpolicy.engine.request import Request, Sampling
    from kvpolicy.engine.results import Result, RunReport
    from kvpolicy.hf import PolicyCache
    from kvpolicy.hooks.discovery import installed_policies, load_policy
    from kvpolicy.model.loading import load_model
    from kvpolicy.plan.plan import Plan

__version__ = "0.1.0"

_HOMES = {
    "Engine": "kvpolicy.engine.engine",
    "Plan": "kvpolicy.plan.plan",
    "PolicyCache": "kvpolicy.hf",
    "Request": "kvpolicy.engine.request",
    "Result": "kvpolicy.engine.results",
    "RunReport": "kvpolicy.engine.results",
    "Sampling": "kvpolicy.engine.request",
    "installed_policies": "kvpolicy.hooks.discovery",
    "load_model": "kvpolicy.model.loading",
    "load_policy": "kvpolicy.hooks.discovery",
}

__all__ = [
    "Engine",
    "Plan",
    "PolicyCache",
    "Request",
    "Result",
    "RunReport",
    "Sampling",
    "__version__",
    "hookimpl",
    "installed_policies",
    "load_model",
    "load_policy",
]


def __getattr__(name: str) -> object:
    """Fetch a public name from its home (PEP 562)."""
    if name not in _HOMES:
        msg = f"module 'kvpolicy' has no attribute '{name}'"
        raise AttributeError(msg)
    return getattr(import_module(_HOMES[name]), name)
