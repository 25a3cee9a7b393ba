"""``kvpolicy lm-eval``: tasks of lm-evaluation-harness, answered under a plan.

``--json`` prints and ``--output`` writes the harness's record (``results``, ``n-samples``,
``configs``, ..., with ``--log-samples`` also ``samples``), and under ``kvpolicy``: ``model``,
``session``, ``plan``, ``plan_digest``, ``model_fingerprint``, ``slots``, ``num_recalled``,
``costs`` of each task and ``reports`` of each kind of request.
"""

import json as jsonlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli.failures import Interrupted
from kvpolicy.cli.option_groups import with_groups
from kvpolicy.cli.options import (
    DecoderOptions,
    Json,
    PlanFile,
    PolicyOptions,
    check_new_file,
    choose_plan,
    examples,
    register_plugins,
    split_list,
    tell_no_effects,
)
from kvpolicy.cli.output import Progress, info, print_exact, print_text, terminal_width
from kvpolicy.cli.text_table import format_table
from kvpolicy.engine.requests.results import Result
from kvpolicy.errors import KVPolicyError
from kvpolicy.files import atomic_write
from kvpolicy.quantities import format_bytes

app = typer.Typer(
    help="Run tasks of lm-evaluation-harness with a plan.",
    rich_help_panel="Experiments",
    add_completion=False,
)

_HEADERS = (
    *("task", "metric", "filter", "value", "± error", "shots", "n"),
    *("length", "truncated", "compactions", "rows", "KV/sequence"),
)
_STDERR = "_stderr"
_MISSING = "-"


@app.command(
    epilog=examples(
        "kvpolicy lm-eval --tasks gsm8k --model Qwen/Qwen3-0.6B --limit 50",
        "kvpolicy lm-eval --tasks gsm8k --plan plan.toml --model ./my-model",
    )
)
@with_groups
def lm_eval(
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Tasks, groups or patterns of the harness, or YAML files."
        ),
    ],
    include_path: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Folder with tasks of your own; may be repeated."),
    ] = None,
    *,
    decoder: DecoderOptions,
    plan: PlanFile = None,
    policies: PolicyOptions,
    limit: Annotated[
        float | None,
        typer.Option(min=0, help="The most questions of each task; below 1, a share of them."),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question. [default: the task's]")
    ] = None,
    apply_chat_template: Annotated[
        bool,
        typer.Option("--apply-chat-template", help="Apply the model's chat template."),
    ] = False,
    system_instruction: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system prompt.")
    ] = None,
    think_end: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text that ends the model's thinking."),
    ] = None,
    gen_kwargs: Annotated[
        str | None,
        typer.Option(metavar="KEY=VALUE,...", help="Replaces generation_kwargs of the tasks."),
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
        typer.Option(help="Sample from the likeliest up to this sum. [default: the task's]"),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=0, help="Sample from so many tokens; 0 means all. [default: the task's]"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Random seed for sampling and examples. [default: the harness's]"),
    ] = None,
    slots: Annotated[
        int, typer.Option("--slots", "--batch-size", min=1, help="Sequences decoded together.")
    ] = 8,
    execute_code: Annotated[
        bool, typer.Option("--execute-code", help="Allow tasks to run programs the model wrote.")
    ] = False,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Record every question and answer, too.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write the record; until then keep answers, so that the command can resume.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Run tasks of lm-evaluation-harness with a policy at a budget.

    Generations and log-likelihoods are computed by the engine, which evicts rows on the way.
    """
    names = split_list(tasks)
    if not names:
        msg = "--tasks names no task; write for example --tasks gsm8k."
        raise KVPolicyError(msg)
    if output is not None:
        check_new_file(output, ".json")
    if limit is not None and (limit == 0 or (limit > 1 and limit != int(limit))):
        msg = f"--limit was given {limit:g}; give a whole number, or a share below 1: 100, 0.1."
        raise KVPolicyError(msg)
    from kvpolicy.lab.tasks.datasets import require

    require("lm_eval", "this command", extra="lm-eval")
    register_plugins(policies.plugin)
    chosen = choose_plan(plan, policies)
    from lm_eval.utils import simple_parse_args_string

    from kvpolicy.engine.engine import Engine
    from kvpolicy.lab.lm_eval.evaluate import OURS, AnswerCache, Tasks, evaluate
    from kvpolicy.lab.lm_eval.model import PolicyLM
    from kvpolicy.lab.store.session import describe_session

    given = {
        "max_gen_toks": max_new_tokens,
        "temperature": temperature,
        "do_sample": None if temperature is None else temperature > 0,
        "top_p": top_p,
        "top_k": top_k,
    }
    shortcuts = {name: value for name, value in given.items() if value is not None}
    session = describe_session(["kvpolicy", *sys.argv[1:]], workers=1)
    session["versions"]["lm_eval"] = version("lm_eval")
    found = Tasks(names, include_path or [], execute_code=execute_code)
    loaded, tokenizer = decoder.load()
    engine = Engine(loaded, tokenizer, chosen, slots=slots, compile=decoder.compile)
    tell_no_effects(engine.plan)
    lm = PolicyLM(engine, seed=seed or 0, think_end_token=think_end, follow=_show_progress)
    cache = None if output is None else AnswerCache(lm, output.with_suffix(".answers.db"))
    if cache is not None and cache.num_found:
        info(f"resuming: {cache.num_found} answers are in {cache.path}.")
    try:
        record = evaluate(
            lm,
            found,
            cache=cache,
            limit=limit,
            num_fewshot=num_fewshot,
            generation=simple_parse_args_string(gen_kwargs) | shortcuts,
            seed=seed,
            chat=apply_chat_template,
            system_instruction=system_instruction,
            log_samples=log_samples,
        )
    except KeyboardInterrupt:
        msg = "interrupted; the answers are lost. With --output FILE.json they are kept."
        if cache is not None:
            msg = (
                f"interrupted; {len(cache.dbdict)} answers are in {cache.path}, and the same "
                "command resumes."
            )
        raise Interrupted(msg) from None
    finally:
        if cache is not None:
            cache.close()
    if engine.compile_s:
        info(f"compiling decode steps took {engine.compile_s:.1f} s.")
    record[OURS] = {"model": decoder.name, "session": session, **record[OURS]}
    _print_record(record, output, json=json)
    if cache is not None:
        cache.path.unlink(missing_ok=True)  # the record holds every answer that counts


def _show_progress(results: Iterable[Result], kind: str, total: int) -> Iterator[Result]:
    with Progress(total) as progress:
        for num_done, result in enumerate(results, 1):
            yield result
            progress.update(kind, num_done)


def _print_record(record: dict[str, Any], output: Path | None, *, json: bool) -> None:
    from lm_eval.utils import handle_non_serializable

    text = jsonlib.dumps(record, ensure_ascii=False, indent=2, default=handle_non_serializable)
    if output is not None:
        atomic_write(output, text + "\n")
    if json:
        print_exact(text + "\n")
    else:
        print_text(_score_table(record) + "\n")
    for name, cost in record["kvpolicy"]["costs"].items():
        if cost["num_shortened"]:
            info(
                f"{cost['num_shortened']} prompts of {name} were too long for the model's "
                "positions; their beginning was dropped."
            )
    if output is not None:
        info(f"the results are in {output}.")


def _score_table(record: Mapping[str, Any]) -> str:
    """One line for each metric of each task or group.

    ``length`` (new tokens) and ``compactions`` are means over a task's sequences; ``rows`` and
    ``KV/sequence`` are the most that one sequence held.
    """
    rows = [row for name in record["results"] for row in _metric_rows(record, name)]
    return format_table(_HEADERS, rows, right=range(3, len(_HEADERS)), width=terminal_width())


def _metric_rows(record: Mapping[str, Any], name: str) -> Iterator[list[str]]:
    figures = record["results"][name]
    shots = record.get("n-shot", {}).get(name)
    count = record.get("n-samples", {}).get(name)
    cost = _cost_columns(record["kvpolicy"]["costs"].get(name))
    for key, value in figures.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith(_STDERR):
            continue
        error = figures.get(f"{metric}{_STDERR},{filter_name}")
        yield [
            figures.get("alias", name),
            metric,
            "" if filter_name == "none" else filter_name,
            _number(value),
            _number(error),
            _MISSING if shots is None else str(shots),
            _MISSING if count is None else str(count["effective"]),
            *cost,
        ]
        cost = [""] * len(cost)  # only in the task's first line


def _cost_columns(cost: Mapping[str, Any] | None) -> list[str]:
    if not cost or not cost["num_sequences"]:
        return [_MISSING] * 5
    num = cost["num_sequences"]
    return [
        f"{cost['new_tokens'] / num:.0f}",
        f"{cost['num_cut_off'] / num:.0%}",
        f"{cost['compactions'] / num:.1f}",
        f"{cost['peak_rows']:,}",
        format_bytes(cost["peak_bytes"]),
    ]


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else _MISSING
