"""``kvpolicy list``: the policies a plan may name, read without importing them.

With ``--json``: a list of ``{"name", "target", "distribution", "summary", "knobs": [{"name",
"type", "default"}], "problem"}``, in alphabetical order; ``problem`` is null for a policy
that can be read.
"""

import textwrap
from shutil import get_terminal_size

import attrs
import typer

from kvpolicy.cli.options import Json, Plugins, register_plugins
from kvpolicy.cli.output import say, write, write_json
from kvpolicy.hooks.discovery import PolicyInfo, installed_policies

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_WIDEST = 100


@app.command()
def listing(plugin: Plugins = None, json: Json = False) -> None:
    """Show the installed policies: what they do, and their knobs with defaults."""
    register_plugins(plugin)
    policies = installed_policies()
    if json:
        write_json([attrs.asdict(policy) for policy in policies], indent=2)
        return
    indent = 2 + max((len(policy.name) for policy in policies), default=0)
    width = min(get_terminal_size().columns, _WIDEST)
    for policy in policies:
        write("\n".join(_lines(policy, indent, width)) + "\n")
    if not policies:
        say("no policies are installed; install a package that brings some along.")


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
