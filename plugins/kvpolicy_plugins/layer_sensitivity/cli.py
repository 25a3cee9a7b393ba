"""``kvpolicy layers``: measure tables of layers, and show them.

With ``--json``, both commands print ``{"file", "quantity", "model", "values", "measured"}``.
"""

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
from kvpolicy.cli.output import Progress, print_json, print_lines, print_text
from kvpolicy.cli.text_table import format_table
from kvpolicy.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.toolkit import LayerTable

app = typer.Typer(
    help="Measure how sensitive layers are to block prefill.",
    rich_help_panel="Models",
    no_args_is_help=True,
    add_completion=False,
)


@app.command(
    short_help="Measure the sensitivity of each layer.",
    epilog=examples(
        "kvpolicy layers measure --task conversation --output t.json",
        "kvpolicy layers measure --model ./m --text book.txt --output m.json",
    ),
)
@with_groups
def measure(
    output: Annotated[Path, typer.Option(metavar="FILE", help="New .json file for the table.")],
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text to measure on, as a whole.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="Task whose train prompts to measure on.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Number of prompts of the task.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for the choice of prompts.")] = 0,
    block: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 64,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens to read of each text or prompt.")
    ] = 16_384,
    *,
    of_model: ModelOptions,
    json: Json = False,
) -> None:
    """Measure the sensitivity of each layer: 1 minus a cosine of keys.

    A full causal forward is compared with a forward in blocks that do not
    see each other. The cosine between the keys of both, in the mean over KV
    heads, positions and texts, is near 1 in layers that do not need earlier
    blocks.
    """
    check_new_file(output, suffix=".json")
    if (text is None) == (task is None):
        msg = "give either --text FILE or --task NAME, what to measure on"
        raise KVPolicyError(msg)
    from kvpolicy.toolkit import LayerTable, save_layer_table
    from kvpolicy_plugins.layer_sensitivity.measure import (
        TextSensitivity,
        measure_texts,
        sensitivities,
    )

    loaded, tokenizer = of_model.load()
    found = _read(text, tokenizer) if text else _draw(str(task), n, seed, tokenizer)
    texts = [ids[:max_tokens] for ids in found]
    if max(map(len, texts)) <= block:
        msg = (
            f"no text is longer than a block of {block} tokens, so that both forwards would be "
            "the same; give a smaller --block or longer texts"
        )
        raise KVPolicyError(msg)
    measured: list[TextSensitivity] = []
    try:
        with Progress(len(texts)) as progress:
            progress.update("comparing forwards", 0)
            for one in measure_texts(loaded, texts, block=block):
                measured.append(one)
                progress.update("comparing forwards", len(measured))
    except KeyboardInterrupt:
        msg = "interrupted; no table was written. The same command starts over."
        raise Interrupted(msg) from None
    source: dict[str, int | str] = {"text": text.name} if text else {}
    if task is not None:
        source = {"task": task, "seed": seed}
    table = LayerTable(
        "sensitivity",
        of_model.model,
        tuple(sensitivities(measured)),
        {
            "block": block,
            **source,
            "texts": len(measured),
            "tokens": sum(one.num_tokens for one in measured),
        },
    )
    save_layer_table(output, table)
    _show(str(output), table, json=json)


@app.command(
    short_help="Show a table of layers.",
    epilog=examples(
        "kvpolicy layers show reasoner",
        "kvpolicy layers show my-table.json --json",
    ),
)
def show(
    table: Annotated[str, typer.Argument(metavar="NAME|FILE", help="Installed name, or a file.")],
    json: Json = False,
) -> None:
    """Show the number of each layer, and how it was measured."""
    from kvpolicy.toolkit import load_layer_table

    _show(table, load_layer_table(table), json=json)


def _read(path: Path, tokenizer: Any) -> list[list[int]]:
    from kvpolicy.files import read_text

    content = read_text(path, f"text '{path}'")
    ids: list[int] = tokenizer(content)["input_ids"]
    if not ids:
        msg = f"text '{path}' is empty"
        raise KVPolicyError(msg)
    return [ids]


def _draw(task: str, n: int, seed: int, tokenizer: Any) -> list[list[int]]:
    """Prompts of a task, of its train split if it has one."""
    from kvpolicy.errors import TaskError
    from kvpolicy.lab.tasks.chat_template import encode, wrap
    from kvpolicy.lab.tasks.task import fitted, load_task

    loaded = fitted(load_task(task), tokenizer)
    try:
        drawn = loaded.examples(n, seed=seed, split="train")
    except TaskError:
        drawn = loaded.examples(n, seed=seed)
    prompts = encode(wrap(drawn, tokenizer), tokenizer)
    texts = [
        tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt for prompt in prompts
    ]
    texts = [ids for ids in texts if ids]
    if not texts:
        msg = f"task '{task}' has no prompts to measure on"
        raise KVPolicyError(msg)
    return texts


def _show(file: str, table: "LayerTable", *, json: bool) -> None:
    if json:
        print_json({"file": file, **attrs.asdict(table)}, indent=2)
        return
    facts = [("model", table.model), *table.measured.items()]
    print_lines([*(f"{name:<8}{fact}" for name, fact in facts), ""])
    rows = [[str(layer), f"{value:.4f}"] for layer, value in enumerate(table.values)]
    print_text(format_table(["layer", table.quantity], rows, right=(0, 1)) + "\n")
