"""KV-cache eviction policies as plugins.

Importing this package patches nothing, reads no environment variable, loads no plugin and
does not import torch: each public name is fetched from its home when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvpolicy.markers import hookimpl

if TYPE_CHECKING:
    from kvpolicy.discovery import installed_policies, load_policy
    from kvpolicy.engine import Engine
    from kvpolicy.hf import PolicyCache
    from kvpolicy.models import load_model
    from kvpolicy.plan import Plan
    from kvpolicy.request import Request, Sampling
    from kvpolicy.results import Result, RunReport

__version__ = "0.1.0"

_HOMES = {
    "Engine": "kvpolicy.engine",
    "Plan": "kvpolicy.plan",
    "PolicyCache": "kvpolicy.hf",
    "Request": "kvpolicy.request",
    "Result": "kvpolicy.results",
    "RunReport": "kvpolicy.results",
    "Sampling": "kvpolicy.request",
    "installed_policies": "kvpolicy.discovery",
    "load_model": "kvpolicy.models",
    "load_policy": "kvpolicy.discovery",
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
