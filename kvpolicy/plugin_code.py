"""Code of plugins while it loads: what it raises becomes one sentence that names the plugin.

Importing a plugin, building its objects and reading what they declare runs code of somebody else.
Whatever that code raises, `sys.exit` included, becomes an error of kvpolicy; what it prints goes
to stderr, as stdout may be JSON; modules that it replaces are put back. Not caught: ``os._exit``,
a crash of the interpreter, an endless loop, changes inside objects of other packages.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from types import ModuleType
from typing import Any

from kvpolicy.errors import KVPolicyError, error_summary, is_interrupt

_MISSING = object()


def declared_by(plugin: object, name: str, default: Any) -> Any:
    """An attribute of a plugin, but none that its `__getattr__` makes up.

    Args:
        plugin: The plugin.
        name: Name of the attribute.
        default: What is returned if there is none.
    """
    is_there = inspect.getattr_static(plugin, name, _MISSING) is not _MISSING
    return getattr(plugin, name) if is_there else default


@contextmanager
def plugin_code(
    problem: str,
    error: type[KVPolicyError],
    *,
    hint: str = "",
    describe: Callable[[BaseException], str] = error_summary,
    passes: tuple[type[BaseException], ...] = (),
    imports: bool = False,
) -> Iterator[None]:
    """Run code of a plugin in a ``with`` block.

    Args:
        problem: Who fails at what, as in ``"policy 'NAME' cannot be imported"``.
        error: Exception to raise.
        hint: End of the sentence.
        describe: Text of an exception.
        passes: Exceptions of the block that are raised as they are.
        imports: Whether the block imports modules; then `sys.modules` is guarded, which takes a
            millisecond.

    Raises:
        KVPolicyError: The block has raised anything but an interrupt of the user, or has replaced
            modules.
    """
    modules = sys.modules
    before = dict(modules) if imports else {}
    replaced: list[str] = []
    try:
        with _printing_to_stderr():
            yield
    except BaseException as cause:
        if is_interrupt(cause) or (isinstance(cause, passes) and _has_text(cause)):
            raise
        msg = f"{problem}: {describe(cause)}{hint}"
        raise error(msg) from cause
    finally:
        sys.modules = modules
        replaced = _put_back(before)
    if replaced:
        msg = f"{problem}: it replaces the module {replaced[0]} in sys.modules, which others use"
        raise error(msg)


def _printing_to_stderr() -> AbstractContextManager[object]:
    """Have `print` write to stderr.

    In the main thread only: two threads that exchange `sys.stdout` would put back each other's.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    return redirect_stdout(sys.stderr) if in_main_thread else nullcontext()


def _has_text(error: BaseException) -> bool:
    """Whether an exception can be printed; some have a broken ``__str__``."""
    try:
        return isinstance(str(error), str)
    except Exception:
        return False


def _put_back(before: Mapping[str, ModuleType]) -> list[str]:
    """Undo replacements in `sys.modules`; returns the names.

    A module may be loaded again from its own file, as transformers does with itself; a package
    that is loaded again may replace the modules in it.
    """
    missing = object()
    now = {name: sys.modules.get(name, missing) for name in before}
    changed = [name for name, module in before.items() if now[name] is not module]
    reloaded = {name for name in changed if not _differs(before[name], now[name])}
    replaced = [name for name in changed if not {name, name.partition(".")[0]} & reloaded]
    if replaced:
        sys.modules.update({name: before[name] for name in changed})
    return replaced


def _differs(module: object, now: object) -> bool:
    file = _file_of(module)
    return file is None or _file_of(now) != file


def _file_of(module: object) -> object:
    """The file of a module, without asking the module: it may be anything."""
    if not issubclass(type(module), ModuleType):
        return None
    return object.__getattribute__(module, "__dict__").get("__file__")
