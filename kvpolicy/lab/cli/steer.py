"""``kvpolicy steer``: make steering vectors, and show what is in a file of them.

With ``--json``, both commands print ``{"file", "calibration", "default_layer", "layers":
[{"layer", "norm", "separation"}]}``; ``calibration`` has the fields of
`kvpolicy.toolkit.steering_vectors.Calibration`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.app import Interrupted
from kvpolicy.cli.options import (
    DEFAULT_MODEL,
    Device,
    Dtype,
    Json,
    Model,
    TrustRemoteCode,
    check_new_file,
    examples,
)
from kvpolicy.cli.output import format_table, info, print_json, print_text
from kvpolicy.entry_points import default_name
from kvpolicy.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.lab.steer.calibrate import CalibrationSource, Trace
    from kvpolicy.lab.steer.thoughts import ThoughtRules
    from kvpolicy.toolkit.steering_vectors import SteeringVector

# The default of --task; ``None`` if no installed package sets one.
DEFAULT_TASK = default_name("task")

app = typer.Typer(
    help="Make steering vectors, and show what is in them.",
    rich_help_panel="Models",
    no_args_is_help=True,
    add_completion=False,
)

_MAX_NEW_TOKENS = 10_000  # SEAL's; for models that do not say how much they usually generate
_FEW_THOUGHTS = 200  # of a side; below, the mean of a few hundred numbers is mostly noise


@app.command(
    short_help="Make steering vectors from traces of a model.",
    epilog=examples(
        "kvpolicy steer calibrate --output vectors.safetensors",
        "kvpolicy steer calibrate --model ./m --task gsm8k --output m.safetensors",
    ),
)
def calibrate(
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Where the vectors go, a new .safetensors file.")
    ],
    model: Model = DEFAULT_MODEL,
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="Task whose training problems are solved.")
    ] = DEFAULT_TASK,
    n: Annotated[int, typer.Option("--n", min=1, help="Problems to solve.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the problems.")] = 0,
    layers: Annotated[
        str, typer.Option(metavar="all|half|N,...", help="Decoder layers, from 0; half is 1,3,...")
    ] = "half",
    default_layer: Annotated[
        int | None, typer.Option(metavar="N", help="Layer to use where none is asked for.")
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Tell kinds of thoughts apart. [default: the task's, or published]",
        ),
    ] = None,
    max_right: Annotated[int, typer.Option(min=0, help="The most correct traces to use.")] = 500,
    max_wrong: Annotated[int, typer.Option(min=0, help="The most wrong traces to use.")] = 500,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The most tokens of a trace. [default: the model's, or 10000]"),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Problems solved together.")] = 16,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Make steering vectors: execution less non-execution thoughts of a model.

    The model solves training problems with the full cache. Its hidden states before the
    thoughts of its traces are averaged by kind, and subtracted.
    """
    check_new_file(output, suffix=".safetensors")
    if task is None:
        msg = "no task was named, and no installed package sets a default: give --task NAME."
        raise KVPolicyError(msg)
    from kvpolicy.lab.steer.calibrate import CalibrationSource, choose_layers
    from kvpolicy.lab.steer.thoughts import default_rules, load_rules
    from kvpolicy.lab.tasks.task import load_task
    from kvpolicy.model.loading import load_model
    from kvpolicy.toolkit.steering_vectors import save_steering_vectors

    chosen_task, chosen_rules = load_task(task), load_rules(rules or default_rules(task))
    loaded, tokenizer = load_model(
        model, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    chosen = choose_layers(layers, loaded.config.get_text_config(decoder=True).num_hidden_layers)
    if default_layer is not None and default_layer not in chosen:
        msg = f"--default-layer got {default_layer}; it is to be one of --layers: {chosen}"
        raise KVPolicyError(msg)
    source = CalibrationSource(loaded, tokenizer, model, chosen_task, n, seed)
    most = max_new_tokens or getattr(loaded.generation_config, "max_new_tokens", None)
    try:
        traces = _solve(source, max_new_tokens=most or _MAX_NEW_TOKENS, slots=slots)
        vectors = _compare(source, traces, chosen_rules, chosen, max_right, max_wrong)
    except KeyboardInterrupt:
        msg = "interrupted; no vector was written, and the same command begins again."
        raise Interrupted(msg) from None
    save_steering_vectors(output, vectors, default_layer=default_layer)
    _show(str(output), vectors, default_layer, json=json)


@app.command(
    short_help="Show what steering vectors are made of.",
    epilog=examples(
        "kvpolicy steer show vectors.safetensors",
        "kvpolicy steer show my-vectors.safetensors --json",
    ),
)
def show(
    file: Annotated[str, typer.Argument(metavar="NAME|FILE", help="Bundled vectors, or a file.")],
    json: Json = False,
) -> None:
    """Show what steering vectors are made of, and how well they separate, layer by layer."""
    from kvpolicy.toolkit.steering_vectors import load_steering_vectors

    vectors, default_layer = load_steering_vectors(file)
    _show(file, vectors, default_layer, json=json)


def _solve(source: "CalibrationSource", *, max_new_tokens: int, slots: int) -> "list[Trace]":
    from kvpolicy.cli.output import Progress
    from kvpolicy.lab.steer.calibrate import write_traces

    traces: list[Trace] = []
    num_right = 0
    with Progress(source.n) as progress:
        progress.update("solving problems", 0)
        for trace in write_traces(source, max_new_tokens=max_new_tokens, slots=slots):
            traces.append(trace)
            num_right += trace.is_correct
            progress.update(f"problems solved, {num_right} correct", len(traces))
    return traces


def _compare(
    source: "CalibrationSource",
    traces: "Sequence[Trace]",
    rules: "ThoughtRules",
    layers: Sequence[int],
    max_right: int,
    max_wrong: int,
) -> "list[SteeringVector]":
    from kvpolicy.cli.output import Progress
    from kvpolicy.lab.steer.calibrate import contrast_layers, describe, mark, pick
    from kvpolicy.lab.steer.thoughts import EXECUTION

    used = pick(traces, max_correct=max_right, max_incorrect=max_wrong)
    marked = mark(used, source.tokenizer, rules)
    calibration = describe(source, used, marked, rules)
    counts = calibration.num_thoughts
    fewest = min(counts[EXECUTION], sum(counts.values()) - counts[EXECUTION])
    if fewest < _FEW_THOUGHTS:
        info(f"one side has {fewest} thoughts only: the vectors will be noisy; raise --n.")
    with Progress(len(marked)) as progress:
        progress.update("traces read again", 0)
        return contrast_layers(
            source.model,
            marked,
            layers,
            calibration,
            report=lambda num_done: progress.update("traces read again", num_done),
        )


def _show(
    file: str, vectors: "Sequence[SteeringVector]", default_layer: int | None, *, json: bool
) -> None:
    calibration = vectors[0].calibration
    if json:
        plain = [
            {"layer": one.layer, "norm": float(one.vector.norm()), "separation": one.separation}
            for one in vectors
        ]
        found = {"calibration": attrs.asdict(calibration), "default_layer": default_layer}
        print_json({"file": file, **found, "layers": plain}, indent=2)
        return
    thoughts = ", ".join(f"{count:,} {kind}" for kind, count in calibration.num_thoughts.items())
    facts = [
        ["model", f"{calibration.model} {calibration.fingerprint}".strip()],
        ["task", f"{calibration.task}, split {calibration.split}, seed {calibration.seed}"],
        ["traces", f"{calibration.num_right} correct, {calibration.num_wrong} wrong"],
        ["thoughts", thoughts],
        ["rules", f"{calibration.rules} {calibration.rules_digest}".strip()],
        ["vector", f"{calibration.sign}, {len(vectors[0].vector)} numbers"],
        ["made by", f"kvpolicy {calibration.version}".strip()],
    ]
    print_text("".join(f"{name:<10}{fact}\n" for name, fact in facts) + "\n")
    rows = [_row(one, default_layer) for one in vectors]
    print_text(
        format_table(["layer", "norm", "separation", "default"], rows, right=(0, 1, 2)) + "\n"
    )


def _row(one: "SteeringVector", default_layer: int | None) -> list[Any]:
    separation = "-" if one.separation is None else f"{one.separation:.2f}"
    is_default = "yes" if one.layer == default_layer else ""
    return [str(one.layer), f"{float(one.vector.norm()):.2f}", separation, is_default]
