"""``kvpolicy run``: generate with a policy at a budget; text to stdout, figures to stderr.

With ``--json``, one object per line: ``{"kind": "result", ...}`` with the fields of `Result`
for each prompt as it finishes, and a last ``{"kind": "run", "plan_digest", ...}`` with those
of `RunReport`.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.console import say, write, write_json
from kvpolicy.cli.figures import describe_result, describe_run
from kvpolicy.cli.interrupt import Interrupted
from kvpolicy.cli.options import (
    Device,
    Dtype,
    Json,
    Model,
    Overrides,
    Plugins,
    TrustRemoteCode,
    register_plugins,
    rows_or_share,
)
from kvpolicy.cli.prompts import Prompt, apply_chat_template, read_prompts, read_stdin
from kvpolicy.errors import KVPolicyError, RequestError

if TYPE_CHECKING:
    from kvpolicy.engine import Engine
    from kvpolicy.plan import Plan
    from kvpolicy.results import Result

app = typer.Typer(add_completion=False, rich_markup_mode=None)

SOME_FAILED = 1
_MAX_NEW_TOKENS = 1024  # for models that do not say how much they usually generate


@app.command()
def run(
    prompt: Annotated[
        str | None, typer.Argument(help="A prompt; '-' reads one from standard input.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Prompts, one per line, or JSON lines."),
    ] = None,
    model: Model = "reasoner",
    plan: Annotated[Path | None, typer.Option(metavar="FILE|NAME", help="A plan, as TOML.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A policy; repeat it, or write A+B, for B to wrap A."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="N|N%", help="Rows that stay per layer and KV head."),
    ] = None,
    buffer: Annotated[
        int | None, typer.Option(help="Rows that may join before a compaction.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens that a budget of N% is a share of.")
    ] = None,
    overrides: Overrides = None,
    plugin: Plugins = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens up to this.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from so many; 0 means all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the drawing.")] = 0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The most tokens to generate. [default: the model's, or 1024]"),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Ends a text; may be repeated.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap prompts in the model's chat template.")
    ] = False,
    slots: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 8,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Generate text with a policy at a budget.

    One prompt is streamed; the results of a file are shown as they finish.
    """
    is_one = file is None
    prompts = _prompts(prompt, file, model, seed)
    register_plugins(plugin)
    numbers = {
        "budget": rows_or_share("--budget", budget),
        "buffer": buffer,
        "length": length,
    }
    chosen = _plan(plan, policy or [], numbers, overrides or [])
    from kvpolicy.engine import Engine
    from kvpolicy.lab.models import open_model
    from kvpolicy.request import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    loaded, tokenizer = open_model(
        model, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    if chat:
        prompts = apply_chat_template(tokenizer, prompts)
    engine = Engine(loaded, tokenizer, chosen, slots=slots)
    options = {
        "max_new_tokens": max_new_tokens or _usual_length(loaded),
        "sampling": sampling,
        "stop": tuple(stop or ()),
    }
    if json:
        failed = _as_json(engine, prompts, options)
    elif is_one:
        failed = _streamed(engine, prompts[0], options)
    else:
        failed = _as_text(engine, prompts, options)
    if failed:
        raise typer.Exit(SOME_FAILED)


def _prompts(prompt: str | None, file: str | None, model: str, seed: int) -> list[Prompt]:
    if file is not None:
        if prompt is not None:
            msg = "a prompt and --file were given; one of them is wanted."
            raise KVPolicyError(msg)
        return read_prompts(file)
    if prompt is not None:
        return [read_stdin() if prompt == "-" else prompt]
    from kvpolicy.lab.reasoner.bundled import BUNDLED

    if model in BUNDLED and sys.stdin.isatty():
        from kvpolicy.lab.tasks import load_task

        item = load_task(model).items(1, seed=seed)[0]
        say(f"no prompt was given; here is held-out problem {seed}, whose answer is {item.answer}:")
        typer.echo(item.prompt.rstrip("\n"), err=True)
        return [item.prompt]
    msg = "no prompt: give one, '-' to read one from standard input, or --file FILE."
    raise KVPolicyError(msg)


def _plan(
    file: Path | None,
    policies: Sequence[str],
    numbers: Mapping[str, int | str | None],
    overrides: Sequence[str],
) -> "Plan":
    from kvpolicy.plan import Plan

    given = [f"{key}={value}" for key, value in numbers.items() if value is not None]
    if file is not None:
        if policies:
            msg = "--plan and --policy were given; one of them is wanted."
            raise KVPolicyError(msg)
        return Plan.load(file, [*given, *overrides])
    if not policies:
        if given:
            msg = f"--{given[0].partition('=')[0]} needs --policy NAME or --plan FILE."
            raise KVPolicyError(msg)
        from kvpolicy.lab.presets import DEFAULT_PRESET, load_preset

        reference = load_preset(DEFAULT_PRESET).series[0]
        say(f"no policy was given: {reference.label}.")
        return Plan.from_dict(reference.plan, overrides, name=f"plan '{reference.label}'")
    stack = [name.strip() for policy in policies for name in policy.split("+")]
    return Plan.from_dict({"stack": stack}, [*given, *overrides], name="the command line")


def _usual_length(model: Any) -> int:
    generation = getattr(model, "generation_config", None)
    return getattr(generation, "max_new_tokens", None) or _MAX_NEW_TOKENS


def _streamed(engine: "Engine", prompt: Prompt, options: dict[str, Any]) -> bool:
    stream = engine.stream(prompt, **options)
    last = ""
    try:
        for piece in stream:
            write(piece)
            last = piece or last
    except KeyboardInterrupt:
        write("\n")
        msg = f"interrupted after {stream.report.new_tokens} tokens."
        raise Interrupted(msg) from None
    result = stream.result
    assert result is not None, "a stream that has ended has its result"
    if result.error is not None:
        raise RequestError(result.error)
    write("" if last.endswith("\n") else "\n")
    say(describe_result(result, engine.plan))
    say(describe_run(stream.report))
    return False


def _as_text(engine: "Engine", prompts: Sequence[Prompt], options: dict[str, Any]) -> bool:
    answers = engine.generate(prompts, **options)
    failed = False
    for result in _until_interrupted(answers, len(prompts)):
        if result.error is not None:
            failed = True
            say(f"prompt {result.id}: {result.error}.")
            continue
        write(
            f"[{result.id}] {result.finish_reason}, {len(result.tokens)} tokens\n{result.text}\n\n"
        )
    say(describe_run(answers.report))
    return failed


def _as_json(engine: "Engine", prompts: Sequence[Prompt], options: dict[str, Any]) -> bool:
    answers = engine.generate(prompts, **options)
    failed = False
    for result in _until_interrupted(answers, len(prompts)):
        failed = failed or result.error is not None
        write_json({"kind": "result", **result.to_dict()})
    digest = engine.plan.digest()
    write_json({"kind": "run", "plan_digest": digest, **answers.report.to_dict()})
    return failed


def _until_interrupted(answers: "Iterable[Result]", total: int) -> "Iterator[Result]":
    done = 0
    try:
        for result in answers:
            yield result
            done += 1
    except KeyboardInterrupt:
        msg = f"interrupted; {done} of {total} results are above, the others are lost."
        raise Interrupted(msg) from None
