"""``kvpolicy plan suggest``: the budget, buffer and slots that fit into a memory or keep a quality.

With ``--json``, prints ``{"model", "dtype", "length", "memory", "memory_of_cache", "weights",
"suggested", "alternatives", "precisions"}``; without ``--memory``, both memories are null, and
there are no alternatives and no precisions. ``suggested`` has the fields of ``plan show --json``,
and in each layer ``"kv_bytes_per_row"``, ``"other_bytes_per_row"`` and ``"window_bytes_per_slot"``;
alternatives are ``{"slots", "budget", "buffer", "bytes_per_slot", "bytes", "whole"}``, where
``whole`` says that nothing would be evicted. ``precisions`` are ``{"rows", "largest",
"slots_with_budget"}``: the alternative with as many slots as are suggested, which is null if none
fits, and how many slots fit with the budget that is suggested. With ``--quality`` there is also
``"quality"``: ``{"wanted", "text", "passages", "tokens", "elapsed_s", "measured"}``, where
``measured`` has for each plan ``{"policy", "rows", "budget", "match", "retained_attention",
"look_backs_held", "output_error", "bytes_per_slot", "full_bytes_per_slot"}``, ``match`` is
``{"value", "low", "high"}``, and a budget is null if nothing is evicted.
"""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.option_groups import with_groups
from kvpolicy.cli.options import (
    POLICY,
    CpuWeights,
    Json,
    ModelOptions,
    Overrides,
    Plugins,
    Policies,
    PrefillBuffer,
    PromptTokens,
    WeightForm,
    check_new_file,
    parse_names,
    plan_of_policies,
    register_plugins,
)
from kvpolicy.cli.output import info, print_json, print_lines, terminal_width
from kvpolicy.cli.text_table import format_table
from kvpolicy.entry_points import default_name
from kvpolicy.errors import KVPolicyError
from kvpolicy.quantities import format_bytes, parse_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvpolicy.engine.memory.footprint import Footprint, LayerFootprint
    from kvpolicy.engine.memory.suggestion import Fitting, PlanOf, Suggestion
    from kvpolicy.plan.plan import Plan

QUALITY = "Quality"

_PASSAGES = 4
_PRECISIONS = ("model", "int8", "int8/int4", "int4")
_SHORTEST = 16  # sequence whose quality can be measured


@with_groups
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
    *,
    of_model: ModelOptions,
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
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT,...",
            help="Precisions of rows to compare: model, int8, int4, or KEYS/VALUES as in "
            "int8/int4. The first is suggested; with --quality, what is measured to be best. "
            "[default: model,int8,int8/int4,int4]",
            rich_help_panel=POLICY,
        ),
    ] = None,
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
            help="Choose precision, policy and budget of the fewest bytes with which the likeliest "
            "token is that of the full cache for this share of the tokens of a text, measured now: "
            "0.99.",
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
        "--device": of_model.device,
        "--cpu-weights": None if cpu_weights is WeightForm.plain else cpu_weights,
    }
    _check_given(memory, quality, budget, length, policy, only_measuring)
    num_bytes = None if memory is None else parse_bytes("--memory", memory)
    if output is not None:
        check_new_file(output, ".toml")
    register_plugins(plugin)
    from kvpolicy.engine.memory.suggestion import budget_of, in_equal_bytes
    from kvpolicy.engine.memory.suggestion import suggest as suggest_plan
    from kvpolicy.model.loading import load_skeleton

    if policy or quality is None:
        stack = policy or [_default_policy()]
        stacks, option = {"+".join(stack): stack}, "--policy"
    else:
        names = parse_names("--policies", policies) or _default_policies()
        stacks, option = {name: [name] for name in names}, "--policies"

    def plans_of(name: str, form: str | None) -> "PlanOf":
        def plan_of(budget: int) -> "Plan":
            numbers: dict[str, int | str | None] = {"budget": budget, "buffer": buffer}
            numbers |= {"prefill_buffer": prefill_buffer, "rows": form}
            return plan_of_policies(stacks[name], numbers, overrides or [], option=option)

        return plan_of

    precisions = _precisions(rows, overrides or [])
    for name in stacks:  # a mistake in a plan is found before the model
        for form in precisions:
            plans_of(name, form)(length)
    model = of_model.model
    skeleton = load_skeleton(
        model, dtype=of_model.dtype, trust_remote_code=of_model.trust_remote_code
    )
    weights = _weight_bytes(skeleton)
    for_cache = num_bytes - weights if num_bytes is not None and with_weights else num_bytes
    if for_cache is not None and for_cache < 1:
        msg = (
            f"--memory {memory} is less than the weights of {model}, which take "
            f"{format_bytes(weights)}; give more."
        )
        raise KVPolicyError(msg)
    fit = partial(suggest_plan, longest=length, longest_prompt=prompt_tokens)
    plan_of, measured = plans_of(next(iter(stacks)), precisions[0]), None
    if quality is not None:
        from kvpolicy.lab.cli.plan_quality import Candidates, measure_candidates
        from kvpolicy.lab.models import ModelCache
        from kvpolicy.plan.plan import Plan
        from kvpolicy.plan.toml import Override

        models = ModelCache(**of_model.loading, cpu_weights=cpu_weights.value)

        def footprint_of(of: "PlanOf", rows: int) -> "Footprint":
            return fit(of, skeleton, memory=sys.maxsize, slots=1, budget=rows).chosen

        measured = measure_candidates(
            lambda: models.open(model),
            Candidates(
                precisions,
                list(stacks),
                plans_of,
                lambda form: Plan.full_cache([Override("rows", form, f"--rows {form}")]),
            ),
            footprint_of,
            length=length,
            quality=quality,
            of=of,
            passages=passages or _PASSAGES,
        )
        plan_of, budget = measured.plan_of, measured.best.budget or length
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
    compared: dict[str, Fitting] = {}
    if for_cache is not None:
        like = partial(plans_of, next(iter(stacks))) if measured is None else measured.in_precision
        fit_beside = partial(
            in_equal_bytes,
            model=skeleton,
            longest=length,
            longest_prompt=prompt_tokens,
            memory=for_cache,
            slots=found.chosen.slots,
            budget=budget_of(found.chosen),
        )
        plans = [like(form) for form in precisions]
        compared = {str(plan_of(length).rows): fit_beside(plan_of) for plan_of in plans}
    if output is not None:
        _write_plan(found.chosen, output, model)
    if json:
        given = {"length": length, "memory": num_bytes, "memory_of_cache": for_cache}
        head = {"model": model, "dtype": found.chosen.dtype, **given, "weights": weights}
        of_quality = {} if measured is None else {"quality": measured.to_dict()}
        of_rows = {"precisions": [_precision(*one) for one in compared.items()]}
        print_json({**head, **of_quality, **_to_dict(found), **of_rows}, indent=2)
    else:
        lines = [] if measured is None else [*measured.lines(), ""]
        lines += _lines(found, model, for_cache, weights, with_weights=with_weights)
        lines += ["", *_precision_lines(found.chosen, compared)] if compared else []
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


def _precisions(rows: str | None, overrides: list[str]) -> list[str | None]:
    """The precisions that are compared, the plan's first; ``None``: what ``--set`` says of rows."""
    is_set = any(one.partition("=")[0].strip() == "rows" for one in overrides)
    if rows is not None and is_set:
        msg = "--rows and --set rows were given; leave one out."
        raise KVPolicyError(msg)
    return [None] if is_set else [*(parse_names("--rows", rows) or _PRECISIONS)]


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
    sizes = ("kv_bytes_per_row", "other_bytes_per_row", "window_bytes_per_slot")
    suggested = found.chosen.to_dict()
    for shown, layer in zip(suggested["layers"], found.chosen.layers, strict=True):
        shown |= {size: getattr(layer, size) for size in sizes}
    return {
        "suggested": suggested,
        "alternatives": [_alternative(one) for one in found.alternatives],
    }


def _alternative(one: "Footprint") -> dict[str, Any]:
    from kvpolicy.engine.memory.suggestion import budget_of, is_whole

    return {
        "slots": one.slots,
        "budget": budget_of(one),
        "buffer": one.first.plan.buffer,
        "bytes_per_slot": one.bytes_per_slot,
        "bytes": one.num_bytes,
        "whole": is_whole(one),
    }


def _precision(rows: str, found: "Fitting") -> dict[str, Any]:
    """What fits in one precision."""
    largest = None if found.largest is None else _alternative(found.largest)
    return {"rows": rows, "slots_with_budget": found.most_slots, "largest": largest}


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


def _precision_lines(chosen: "Footprint", compared: "dict[str, Fitting]") -> list[str]:
    """What the memory holds in each precision: for as many slots, and with the same budget."""
    from kvpolicy.engine.memory.suggestion import budget_of, is_whole

    rows = [
        [
            name,
            *(
                ["-", "", "-"]
                if (one := found.largest) is None
                else [
                    "all" if is_whole(one) else f"{budget_of(one):,}",
                    "" if is_whole(one) else f"{budget_of(one) / one.tokens:.1%}",
                    format_bytes(one.num_bytes),
                ]
            ),
            f"{found.most_slots:,}",
            "suggested" if name == str(chosen.first.plan.rows) else "",
        ]
        for name, found in compared.items()
    ]
    kept = "all rows" if is_whole(chosen) else f"{budget_of(chosen):,} rows"
    headers = [f"rows, {chosen.slots:,} slots", "budget", "of length", "cache"]
    headers += [f"slots of {kept}", ""]
    return format_table(headers, rows, right=range(1, 5), width=terminal_width()).split("\n")
