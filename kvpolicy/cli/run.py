"""``kvpolicy run``: generate with a policy at a budget; text to stdout, figures to stderr.

With ``--json``, one object per line: ``{"kind": "result", ...}`` with the fields of `Result`
for each prompt as it finishes, and a last ``{"kind": "run", "plan_digest", ...}`` with those
of `RunReport`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.figures import describe_result, describe_run
from kvpolicy.cli.generation import SOME_FAILED, prepare
from kvpolicy.cli.interrupt import Interrupted
from kvpolicy.cli.options import (
    DEFAULT_MODEL,
    Budget,
    Buffer,
    Chat,
    Device,
    Dtype,
    Json,
    Length,
    MaxNewTokens,
    Model,
    Overrides,
    PlanFile,
    Plugins,
    Policies,
    PromptFile,
    PromptText,
    RunningBatch,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    TrustRemoteCode,
)
from kvpolicy.cli.output import say, write, write_json
from kvpolicy.cli.prompts import Prompt
from kvpolicy.cli.together import together
from kvpolicy.errors import RequestError

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine
    from kvpolicy.engine.results import Result

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def run(
    prompt: PromptText = None,
    file: PromptFile = None,
    model: Model = DEFAULT_MODEL,
    plan: PlanFile = None,
    policy: Policies = None,
    budget: Budget = None,
    buffer: Buffer = None,
    length: Length = None,
    overrides: Overrides = None,
    plugin: Plugins = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = None,
    stop: Stop = None,
    chat: Chat = False,
    slots: RunningBatch = 8,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="If a policy fails, answer the prompts it was asked about with the error, and "
            "go on with the others.",
        ),
    ] = False,
    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel",
            help="Split the model over the processes that torchrun has started; the first one "
            "writes.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Generate text with a policy at a budget.

    One prompt is streamed; the results of a file are shown as they finish.
    """
    with together() if tensor_parallel else nullcontext():
        _generate(
            prompt=prompt,
            file=file,
            json=json,
            model=model,
            plan=plan,
            policy=policy,
            budget=budget,
            buffer=buffer,
            length=length,
            overrides=overrides,
            plugin=plugin,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            max_new_tokens=max_new_tokens,
            stop=stop,
            chat=chat,
            slots=slots,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            keep_going=keep_going,
            tensor_parallel=tensor_parallel,
        )


def _generate(*, file: str | None, json: bool, **options: Any) -> None:
    task = prepare(file=file, **options)
    if json:
        failed = _as_json(task.engine, task.prompts, task.options)
    elif file is None:
        failed = _streamed(task.engine, task.prompts[0], task.options)
    else:
        failed = _as_text(task.engine, task.prompts, task.options)
    if failed:
        raise typer.Exit(SOME_FAILED)


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
