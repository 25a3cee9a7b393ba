"""``kvpolicy reasoner``: sample from a bundled reasoner, evaluate it, or train it again.

With ``--json``, ``sample`` prints a list of ``{"prompt", "trace", "answer", "depth",
"num_facts"}``, with ``"verbosity"`` for ``reasoner-verbose``; ``--generate`` adds
``{"generated", "num_tokens", "finished", "right"}``. ``evaluate`` prints ``{"n", "seed", "right",
"accuracy", "accuracy_low", "accuracy_high", "finished", "mean_tokens", "by_depth": [{"depth",
"n", "right", "accuracy", "accuracy_low", "accuracy_high"}]}``; ``accuracy_low`` and
``accuracy_high`` bound the 95 % confidence interval.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.options import Json, examples
from kvpolicy.cli.output import info, print_exact, print_json, print_lines, print_text
from kvpolicy.cli.text_table import format_table
from kvpolicy.errors import KVPolicyError
from kvpolicy_reasoner import REASONER, REASONERS, bundled_path

if TYPE_CHECKING:
    from kvpolicy_reasoner.evaluate import Attempt, Score
    from kvpolicy_reasoner.task import Problem
    from kvpolicy_reasoner.train.train import TrainingRecord

app = typer.Typer(
    help="Sample from, evaluate and train the bundled reasoners.",
    rich_help_panel="Models",
    no_args_is_help=True,
    add_completion=False,
)

_PLAIN_LINE_EVERY_STEPS = 50

_Name = Annotated[str, typer.Option(metavar="NAME", help=f"The reasoner: {', '.join(REASONERS)}.")]
_Seed = Annotated[int, typer.Option(help="Random seed for problems.")]
_Folder = Annotated[
    Path | None,
    typer.Option("--model", metavar="FOLDER", help="Weights; bundled if not given."),
]


@app.command(
    short_help="Show problems with reference or generated traces.",
    epilog=examples(
        "kvpolicy reasoner sample --n 3",
        "kvpolicy reasoner sample --seed 7 --json",
    ),
)
def sample(
    name: _Name = REASONER,
    n: Annotated[int, typer.Option(help="Problems to show.")] = 1,
    seed: _Seed = 0,
    depth: Annotated[
        int | None, typer.Option(help="Derivation steps per problem; mixed if not given.")
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Generate answers and grade them.")
    ] = False,
    model: _Folder = None,
    json: Json = False,
) -> None:
    """Show problems with their reference traces, or with generated traces."""
    problems = _problems(name, n, seed, depth)
    attempts = _attempts(name, problems, model) if generate else []
    if json:
        print_json([_to_dict(*pair) for pair in _pairs(problems, attempts)], indent=2)
        return
    for number, (problem, attempt) in enumerate(_pairs(problems, attempts), start=1):
        head = f"problem {number}: depth {problem.depth}, {problem.num_facts} facts"
        print_text(f"── {head} ──\n{problem.prompt}")
        print_exact(f"{problem.trace if attempt is None else attempt.text}\n")
        if attempt is not None:
            print_lines([f"── {_verdict(attempt)} ──"])
        print_lines([""])


@app.command(
    short_help="Measure greedy accuracy by depth.",
    epilog=examples(
        "kvpolicy reasoner evaluate",
        "kvpolicy reasoner evaluate --name reasoner-verbose --n 500",
    ),
)
def evaluate(
    name: _Name = REASONER,
    n: Annotated[int, typer.Option(help="Number of test problems.")] = 200,
    seed: _Seed = 0,
    model: _Folder = None,
    json: Json = False,
) -> None:
    """Measure greedy accuracy by depth, with the full cache and no policy."""
    from kvpolicy_reasoner.evaluate import score, score_by_depth

    attempts = _attempts(name, _problems(name, n, seed, None), model)
    overall, by_depth = score(attempts), score_by_depth(attempts)
    finished = sum(attempt.finished for attempt in attempts) / n
    mean_tokens = sum(attempt.num_tokens for attempt in attempts) / n
    if json:
        rows = [{"depth": depth} | _score_to_dict(one) for depth, one in by_depth.items()]
        record = {"n": n, "seed": seed} | _score_to_dict(overall)
        generation = {"finished": finished, "mean_tokens": mean_tokens}
        print_json(record | generation | {"by_depth": rows}, indent=2)
        return
    cells = [
        [str(depth), str(one.total), str(one.num_correct), f"{one.accuracy:.1%}", _interval(one)]
        for depth, one in [*by_depth.items(), ("all", overall)]
    ]
    headers = ["depth", "n", "right", "accuracy", "95 % CI"]
    print_text(format_table(headers, cells, right=range(len(headers))) + "\n")
    print_text(f"{finished:.1%} of traces finished; mean length {mean_tokens:.0f} tokens.\n")


@app.command(
    epilog=examples(
        "kvpolicy reasoner train --output my-reasoner",
        "kvpolicy reasoner train --output my-reasoner --seed 1",
    )
)
def train(
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of the run; the model is in model/.")
    ],
    name: _Name = REASONER,
    seed: Annotated[int, typer.Option(help="Random seed for weights and problems.")] = 0,
    tokens: Annotated[
        int | None, typer.Option(help="Training tokens; as for the bundled weights if not given.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Single-thread processes, at most one per core; 2 if not given."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute, such as cuda.")] = "cpu",
    resume: Annotated[
        bool, typer.Option("--resume/--restart", help="Continue the run in FOLDER, or restart it.")
    ] = True,
) -> None:
    """Train a reasoner again; an interrupted run continues from its last checkpoint.

    'reasoner' starts from random weights, 'reasoner-verbose' from the weights of
    'reasoner', and 'smollm2-reasoner' is an adapter of 'smollm2', trained with PEFT.
    """
    if find_spec("kvpolicy_reasoner.train") is None:
        msg = "training is not part of the installed package; run it in a checkout of kvpolicy"
        raise KVPolicyError(msg)
    from kvpolicy_reasoner.train.train import train as train_reasoner

    with _progress() as report:
        folder = train_reasoner(
            output,
            name=name,
            seed=seed,
            tokens=tokens,
            workers=workers,
            device=device,
            resume=resume,
            report=report,
        )
    print_lines([f"{folder}"])


def _problems(name: str, n: int, seed: int, depth: int | None) -> "list[Problem]":
    from kvpolicy_reasoner.problems import problems_of

    problems = problems_of(name)
    if n < 1:
        msg = f"--n got {n}; expected 1 or more problems"
        raise KVPolicyError(msg)
    if depth is None:
        return problems.draw(n, seed=seed)
    if not 1 <= depth <= problems.max_depth:
        msg = (
            f"--depth got {depth}; expected 1 to {problems.max_depth}, the depths that the"
            " reasoner was trained on"
        )
        raise KVPolicyError(msg)
    difficulty = attrs.evolve(problems.standard, min_depth=depth, max_depth=depth)
    return problems.draw(n, seed=seed, difficulty=difficulty)


def _attempts(name: str, problems: "Sequence[Problem]", folder: Path | None) -> "list[Attempt]":
    from kvpolicy_reasoner.evaluate import attempt
    from kvpolicy_reasoner.model import load_reasoner
    from kvpolicy_reasoner.problems import problems_of

    model, tokenizer = load_reasoner(bundled_path(name) if folder is None else folder)
    report = _count(len(problems)) if sys.stderr.isatty() else None
    limit = problems_of(name).max_new_tokens
    return attempt(model, tokenizer, problems, max_new_tokens=limit, report=report)


def _count(total: int) -> Callable[[int], None]:
    return lambda done: info(f"{done} of {total} problems answered.")


def _pairs(
    problems: "Sequence[Problem]", attempts: "Sequence[Attempt]"
) -> "list[tuple[Problem, Attempt | None]]":
    if not attempts:
        return [(problem, None) for problem in problems]
    return list(zip(problems, attempts, strict=True))


def _to_dict(problem: "Problem", attempt: "Attempt | None") -> dict[str, Any]:
    # Fields without a repr, such as loss weights, are not printed.
    fields = attrs.asdict(problem, filter=lambda field, _: bool(field.repr))
    if attempt is not None:
        fields["generated"] = attempt.text
        fields |= {"num_tokens": attempt.num_tokens, "finished": attempt.finished}
        fields["right"] = attempt.is_correct
    return fields


def _score_to_dict(score: "Score") -> dict[str, Any]:
    estimate = score.estimate
    bounds = {"accuracy_low": estimate.low, "accuracy_high": estimate.high}
    return {"n": score.total, "right": score.num_correct, "accuracy": estimate.value, **bounds}


def _interval(score: "Score") -> str:
    return f"{100 * score.estimate.low:.1f}-{score.estimate.high:.1%}"


def _verdict(attempt: "Attempt") -> str:
    from kvpolicy.lab.tasks.answers import extract_answer

    if attempt.is_correct:
        return f"correct; {attempt.num_tokens} tokens"
    found = extract_answer(attempt.text)
    given = "no boxed answer" if found is None else found
    return f"wrong: {given}, expected {attempt.problem.answer}; {attempt.num_tokens} tokens"


@contextmanager
def _progress() -> "Iterator[Callable[[TrainingRecord], None]]":
    """Yield a function that shows a training record: a bar on a terminal, else plain lines."""
    if not sys.stderr.isatty():
        yield _print_record
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("starting", total=None)

        def show(record: "TrainingRecord") -> None:
            progress.update(
                bar,
                total=record.num_steps,
                completed=record.step,
                description=_describe(record),
            )

        yield show


def _print_record(record: "TrainingRecord") -> None:
    is_last = record.step == record.num_steps
    is_due = record.step % _PLAIN_LINE_EVERY_STEPS == 0
    if is_last or is_due or record.tune_accuracy is not None:
        info(_describe(record))


def _describe(record: "TrainingRecord") -> str:
    text = (
        f"step {record.step} of {record.num_steps}, loss {record.loss:.4f},"
        f" {record.throughput_tok_s:,.0f} tokens/s"
    )
    if record.tune_accuracy is not None:
        text += f", accuracy {record.tune_accuracy:.0%} on held-out problems"
    return text
