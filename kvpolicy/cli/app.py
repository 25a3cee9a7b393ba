"""The ``kvpolicy`` program: finds commands by entry point and runs one.

Any package can add a command. An entry point of the group ``kvpolicy.commands`` names a
`typer.Typer` object; the arguments ``help`` and ``rich_help_panel`` of that object are read from
its source for ``kvpolicy --help``, so that only the command that runs is imported.
"""

import ast
import math
import sys
import threading
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import EntryPoint
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from kvpolicy.cli.failures import INTERRUPTED, answer, check_surroundings, standard_streams
from kvpolicy.cli.output import StdoutClosed, info, plain, print_text
from kvpolicy.entry_points import (
    find_installed,
    installed,
    load_installed,
    module_and_name,
    parse_module,
)
from kvpolicy.errors import KVPolicyError, shown
from kvpolicy.plugin_code import plugin_code
from kvpolicy.validators import MAX_COUNT, MAX_SEED

GROUP = "kvpolicy.commands"
HELP = "KV-cache eviction policies as plugins: run them, mix them per layer, compare them."
# Panels of `kvpolicy --help` in this order, then those of other packages.
PANELS = ("Generate text", "Policies and plans", "Experiments", "Results", "Models")

_RESEND_AFTER_S = 0.05


def run(args: list[str]) -> int:
    """Run one command.

    Args:
        args: Arguments after ``kvpolicy``.

    Returns:
        The exit status.
    """
    with standard_streams():
        try:
            check_surroundings(args)
            with _no_lost_interrupts():
                status = build().main(args, prog_name="kvpolicy", standalone_mode=False)
            sys.stdout.flush()
        except SystemExit as error:  # of click, for the reader of a help that has gone
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            return answer(StdoutClosed())
        except (Exception, KeyboardInterrupt) as error:
            return answer(error)
        if status == INTERRUPTED:  # typer caught Ctrl-C
            info("interrupted.")
        return status if isinstance(status, int) else 0


def build() -> Any:
    """Build the command line with all installed commands."""
    app = typer.Typer(cls=CommandGroup, help=HELP, rich_markup_mode="rich")
    app.callback(invoke_without_command=True)(_root)
    return get_command(app)


def command_names() -> list[str]:
    """Names of the installed commands, in the order of ``kvpolicy --help``."""
    rank = {panel: i for i, panel in enumerate(PANELS)}
    commands = [LazyCommand(point) for point in installed(GROUP).values()]
    commands.sort(key=lambda one: (rank.get(one.rich_help_panel or "", len(PANELS)), one.name))
    return [str(command.name) for command in commands]


class CommandGroup(TyperGroup):
    """The commands that installed packages register."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands."""
        return command_names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Look up one command by name.

        Raises:
            KVPolicyError: No package registers it.
        """
        points = installed(GROUP)
        if cmd_name in points:
            return LazyCommand(points[cmd_name])
        if ctx.resilient_parsing:  # shell completion
            return None
        return find_installed(GROUP, cmd_name, what="command")  # raises


class LazyCommand(TyperCommand):
    """A command whose module is imported when it runs or shows its own help."""

    def __init__(self, point: EntryPoint) -> None:
        """Read the summary and the panel from the source."""
        declared = _declared_arguments(point)
        panel = declared.get("rich_help_panel")
        super().__init__(
            point.name,
            help=plain(declared.get("help", point.value)),
            rich_help_panel=panel and plain(panel),
        )
        self._name = point.name

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Import the command and parse its arguments."""
        return load_command(self._name).make_context(info_name, args, parent, **extra)


def load_command(name: str) -> Any:
    """Import a command.

    Args:
        name: Its name.

    Raises:
        KVPolicyError: No package registers it, or it cannot be imported.
    """
    app = load_installed(GROUP, name, what="command")
    if not isinstance(app, typer.Typer):
        msg = f"command '{name}' is {shown(app)}; its package should name a typer.Typer object"
        raise KVPolicyError(msg)
    with plugin_code(f"command '{name}' cannot be built", KVPolicyError):
        app.rich_markup_mode = "rich"
        command = get_command(app)
        for one in (command, *getattr(command, "commands", {}).values()):
            _show_plainly(one)
            _check_numbers(one)
    return command


def _show_plainly(command: Any) -> None:
    """Help texts are plain text: ``[default: cpu]`` is no markup of rich."""
    for one in (command, *command.params):
        for attribute in ("help", "short_help", "epilog"):
            text = getattr(one, attribute, None)
            if text:
                setattr(one, attribute, plain(text))


def _check_numbers(command: Any) -> None:
    """Refuse numbers that no command can use: infinities, NaN, and beyond 32 or 64 bits."""
    callback = command.callback
    if callback is None:
        return

    @wraps(callback)
    def checked(**values: Any) -> Any:
        for param in command.params:
            given = values.get(param.name)
            for value in given if isinstance(given, (list, tuple)) else [given]:
                _check_number(param.opts[0], value)
        return callback(**values)

    command.callback = checked


def _check_number(option: str, value: object) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        msg = f"{option} got {value}; give a finite number"
        raise KVPolicyError(msg)
    most = MAX_SEED if "seed" in option else MAX_COUNT
    if isinstance(value, int) and abs(value) > most:
        msg = f"{option} got {str(value)[:40]}; give a whole number up to {most:,}"
        raise KVPolicyError(msg)


def _declared_arguments(point: EntryPoint) -> dict[str, str]:
    """String arguments of the assignment ``app = typer.Typer(...)``, read without importing it."""
    try:
        module, name = module_and_name(point)
        tree = parse_module(module)
    except LookupError:
        return {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            targets = [one.id for one in node.targets if isinstance(one, ast.Name)]
            if name in targets:
                return {
                    str(keyword.arg): keyword.value.value
                    for keyword in node.value.keywords
                    if isinstance(keyword.value, ast.Constant)
                    and isinstance(keyword.value.value, str)
                }
    return {}


def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    if version:
        import kvpolicy

        print_text(f"kvpolicy {kvpolicy.__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), nl=False)


@contextmanager
def _no_lost_interrupts() -> Iterator[None]:
    """Send an interrupt again that Python has printed and dropped.

    Python drops what is raised in a finaliser or in a callback of the garbage collector;
    Hypothesis has such a callback.
    """
    before = sys.unraisablehook

    def resend(dropped: "sys.UnraisableHookArgs") -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            before(dropped)
            return
        # Raised right here, it would be dropped as well.
        timer = threading.Timer(_RESEND_AFTER_S, interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = resend
    try:
        yield
    finally:
        sys.unraisablehook = before
