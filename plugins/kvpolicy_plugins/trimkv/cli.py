"""``kvpolicy trimkv``: train retention gates for a model, and show the contents of a file.

With ``--json``, both commands print ``{"file", "gates": {"retention_gate", "hidden_act", "layers",
"kv_heads", "inputs", "numbers"}, "training"}``; ``training`` is what the file says of its origin:
``{"model", "fingerprint", "texts", "num_texts", "num_tokens", "recipe", "bias", "kl", "ntp",
"capacity", "occupancy", "elapsed_s", "version"}``.
"""

import hashlib
import json as json_format
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from filelock import FileLock, Timeout

import kvpolicy
from kvpolicy.cli.failures import Interrupted
from kvpolicy.cli.option_groups import with_groups
from kvpolicy.cli.options import (
    Json,
    ModelOptions,
    check_new_file,
    examples,
)
from kvpolicy.cli.output import Progress, info, print_json, print_lines
from kvpolicy.cli.stopping import stop_signals
from kvpolicy.entry_points import default_name
from kvpolicy.errors import KVPolicyError, OutputError
from kvpolicy.quantities import format_seconds

if TYPE_CHECKING:
    from kvpolicy_plugins.trimkv.gates import Gates
    from kvpolicy_plugins.trimkv.training import Recipe, StepRecord, Trainer

# The default of --task; ``None`` if no installed package sets one.
DEFAULT_TASK = default_name("task")

app = typer.Typer(
    help="Train and show retention gates of TRIM-KV.",
    rich_help_panel="Models",
    no_args_is_help=True,
    add_completion=False,
)

TEXTS, RECIPE = "Texts", "Recipe"

_MEAN_OF_LAST = 25  # steps over which the losses in the summary are averaged


def _option(panel: str, help_text: str, **more: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel, **more)


@app.command(
    short_help="Train gates for a model from texts.",
    epilog=examples(
        "kvpolicy trimkv train --output gates.safetensors",
        "kvpolicy trimkv train --model ./m --texts t.jsonl --output m.safetensors",
    ),
)
@with_groups
def train(
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="New .safetensors file for the gates.")
    ],
    *,
    of_model: ModelOptions,
    task: Annotated[
        str | None,
        _option(TEXTS, "Task whose train split has reference texts.", metavar="NAME"),
    ] = DEFAULT_TASK,
    texts: Annotated[
        str | None,
        _option(TEXTS, "Texts instead of a task's: JSON Lines, CSV or plain text.", metavar="FILE"),
    ] = None,
    n: Annotated[int, _option(TEXTS, "Most texts to read.", min=1)] = 2000,
    max_tokens: Annotated[int, _option(TEXTS, "Tokens of a text that are used.", min=2)] = 4096,
    steps: Annotated[int, _option(RECIPE, "Optimizer steps.", min=1)] = 400,
    batch: Annotated[int, _option(RECIPE, "Texts of a step.", min=1)] = 4,
    memory: Annotated[
        float, _option(RECIPE, "Rows a head may hold; below 1, a share of the text.", min=0.001)
    ] = 32,
    lr: Annotated[float, _option(RECIPE, "Peak learning rate.", min=1e-8)] = 3e-3,
    bias: Annotated[
        float | None,
        _option(RECIPE, "What biases begin with. [default: the logarithm of twice the length]"),
    ] = None,
    gate: Annotated[str, _option(RECIPE, "Form of the gates.", metavar="rg|rg2|rg3")] = "rg",
    size: Annotated[int, _option(RECIPE, "Width of their hidden layer.", min=1)] = 512,
    capacity: Annotated[float, _option(RECIPE, "Weight of the capacity loss.", min=0)] = 1.0,
    cap_norm: Annotated[
        str, _option(RECIPE, "Norm of the capacity loss.", metavar="active|paper")
    ] = "active",
    cap_over: Annotated[
        str, _option(RECIPE, "Who shares --memory.", metavar="head|model")
    ] = "head",
    quality: Annotated[
        str, _option(RECIPE, "How the other two losses are combined.", metavar="mean|sum")
    ] = "mean",
    seed: Annotated[
        int, _option(RECIPE, "Random seed for texts, their order and weights.", min=0)
    ] = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 25,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start over, even if there is a checkpoint.")
    ] = False,
    json: Json = False,
) -> None:
    """Train gates for a model, which itself is not changed.

    The gates learn to forget as many tokens as the capacity asks for, and
    to keep those without which the model would say something else. A
    checkpoint stands beside the output: the same command goes on from it.
    Ctrl-C ends the run after the step that it is at, a second one at once.
    """
    from kvpolicy_plugins.trimkv.training import Recipe, Trainer

    check_new_file(output, suffix=".safetensors")
    recipe = _recipe(
        Recipe,
        {
            "--steps": ("steps", steps),
            "--batch": ("batch", batch),
            "--memory": ("memory", memory),
            "--lr": ("lr", lr),
            "--bias": ("bias", bias),
            "--gate": ("form", gate),
            "--size": ("intermediate_size", size),
            "--max-tokens": ("max_tokens", max_tokens),
            "--capacity": ("weight", capacity),
            "--cap-norm": ("cap_norm", cap_norm),
            "--cap-over": ("cap_over", cap_over),
            "--quality": ("quality_reduce", quality),
            "--seed": ("seed", seed),
        },
    )
    from kvpolicy.lab.models import fingerprint

    source = _Source(task, texts, n, seed)
    loaded, tokenizer = of_model.load()
    written = source.read(tokenizer)
    token_ids = [_tokens(text, tokenizer, source.name) for text in written]
    origin = {
        "model": of_model.model,
        "fingerprint": fingerprint(loaded),
        "texts": source.name,
        "num_texts": len(token_ids),
        "num_tokens": sum(min(len(ids), recipe.max_tokens) for ids in token_ids),
    }
    digest = hashlib.sha256(json_format.dumps(token_ids).encode()).hexdigest()[:16]
    identity = {**origin, "digest": digest, **attrs.asdict(recipe)}
    with _alone(output):
        run = _Run(Trainer(loaded, token_ids, recipe), output, identity, save_every)
        run.finish(restart=restart)
        gates = run.gates(origin)
        gates.save(output)
        run.unfinished.unlink(missing_ok=True)
    _show(str(output), gates, json=json)


@app.command(
    short_help="Show the contents of a file of gates.",
    epilog=examples(
        "kvpolicy trimkv show reasoner",
        "kvpolicy trimkv show my-gates.safetensors --json",
    ),
)
def show(
    file: Annotated[str, typer.Argument(metavar="NAME|FILE", help="Installed name, or a file.")],
    json: Json = False,
) -> None:
    """Show how gates were trained, and the size of the file's tensors."""
    from kvpolicy_plugins.trimkv.gates import load_gates

    _show(file, load_gates(file), json=json)


@attrs.frozen
class _Source:
    """Where the texts are from: a task, or a file if one is given."""

    task: str | None
    file: str | None
    n: int
    seed: int

    @property
    def name(self) -> str:
        """Its name in the file of gates."""
        return self.file or f"{self.task}, split train"

    def read(self, tokenizer: Any) -> list[str]:
        """Prompts with their reference texts, or texts alone."""
        from kvpolicy.lab.tasks.task import fitted, load_task

        named = self.file or self.task
        if named is None:
            msg = "no installed package sets a default task; give --task NAME or --texts FILE"
            raise KVPolicyError(msg)
        task = fitted(load_task(named), tokenizer)
        drawn = task.examples(self.n, seed=self.seed, split="test" if self.file else "train")
        if any(example.reference is None for example in drawn):
            msg = (
                f"'{named}' has no reference texts; give --texts with a file whose lines have "
                "'text', or 'prompt' and 'reference'"
            )
            raise KVPolicyError(msg)
        return [example.prompt + (example.reference or "") for example in drawn]


class _Run:
    """A run with its checkpoint and its progress on the terminal."""

    def __init__(
        self, trainer: "Trainer", output: Path, identity: dict[str, Any], save_every: int
    ) -> None:
        from kvpolicy_plugins.trimkv.checkpoint import path_beside

        self.trainer = trainer
        self.unfinished = path_beside(output)
        self._identity, self._save_every = identity, save_every
        self._records: list[StepRecord] = []
        self._elapsed_s, self._started = 0.0, time.monotonic()

    def finish(self, *, restart: bool) -> None:
        """Do the steps that are left."""
        from kvpolicy_plugins.trimkv.checkpoint import restore

        trainer = self.trainer
        if restart:
            self.unfinished.unlink(missing_ok=True)
        found = restore(self.unfinished, trainer, self._identity)
        self._records, self._elapsed_s = list(found.records), found.elapsed_s
        self._started = time.monotonic()
        if trainer.done:
            info(f"going on after step {trainer.done}, from {self.unfinished}")
        saved = trainer.done
        try:
            with stop_signals() as stopped, Progress(trainer.recipe.steps, saved) as progress:
                progress.update("beginning", saved)
                for record in trainer.steps():
                    self._records = [*self._records, record][-_MEAN_OF_LAST:]
                    is_last = record.step == trainer.recipe.steps
                    if is_last or stopped.is_set() or record.step % self._save_every == 0:
                        self._save()
                        saved = record.step
                    progress.update(_described(record), record.step)
                    if stopped.is_set() and not is_last:
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            msg = f"interrupted; step {saved} is saved, and the same command goes on from there."
            if not saved:
                msg = "interrupted before the first step was saved."
            raise Interrupted(msg) from None

    def gates(self, origin: dict[str, Any]) -> "Gates":
        """The gates, with the record of their training."""
        means = {
            name: fmean(getattr(record, name) for record in self._records)
            for name in ("kl", "ntp", "capacity", "occupancy")
        }
        told = {
            **origin,
            "recipe": attrs.asdict(self.trainer.recipe),
            "bias": self.trainer.bias,
            **means,
            "elapsed_s": self._elapsed(),
            "version": kvpolicy.__version__,
        }
        return attrs.evolve(self.trainer.gates, training=told)

    def _save(self) -> None:
        from kvpolicy_plugins.trimkv import checkpoint

        progress = checkpoint.Progress(self._records, self._elapsed())
        checkpoint.save(self.unfinished, self.trainer, progress, self._identity)

    def _elapsed(self) -> float:
        return self._elapsed_s + time.monotonic() - self._started


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Refuse a second run with the same output."""
    path = output.with_name(f"{output.name}.lock")
    try:
        with FileLock(path, timeout=0):
            try:
                yield
            finally:
                with suppress(OSError):  # Windows removes no file that is open
                    path.unlink()
    except Timeout as error:
        msg = f"{output} is being trained by another process; wait for it, or choose another file"
        raise OutputError(msg) from error


def _recipe(kind: "type[Recipe]", options: dict[str, tuple[str, Any]]) -> "Recipe":
    """The recipe that options describe; an error names the option."""
    from kvpolicy_plugins.trimkv.gates import FORMS

    choices = {
        "--gate": FORMS,
        "--cap-norm": ("active", "paper"),
        "--cap-over": ("head", "model"),
        "--quality": ("mean", "sum"),
    }
    for option, allowed in choices.items():
        given = options[option][1]
        if given not in allowed:
            msg = f"{option} got {given!r:.60}; choose {' or '.join(allowed)}"
            raise KVPolicyError(msg)
    return kind(**dict(options.values()))


def _tokens(text: str, tokenizer: Any, source: str) -> list[int]:
    """The token ids of a text."""
    ids: list[int] = tokenizer(text)["input_ids"]
    if len(ids) < 2:
        msg = f"{source} has the text {text!r:.60}, of less than two tokens; leave it out"
        raise KVPolicyError(msg)
    return ids


def _described(record: "StepRecord") -> str:
    return (
        f"steps; KL {record.kl:.3f}, capacity loss {record.capacity:.3f}, "
        f"{record.occupancy:.0f} rows held"
    )


def _show(file: str, gates: "Gates", *, json: bool) -> None:
    first = next(iter(gates.by_layer.values()))
    sizes = {
        "retention_gate": first.form,
        "hidden_act": first.hidden_act,
        "layers": len(gates.by_layer),
        "kv_heads": first.num_heads,
        "inputs": first.num_inputs,
        "numbers": gates.num_numbers,
    }
    if json:
        print_json({"file": file, "gates": sizes, "training": dict(gates.training)}, indent=2)
        return
    print_lines(f"{name:<12}{fact}" for name, fact in _facts(file, gates, sizes))


def _facts(file: str, gates: "Gates", sizes: dict[str, Any]) -> Sequence[tuple[str, str]]:
    facts = [
        ("file", file),
        ("gates", "{retention_gate}, {hidden_act}, {numbers:,} numbers".format(**sizes)),
        ("for", "{layers} layers of {kv_heads} KV heads, {inputs} inputs".format(**sizes)),
    ]
    told = gates.training
    if not told:
        return [*facts, ("training", "the file does not say")]
    recipe = told["recipe"]
    return [
        *facts,
        ("model", f"{told['model']} {told['fingerprint']}"),
        ("texts", f"{told['texts']}; {told['num_texts']:,} of {told['num_tokens']:,} tokens"),
        (
            "recipe",
            f"{recipe['steps']} steps of {recipe['batch']} texts, memory {recipe['memory']:g}, "
            f"lr {recipe['lr']:g}, bias {told['bias']:.2f}, seed {recipe['seed']}",
        ),
        ("at the end", f"KL {told['kl']:.3f} nats per token, {told['occupancy']:.1f} rows held"),
        ("took", format_seconds(told["elapsed_s"])),
        ("made by", f"kvpolicy {told['version']}"),
    ]
