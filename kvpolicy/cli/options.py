"""Options that several commands share, and what they stand for: prompts, plan and engine.

An option is an annotated type, so that it has one name, one help text and one panel everywhere.
"""

import os
import stat
import sys
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import attrs
import typer

from kvpolicy.cli.completion import names_of
from kvpolicy.cli.output import info, info_text
from kvpolicy.cli.prompts import read_prompts, read_standard_input
from kvpolicy.entry_points import default_name, installed, load_installed
from kvpolicy.errors import KVPolicyError, OutputError
from kvpolicy.plugin_code import plugin_code
from kvpolicy.prompts import Chat, ChatPrompts, Prompt
from kvpolicy.quantities import format_bytes
from kvpolicy.validators import MAX_SEED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvpolicy.engine.engine import Engine, Run
    from kvpolicy.engine.requests.request import Request
    from kvpolicy.engine.reuse.store import PrefixStore
    from kvpolicy.plan.plan import Plan
    from kvpolicy.plan.resolved import ResolvedPlan
    from kvpolicy.plan.toml import Override

SOME_FAILED = 1  # exit status of commands of which a part failed

# Panels of the options in ``--help``.
PROMPTS, POLICY, SAMPLING, MODEL = "Prompts", "Policy", "Sampling", "Model"

# The default of --model; ``None`` if no installed package sets one.
DEFAULT_MODEL: Any = default_name("model")


def _model_or_default(model: str | None) -> str:
    if model is None:
        msg = (
            "no model was named, and no installed package sets a default: give --model with a "
            "hub id, a local folder or a GGUF file."
        )
        raise KVPolicyError(msg)
    return model


class WeightForm(Enum):
    """Forms of weights of linear layers: the values of `kvpolicy.model.weight_forms.CpuWeights`."""

    plain = "plain"
    packed = "packed"
    bf16 = "bf16"
    int8 = "int8"


class Where(Enum):
    """Where a command computes."""

    here = "here"
    ray = "ray"


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="A Python file whose policies become available by name; may be repeated.",
        rich_help_panel=POLICY,
    ),
]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest prompt, for a plan that keeps the rows of prompts.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change an entry of the plan: buffer=16, POLICY.KNOB=0.5; may be repeated.",
        rich_help_panel=POLICY,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        metavar="NAME|FOLDER|FILE",
        callback=_model_or_default,
        autocompletion=names_of("kvpolicy.models", "/", ".gguf"),
        help="Name of an installed model, hub id, local folder or GGUF file.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.", rich_help_panel=MODEL),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Such as cpu or cuda:0. [default: cuda, or cpu]",
        rich_help_panel=MODEL,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that comes with the model.",
        rich_help_panel=MODEL,
    ),
]
CpuWeights = Annotated[
    WeightForm,
    typer.Option(
        "--cpu-weights",
        help="Faster steps on a CPU: packed weights, with which tokens may differ by rounding; or "
        "packed and rounded to bf16 or int8, which gives other answers.",
        rich_help_panel=MODEL,
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile decode steps, which takes a minute or more; tokens may differ by rounding.",
        rich_help_panel=MODEL,
    ),
]
PromptText = Annotated[
    str | None, typer.Argument(help="A prompt; '-' reads one from standard input.")
]
PromptFile = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        "--file",
        metavar="FILE|-",
        help="Prompts, one per line, or JSON lines with id, prompt or messages, and limits and "
        "sampling of their own.",
        rich_help_panel=PROMPTS,
    ),
]
Raw = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Take texts as they are, without the model's chat template.",
        rich_help_panel=PROMPTS,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="The system's message before each text. [default: the template's]",
        rich_help_panel=PROMPTS,
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE|NAME",
        autocompletion=names_of("kvpolicy.plans", ".toml"),
        help="A plan, as TOML.",
        rich_help_panel=POLICY,
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        autocompletion=names_of("kvpolicy.policies"),
        help="A policy; repeat it, or write A+B, for B to wrap A.",
        rich_help_panel=POLICY,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="N|N%", help="Rows to keep per layer and KV head.", rich_help_panel=POLICY
    ),
]
Buffer = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rows to append between compactions. [default: the plan's, or an eighth of the "
        "budget, from 32 to 128]",
        rich_help_panel=POLICY,
    ),
]
PrefillBuffer = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rows to append between compactions while a prompt enters. [default: the plan's, or "
        "the budget from 256 on, at most 1024]",
        rich_help_panel=POLICY,
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        min=1, help="Sequence length that a budget of N% refers to.", rich_help_panel=POLICY
    ),
]
TEMPERATURE = typer.Option(
    min=0, help="Sampling temperature; 0 is greedy.", rich_help_panel=SAMPLING
)
Temperature = Annotated[float, TEMPERATURE]
TOP_P = typer.Option(
    help="Sample from the likeliest tokens up to this probability.", rich_help_panel=SAMPLING
)
TopP = Annotated[float, TOP_P]
TopK = Annotated[
    int,
    typer.Option(
        min=0, help="Sample from this many tokens; 0 means all.", rich_help_panel=SAMPLING
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        help="Sample from tokens with this share of the likeliest one's probability.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Divides logits of tokens that were there; 1 is off. [default: the model's]",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int, typer.Option(min=0, help="Random seed for sampling.", rich_help_panel=SAMPLING)
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most tokens to generate. [default: the model's, or 1024]",
        rich_help_panel=SAMPLING,
    ),
]
MinNewTokens = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Tokens before which the end token is not drawn. [default: the model's]",
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="Text that ends a sequence; may be repeated.", rich_help_panel=SAMPLING
    ),
]
SLOTS = typer.Option(min=1, help="Sequences decoded together.", rich_help_panel=MODEL)
Slots = Annotated[int, SLOTS]


def examples(*commands: str) -> str:
    """The end of a command's help: commands to try.

    Args:
        commands: Complete command lines of at most 76 characters.
    """
    return "\n".join(["Examples:", *commands])


@attrs.frozen
class ModelOptions:
    """Options of the commands that load a model."""

    model: Model = DEFAULT_MODEL
    dtype: Dtype = "auto"
    device: Device = None
    trust_remote_code: TrustRemoteCode = False

    @property
    def loading(self) -> dict[str, Any]:
        """How the model is loaded: arguments of `kvpolicy.model.loading.load_model`."""
        return {
            "dtype": self.dtype,
            "device": self.device,
            "trust_remote_code": self.trust_remote_code,
        }

    def load(self) -> "tuple[PreTrainedModel, Any]":
        """Load the model and its tokenizer.

        Raises:
            ModelError: It cannot be loaded.
        """
        from kvpolicy.model.loading import load_model

        return load_model(self.model, **self.loading)


@attrs.frozen(kw_only=True)
class DecoderOptions:
    """Options of the commands that load a model and generate with it."""

    of_model: ModelOptions
    cpu_weights: CpuWeights = WeightForm.plain
    compile: Compile = False

    @property
    def name(self) -> str:
        """``--model``."""
        return self.of_model.model

    @property
    def loading(self) -> dict[str, Any]:
        """How the model is loaded: arguments of `kvpolicy.model.loading.load_model`."""
        return {**self.of_model.loading, "cpu_weights": self.cpu_weights.value}

    def load(self, *, tp_plan: str | None = None) -> "tuple[PreTrainedModel, Any]":
        """Load the model and its tokenizer, and say what its packed weights take.

        Args:
            tp_plan: How processes share the model, see `kvpolicy.model.loading.load_model`.

        Raises:
            ModelError: It cannot be loaded.
        """
        from kvpolicy.model.loading import load_model

        model, tokenizer = load_model(self.name, **self.loading, tp_plan=tp_plan)
        tell_packing(model, self.cpu_weights)
        return model, tokenizer


@attrs.frozen
class PolicyOptions:
    """Options that describe a plan, beside a file that holds one."""

    policy: Policies = None
    budget: Budget = None
    buffer: Buffer = None
    prefill_buffer: PrefillBuffer = None
    length: Length = None
    overrides: Overrides = None
    plugin: Plugins = None

    @property
    def numbers(self) -> dict[str, int | str | None]:
        """The entries of a plan that have an option, ``None`` if it was not given."""
        return {
            "budget": self.budget,
            "buffer": self.buffer,
            "prefill_buffer": self.prefill_buffer,
            "length": self.length,
        }

    @property
    def are_given(self) -> bool:
        """Whether they say anything of a plan."""
        return bool(self.policy or self.overrides or any(self.numbers.values()))


@attrs.frozen(kw_only=True)
class GenerationOptions:
    """Options of the commands that generate text, in the order of their help."""

    prompt: PromptText = None
    file: PromptFile = None
    raw: Raw = False
    system: System = None
    plan: PlanFile = None
    policies: PolicyOptions
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = None
    seed: Seed = 0
    max_new_tokens: MaxNewTokens = None
    min_new_tokens: MinNewTokens = None
    stop: Stop = None
    decoder: DecoderOptions
    slots: Slots = 8

    @property
    def chat(self) -> Chat:
        """How texts become prompts.

        Raises:
            KVPolicyError: Two options contradict each other.
        """
        if self.raw and self.system is not None:
            msg = "--system is a message of a chat, and --raw was given; give one of them."
            raise KVPolicyError(msg)
        return Chat(self.raw, self.system)


@attrs.frozen
class Generation:
    """An engine and what it is to generate.

    Attributes:
        engine: The engine.
        prompts: The prompts.
        defaults: Limits and sampling of the prompts that have none of their own.
    """

    engine: "Engine"
    prompts: list[Prompt]
    defaults: "Request"

    @property
    def requests(self) -> "list[Request]":
        """A request for each prompt."""
        return [one.request(self.defaults) for one in self.prompts]

    def start(self) -> "Run":
        """Begin to generate for all prompts; results are numbered in their order."""
        return self.engine.generate(self.requests)


def prepare(
    options: GenerationOptions,
    *,
    keep_going: bool = False,
    tensor_parallel: bool = False,
    prefix_store: "PrefixStore | None" = None,
) -> Generation:
    """Read prompts and plan, load the model, and build an engine.

    Args:
        options: The options given.
        keep_going: Whether a policy that fails ends only the affected prompts.
        tensor_parallel: Whether the processes of torchrun share the model.
        prefix_store: What the engine reuses, if anything.

    Raises:
        KVPolicyError: An option is wrong, or two contradict each other.
    """
    if tensor_parallel and "-" in (options.prompt, options.file):
        msg = (
            "--tensor-parallel was given, and the prompts on standard input, which only one "
            "process could read; put them into a file and give --prompts FILE."
        )
        raise KVPolicyError(msg)
    chat, prompts = options.chat, _prompts(options)
    register_plugins(options.policies.plugin)
    plan = choose_plan(options.plan, options.policies)
    from kvpolicy.engine.engine import Engine
    from kvpolicy.engine.requests.request import default_length
    from kvpolicy.model.tensor_parallel import refuse_several_processes

    if not tensor_parallel:
        refuse_several_processes()
    defaults = default_request(options)  # before a large model is loaded
    model, tokenizer = options.decoder.load(tp_plan="auto" if tensor_parallel else None)
    chats = ChatPrompts(tokenizer, chat)
    if chats.note is not None and any(map(chats.wraps, prompts)):
        info(chats.note)
    elif chat.system is not None:
        info("--system changes nothing: no prompt is a text that is put into a chat template.")
    prompts = [chats.encoded(one) for one in prompts]
    on_hook_error: Any = "answer" if keep_going else "raise"
    engine = Engine(
        model,
        tokenizer,
        plan,
        slots=options.slots,
        on_hook_error=on_hook_error,
        compile=options.decoder.compile,
        prefix_store=prefix_store,
    )
    tell_no_effects(engine.plan)
    if options.max_new_tokens is None:
        defaults = attrs.evolve(defaults, max_new_tokens=default_length(model))
    return Generation(engine, prompts, defaults)


def default_request(options: GenerationOptions) -> "Request":
    """Limits and sampling that the options give; without ``--max-new-tokens``, the default limit.

    Args:
        options: The options given.

    Raises:
        KVPolicyError: One of them is out of range.
    """
    from kvpolicy.engine.requests.request import DEFAULT_LENGTH, Request, Sampling

    sampling = Sampling(
        options.temperature,
        options.top_k,
        options.top_p,
        options.seed,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )
    most = options.max_new_tokens or DEFAULT_LENGTH
    return Request(
        max_new_tokens=most,
        sampling=sampling,
        stop=tuple(options.stop or ()),
        min_new_tokens=options.min_new_tokens,
    )


def tell_packing(model: "PreTrainedModel", cpu_weights: WeightForm) -> None:
    """Say how much memory packed weights take, or that none were packed, if that was asked for."""
    from kvpolicy.model.packed import MIN_BYTES, packed_weights

    found = packed_weights(model)
    if found.num_layers:
        rounded = "" if found.form == "packed" else f" in {found.form}"
        info(
            f"packed {found.num_layers} linear layers as {found.num_products} products: "
            f"{format_bytes(found.packed_bytes)} of packed weights{rounded}, and "
            f"{format_bytes(found.released_bytes)} of plain ones released."
        )
    elif cpu_weights is not WeightForm.plain:
        info(
            f"no weights were packed: all products of this model have less than "
            f"{format_bytes(MIN_BYTES)} of them, and would get slower."
        )


def tell_no_effects(plan: "ResolvedPlan", whose: str = "") -> None:
    """Say what in a plan changes nothing.

    Args:
        plan: The plan.
        whose: Begins each message, where there are several plans.
    """
    from kvpolicy.plan.no_effect import without_effect

    for sentence in without_effect(plan):
        info(f"{whose}{sentence}.")


def _prompts(options: GenerationOptions) -> list[Prompt]:
    if options.file is not None:
        if options.prompt is not None:
            msg = "a prompt and --prompts were given; give one of them."
            raise KVPolicyError(msg)
        return read_prompts(options.file)
    if options.prompt == "-":
        return [Prompt(0, read_standard_input().removesuffix("\n"))]
    if options.prompt is not None:
        return [Prompt(0, options.prompt)]
    # An installed model may come with a task of the same name.
    model = options.decoder.name
    if not _is_redirected(sys.stdin) and model in installed("kvpolicy.tasks"):
        make_task = load_installed("kvpolicy.tasks", model, what="task")
        with plugin_code(f"task '{model}' is broken", KVPolicyError):
            example = make_task().examples(1, seed=options.seed)[0]
        answer = f"(answer: {example.answer})"
        info(f"no prompt was given; using held-out problem {options.seed} {answer}:")
        info_text(example.prompt.rstrip("\n"))
        return [Prompt(0, example.prompt)]
    msg = "no prompt: give one, '-' to read one from standard input, or --prompts FILE."
    raise KVPolicyError(msg)


def _is_redirected(stream: TextIO | None) -> bool:
    """Whether a stream reads a pipe or a file, which may hold the prompt that was forgotten."""
    try:
        mode = os.fstat(stream.fileno()).st_mode if stream is not None else 0
    except (OSError, ValueError):  # closed, or no file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def choose_plan(file: Path | None, options: PolicyOptions) -> "Plan":
    """The plan that the options describe; by default that of the full cache.

    Args:
        file: ``--plan``.
        options: The other options; their plugins are registered.

    Raises:
        KVPolicyError: The options contradict each other, or the plan is wrong.
    """
    from kvpolicy.plan.plan import Plan

    numbers, overrides = options.numbers, options.overrides or []
    given = _typed_numbers(numbers)
    if file is not None:
        if options.policy:
            msg = f"the plan {str(file)!r} and --policy were given; give one of them."
            raise KVPolicyError(msg)
        return Plan.load(file, [*given, *overrides], options={key: _option(key) for key in numbers})
    if not options.policy:
        sources = [one.source for one in given] or _idle(overrides, numbers)
        if sources:
            msg = f"{sources[0]} needs --policy NAME or --plan FILE."
            raise KVPolicyError(msg)
        info("no policy was given: full cache.")
        return Plan.full_cache(overrides)
    return plan_of_policies(options.policy, numbers, overrides)


def _idle(overrides: Sequence[str], numbers: Collection[str]) -> list[str]:
    """The ``--set`` options if they set numbers only, which mean nothing to a full cache."""
    keys = {one.partition("=")[0].strip() for one in overrides}
    return [f"--set {quote(one)}" for one in overrides] if keys <= set(numbers) else []


def plan_of_policies(
    policies: Sequence[str],
    numbers: Mapping[str, int | str | None],
    overrides: Sequence[str],
    *,
    option: str = "--policy",
) -> "Plan":
    """The plan with the same policies in every layer.

    Args:
        policies: ``--policy``.
        numbers: Values of ``--budget`` and others, ``None`` if not given.
        overrides: ``--set``.
        option: The option that named the policies, for messages.

    Raises:
        PlanError: The plan is wrong.
    """
    from kvpolicy.plan.plan import Plan
    from kvpolicy.plan.toml import Override

    stack = [name.strip() for policy in policies for name in policy.split("+")]
    typed = " ".join(f"{option} {quote(policy)}" for policy in policies)
    changes: list[str | Override] = [Override("stack", stack, source=typed)]
    changes += [*_typed_numbers(numbers), *overrides]
    options = {key: _option(key) for key in numbers}
    return Plan.from_dict({}, changes, name="the command line", options=options)


def _typed_numbers(numbers: Mapping[str, int | str | None]) -> "list[Override]":
    return [_typed(key, str(value)) for key, value in numbers.items() if value is not None]


def _typed(key: str, value: str) -> "Override":
    """The override that an option of the command line stands for."""
    from kvpolicy.plan.toml import Override, parse_value

    return Override(key, parse_value(value), source=f"{_option(key)} {quote(value)}")


def _option(key: str) -> str:
    """The option of an entry of a plan."""
    return f"--{key.replace('_', '-')}"


def register_plugins(plugins: list[Path] | None) -> None:
    """Make the policies of the files given with ``--plugin`` available.

    Args:
        plugins: The files.

    Raises:
        PolicyLoadError: A file cannot be read or run, or has no policy.
    """
    if plugins:
        from kvpolicy.hooks.discovery import load_policy_file

        for path in plugins:
            load_policy_file(path)


def check_new_file(output: Path, suffix: str = "", *, option: str = "--output") -> None:
    """Check that a new file can be written, before hours of work and not after.

    Args:
        output: The file that the option names.
        suffix: Required suffix of its name.
        option: The option, for the message.

    Raises:
        OutputError: It exists, its folder does not, or it has another suffix.
    """
    problem = None
    if not output.name.endswith(suffix):
        problem = f"does not end in {suffix}"
    elif os.path.lexists(output):
        problem = "exists"
    elif not output.parent.is_dir():
        problem = f"cannot be written: there is no folder {output.parent}"
    elif not os.access(output.parent, os.W_OK):
        problem = f"cannot be written: folder {output.parent} is read-only"
    else:
        problem = _why_not_created(output)
    if problem is not None:
        msg = f"output file {output} {problem}; choose another one with {option}."
        raise OutputError(msg)


def _why_not_created(path: Path) -> str | None:
    """Create a file and remove it again; its name may be too long, for example."""
    try:
        path.open("xb").close()
        path.unlink()
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return None


def split_list(text: str | None) -> list[str]:
    """The values of a comma-separated option.

    Args:
        text: Such as ``"a, b"``.
    """
    return [value.strip() for value in (text or "").split(",") if value.strip()]


def parse_names(option: str, text: str | None) -> list[str]:
    """Parse the names of a comma-separated option.

    Args:
        option: Name of the option, for the message.
        text: Such as ``"h2o,rkv"``; ``None`` if the option was not given.

    Raises:
        KVPolicyError: The option was given without a name.
    """
    names = split_list(text)
    if text is not None and not names:
        msg = f"{option} was given no name; leave it out, or give names: {option} A,B."
        raise KVPolicyError(msg)
    return names


def parse_ints(option: str, text: str | None, *, minimum: int = 1) -> list[int]:
    """Parse the numbers of a comma-separated option.

    Args:
        option: Name of the option, for the message.
        text: Such as ``"96,128"``.
        minimum: The smallest number allowed.

    Raises:
        KVPolicyError: One of them is not a whole number of at least ``minimum``, or there is none.
    """
    values = split_list(text)
    wrong = [value for value in values if not _is_whole(value, minimum)]
    if wrong or (text is not None and not values):
        found = f"{wrong[0]!r:.60}" if wrong else "no number"
        msg = (
            f"{option} was given {found}; give whole numbers of at least {minimum}: "
            f"{option} {minimum},{minimum + 1}."
        )
        raise KVPolicyError(msg)
    return [int(value) for value in values]


def _is_whole(text: str, minimum: int) -> bool:
    # Python refuses to convert thousands of digits.
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_SEED))
    return is_number and minimum <= int(text) <= MAX_SEED
