"""``kvpolicy lm-eval``: tasks of lm-evaluation-harness, answered under a plan.

With ``--json`` on stdout, with ``--output`` in a file: the harness's record (``results``,
``n-samples``, ``configs``, ..., with ``--log-samples`` also ``samples``), and under
``kvpolicy``: ``model``, ``session``, ``plan``, ``plan_digest``, ``model_fingerprint``, ``slots``,
``num_recalled``, ``costs`` of each task and ``reports`` of each kind of request.
"""

import json as jsonlib
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.generation import choose_plan
from kvpolicy.cli.interrupt import Interrupted
from kvpolicy.cli.options import (
    DEFAULT_MODEL,
    Budget,
    Buffer,
    Device,
    Dtype,
    Json,
    Length,
    Model,
    Overrides,
    PlanFile,
    Plugins,
    Policies,
    RunningBatch,
    TrustRemoteCode,
    check_new_file,
    register_plugins,
    rows_or_share,
    words,
)
from kvpolicy.cli.output import say, terminal_width, write
from kvpolicy.errors import KVPolicyError
from kvpolicy.files import atomic_write

if TYPE_CHECKING:
    from kvpolicy.engine.results import Result
    from kvpolicy.lab.lm_eval.journal import Journal

app = typer.Typer(add_completion=False, rich_markup_mode=None)

INSTALL = "pip install 'kvpolicy[lm-eval]'"


@app.command()
def lm_eval(
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Tasks, groups or patterns of the harness, or YAML files."
        ),
    ],
    include_path: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Where tasks of your own are; may be repeated."),
    ] = None,
    model: Model = DEFAULT_MODEL,
    plan: PlanFile = None,
    policy: Policies = None,
    budget: Budget = None,
    buffer: Buffer = None,
    length: Length = None,
    overrides: Overrides = None,
    plugin: Plugins = None,
    limit: Annotated[
        float | None,
        typer.Option(min=0, help="The most questions of each task; below 1, a share of them."),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before a question. [default: the task's]")
    ] = None,
    apply_chat_template: Annotated[
        bool,
        typer.Option("--apply-chat-template", help="Wrap questions in the model's chat template."),
    ] = False,
    think_end: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Ends a model's thinking; the answer is what follows."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The most tokens to generate. [default: the task's, or 256]"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0 takes the likeliest token. [default: the task's]"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest tokens up to this. [default: the task's]"),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=0, help="Draw from so many; 0 means all. [default: the task's]"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of drawing and of examples. [default: the harness's]"),
    ] = None,
    slots: RunningBatch = 8,
    execute_code: Annotated[
        bool, typer.Option("--execute-code", help="Let tasks run programs the model wrote.")
    ] = False,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Keep every question and answer, too.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Keep the figures, and until then the answers: the same command goes on.",
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Run tasks of lm-evaluation-harness with a policy at a budget.

    Generations go through the engine, and so do likelihoods: the model is led along each
    continuation while rows are evicted.
    """
    asked = words(tasks)
    if not asked:
        msg = "--tasks names no task; write for example --tasks gsm8k."
        raise KVPolicyError(msg)
    if output is not None:
        check_new_file(output, ".json")
    if limit is not None and (limit == 0 or (limit > 1 and limit != int(limit))):
        msg = (
            f"--limit was given {limit:g}; a whole number is wanted, or a share below 1: 100, 0.1."
        )
        raise KVPolicyError(msg)
    from kvpolicy.lab.tasks.datasets import require

    require("lm_eval", "this command", install=INSTALL)
    register_plugins(plugin)
    numbers = {"budget": rows_or_share("--budget", budget), "buffer": buffer, "length": length}
    chosen = choose_plan(plan, policy or [], numbers, overrides or [])
    from kvpolicy.engine.engine import Engine
    from kvpolicy.lab.lm_eval.evaluate import OURS, evaluate
    from kvpolicy.lab.lm_eval.model import PolicyLM
    from kvpolicy.lab.lm_eval.tasks import Tasks
    from kvpolicy.lab.store.session import describe_session
    from kvpolicy.model.loading import load_model

    session = describe_session(["kvpolicy", *sys.argv[1:]], workers=1)
    session["versions"]["lm_eval"] = version("lm_eval")
    found = Tasks(asked, include_path or [], execute_code=execute_code)
    loaded, tokenizer = load_model(
        model, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    engine = Engine(loaded, tokenizer, chosen, slots=slots)
    journal = None if output is None else output.with_suffix(".answers.jsonl")
    lm = PolicyLM(engine, seed=seed or 0, think_end=think_end, follow=_follow, journal=journal)
    _tell_found(lm.journal)
    try:
        record = evaluate(
            lm,
            found,
            limit=limit,
            num_fewshot=num_fewshot,
            generation=_generation(max_new_tokens, temperature, top_p, top_k),
            seed=seed,
            chat=apply_chat_template,
            log_samples=log_samples,
        )
    except KeyboardInterrupt:
        num_done = lm.journal.num_found + lm.journal.num_kept
        fate = (
            "which are lost; with --output FILE.json they are kept"
            if journal is None
            else f"which are in {journal}; the same command goes on"
        )
        msg = f"interrupted after {num_done} answers, {fate}."
        raise Interrupted(msg) from None
    finally:
        lm.journal.close()
    record[OURS] = {"model": model, "session": session, **record[OURS]}
    _show(record, output, json=json)
    if journal is not None:
        journal.unlink(missing_ok=True)  # the record holds what it held


def _tell_found(journal: "Journal") -> None:
    if journal.num_found:
        say(f"going on: {journal.num_found} answers are in {journal.path}.")
    if journal.was_torn:
        say(f"the last line of {journal.path} was incomplete; its answer is computed again.")


def _generation(
    max_new_tokens: int | None, temperature: float | None, top_p: float | None, top_k: int | None
) -> dict[str, Any]:
    """What replaces the tasks' own settings, in the harness's words."""
    given = {
        "max_gen_toks": max_new_tokens,
        "temperature": temperature,
        "do_sample": None if temperature is None else temperature > 0,
        "top_p": top_p,
        "top_k": top_k,
    }
    return {key: value for key, value in given.items() if value is not None}


def _follow(
    results: "Iterable[Result]", what: str, total: int, num_known: int
) -> "Iterator[Result]":
    from kvpolicy.cli.progress import open_progress

    with open_progress(total, num_known) as progress:
        for num_done, result in enumerate(results, 1):
            yield result
            if num_done > num_known:
                progress.show(what, num_done)


def _show(record: dict[str, Any], output: Path | None, *, json: bool) -> None:
    from kvpolicy.lab.cli.scores import table

    text = jsonlib.dumps(record, ensure_ascii=False, indent=2, default=_plain) + "\n"
    if output is not None:
        atomic_write(output, text)
    write(text if json else table(record, width=terminal_width()) + "\n")
    costs = record["kvpolicy"]["costs"]
    for name, cost in costs.items():
        if cost["num_shortened"]:
            say(
                f"{cost['num_shortened']} prompts of {name} were too long for the model's "
                "positions, and have lost their beginning."
            )
    if output is not None:
        say(f"the figures are in {output}.")


def _plain(value: Any) -> Any:
    """What the harness leaves in its record that is no plain data."""
    from lm_eval.utils import handle_non_serializable

    return handle_non_serializable(value)
