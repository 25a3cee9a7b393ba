"""``kvpolicy plan show``: what a plan does in each layer of a model, and what it takes.

With ``--json``: ``{"model", "dtype", "tokens", "slots", "digest", "bytes_per_slot", "bytes",
"full_bytes_per_slot", "layers": [{"layer", "stack", "budget", "buffer", "rows_per_slot",
"bytes_per_slot"}], "schedule"}``; a budget is null where everything stays.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.columns import columns
from kvpolicy.cli.console import terminal_width, write, write_json
from kvpolicy.cli.options import (
    Dtype,
    Json,
    Model,
    Overrides,
    Plugins,
    TrustRemoteCode,
    register_plugins,
)
from kvpolicy.cli.units import human_bytes

if TYPE_CHECKING:
    from kvpolicy.footprint import Footprint, LayerFootprint

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Show what a plan does in each layer, and what it takes.",
)


@app.callback()
def _group() -> None:
    """Keep `show` a command of its own, though it is the only one so far."""


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE|NAME", help="A plan, as TOML.")],
    model: Model = "reasoner",
    slots: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 8,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest sequence. [default: the model's positions]"),
    ] = None,
    overrides: Overrides = None,
    plugin: Plugins = None,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Show what each layer of a model will do, and the bytes it will take.

    Needs the model's configuration only, not its weights.
    """
    register_plugins(plugin)
    from kvpolicy.lab.models import open_skeleton
    from kvpolicy.plan import Plan

    plan = Plan.load(file, overrides or [])
    skeleton = open_skeleton(model, dtype=dtype, trust_remote_code=trust_remote_code)
    from kvpolicy.footprint import footprint

    found = footprint(plan, skeleton, slots=slots, longest=tokens)
    if json:
        write_json({"model": model, **found.to_dict()}, indent=2)
    else:
        write(_text(found, file, model))


def _text(found: "Footprint", file: Path, model: str) -> str:
    rows = [_row(group) for group in _fold(found.layers)]
    headers = ["layers", "budget", "buffer", "rows/slot", "KV/slot", "policies"]
    share = found.bytes_per_slot / found.full_bytes_per_slot
    lines = [
        f"{file} on {model}: {len(found.layers)} layers, {found.dtype}, "
        f"sequences of up to {found.tokens:,} tokens",
        "",
        columns(headers, rows, right=range(1, 5), width=terminal_width()),
        "",
        f"per slot    {human_bytes(found.bytes_per_slot)}, {share:.1%} of the full cache",
        f"{found.slots} slots".ljust(12) + human_bytes(found.num_bytes),
        f"digest      {found.digest}",
    ]
    return "\n".join(lines) + "\n"


def _fold(layers: "tuple[LayerFootprint, ...]") -> "list[list[LayerFootprint]]":
    """Consecutive layers that do and take the same, together."""
    groups: list[list[LayerFootprint]] = []
    for layer in layers:
        if groups and groups[-1][-1].same_as(layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return groups


def _row(group: "list[LayerFootprint]") -> list[str]:
    first, last = group[0], group[-1]
    plan = first.plan.to_dict()
    each = "" if len(group) == 1 else " each"
    return [
        f"{first.layer_idx}" if first is last else f"{first.layer_idx}-{last.layer_idx}",
        "all" if plan["budget"] is None else f"{plan['budget']:,}",
        "-" if plan["buffer"] is None else f"{plan['buffer']:,}",
        f"{first.rows_per_slot:,}",
        human_bytes(first.bytes_per_slot) + each,
        " + ".join(_policy(spec) for spec in plan["stack"]),
    ]


def _policy(spec: dict[str, Any]) -> str:
    knobs = ", ".join(f"{name}={_knob(knob)}" for name, knob in spec.items() if name != "policy")
    return f"{spec['policy']}({knobs})" if knobs else str(spec["policy"])


def _knob(value: object) -> str:
    """A value as text; what would not show, such as a line break, as Python writes it."""
    if isinstance(value, (list, tuple)) and any(isinstance(one, dict) for one in value):
        parts = (_policy(one) if "policy" in one else str(one) for one in value)
        return f"[{', '.join(parts)}]"
    return str(value) if str(value).isprintable() and value != "" else repr(value)
