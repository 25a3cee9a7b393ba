"""``kvpolicy list``: the policies that a plan may name, read without importing them.

Behind them stand the evictions of blocks that are asked for again, which a store names and no plan.
With ``--load`` each is imported and built as well: what a policy raises then is not in its source.

With ``--json``: a list of ``{"name", "target", "distribution", "summary", "knobs": [{"name",
"type", "default"}], "problem"}``, in alphabetical order; ``problem`` is null for a policy
that can be read, and loaded if asked. With ``--blocks``: the same for evictions of blocks only.
"""

from random import Random
from typing import Annotated

import attrs
import typer

from kvpolicy.block_eviction import installed_block_evictions, load_block_eviction
from kvpolicy.cli.options import Json, Plugins, examples, register_plugins
from kvpolicy.cli.output import info, print_entries, print_json, print_lines
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


@app.command(
    epilog=examples(
        "kvpolicy list",
        "kvpolicy list --blocks",
        "kvpolicy list --plugin my_policy.py --json",
    )
)
def list_policies(
    plugin: Plugins = None,
    load: Annotated[
        bool, typer.Option("--load", help="Import and build each, to find those that fail.")
    ] = False,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Only evictions of blocks that are asked for again.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the installed policies: a summary of each, and its knobs with defaults.

    Behind them: what evicts blocks of a store. A broken one is listed with its error.
    """
    register_plugins(plugin)
    policies = [] if blocks else installed_policies()
    evictions = [] if json and not blocks else installed_block_evictions()
    if load:
        policies = [_loaded(policy) for policy in policies]
        evictions = [_loaded_eviction(eviction) for eviction in evictions]
    if json:
        found = evictions if blocks else policies
        print_json([attrs.asdict(one) for one in found], indent=2)
        return
    print_entries([_entry(policy) for policy in policies])
    if evictions and not blocks:
        print_lines(["", "For stores of blocks, which no plan names:", ""])
    print_entries([_entry(eviction) for eviction in evictions])
    if not policies and not blocks:
        info("no policies are installed; install a package that has some.")
    if not evictions and blocks:
        info("no evictions of blocks are installed; install a package that has some.")


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


def _loaded_eviction(eviction: PolicyInfo) -> PolicyInfo:
    """The same, with the error that it raises when it is built with its defaults."""
    if eviction.problem is not None or any(knob.default == "required" for knob in eviction.knobs):
        return eviction
    try:
        load_block_eviction(eviction.name, capacity=1, rng=Random(0))
    except KVPolicyError as error:
        return attrs.evolve(eviction, problem=str(error))
    return eviction


def _entry(policy: PolicyInfo) -> tuple[str, str, str]:
    knobs = "  ".join(f"{knob.name}={knob.default}" for knob in policy.knobs)
    broken = policy.problem and f"broken: {policy.problem} ({policy.target})"
    return policy.name, broken or policy.summary or policy.target, knobs
