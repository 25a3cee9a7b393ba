"""``kvpolicy list``: the policies that a plan may name, read without importing them.

With ``--json``: a list of ``{"name", "target", "distribution", "summary", "knobs": [{"name",
"type", "default"}], "problem"}``, in alphabetical order; ``problem`` is null for a policy
that can be read.
"""

import attrs
import typer

from kvpolicy.cli.options import Json, Plugins, examples, register_plugins
from kvpolicy.cli.output import info, print_entries, print_json
from kvpolicy.hooks.discovery import PolicyInfo, installed_policies

app = typer.Typer(
    help="Show the installed policies and their knobs.",
    rich_help_panel="Policies and plans",
    add_completion=False,
)


@app.command(epilog=examples("kvpolicy list", "kvpolicy list --plugin my_policy.py --json"))
def list_policies(plugin: Plugins = None, json: Json = False) -> None:
    """Show the installed policies: a summary of each, and its knobs with defaults."""
    register_plugins(plugin)
    policies = installed_policies()
    if json:
        print_json([attrs.asdict(policy) for policy in policies], indent=2)
        return
    print_entries([_entry(policy) for policy in policies])
    if not policies:
        info("no policies are installed; install a package that has some.")


def _entry(policy: PolicyInfo) -> tuple[str, str, str]:
    knobs = "  ".join(f"{knob.name}={knob.default}" for knob in policy.knobs)
    broken = policy.problem and f"broken: {policy.problem} ({policy.target})"
    return policy.name, broken or policy.summary or policy.target, knobs
