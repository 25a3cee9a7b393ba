"""The list of commands, and the group that imports one only when it is asked for."""

import difflib
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kvpolicy.errors import KVPolicyError

# Name of the command: the module whose `app` it is, and what it does in one line. The line
# stands here, and not only in the module, so that `kvpolicy --help` imports none of them.
COMMANDS = {
    "list": ("kvpolicy.cli.list", "Show the installed policies and their knobs."),
    "plan": ("kvpolicy.cli.plan", "Show what a plan does in each layer, or what is wrong with it."),
    "run": ("kvpolicy.cli.run", "Generate text with a policy at a budget."),
    "trace": ("kvpolicy.cli.trace", "Show every hook call of a generation."),
    "ablate": ("kvpolicy.lab.cli.ablate", "Compare policies at several budgets."),
    "results": ("kvpolicy.lab.cli.results", "List, show, compare and export what ablations found."),
    "report": ("kvpolicy.lab.cli.report", "Show runs as one page that opens anywhere."),
    "plot": ("kvpolicy.lab.cli.plot", "Draw a figure of runs for a paper."),
    "lm-eval": ("kvpolicy.lab.cli.lm_eval", "Run tasks of lm-evaluation-harness with a plan."),
    "tasks": ("kvpolicy.lab.cli.tasks", "Show what an ablation can ask, and its problems."),
    "check": ("kvpolicy.cli.check", "Hold policies against the contract, in drawn cases."),
    "bench": ("kvpolicy.lab.cli.bench", "Measure the engine's speed against generate()."),
    "steer": ("kvpolicy.lab.cli.steer", "Make steering vectors, and show what is in them."),
    "reasoner": ("kvpolicy_reasoner.cli", "Sample from a bundled reasoner, or train it again."),
}

HELP = "KV-cache eviction policies as plugins: run them, mix them per layer, compare them."


class LazyGroup(TyperGroup):
    """A group of commands whose modules are imported on use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands, in the order in which a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command, or refuse a name that is not one."""
        if cmd_name not in COMMANDS:
            msg = f"there is no command {cmd_name!r}; {_nearest(cmd_name)}"
            raise KVPolicyError(msg)
        module, _ = COMMANDS[cmd_name]
        return get_command(import_module(module).app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def build() -> Any:
    """Build the whole command line."""
    # Plain help: importing rich takes longer than everything else `kvpolicy --help` does.
    app = typer.Typer(cls=LazyGroup, help=HELP, add_completion=False, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(_root)
    return get_command(app)


def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    if version:
        import kvpolicy

        typer.echo(f"kvpolicy {kvpolicy.__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "the commands are:"
    return hint if near else f"{hint} {', '.join(COMMANDS)}."
