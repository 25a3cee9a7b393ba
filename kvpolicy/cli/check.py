"""``kvpolicy check``: test policies against the whole contract, in generated cases.

With ``--json``, one object per policy and line: ``{"policy", "cases", "elapsed_s", "checked",
"skipped"}``, or ``{"policy", "clause", "expected", "came", "example": {"setup", "code"}}`` for
one that breaks a clause, or ``{"policy", "problem"}`` for an installed one that cannot be loaded.
"""

from collections import defaultdict
from functools import partial
from typing import Annotated, Any

import attrs
import typer

from kvpolicy.cli.completion import names_of
from kvpolicy.cli.options import SOME_FAILED, Json, Plugins, examples, register_plugins
from kvpolicy.cli.output import Progress, info, print_json, print_text
from kvpolicy.errors import KVPolicyError
from kvpolicy.hooks.discovery import load_policy_class, policy_names
from kvpolicy.plan.toml import parse_value

app = typer.Typer(
    help="Test policies against the contract, with generated cases.",
    rich_help_panel="Policies and plans",
    add_completion=False,
)


@app.command(
    epilog=examples(
        "kvpolicy check h2o",
        "kvpolicy check --plugin my_policy.py my_policy --profile ci",
    )
)
def check(
    policy: Annotated[
        list[str] | None,
        typer.Argument(
            autocompletion=names_of("kvpolicy.policies"),
            help="Policies; all that are installed if none.",
        ),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(metavar="NAME", help="Cases per policy: quick 100, ci 1000, thorough 10000."),
    ] = "quick",
    cases: Annotated[
        int | None,
        typer.Option(min=1, help="Cases in all, shared among the policies, whatever the profile."),
    ] = None,
    knobs: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="POLICY.KNOB=VALUE", help="A knob; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds draw equal cases.")] = 0,
    hidden_size: Annotated[
        int, typer.Option(min=1, help="Size of the hidden states, for steering vectors.")
    ] = 16,
    layers: Annotated[int, typer.Option(min=1, max=1000, help="Decoder layers.")] = 2,
    plugin: Plugins = None,
    json: Json = False,
) -> None:
    """Check policies against the contract; exit status 1 if one breaks it.

    Each broken clause is named, with a minimal example to run.
    """
    register_plugins(plugin)
    names = policy or policy_names()
    for name in policy or ():
        load_policy_class(name)  # report an unknown name before the long checks begin
    given = _knobs(knobs or [], names)

    from kvpolicy.testing import ConformanceError, check_policy
    from kvpolicy.testing.conformance import PROFILES

    # check_policy reports an unknown profile.
    num = PROFILES.get(profile, 1) if cases is None else -(-cases // len(names))
    num_failed = 0
    for name in names:
        with Progress(num) as shown:
            try:
                report = check_policy(
                    name,
                    knobs=given[name],
                    profile=profile,
                    max_examples=None if cases is None else num,
                    seed=seed,
                    hidden_size=hidden_size,
                    num_layers=layers,
                    progress=partial(_show, shown, name),
                )
            except ConformanceError as error:
                num_failed += 1
                print_json(_broken(error)) if json else print_text(f"{error}\n\n")
                continue
            except KVPolicyError as error:
                if policy:
                    raise
                # One of all that are installed: the others are checked nevertheless.
                num_failed += 1
                problem = {"policy": name, "problem": str(error)}
                print_json(problem) if json else print_text(f"{error}\n\n")
                continue
        print_json(report.to_dict()) if json else print_text(f"{report}\n\n")
    if num_failed:
        info(f"{num_failed} of {len(names)} policies break the contract.")
        raise typer.Exit(SOME_FAILED)


def _show(shown: Progress, name: str, done: int, _: int) -> None:
    shown.update(name, done)


def _broken(error: Any) -> dict[str, Any]:
    return {
        "policy": error.policy,
        "clause": error.clause,
        "expected": error.expected,
        "came": error.came,
        "example": attrs.asdict(error.example),
    }


def _knobs(settings: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    """The knobs of each policy."""
    given: dict[str, dict[str, Any]] = defaultdict(dict)
    for setting in settings:
        path, equals, text = setting.partition("=")
        name, dot, knob = path.strip().partition(".")
        if not (equals and dot and knob) or name not in names:
            msg = (
                f"--set {setting!r} is not POLICY.KNOB=VALUE with one of the policies that are "
                f"checked: {', '.join(names)}"
            )
            raise KVPolicyError(msg)
        given[name][knob] = parse_value(text)
    return given
