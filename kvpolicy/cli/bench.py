"""``kvpolicy bench``: the engine's decode speed under each policy against ``generate``.

With ``--json`` on stdout, with ``--output`` in a file: ``{"workload", "session",
"num_parameters", "standings": [{"name", "budget", "decode_tok_s", "ratio",
"ratio_min", "ratio_max", "policy_share", "kv_bytes", "rounds"}]}``; the first standing is
``generate``'s, and ratios are to it, paired by round.
"""

import json as jsonlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.columns import columns
from kvpolicy.cli.console import terminal_width, write, write_json
from kvpolicy.cli.interrupt import Interrupted
from kvpolicy.cli.options import (
    Json,
    Overrides,
    Plugins,
    check_new_file,
    register_plugins,
    words,
)
from kvpolicy.cli.units import human_bytes
from kvpolicy.errors import KVPolicyError
from kvpolicy.wholefile import write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvpolicy.lab.bench import Standing, Turn, Workload
    from kvpolicy.lab.grid import Cell

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def bench(
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Whose policies to run. [default: baselines]"),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Policies to run instead; in A+B, B wraps A."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 8,
    prompt_min: Annotated[int, typer.Option(min=1, help="Tokens of the shortest prompt.")] = 64,
    prompt_max: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated for each.")] = 1024,
    budget: Annotated[int, typer.Option(min=1, help="Rows that stay.")] = 256,
    buffer: Annotated[int, typer.Option(min=1, help="Rows that may join.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Times everybody takes a turn.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and prompts.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch. [default: torch's choice]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the figures as JSON.")
    ] = None,
    overrides: Overrides = None,
    plugin: Plugins = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Where to run, such as cuda:0.")
    ] = "cpu",
    json: Json = False,
) -> None:
    """Measure decode speed against transformers' generate() with the full cache.

    On a model of about 30 M parameters with random weights; everybody takes turns in one
    process, and speeds are compared within a round.
    """
    if prompt_max < prompt_min:
        msg = f"--prompt-max {prompt_max} is below --prompt-min {prompt_min}."
        raise KVPolicyError(msg)
    if output is not None:
        check_new_file(output)
    register_plugins(plugin)
    from kvpolicy.lab.bench import Workload, standings

    workload = Workload(batch, prompt_min, prompt_max, new_tokens, seed)
    model, cells = _prepare(
        preset, words(policies), budget, buffer, overrides or [], workload, threads, device
    )
    turns: list[Turn] = []
    interrupted = _follow(model, cells, workload, rounds, turns)
    found = standings(turns, cells)
    if found:
        _show(_record(model, workload, found), found, output, json=json)
    if interrupted:
        num_complete = len(found[0].rounds) if found else 0
        msg = f"interrupted; {num_complete} of {rounds} rounds were complete and count."
        raise Interrupted(msg)


def _prepare(
    preset: str | None,
    stacks: Sequence[str],
    budget: int,
    buffer: int,
    overrides: Sequence[str],
    workload: "Workload",
    threads: int | None,
    device: str,
) -> "tuple[PreTrainedModel, list[Cell]]":
    import torch

    from kvpolicy.lab.bench import small_model
    from kvpolicy.lab.grid import build_cells
    from kvpolicy.lab.setup import choose

    if threads is not None:
        torch.set_num_threads(threads)
    chosen = choose(preset, policies=stacks, budgets=[budget], buffer=buffer)
    longest = workload.prompt_max + workload.new_tokens
    model = small_model(workload.seed, max_positions=longest, device=device)
    cells = build_cells(
        chosen.series,
        num_layers=model.config.num_hidden_layers,
        budgets=[budget],
        buffer=buffer,
        overrides=overrides,
    )
    return model, cells


def _follow(
    model: "PreTrainedModel",
    cells: "Sequence[Cell]",
    workload: "Workload",
    rounds: int,
    turns: "list[Turn]",
) -> bool:
    """Collect turns as they end; whether the user has had enough before the last one."""
    from kvpolicy.cli.progress import open_progress
    from kvpolicy.lab.bench import measure

    total = rounds * (1 + len(cells))
    try:
        with open_progress(total) as progress:
            progress.show("warming up", 0)
            for turn in measure(model, cells, workload, rounds=rounds):
                turns.append(turn)
                line = f"round {turn.round + 1}, {turn.name}: {turn.decode_tok_s:.0f} tokens/s"
                progress.keep(line)
                progress.show("", len(turns))
    except KeyboardInterrupt:
        return True
    return False


def _record(
    model: "PreTrainedModel", workload: "Workload", found: "Sequence[Standing]"
) -> dict[str, Any]:
    from kvpolicy.lab.session import describe_session

    return {
        "workload": attrs.asdict(workload),
        "session": describe_session(["kvpolicy", *sys.argv[1:]], workers=1),
        "num_parameters": model.num_parameters(),
        "standings": [attrs.asdict(standing) for standing in found],
    }


def _show(
    record: dict[str, Any], found: "Sequence[Standing]", output: Path | None, *, json: bool
) -> None:
    if output is not None:
        write_whole(output, jsonlib.dumps(record, indent=2) + "\n")
    if json:
        write_json(record, indent=2)
        return
    headers = ["", "budget", "tok/s", "x generate", "least - most", "policy", "KV cache"]
    write(
        columns(headers, [_row(one) for one in found], right=range(1, 7), width=terminal_width())
        + "\n"
    )


def _row(standing: "Standing") -> list[str]:
    share = standing.policy_share
    return [
        standing.name,
        "all" if standing.budget is None else f"{standing.budget:g}",
        f"{standing.decode_tok_s:.0f}",
        f"{standing.ratio:.2f}",
        f"{standing.ratio_min:.2f} - {standing.ratio_max:.2f}",
        "-" if share is None else f"{share:.1%}",
        human_bytes(standing.kv_bytes),
    ]
