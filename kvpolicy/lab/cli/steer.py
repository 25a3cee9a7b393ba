"""``kvpolicy steer``: compute steering vectors, and show the contents of a file.

With ``--json``, both commands print ``{"file", "calibration", "default_layer", "layers":
[{"layer", "norm", "separation"}]}``; ``calibration`` has the fields of
`kvpolicy.toolkit.steering_vectors.Calibration`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.failures import Interrupted
from kvpolicy.cli.option_groups import with_groups
from kvpolicy.cli.options import (
    Json,
    ModelOptions,
    check_new_file,
    examples,
)
from kvpolicy.cli.output import info, print_json, print_lines, print_text
from kvpolicy.cli.text_table import format_table
from kvpolicy.entry_points import default_name
from kvpolicy.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.lab.steer.calibrate import CalibrationSource, Trace
    from kvpolicy.lab.steer.thoughts import ThoughtRules
    from kvpolicy.toolkit.steering_vectors import SteeringVector

# The default of --task; ``None`` if no installed package sets one.
DEFAULT_TASK = default_name("task")

app = typer.Typer(
    help="Compute and show steering vectors.",
    rich_help_panel="Models",
    no_args_is_help=True,
    add_completion=False,
)

_MAX_NEW_TOKENS = 10_000  # as in SEAL; for models whose generation config has no default
_MIN_THOUGHTS = 200  # of each kind; with fewer, the mean is mostly noise


@app.command(
    short_help="Compute steering vectors from traces of a model.",
    epilog=examples(
        "kvpolicy steer calibrate --output vectors.safetensors",
        "kvpolicy steer calibrate --model ./m --task gsm8k --output m.safetensors",
    ),
)
@with_groups
def calibrate(
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="New .safetensors file for the vectors.")
    ],
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="Task with a train split.")
    ] = DEFAULT_TASK,
    n: Annotated[int, typer.Option("--n", min=1, help="Number of problems.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for the choice of problems.")] = 0,
    layers: Annotated[
        str, typer.Option(metavar="all|half|N,...", help="Decoder layers, from 0; half is 1,3,...")
    ] = "half",
    default_layer: Annotated[
        int | None, typer.Option(metavar="N", help="Default layer of the file.")
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Rules that classify thoughts. [default: the task's, or published]",
        ),
    ] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Text in the tokens that end a paragraph. [default: a blank line]"
        ),
    ] = None,
    max_right: Annotated[int, typer.Option(min=0, help="Maximum number of correct traces.")] = 500,
    max_wrong: Annotated[int, typer.Option(min=0, help="Maximum number of wrong traces.")] = 500,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens of a trace. [default: the model's, or 10000]"),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 16,
    *,
    of_model: ModelOptions,
    json: Json = False,
) -> None:
    """Compute steering vectors: execution minus non-execution thoughts.

    The model solves training problems with the full cache. Hidden states
    before its thoughts are averaged by kind; a vector is the difference of
    the two means.
    """
    check_new_file(output, suffix=".safetensors")
    if task is None:
        msg = "no installed package sets a default task; give --task NAME"
        raise KVPolicyError(msg)
    from kvpolicy.lab.steer.calibrate import CalibrationSource, choose_layers, pick
    from kvpolicy.lab.steer.thoughts import load_rules, rules_for
    from kvpolicy.lab.tasks.task import load_task
    from kvpolicy.toolkit.paragraphs import PARAGRAPH
    from kvpolicy.toolkit.steering_vectors import save_steering_vectors

    chosen_task, chosen_rules = load_task(task), load_rules(rules or rules_for(task))
    loaded, tokenizer = of_model.load()
    chosen = choose_layers(layers, loaded.config.get_text_config(decoder=True).num_hidden_layers)
    if default_layer is not None and default_layer not in chosen:
        msg = f"--default-layer got {default_layer}; expected one of --layers: {chosen}"
        raise KVPolicyError(msg)
    source = CalibrationSource(loaded, tokenizer, of_model.model, chosen_task, n, seed)
    max_tokens = max_new_tokens or getattr(loaded.generation_config, "max_new_tokens", None)
    try:
        traces = _solve(source, max_new_tokens=max_tokens or _MAX_NEW_TOKENS, slots=slots)
        used = pick(traces, max_correct=max_right, max_incorrect=max_wrong)
        vectors = _compare(source, used, chosen_rules, delimiter or PARAGRAPH, chosen)
    except KeyboardInterrupt:
        msg = "interrupted; no vectors were written. The same command starts over."
        raise Interrupted(msg) from None
    save_steering_vectors(output, vectors, default_layer=default_layer)
    _show(str(output), vectors, default_layer, json=json)


@app.command(
    short_help="Show the contents of a file of steering vectors.",
    epilog=examples(
        "kvpolicy steer show vectors.safetensors",
        "kvpolicy steer show my-vectors.safetensors --json",
    ),
)
def show(
    file: Annotated[str, typer.Argument(metavar="NAME|FILE", help="Installed name, or a file.")],
    json: Json = False,
) -> None:
    """Show the origin of steering vectors, and the norm and separation of each layer."""
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
    used: "Sequence[Trace]",
    rules: "ThoughtRules",
    delimiter: str,
    layers: Sequence[int],
) -> "list[SteeringVector]":
    from kvpolicy.cli.output import Progress
    from kvpolicy.lab.steer.calibrate import contrast_layers, describe, mark
    from kvpolicy.lab.steer.thoughts import EXECUTION

    marked = mark(used, source.tokenizer, rules, delimiter)
    calibration = describe(source, used, marked, rules, delimiter)
    counts = calibration.num_thoughts
    fewest = min(counts[EXECUTION], sum(counts.values()) - counts[EXECUTION])
    if fewest < _MIN_THOUGHTS:
        info(f"one kind has only {fewest} thoughts, so the vectors will be noisy; raise --n.")
    with Progress(len(marked)) as progress:
        progress.update("computing hidden states", 0)
        return contrast_layers(
            source.model,
            marked,
            layers,
            calibration,
            report=lambda num_done: progress.update("computing hidden states", num_done),
        )


def _show(
    file: str, vectors: "Sequence[SteeringVector]", default_layer: int | None, *, json: bool
) -> None:
    calibration = vectors[0].calibration
    if json:
        layers = [
            {"layer": one.layer, "norm": float(one.vector.norm()), "separation": one.separation}
            for one in vectors
        ]
        origin = {"calibration": attrs.asdict(calibration), "default_layer": default_layer}
        print_json({"file": file, **origin, "layers": layers}, indent=2)
        return
    thoughts = ", ".join(f"{count:,} {kind}" for kind, count in calibration.num_thoughts.items())
    facts = [
        ["model", f"{calibration.model} {calibration.fingerprint}".strip()],
        ["task", f"{calibration.task}, split {calibration.split}, seed {calibration.seed}"],
        ["traces", f"{calibration.num_right} correct, {calibration.num_wrong} wrong"],
        ["thoughts", thoughts],
        ["rules", f"{calibration.rules} {calibration.rules_digest}".strip()],
        ["delimiter", repr(calibration.delimiter)],
        ["vector", f"{calibration.sign}, {len(vectors[0].vector)} numbers"],
        ["made by", f"kvpolicy {calibration.version}".strip()],
    ]
    print_lines([*(f"{name:<10}{fact}" for name, fact in facts), ""])
    rows = [_row(one, default_layer) for one in vectors]
    print_text(
        format_table(["layer", "norm", "separation", "default"], rows, right=(0, 1, 2)) + "\n"
    )


def _row(one: "SteeringVector", default_layer: int | None) -> list[Any]:
    separation = "-" if one.separation is None else f"{one.separation:.2f}"
    is_default = "yes" if one.layer == default_layer else ""
    return [str(one.layer), f"{float(one.vector.norm()):.2f}", separation, is_default]
