"""``kvpolicy plan show``, ``plan check``, ``plan schema`` and ``plan suggest``.

With ``--json``, `show` prints ``{"model", "dtype", "tokens", "prompt_tokens", "slots", "digest",
"bytes_per_slot", "bytes", "copied_bytes", "staging_bytes", "full_bytes_per_slot",
"shared_bytes_per_slot", "lookahead_bytes_per_slot",
"layers": [{"layer", "stack", "budget", "buffer", "sliding_window", "rows_per_slot",
"bytes_per_slot"}], "schedule"}``.
A budget is null if all rows stay, a sliding window if the layer has none; a layer whose budget is
given as a share also has ``"budget_from"``, one in which the rows of prompts stay ``"prompt"``, one
with a larger buffer for prompts that enter ``"prefill_buffer"``, and one with rows in integers
``"rows"``.
`check` prints ``{"file", "model", "ok", "digest", "problems":
[{"error", "message"}], "warnings"}``; ``error`` is the class of the problem, and the digest is null
if there are problems. A warning says what in the plan changes nothing.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.completion import names_of
from kvpolicy.cli.failures import WRONG_INPUT
from kvpolicy.cli.option_groups import with_groups
from kvpolicy.cli.options import (
    DEFAULT_MODEL,
    Dtype,
    Json,
    Model,
    Overrides,
    Plugins,
    PolicyOptions,
    PromptTokens,
    TrustRemoteCode,
    choose_plan,
    examples,
    register_plugins,
)
from kvpolicy.cli.output import (
    as_sentence,
    info,
    print_exact,
    print_json,
    print_lines,
    terminal_width,
)
from kvpolicy.cli.text_table import format_table
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.cli.plan_suggest import suggest
from kvpolicy.quantities import format_bytes

if TYPE_CHECKING:
    from kvpolicy.engine.memory.footprint import Footprint, LayerFootprint
    from kvpolicy.plan.plan import PlanCheck
    from kvpolicy.plan.spec import RowFormats

_PLANS = names_of("kvpolicy.plans", ".toml")

app = typer.Typer(
    help="Show or check what a plan does in each layer, or suggest one.",
    rich_help_panel="Policies and plans",
    no_args_is_help=True,
    add_completion=False,
)


@app.command(
    short_help="Show what each layer does, and the bytes it allocates.",
    epilog=examples(
        "kvpolicy plan show plan.toml",
        "kvpolicy plan show skipkv --set budget=64 --toml",
        "kvpolicy plan show --policy h2o+protect --budget 64",
    ),
)
@with_groups
def show(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE|NAME",
            autocompletion=_PLANS,
            help="A plan, as TOML; or name policies.",
        ),
    ] = None,
    *,
    policies: PolicyOptions,
    model: Model = DEFAULT_MODEL,
    slots: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 8,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest sequence. [default: the model's positions]"),
    ] = None,
    prompt_tokens: PromptTokens = None,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print the resolved plan as TOML, with all knobs.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what each layer of a model does, and the bytes it allocates.

    Reads the model's configuration only, not its weights.
    """
    if toml and json:
        msg = "--toml and --json cannot be combined; give one of them."
        raise KVPolicyError(msg)
    register_plugins(policies.plugin)
    from kvpolicy.model.loading import load_skeleton

    plan = choose_plan(file, policies)
    skeleton = load_skeleton(model, dtype=dtype, trust_remote_code=trust_remote_code)
    from kvpolicy.engine.memory.footprint import footprint

    found = footprint(plan, skeleton, slots=slots, longest=tokens, longest_prompt=prompt_tokens)
    if toml:
        from kvpolicy.plan.dump import to_toml

        print_exact(to_toml(found.plan))
    elif json:
        print_json({"model": model, **found.to_dict()}, indent=2)
    else:
        name = str(file) if file is not None else "+".join(policies.policy or ["the full cache"])
        print_lines(_lines(found, name, model))


@app.command(
    short_help="Find everything that is wrong with a plan.",
    epilog=examples(
        "kvpolicy plan check plan.toml",
        "kvpolicy plan check plan.toml --model Qwen/Qwen3-0.6B --json",
    ),
)
def check(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE|NAME", autocompletion=_PLANS, help="A plan, as TOML."),
    ],
    model: Model = DEFAULT_MODEL,
    overrides: Overrides = None,
    plugin: Plugins = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Find everything that is wrong with a plan, one sentence for each problem.

    Exits with status 2 if there are problems. Says what in the plan changes nothing. Reads the
    model's configuration only.
    """
    register_plugins(plugin)
    found = _check(file, model, overrides or [], trust_remote_code)
    from kvpolicy.plan.no_effect import without_effect

    digest = found.resolved.digest() if found.resolved else None
    warnings = without_effect(found.resolved) if found.resolved else []
    if json:
        problems = [{"error": type(one).__name__, "message": str(one)} for one in found.problems]
        result = {"file": str(file), "model": model, "ok": not problems, "digest": digest}
        print_json({**result, "problems": problems, "warnings": warnings}, indent=2)
    else:
        for problem in found.problems:
            info(as_sentence(str(problem)))
        for warning in warnings:
            info(f"{warning}.")
    if found.problems:
        raise typer.Exit(WRONG_INPUT)
    if not json:
        assert found.resolved is not None, "a plan without problems is resolved"
        num_layers = len(found.resolved.layers)
        print_lines([f"{file}: OK on the {num_layers} layers of {model}, digest {digest}"])


@app.command(
    epilog=examples(
        "kvpolicy plan schema",
        "kvpolicy plan schema > plan.schema.json",
    )
)
def schema() -> None:
    """Print a JSON schema of plan files, for editors.

    A plan names it in a first line: #:schema https://.../plan.schema.json, or a path.
    """
    from kvpolicy.plan.schema import plan_schema

    print_json(plan_schema(), indent=2)


app.command(
    short_help="Suggest the budget, buffer and slots that fit into a memory, or keep a quality.",
    epilog=examples(
        "kvpolicy plan suggest --model Qwen/Qwen3-0.6B --length 8192 --memory 8GiB",
        "kvpolicy plan suggest --length 1024 --memory 4MB --slots 8 --policy h2o",
        "kvpolicy plan suggest --model smollm2 --length 1024 --quality 0.9",
    ),
)(suggest)


def _check(file: Path, model: str, overrides: list[str], trust_remote_code: bool) -> "PlanCheck":
    """Check a plan file; a model that cannot be opened is one more problem."""
    from kvpolicy.engine.memory.layers import check_layers
    from kvpolicy.model.adapter import ModelAdapter
    from kvpolicy.model.loading import load_skeleton
    from kvpolicy.plan.plan import PlanCheck, check_plan
    from kvpolicy.plan.toml import read_file

    adapter, problems = None, []
    try:
        adapter = ModelAdapter(load_skeleton(model, trust_remote_code=trust_remote_code))
    except KVPolicyError as error:
        problems = [error]
    try:
        data = read_file(file)
    except KVPolicyError as error:
        return PlanCheck((error, *problems))
    num_layers = None if adapter is None else adapter.num_layers
    attention = None if adapter is None else adapter.attention_layers
    found = check_plan(
        data, overrides, num_layers=num_layers, attention=attention, name=f"plan '{file}'"
    )
    if adapter is not None and found.resolved is not None:
        try:
            check_layers(found.resolved, adapter)
        except KVPolicyError as error:
            return PlanCheck((error,))
    return PlanCheck((*found.problems, *problems), found.resolved)


def _lines(found: "Footprint", name: str, model: str) -> list[str]:
    windows = any(layer.sliding_window for layer in found.layers)
    rows = [_row(group, windows=windows) for group in found.groups]
    window = ["window"] if windows else []
    headers = ["layers", "budget", "buffer", *window, "rows/slot", "KV/slot", "policies"]
    shared = found.shared_bytes_per_slot
    rest = f", {format_bytes(shared)} of it shared by all layers" if shared else ""
    share = found.bytes_per_slot / found.full_bytes_per_slot
    table = format_table(headers, rows, right=range(1, len(headers) - 1), width=terminal_width())
    return [
        f"{name} on {model}: {_num_layers(found)}, {found.dtype}, "
        f"sequences of up to {found.tokens:,} tokens{_prompts(found)}",
        "",
        *table.split("\n"),
        "",
        f"per slot    {format_bytes(found.bytes_per_slot)}, {share:.1%} of the full cache{rest}",
        *_states(found),
        f"{found.slots} slots".ljust(12) + format_bytes(found.num_bytes) + _copied(found),
        *_staging(found),
        *_lookahead(found),
        f"digest      {found.plan.digest()}",
        *_shares(found.layers),
    ]


def _num_layers(found: "Footprint") -> str:
    num, with_rows = len(found.layers), len(found.plan.attention)
    if num == with_rows:
        return f"{num} layers"
    shared = any(layer.source is not None for layer in found.layers)
    return f"{num} layers, {with_rows} with {'rows' if shared else 'attention'}"


def _states(found: "Footprint") -> list[str]:
    """What of it are states of fixed size, if layers have any."""
    if not found.state_bytes_per_slot:
        return []
    num = sum(1 for layer in found.layers if layer.state_bytes_per_slot)
    of_rows = format_bytes(found.bytes_per_slot - found.state_bytes_per_slot)
    of_states = format_bytes(found.state_bytes_per_slot)
    return [
        f"{'':<12}{of_rows} of it rows, and {of_states} states of {num} layers, which no budget "
        "changes"
    ]


def _prompts(found: "Footprint") -> str:
    """The longest prompt, where its rows stay."""
    if not found.plan.keeps_prompts:
        return ""
    if found.prompt_tokens == found.tokens:
        return ", which may be prompts as a whole: give --prompt-tokens if prompts are shorter"
    return f", prompts of up to {found.prompt_tokens:,}"


def _copied(found: "Footprint") -> str:
    """What copies take for a moment, which ``--kv-memory`` counts, too."""
    if not found.plan.compacting_layers():
        return ""
    when = "a forward or a compaction" if found.staging_bytes else "a compaction"
    return f", and {format_bytes(found.copied_bytes)} for a moment in {when}"


def _staging(found: "Footprint") -> list[str]:
    """What of it lies beside the slots, if prompts enter in larger chunks than a slot takes."""
    if not found.staging_bytes:
        return []
    num = found.num_staged
    prompts = "1 prompt that enters" if num == 1 else f"{num:,} prompts that enter at a time"
    num_bytes = format_bytes(found.staging_bytes)
    return [f"staging     {num_bytes} of it, for {prompts}"]


def _lookahead(found: "Footprint") -> list[str]:
    """What a lookahead takes, if a policy has one."""
    if not found.lookahead_size:
        return []
    num_bytes = format_bytes(found.lookahead_bytes_per_slot)
    return [f"lookahead   up to {found.lookahead_size:,} tokens, {num_bytes} per slot for a moment"]


def _shares(layers: "tuple[LayerFootprint, ...]") -> list[str]:
    """The calculation of each budget that is given as a share."""
    plans = [layer.plan for layer in layers if layer.plan.budget_from is not None]
    lines = dict.fromkeys(str(plan.budget_from) for plan in plans)
    return [f"{'budget' if i == 0 else '':<12}{line}" for i, line in enumerate(lines)]


def _row(group: "list[LayerFootprint]", *, windows: bool) -> list[str]:
    first, last = group[0], group[-1]
    plan = first.to_dict()
    prompt = "prompt + " if first.plan.keeps_prompt and first.plan.bounded else ""
    shared = " shared" if first.plan.heads == "shared" else ""
    each = "" if len(group) == 1 else " each"
    layers = f"{first.layer_idx}" if first is last else f"{first.layer_idx}-{last.layer_idx}"
    if not first.plan.has_rows:
        held = format_bytes(first.bytes_per_slot) + each if first.bytes_per_slot else "-"
        what = "no attention: states" if first.bytes_per_slot else "no attention"
        if first.source is not None:
            what = f"attends to the rows of layer {first.source}"
        return [layers, "-", "-", *(["-"] if windows else []), "-", held, what]
    return [
        layers,
        "all" if plan["budget"] is None else f"{prompt}{plan['budget']:,}{shared}",
        "-" if plan["buffer"] is None else f"{plan['buffer']:,}{_prefill_buffer(plan)}",
        *([f"{first.sliding_window:,}" if first.sliding_window else "-"] if windows else []),
        f"{first.rows_per_slot:,}{_format(first.plan.rows)}",
        format_bytes(first.bytes_per_slot) + each,
        " + ".join(_policy(spec) for spec in plan["stack"]),
    ]


def _prefill_buffer(plan: dict[str, Any]) -> str:
    return f", prefill {plan['prefill_buffer']:,}" if "prefill_buffer" in plan else ""


def _format(rows: "RowFormats") -> str:
    """How rows are stored, if not in the model's precision."""
    from kvpolicy.plan.spec import PLAIN_ROWS

    return "" if rows == PLAIN_ROWS else f" {rows}"


def _policy(spec: dict[str, Any]) -> str:
    knobs = ", ".join(f"{name}={_knob(knob)}" for name, knob in spec.items() if name != "policy")
    return f"{spec['policy']}({knobs})" if knobs else str(spec["policy"])


def _knob(value: object) -> str:
    """A value as text; in Python's notation if it has characters that do not print."""
    if isinstance(value, (list, tuple)) and any(isinstance(one, dict) for one in value):
        parts = (_policy(one) if "policy" in one else str(one) for one in value)
        return f"[{', '.join(parts)}]"
    return str(value) if str(value).isprintable() and value != "" else repr(value)
