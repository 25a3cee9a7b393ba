"""``kvpolicy epicache``: caches for the topics of a conversation, built, asked and measured.

With ``--json``, ``build`` prints ``{"folder", "tokens", "episodes", "host_bytes", "peak_bytes",
"full_bytes"}``, where an episode is ``{"windows", "medoids", "prompt_tokens", "rows", "bytes"}``;
``ask`` prints a list of ``{"question", "episode", "text", "error"}``; ``evaluate`` prints
``{"task", "plan_digest", "conversations", "questions", "caches": [{"name", "accuracy",
"prefill_bytes", "decode_bytes", "host_bytes", "errors"}], "differences": [{"of", "from",
"difference"}], "answers"}``; accuracy and difference are ``{"value", "low", "high"}``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.failures import Interrupted
from kvpolicy.cli.option_groups import with_groups
from kvpolicy.cli.options import (
    Json,
    MaxNewTokens,
    ModelOptions,
    PlanFile,
    PolicyOptions,
    Slots,
    choose_plan,
    examples,
    register_plugins,
)
from kvpolicy.cli.output import info, print_json, print_lines, print_text
from kvpolicy.cli.text_table import format_table
from kvpolicy.errors import KVPolicyError
from kvpolicy.quantities import format_bytes
from kvpolicy.text import visible

if TYPE_CHECKING:
    from kvpolicy import Engine, Plan, Result
    from kvpolicy.lab.statistics import Interval
    from kvpolicy.lab.tasks.conversation import Conversation, ConversationTask, Frame
    from kvpolicy_plugins.epicache.store import EpisodeStore, Settings

app = typer.Typer(
    help="Keep conversations in one cache for each of their topics.",
    rich_help_panel="Generate text",
    no_args_is_help=True,
    add_completion=False,
)

_EPISODES = "Episodes"
_PLAN_FILE = "plan.toml"
_MAX_NEW_TOKENS = 256


class EmbeddingKind(Enum):
    """What texts are compared by."""

    inputs = "inputs"
    states = "states"


class Route(Enum):
    """How a question finds its episode."""

    cosine = "cosine"
    dot = "dot"


TaskName = Annotated[
    str,
    typer.Argument(
        metavar="FILE|TASK",
        help="A file of conversations, or a task that has them, with its options.",
    ),
]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="Take those of a file as they are, without the chat template."),
]
Seed = Annotated[int, typer.Option(min=0, help="Random seed of conversations and clustering.")]
NumEpisodes = Annotated[
    int, typer.Option("--episodes", min=1, help="Caches, E.", rich_help_panel=_EPISODES)
]
WindowSize = Annotated[
    int, typer.Option(min=1, help="Utterances in a window.", rich_help_panel=_EPISODES)
]
Medoids = Annotated[
    int,
    typer.Option(min=1, help="Windows in each patched prompt.", rich_help_panel=_EPISODES),
]
Instruction = Annotated[
    str | None,
    typer.Option(
        help="Text before these windows; may be empty. [default: to extract what is essential]",
        rich_help_panel=_EPISODES,
    ),
]
Embedding = Annotated[
    EmbeddingKind,
    typer.Option(
        help="Compare texts by input embeddings, or by last hidden states.",
        rich_help_panel=_EPISODES,
    ),
]
Router = Annotated[
    Route,
    typer.Option(help="Compare a question with centroids by this.", rich_help_panel=_EPISODES),
]


@attrs.frozen
class EpisodeOptions:
    """Options of the commands that build caches."""

    seed: Seed = 0
    episodes: NumEpisodes = 4
    window: WindowSize = 4
    medoids: Medoids = 8
    instruction: Instruction = None
    embedding: Embedding = EmbeddingKind.inputs
    route: Router = Route.cosine

    def settings(self) -> "Settings":
        """What a store is built with."""
        from kvpolicy_plugins.epicache.store import INSTRUCTION, Settings

        return Settings(
            num_episodes=self.episodes,
            window=self.window,
            n_medoid=self.medoids,
            instruction=INSTRUCTION if self.instruction is None else self.instruction,
            embedding=self.embedding.value,
            route=self.route.value,
            seed=self.seed,
        )


@app.command(
    short_help="Build the caches of a conversation.",
    epilog=examples(
        "kvpolicy epicache build talks.jsonl --output store --budget 2048",
        "kvpolicy epicache build conversation --output store --budget 80",
    ),
)
@with_groups
def build(
    task: TaskName,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the store.")],
    number: Annotated[int, typer.Option("--conversation", min=0, help="Which one, from 0.")] = 0,
    raw: Raw = False,
    *,
    episodes: EpisodeOptions,
    plan: PlanFile = None,
    policies: PolicyOptions,
    of_model: ModelOptions,
    slots: Slots = 8,
    json: Json = False,
) -> None:
    """Prefill a conversation once for each of its topics, and write what stays to a folder."""
    settings, chosen = episodes.settings(), _plan_of(plan, policies)
    _check_conversations(task, raw=raw)
    from kvpolicy.plan.dump import to_toml
    from kvpolicy_plugins.epicache.store import EpisodeStore

    engine = _engine(chosen, of_model, slots)
    text = to_toml(engine.plan)  # refused before anything is computed
    conversations = _conversations(task, engine.tokenizer, raw=raw)
    drawn = conversations.conversations(number + 1, seed=episodes.seed)
    if number >= len(drawn):
        msg = f"--conversation got {number}; {task} has {len(drawn)}, counted from 0"
        raise KVPolicyError(msg)
    frame = conversations.frame(engine.tokenizer)
    with _progress() as report:
        store = EpisodeStore.build(
            engine, drawn[number], frame=frame, settings=settings, report=report
        )
    store.save(output)
    from kvpolicy.files import atomic_write

    atomic_write(output / _PLAN_FILE, text.encode())
    _show_store(store, output, json=json)


@app.command(
    short_help="Ask questions about a conversation.",
    epilog=examples(
        'kvpolicy epicache ask store "What did Ann plant?"',
        'kvpolicy epicache ask store " What is tea?" --json',
    ),
)
@with_groups
def ask(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `build` has written.")],
    questions: Annotated[list[str], typer.Argument(metavar="QUESTION...", help="The questions.")],
    max_new_tokens: MaxNewTokens = None,
    *,
    of_model: ModelOptions,
    slots: Slots = 8,
    json: Json = False,
) -> None:
    """Answer each question from the cache of its topic; the caches stay as they are."""
    if not (folder / _PLAN_FILE).is_file():
        msg = (
            f"'{folder}' holds no store with a {_PLAN_FILE}; make one with kvpolicy epicache build"
        )
        raise KVPolicyError(msg)
    from kvpolicy import Plan
    from kvpolicy_plugins.epicache.store import EpisodeStore

    plan = Plan.load(folder / _PLAN_FILE)
    engine = _engine(plan, of_model, slots)
    store = EpisodeStore.load(folder, engine)
    answers = store.ask_all(questions, max_new_tokens=max_new_tokens or _MAX_NEW_TOKENS)
    if json:
        print_json(
            [
                {
                    "question": one.question,
                    "episode": one.episode,
                    "text": one.text,
                    "error": one.result.error,
                }
                for one in answers
            ],
            indent=2,
        )
    else:
        for one in answers:
            head = f"[episode {one.episode}] {visible(one.question.strip())}"
            print_text(f"{head}\n{one.result.error or one.text}\n\n")
    if any(one.result.error for one in answers):
        raise typer.Exit(1)


@app.command(
    short_help="Measure accuracy and bytes beside one cache and the full cache.",
    epilog=examples(
        "kvpolicy epicache evaluate conversation --n 12 --budget 80 --window 2",
        "kvpolicy epicache evaluate talks.jsonl --budget 2048 --json",
    ),
)
@with_groups
def evaluate(
    task: TaskName = "conversation",
    n: Annotated[int, typer.Option("--n", min=1, help="Number of conversations.")] = 12,
    raw: Raw = False,
    *,
    episodes: EpisodeOptions,
    plan: PlanFile = None,
    policies: PolicyOptions,
    max_new_tokens: MaxNewTokens = None,
    of_model: ModelOptions,
    slots: Slots = 8,
    json: Json = False,
) -> None:
    """Ask all questions of conversations in three ways, and compare them.

    One cache for each topic; one cache with the same budget and one patched
    prompt; and the full cache. A pair is a conversation: intervals are of
    differences between the shares of its questions that were answered.
    """
    settings, chosen = episodes.settings(), _plan_of(plan, policies)
    _check_conversations(task, raw=raw)
    from kvpolicy import Engine, Plan
    from kvpolicy.lab.tasks.task import grader_of

    engine = _engine(chosen, of_model, slots)
    full = Engine(engine.adapter, engine.tokenizer, Plan.full_cache(), slots=slots)
    conversations = _conversations(task, engine.tokenizer, raw=raw)
    frame = conversations.frame(engine.tokenizer)
    options = {"max_new_tokens": max_new_tokens or _MAX_NEW_TOKENS}
    ways: dict[str, Callable[[Conversation], _Measured]] = {
        f"{episodes.episodes} episodes": lambda one: _by_store(
            engine, one, frame, settings, options
        ),
        "one cache": lambda one: _by_store(
            engine, one, frame, attrs.evolve(settings, num_episodes=1), options
        ),
        "full cache": lambda one: _by_full(full, one, frame, options),
    }
    grade = grader_of(conversations)
    drawn = conversations.conversations(n, seed=episodes.seed)
    found: dict[str, list[_Graded]] = {name: [] for name in ways}
    with _progress("conversations") as report:
        for done, conversation in enumerate(drawn):
            report(done, len(drawn))
            for name, measure in ways.items():
                measured = measure(conversation)
                found[name].append(_graded(measured, conversation, grade))
    _show_evaluation(conversations.name, engine, found, json=json)


@attrs.frozen(eq=False)
class _Measured:
    """One conversation's answers in one way, and what they took."""

    results: "Sequence[Result]"
    prefill_bytes: int
    host_bytes: int


@attrs.frozen
class _Graded:
    """What is kept of it."""

    correct: list[bool]
    prefill_bytes: int
    decode_bytes: int
    host_bytes: int
    num_errors: int

    @property
    def share(self) -> float:
        return fmean(map(float, self.correct))


def _by_store(
    engine: "Engine",
    conversation: "Conversation",
    frame: "Frame",
    settings: "Settings",
    options: dict[str, Any],
) -> _Measured:
    from kvpolicy_plugins.epicache.store import EpisodeStore

    store = EpisodeStore.build(engine, conversation, frame=frame, settings=settings)
    answers = store.ask_all([one.text for one in conversation.questions], **options)
    return _Measured([one.result for one in answers], store.peak_bytes, store.host_bytes)


def _by_full(
    engine: "Engine", conversation: "Conversation", frame: "Frame", options: dict[str, Any]
) -> _Measured:
    from kvpolicy_plugins.epicache.embeddings import encoded
    from kvpolicy_plugins.epicache.store import asked, prefilled

    history = frame.history(conversation)
    ids = encoded(engine, history, begins=not frame.has_special_tokens)
    snapshot, _, peak_bytes, _ = prefilled(engine, ids)
    prompts = [encoded(engine, frame.question(one)) for one in conversation.questions]
    return _Measured(asked(engine, snapshot, prompts, **options), peak_bytes, snapshot.num_bytes)


def _graded(measured: _Measured, conversation: "Conversation", grade: Any) -> _Graded:
    from kvpolicy.lab.tasks.task import Example

    correct = [
        result.error is None
        and bool(grade(result.text or "", Example(index, question.text, question.answer)))
        for index, (result, question) in enumerate(
            zip(measured.results, conversation.questions, strict=True)
        )
    ]
    return _Graded(
        correct,
        measured.prefill_bytes,
        max(result.peak_bytes for result in measured.results),
        measured.host_bytes,
        sum(result.error is not None for result in measured.results),
    )


@attrs.frozen
class _Row:
    """One way, over all conversations; bytes are the most of one sequence."""

    name: str
    accuracy: "Interval"
    prefill_bytes: int
    decode_bytes: int
    host_bytes: int
    errors: int

    @classmethod
    def of(cls, name: str, graded: Sequence[_Graded]) -> "_Row":
        from kvpolicy.lab.statistics import bootstrap_mean

        return cls(
            name,
            bootstrap_mean([one.share for one in graded]),
            max(one.prefill_bytes for one in graded),
            max(one.decode_bytes for one in graded),
            max(one.host_bytes for one in graded),
            sum(one.num_errors for one in graded),
        )


def _show_evaluation(
    task: str, engine: "Engine", found: dict[str, list[_Graded]], *, json: bool
) -> None:
    from kvpolicy.lab.statistics import bootstrap_mean

    rows = [_Row.of(name, graded) for name, graded in found.items()]
    first, *others = rows
    differences = {
        other.name: bootstrap_mean(
            [a.share - b.share for a, b in zip(found[first.name], found[other.name], strict=True)]
        )
        for other in others
    }
    num, num_questions = len(found[first.name]), sum(len(one.correct) for one in found[first.name])
    if json:
        figures = {
            "task": task,
            "plan_digest": engine.plan.digest(),
            "conversations": num,
            "questions": num_questions,
            "caches": [attrs.asdict(row) for row in rows],
            "differences": [
                {"of": first.name, "from": other, "difference": attrs.asdict(difference)}
                for other, difference in differences.items()
            ],
            "answers": {name: [one.correct for one in graded] for name, graded in found.items()},
        }
        print_json(figures, indent=2)
        return
    table = [
        [
            row.name,
            _percent(row.accuracy, num),
            *map(format_bytes, (row.prefill_bytes, row.decode_bytes, row.host_bytes)),
        ]
        for row in rows
    ]
    header = ["caches", "accuracy", "in prefill", "in decode", "on the host"]
    print_text(format_table(header, table, right=(1, 2, 3, 4)) + "\n\n")
    print_lines(
        f"{first.name} minus {other}: {_percent(difference, num)}"
        for other, difference in differences.items()
    )
    info(
        f"{num_questions} questions about {num} conversations of {task}; bytes are the most of "
        "one sequence: keys and values on the device, snapshots on the host."
    )
    if num == 1:
        info("one conversation gives no intervals; give --n 2 or more.")
    if failed := sum(row.errors for row in rows):
        info(f"{failed} answers failed and count as wrong.")


def _percent(interval: "Interval", num: int) -> str:
    """A share of ``num`` conversations; one of them says nothing of others, so has no interval."""
    if num == 1:
        return f"{interval.value:.1%}"
    return f"{interval.value:.1%} [{interval.low:.1%}, {interval.high:.1%}]"


def _show_store(store: "EpisodeStore", folder: Path, *, json: bool) -> None:
    from kvpolicy_plugins.epicache.embeddings import encoded

    snapshots = [one.snapshot for one in store.episodes]
    full_bytes = max(one.full_bytes for one in store.episodes)
    prompts = [len(encoded(store.engine, one.prompt)) for one in store.episodes]
    rows = [max(layer.rows for layer in one.contents.layers) for one in snapshots]
    if json:
        episodes = [
            {
                "windows": list(one.episode.windows),
                "medoids": list(one.episode.medoids),
                "prompt_tokens": prompt_tokens,
                "rows": num_rows,
                "bytes": one.snapshot.num_bytes,
            }
            for one, prompt_tokens, num_rows in zip(store.episodes, prompts, rows, strict=True)
        ]
        figures = {
            "folder": str(folder),
            "tokens": snapshots[0].seq_len,
            "episodes": episodes,
            "host_bytes": store.host_bytes,
            "peak_bytes": store.peak_bytes,
            "full_bytes": full_bytes,
        }
        print_json(figures, indent=2)
        return
    table = [
        [
            str(number),
            " ".join(map(str, one.episode.windows)),
            f"{prompts[number]:,}",
            f"{rows[number]:,}",
            format_bytes(one.snapshot.num_bytes),
        ]
        for number, one in enumerate(store.episodes)
    ]
    header = ["episode", "windows", "patched prompt", "rows", "bytes"]
    print_text(format_table(header, table, right=(0, 2, 3, 4)) + "\n")
    info(
        f"{snapshots[0].seq_len:,} tokens in '{folder}': {format_bytes(store.host_bytes)} in all; "
        f"at most {format_bytes(store.peak_bytes)} of keys and values on the device at a time, "
        f"where a full cache has {format_bytes(full_bytes)}."
    )


def _plan_of(file: Path | None, options: PolicyOptions) -> "Plan":
    register_plugins(options.plugin)
    if file is None:
        if options.budget is None and not any("budget" in one for one in options.overrides or ()):
            msg = "no budget was given: the rows that stay of a conversation; give --budget N"
            raise KVPolicyError(msg)
        options = attrs.evolve(options, policy=options.policy or ["epicache"])
    return choose_plan(file, options)


def _check_conversations(name: str, *, raw: bool) -> None:
    """Refuse what has no conversations, before a model is loaded."""
    from kvpolicy.lab.tasks.conversation import conversations_of

    if raw and not _is_file(name):
        msg = "--raw is for files of conversations; a task has its own prompts"
        raise KVPolicyError(msg)
    conversations_of(_task(name, chat=False), 1, seed=0)


def _conversations(name: str, tokenizer: Any, *, raw: bool) -> "ConversationTask":
    """The task; conversations of a file are put into the model's chat template if it has one."""
    from kvpolicy.model.chat import has_chat_template

    chat = _is_file(name) and not raw and has_chat_template(tokenizer)
    if chat:
        info("conversations are put into the chat template of this model; --raw leaves it out.")
    return _task(name, chat=chat)


def _task(name: str, *, chat: bool) -> "ConversationTask":
    from kvpolicy.lab.tasks.task import load_task

    if _is_file(name):
        name = f"conversations:source={name},chat={str(chat).lower()}"
    task: ConversationTask = load_task(name)
    return task


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".jsonl", ".json")


def _engine(plan: "Plan", of_model: ModelOptions, slots: int) -> "Engine":
    from kvpolicy import Engine

    return Engine(*of_model.load(), plan, slots=slots)


@contextmanager
def _progress(noun: str = "episodes") -> Iterator[Callable[[int, int], None]]:
    """Show the progress of something that reports how many of how many are done."""
    from kvpolicy.cli.output import Progress

    with ExitStack() as stack:
        bars: list[Progress] = []

        def report(num_done: int, num: int) -> None:
            if not bars:
                bars.append(stack.enter_context(Progress(num)))
            bars[0].update(noun, num_done)

        try:
            yield report
        except KeyboardInterrupt:
            msg = f"interrupted; nothing was written, and the {noun} so far are lost."
            raise Interrupted(msg) from None
