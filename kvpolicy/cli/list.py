"""``kvpolicy list``: the policies that a plan may name, read without importing them.

With ``--load`` each is imported and built as well: what a policy raises then is not in its source.

With ``--json``: a list of ``{"name", "target", "distribution", "summary", "knobs": [{"name",
"type", "default"}], "problem"}``, in alphabetical order; ``problem`` is null for a policy
that can be read, and loaded if asked.
"""

from typing import Annotated

import attrs
import typer

from kvpolicy.cli.options import Json, Plugins, examples, register_plugins
from kvpolicy.cli.output import info, print_entries, print_json
from kvpolicy.errors import KVPolicyError
from kvpolicy.hooks.discovery import (
    PolicyInfo,
    installed_policies,
    load_policy,
    load_policy_class,
)

app = typer.Typer(
    help="Show the installed policies and their knobs.",
    rich_help_panel="Policies and plans",
    add_completion=False,
)


@app.command(epilog=examples("kvpolicy list", "kvpolicy list --plugin my_policy.py --json"))
def list_policies(
    plugin: Plugins = None,
    load: Annotated[
        bool, typer.Option("--load", help="Import and build each, to find those that fail.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the installed policies: a summary of each, and its knobs with defaults.

    A broken policy is listed with its error.
    """
    register_plugins(plugin)
    policies = installed_policies()
    if load:
        policies = [_loaded(policy) for policy in policies]
    if json:
        print_json([attrs.asdict(policy) for policy in policies], indent=2)
        return
    print_entries([_entry(policy) for policy in policies])
    if not policies:
        info("no policies are installed; install a package that has some.")


def _loaded(policy: PolicyInfo) -> PolicyInfo:
    """The same policy, with the error that it raises when it is loaded."""
    if policy.problem is not None:
        return policy
    from kvpolicy.hooks.stack import Stack

    try:
        if any(knob.default == "required" for knob in policy.knobs):
            load_policy_class(policy.name)
        else:
            Stack([(policy.name, load_policy(policy.name))])
    except KVPolicyError as error:
        return attrs.evolve(policy, problem=str(error))
    return policy


def _entry(policy: PolicyInfo) -> tuple[str, str, str]:
    knobs = "  ".join(f"{knob.name}={knob.default}" for knob in policy.knobs)
    broken = policy.problem and f"broken: {policy.problem} ({policy.target})"
    return policy.name, broken or policy.summary or policy.target, knobs
