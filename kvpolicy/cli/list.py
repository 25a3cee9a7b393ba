"""``kvpolicy list``: the policies that a plan may name, read without importing them.

With ``--json``: a list of ``{"name", "target", "distribution", "summary", "knobs": [{"name",
"type", "default"}], "problem"}``, in alphabetical order; ``problem`` is null for a policy
that can be read.
"""

import textwrap
from shutil import get_terminal_size

import attrs
import typer

from kvpolicy.cli.options import Json, Plugins, examples, register_plugins
from kvpolicy.cli.output import info, print_json, print_text
from kvpolicy.hooks.discovery import PolicyInfo, installed_policies

app = typer.Typer(
    help="Show the installed policies and their knobs.",
    rich_help_panel="Policies and plans",
    add_completion=False,
)

_WIDEST = 100


@app.command(epilog=examples("kvpolicy list", "kvpolicy list --plugin my_policy.py --json"))
def list_policies(plugin: Plugins = None, json: Json = False) -> None:
    """Show the installed policies: a summary of each, and its knobs with defaults."""
    register_plugins(plugin)
    policies = installed_policies()
    if json:
        print_json([attrs.asdict(policy) for policy in policies], indent=2)
        return
    indent = 2 + max((len(policy.name) for policy in policies), default=0)
    width = min(get_terminal_size().columns, _WIDEST)
    for policy in policies:
        print_text("\n".join(_lines(policy, indent, width)) + "\n")
    if not policies:
        info("no policies are installed; install a package that has some.")


def _lines(policy: PolicyInfo, indent: int, width: int) -> list[str]:
    knobs = "  ".join(f"{knob.name}={knob.default}" for knob in policy.knobs)
    broken = policy.problem and f"broken: {policy.problem} ({policy.target})"
    lines = _wrap(broken or policy.summary or policy.target, indent, width)
    lines += _wrap(knobs, indent + 2, width) if knobs else []
    lines[0] = policy.name.ljust(indent) + lines[0].lstrip()
    return lines


def _wrap(text: str, indent: int, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
