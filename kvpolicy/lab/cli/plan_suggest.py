"""``kvpolicy plan suggest``: the budget, buffer and slots that fit into a memory or keep a quality.

With ``--json``, prints ``{"model", "dtype", "length", "memory", "memory_of_cache", "weights",
"suggested", "alternatives"}``; without ``--memory``, both memories are null, and there are no
alternatives. ``suggested`` has the fields of ``plan show --json``, and in each layer
``"kv_bytes_per_row"``, ``"other_bytes_per_row"`` and ``"window_bytes_per_slot"``; alternatives are
``{"slots", "budget", "buffer", "bytes_per_slot", "bytes", "whole"}``, where ``whole`` says that
nothing would be evicted. With ``--quality`` there is also ``"quality"``: ``{"wanted", "text",
"passages", "tokens", "elapsed_s", "measured"}``, where ``measured`` has for each plan ``{"policy",
"budget", "match", "retained_attention", "look_backs_held", "output_error", "bytes_per_slot",
"full_bytes_per_slot"}``, and ``match`` is ``{"value", "low", "high"}``.
"""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.options import (
    DEFAULT_MODEL,
    POLICY,
    CpuWeights,
    Device,
    Dtype,
    Json,
    Model,
    Overrides,
    Plugins,
    Policies,
    PrefillBuffer,
    PromptTokens,
    TrustRemoteCode,
    WeightForm,
    check_new_file,
    parse_bytes,
    parse_names,
    plan_of_policies,
    register_plugins,
)
from kvpolicy.cli.output import (
    format_bytes,
    info,
    print_json,
    print_lines,
    terminal_width,
)
from kvpolicy.cli.text_table import format_table
from kvpolicy.entry_points import default_name
from kvpolicy.errors import KVPolicyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvpolicy.engine.memory.footprint import Footprint, LayerFootprint
    from kvpolicy.engine.memory.suggestion import PlanOf, Suggestion
    from kvpolicy.plan.plan import Plan

QUALITY = "Quality"

_PASSAGES = 4
_SHORTEST = 16  # sequence whose quality can be measured


def suggest(
    length: Annotated[
        int, typer.Option(min=1, help="Tokens of the longest sequence, prompt and generation.")
    ],
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Memory for the cache: 8GiB, 500MB. May be left out with --quality.",
        ),
    ] = None,
    model: Model = DEFAULT_MODEL,
    policy: Policies = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Sequences decoded together. [default: chosen]")
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rows to keep. [default: the most that fit]", rich_help_panel=POLICY
        ),
    ] = None,
    buffer: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rows to append between compactions. [default: an eighth of the budget, from 32 "
            "to 128]",
            rich_help_panel=POLICY,
        ),
    ] = None,
    prefill_buffer: PrefillBuffer = None,
    keep: Annotated[
        float,
        typer.Option(
            min=0, max=100, help="Percent of --length that must stay where slots are chosen."
        ),
    ] = 25.0,
    with_weights: Annotated[
        bool, typer.Option("--with-weights", help="The memory is for the weights, too.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Write the suggested plan to a new file."),
    ] = None,
    prompt_tokens: PromptTokens = None,
    quality: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Choose the least budget, and the policy, with which the likeliest token is that "
            "of the full cache for this share of the tokens of a text, measured now: 0.99.",
            rich_help_panel=QUALITY,
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Policies to choose from; in A+B, B wraps A. [default: the default sweep's]",
            rich_help_panel=QUALITY,
        ),
    ] = None,
    of: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The text. [default: the language reference in Python's standard library]",
            rich_help_panel=QUALITY,
        ),
    ] = None,
    passages: Annotated[
        int | None,
        typer.Option(min=1, help="Passages of the text. [default: 4]", rich_help_panel=QUALITY),
    ] = None,
    overrides: Overrides = None,
    plugin: Plugins = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    cpu_weights: CpuWeights = WeightForm.plain,
    json: Json = False,
) -> None:
    """Suggest the budget, buffer and slots that fit into a memory, with the arithmetic.

    Reads the model's configuration only, unless --quality has it measured. Activations, and
    whatever else the device holds, need memory beside the cache.
    """
    only_measuring = {
        "--policies": policies,
        "--of": of,
        "--passages": passages,
        "--device": device,
        "--cpu-weights": None if cpu_weights is WeightForm.plain else cpu_weights,
    }
    _check_given(memory, quality, budget, length, policy, only_measuring)
    num_bytes = None if memory is None else parse_bytes("--memory", memory)
    if output is not None:
        check_new_file(output, ".toml")
    register_plugins(plugin)
    from kvpolicy.engine.memory.suggestion import suggest as suggest_plan
    from kvpolicy.model.loading import load_skeleton

    def plans_of(stack: list[str], option: str) -> "PlanOf":
        def plan_of(rows: int) -> "Plan":
            numbers = {"budget": rows, "buffer": buffer, "prefill_buffer": prefill_buffer}
            return plan_of_policies(stack, numbers, overrides or [], option=option)

        plan_of(length)  # a mistake in the plan is found before the model
        return plan_of

    if policy or quality is None:
        stack = policy or [_default_policy()]
        candidates = {"+".join(stack): plans_of(stack, "--policy")}
    else:
        names = parse_names("--policies", policies) or _default_policies()
        candidates = {name: plans_of([name], "--policies") for name in names}
    skeleton = load_skeleton(model, dtype=dtype, trust_remote_code=trust_remote_code)
    weights = _weight_bytes(skeleton)
    for_cache = num_bytes - weights if num_bytes is not None and with_weights else num_bytes
    if for_cache is not None and for_cache < 1:
        msg = (
            f"--memory {memory} is less than the weights of {model}, which take "
            f"{format_bytes(weights)}; give more."
        )
        raise KVPolicyError(msg)
    fit = partial(suggest_plan, longest=length, longest_prompt=prompt_tokens)
    plan_of, measured = next(iter(candidates.values())), None
    if quality is not None:
        from kvpolicy.lab.cli.plan_quality import measure_candidates
        from kvpolicy.lab.models import ModelCache

        models = ModelCache(
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            cpu_weights=cpu_weights.value,
        )

        def footprint_of(of: "PlanOf", rows: int) -> "Footprint":
            return fit(of, skeleton, memory=sys.maxsize, slots=1, budget=rows).chosen

        measured = measure_candidates(
            lambda: models.open(model),
            candidates,
            footprint_of,
            length=length,
            quality=quality,
            of=of,
            passages=passages or _PASSAGES,
        )
        plan_of, budget = candidates[measured.best.policy], measured.best.budget
    found = fit(
        plan_of,
        skeleton,
        memory=sys.maxsize if for_cache is None else for_cache,
        slots=slots or (1 if for_cache is None else None),
        budget=budget,
        keep=keep / 100,
    )
    if for_cache is None:
        found = attrs.evolve(found, alternatives=())
    if output is not None:
        _write_plan(found.chosen, output, model)
    if json:
        given = {"length": length, "memory": num_bytes, "memory_of_cache": for_cache}
        head = {"model": model, "dtype": found.chosen.dtype, **given, "weights": weights}
        of_quality = {} if measured is None else {"quality": measured.to_dict()}
        print_json({**head, **of_quality, **_to_dict(found)}, indent=2)
    else:
        lines = [] if measured is None else [*measured.lines(), ""]
        lines += _lines(found, model, for_cache, weights, with_weights=with_weights)
        print_lines(lines)


def _default_policy() -> str:
    name = default_name("eviction_policy")
    if name is None:
        msg = "no policy was named, and no installed package sets a default: give --policy NAME."
        raise KVPolicyError(msg)
    return name


def _default_policies() -> list[str]:
    """The policies of the default sweep that evict, as they are typed."""
    from kvpolicy.lab.sweep.prepare import load_series

    stacks = [one.plan["stack"] for one in load_series(None) if "stack" in one.plan]
    named = ["+".join(stack) for stack in stacks if all(isinstance(name, str) for name in stack)]
    return list(dict.fromkeys(named))  # one may be in several precisions


def _check_given(
    memory: str | None,
    quality: float | None,
    budget: int | None,
    length: int,
    policy: list[str] | None,
    only_measuring: dict[str, Any],
) -> None:
    """Refuse options that do not go together."""
    given = [option for option, value in only_measuring.items() if value is not None]
    msg = None
    if quality is None:
        if given:
            msg = f"{given[0]} was given without --quality; add --quality 0.99, or leave it out."
        elif memory is None:
            msg = "neither --memory nor --quality was given; give --memory 8GiB, or --quality 0.99."
    elif not quality:
        msg = "--quality was given 0, which every plan has; give a share above 0, such as 0.99."
    elif budget is not None:
        msg = "--budget and --quality were given; --quality chooses the budget: leave one out."
    elif policy and "--policies" in given:
        msg = "--policy and --policies were given; name all of them in --policies A,B+C."
    elif length < _SHORTEST:
        msg = f"--length was given {length}; --quality is measured from {_SHORTEST} tokens on."
    if msg is not None:
        raise KVPolicyError(msg)


def _weight_bytes(skeleton: "PreTrainedModel") -> int:
    """Bytes of the parameters and buffers; weights that are tied count once."""
    tensors = [*skeleton.parameters(), *skeleton.buffers()]
    return sum(tensor.nbytes for tensor in tensors)


def _write_plan(found: "Footprint", output: Path, model: str) -> None:
    import attrs

    from kvpolicy.files import atomic_write
    from kvpolicy.plan.dump import to_toml

    name = f"suggested for {found.slots} slots of {model} and {found.tokens:,} tokens"
    atomic_write(output, to_toml(attrs.evolve(found.plan, name=name)))
    info(f"{output} has the suggested plan.")


def _to_dict(found: "Suggestion") -> dict[str, Any]:
    from kvpolicy.engine.memory.suggestion import budget_of, is_whole

    sizes = ("kv_bytes_per_row", "other_bytes_per_row", "window_bytes_per_slot")
    suggested = found.chosen.to_dict()
    for shown, layer in zip(suggested["layers"], found.chosen.layers, strict=True):
        shown |= {size: getattr(layer, size) for size in sizes}
    return {
        "suggested": suggested,
        "alternatives": [
            {
                "slots": one.slots,
                "budget": budget_of(one),
                "buffer": one.first.plan.buffer,
                "bytes_per_slot": one.bytes_per_slot,
                "bytes": one.num_bytes,
                "whole": is_whole(one),
            }
            for one in found.alternatives
        ],
    }


def _lines(
    found: "Suggestion", model: str, memory: int | None, weights: int, *, with_weights: bool
) -> list[str]:
    from kvpolicy.engine.memory.suggestion import budget_of, is_whole

    chosen = found.chosen
    stack = " + ".join(spec.policy for spec in chosen.first.plan.stack)
    rest = "" if memory is None else ", which --memory is not for"
    if memory is not None and with_weights:
        rest = f"; {format_bytes(memory)} are left"
    return [
        f"{stack} on {model}: {len(chosen.layers)} layers, {chosen.dtype}, sequences of up to "
        f"{chosen.tokens:,} tokens",
        "",
        f"budget      {_budget(chosen)}",
        f"buffer      {chosen.first.plan.buffer:,} rows{_while_entering(chosen)}",
        f"slots       {chosen.slots:,}",
        "",
        *_arithmetic(chosen, memory),
        f"copies      {'a forward or ' if chosen.staging_bytes else ''}a compaction copies rows of "
        f"one layer: up to {format_bytes(chosen.copied_bytes)} more",
        f"weights     {format_bytes(weights)}{rest}",
        *(["", *_alternatives(found)] if found.alternatives else []),
        *(
            []
            if found.enough is None or is_whole(chosen) or budget_of(chosen) >= found.enough
            else ["", f"No choice keeps the {found.enough:,} rows that --keep asks for."]
        ),
    ]


def _while_entering(one: "Footprint") -> str:
    """The buffer of prompts, if they have rows beside their slots."""
    rows = one.first.plan.prefill_buffer
    return f", {rows:,} while a prompt enters" if one.staging_bytes and rows else ""


def _budget(one: "Footprint") -> str:
    from kvpolicy.engine.memory.suggestion import budget_of, is_whole

    if is_whole(one):
        return "all rows: a full cache fits, and nothing is evicted"
    rows = budget_of(one)
    behind = f" behind a prompt of {one.prompt_tokens:,}" if one.plan.keeps_prompts else ""
    return f"{rows:,} rows{behind}, {rows / one.tokens:.1%} of the longest sequence"


def _arithmetic(one: "Footprint", memory: int | None) -> list[str]:
    exact = any(layer.exact_bytes_per_slot for layer in one.layers)
    columns = ["queries", *(["exact"] if exact else [])]
    headers = ["layers", "rows/slot", "KV/row", "other/row", *columns, "bytes/slot"]
    rows = [_row(group, exact=exact) for group in one.groups]
    table = format_table(headers, rows, right=range(1, len(headers)), width=terminal_width())
    shared = one.shared_bytes_per_slot
    beside = f" with {shared:,} B that belong to no layer" if shared else ""
    staging = f" and {one.staging_bytes:,} B of staging" if one.staging_bytes else ""
    full = one.slots * one.full_bytes_per_slot
    saved = 1 - one.num_bytes / full
    given = "" if memory is None else f" of {format_bytes(memory)}"
    return [
        *table.split("\n"),
        "",
        f"a slot      {one.bytes_per_slot:,} B = {format_bytes(one.bytes_per_slot)}{beside}",
        f"the cache   {one.slots:,} x {one.bytes_per_slot:,} B{staging} = "
        f"{format_bytes(one.num_bytes)}{given}",
        f"full cache  {format_bytes(full)} for as many slots; the plan saves {max(saved, 0):.1%}",
    ]


def _row(group: "list[LayerFootprint]", *, exact: bool) -> list[str]:
    first, last = group[0], group[-1]
    each = "" if first is last else f"{len(group)} x "
    return [
        f"{first.layer_idx}" if first is last else f"{first.layer_idx}-{last.layer_idx}",
        f"{first.rows_per_slot:,}",
        f"{first.kv_bytes_per_row:,}",
        f"{first.other_bytes_per_row:,}",
        f"{first.window_bytes_per_slot:,}",
        *([f"{first.exact_bytes_per_slot:,}"] if exact else []),
        f"{each}{first.bytes_per_slot:,}",
    ]


def _alternatives(found: "Suggestion") -> list[str]:
    from kvpolicy.engine.memory.suggestion import budget_of, is_whole

    rows = [
        [
            f"{one.slots:,}",
            "all" if is_whole(one) else f"{budget_of(one):,}",
            "-" if is_whole(one) else f"{one.first.plan.buffer:,}",
            "" if is_whole(one) else f"{budget_of(one) / one.tokens:.1%}",
            format_bytes(one.num_bytes),
            "suggested" if one == found.chosen else "",
        ]
        for one in found.alternatives
    ]
    headers = ["slots", "budget", "buffer", "of length", "cache", ""]
    return format_table(headers, rows, right=range(5), width=terminal_width()).split("\n")
