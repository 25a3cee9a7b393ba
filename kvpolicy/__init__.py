"""KV-cache eviction policies as plugins.

``__init__.pyi`` lists the public names with their modules. Each name is imported when it is
first used, so `import kvpolicy` imports neither torch nor a plugin, patches nothing and reads
no environment variable.
"""

import ast
from importlib import import_module
from pathlib import Path

from kvpolicy.markers import hookimpl

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: str(node.module)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = ["__version__", "hookimpl", *sorted(_MODULES.keys() - {"hookimpl"})]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _MODULES:
        msg = f"module 'kvpolicy' has no attribute '{name}'"
        raise AttributeError(msg)
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted(__all__)
