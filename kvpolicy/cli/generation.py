"""What the commands that generate text have in common: from their options to an engine."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import typer

from kvpolicy.cli.options import register_plugins, rows_or_share
from kvpolicy.cli.output import say
from kvpolicy.cli.prompts import Prompt, apply_chat_template, read_prompts, read_stdin
from kvpolicy.entry_points import installed, load_installed
from kvpolicy.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine
    from kvpolicy.plan.plan import Plan

SOME_FAILED = 1
_MAX_NEW_TOKENS = 1024  # for models that do not say how much they usually generate


@attrs.frozen
class Generation:
    """What is to be generated.

    Attributes:
        engine: The engine.
        prompts: The prompts.
        options: What else `Engine.generate` is given.
    """

    engine: "Engine"
    prompts: list[Prompt]
    options: dict[str, Any]


def prepare(
    *,
    prompt: str | None,
    file: str | None,
    model: str,
    plan: Path | None,
    policy: list[str] | None,
    budget: str | None,
    buffer: int | None,
    length: int | None,
    overrides: list[str] | None,
    plugin: list[Path] | None,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    max_new_tokens: int | None,
    stop: list[str] | None,
    chat: bool,
    slots: int,
    dtype: str,
    device: str | None,
    trust_remote_code: bool,
    keep_going: bool = False,
    tensor_parallel: bool = False,
) -> Generation:
    """Read prompts and plan, load the model, and bind them; arguments are the options' values.

    Raises:
        KVPolicyError: An option is wrong, or two do not go together.
    """
    if tensor_parallel and "-" in (prompt, file):
        msg = (
            "--tensor-parallel was given, and the prompts on standard input, which only one "
            "process could read; put them into a file and give --file FILE."
        )
        raise KVPolicyError(msg)
    prompts = _prompts(prompt, file, model, seed)
    register_plugins(plugin)
    numbers = {
        "budget": rows_or_share("--budget", budget),
        "buffer": buffer,
        "length": length,
    }
    chosen = choose_plan(plan, policy or [], numbers, overrides or [])
    from kvpolicy.engine.engine import Engine
    from kvpolicy.engine.request import Sampling
    from kvpolicy.model.loading import load_model
    from kvpolicy.model.tensor_parallel import refuse_several_processes

    if not tensor_parallel:
        refuse_several_processes()
    sampling = Sampling(temperature, top_k, top_p, seed)
    loaded, tokenizer = load_model(
        model,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        tp_plan="auto" if tensor_parallel else None,
    )
    if chat:
        prompts = apply_chat_template(tokenizer, prompts)
    on_hook_error: Any = "answer" if keep_going else "raise"
    engine = Engine(loaded, tokenizer, chosen, slots=slots, on_hook_error=on_hook_error)
    options = {
        "max_new_tokens": max_new_tokens or _usual_length(loaded),
        "sampling": sampling,
        "stop": tuple(stop or ()),
    }
    return Generation(engine, prompts, options)


def _prompts(prompt: str | None, file: str | None, model: str, seed: int) -> list[Prompt]:
    if file is not None:
        if prompt is not None:
            msg = "a prompt and --file were given; one of them is wanted."
            raise KVPolicyError(msg)
        return read_prompts(file)
    if prompt is not None:
        return [read_stdin() if prompt == "-" else prompt]
    # An installed model may come with a task of the same name.
    if sys.stdin.isatty() and model in installed("kvpolicy.tasks"):
        item = load_installed("kvpolicy.tasks", model, what="task")().items(1, seed=seed)[0]
        say(f"no prompt was given; this is held-out problem {seed} (answer: {item.answer}):")
        typer.echo(item.prompt.rstrip("\n"), err=True)
        return [item.prompt]
    msg = "no prompt: give one, '-' to read one from standard input, or --file FILE."
    raise KVPolicyError(msg)


def choose_plan(
    file: Path | None,
    policies: Sequence[str],
    numbers: Mapping[str, int | str | None],
    overrides: Sequence[str],
) -> "Plan":
    """The plan that the options speak of; that of the full cache if they speak of none.

    Args:
        file: ``--plan``.
        policies: ``--policy``.
        numbers: Values of ``--budget``, ``--buffer`` and ``--length``, ``None`` if not given.
        overrides: ``--set``.

    Raises:
        KVPolicyError: They do not go together, or the plan is wrong.
    """
    from kvpolicy.plan.plan import Plan

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
        say("no policy was given: full cache.")
        return Plan.from_dict({"stack": ["full"]}, overrides, name="plan 'full cache'")
    stack = [name.strip() for policy in policies for name in policy.split("+")]
    return Plan.from_dict({"stack": stack}, [*given, *overrides], name="the command line")


def _usual_length(model: Any) -> int:
    generation = getattr(model, "generation_config", None)
    return getattr(generation, "max_new_tokens", None) or _MAX_NEW_TOKENS
