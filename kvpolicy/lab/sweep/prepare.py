"""From command-line options to a sweep that is ready to run: `load_sweep`, then `build_sweep`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.engine.requests.encoding import encode as encode_prompt
from kvpolicy.engine.requests.request import Sampling
from kvpolicy.entry_points import default_name, nearest
from kvpolicy.errors import KVPolicyError, RequestError, TaskError
from kvpolicy.lab.models import Lengths, ModelProvider
from kvpolicy.lab.sweep.grid import Cell, EvalSetting, Sweep, build_cells, digest, sized
from kvpolicy.lab.sweep.sizes import Sizes
from kvpolicy.lab.sweep.sweep_file import Series, SweepConfig, Variant, load_preset
from kvpolicy.lab.tasks.chat_template import encode, wrap
from kvpolicy.lab.tasks.task import Example, Task, fitted, load_task, needs_tokenizer

_NO_SWEEP = (
    "no sweep was named, and no installed package sets a default: give --preset FILE, or {}."
)

# A model, a task and a seed, as typed.
_Names = tuple[str, str, int]


def load_sweep(
    preset: str | None,
    *,
    policies: Sequence[str] = (),
    plans: Sequence[Path] = (),
    knobs: Mapping[str, tuple[Any, ...]] | None = None,
    **changes: Any,
) -> SweepConfig:
    """Read a sweep file and change it. Without a file, the changes have all that is required.

    Args:
        preset: Name or file of the sweep; if not given, the default one, if there is any.
        policies: See `load_series`.
        plans: See `load_series`.
        knobs: Values of knobs, added to those of the file.
        changes: Other values of `SweepConfig` by name; ``None`` is no change.

    Raises:
        KVPolicyError: The sweep or a plan cannot be read, or a required value is missing.
    """
    given = {key: value for key, value in changes.items() if value is not None}
    if "budgets" in given and "bytes" in given:
        msg = "--budgets and --bytes were given; bytes choose the budgets: leave one of them out."
        raise KVPolicyError(msg)
    if "budgets" in given:
        given["bytes"] = ()
    elif "bytes" in given:
        given["budgets"] = ()
    series = load_series(
        preset,
        policies=policies,
        plans=plans,
        budgets=given.get("budgets") or given.get("bytes", ()),
        buffer=given.get("buffer"),
        prefill_buffer=given.get("prefill_buffer"),
    )
    given["series"] = tuple(series)
    if policies or plans:
        given["name"] = "-".join(one.label for one in series)
    file = preset or default_name("sweep")
    if file is not None:
        base = load_preset(file)
        return attrs.evolve(base, **given, knobs={**base.knobs, **(knobs or {})})
    if "models" not in given or "tasks" not in given:
        msg = _NO_SWEEP.format("--model and --task")
        raise KVPolicyError(msg)
    return SweepConfig(**given, knobs=dict(knobs or {}))


def load_series(
    preset: str | None,
    *,
    policies: Sequence[str] = (),
    plans: Sequence[Path] = (),
    budgets: Sequence[int] = (),
    buffer: int | None = None,
    prefill_buffer: int | None = None,
) -> list[Series]:
    """Read what a sweep compares; policies and plans need no sweep file.

    Args:
        preset: Name or file of the sweep; if not given, the default one, if there is any.
        policies: Stacks to compare instead of the file's series, labelled as they are written
            here. If a file is named, a stack that series of it consist of stands for all of them,
            with their labels and knobs.
        plans: Plan files to compare too; instead of the file's series if no preset is named.
        budgets: If given, plans lose the budget of their own.
        buffer: Likewise.
        prefill_buffer: Likewise.

    Raises:
        KVPolicyError: The sweep or a plan cannot be read.
    """
    file = preset or default_name("sweep")
    base = load_preset(file).series if file is not None else ()
    if policies:
        known = base if preset is not None else ()
        series = []
        for stack in policies:
            series += [one for one in known if _stack(one) == stack] or [Series.from_stack(stack)]
    elif preset is None and plans:
        series = []
    elif file is None:
        msg = _NO_SWEEP.format("--policies or --plan")
        raise KVPolicyError(msg)
    else:
        series = list(base)
    series += [Series.from_file(path) for path in plans]
    given = {
        "budget": bool(budgets),
        "buffer": buffer is not None,
        "prefill_buffer": prefill_buffer is not None,
    }
    left_out = [key for key, is_given in given.items() if is_given]
    return _told_apart([_without(one, left_out) for one in series])


def _told_apart(series: Sequence[Series]) -> list[Series]:
    """Series with a number behind each label that another plan has before: "epicache (2)"."""
    found: dict[str, list[Series]] = {}
    for one in series:
        alike = found.setdefault(one.label, [])
        if one not in alike:
            alike.append(one)
    numbers = [found[one.label].index(one) + 1 for one in series]
    return [
        one if number == 1 else attrs.evolve(one, label=f"{one.label} ({number})")
        for one, number in zip(series, numbers, strict=True)
    ]


def build_sweep(
    config: SweepConfig,
    models: ModelProvider,
    *,
    overrides: Sequence[str] = (),
    execute_code: bool = False,
) -> Sweep:
    """Select the examples, inspect every model and resolve the plans.

    Args:
        config: The sweep.
        models: Describes the models and provides their tokenizers.
        overrides: ``--set`` strings.
        execute_code: Whether metrics may run programs that a model writes.

    Returns:
        The sweep. A setting or cell that occurs under two names, such as a model by name and by
        folder, is in it once.

    Raises:
        KVPolicyError: A name is unknown, or a plan or option does not fit.
    """
    variants: dict[_Names, list[Variant]] = {}
    for point in config.points():
        names = (point.model, point.task, point.seed)
        variants.setdefault(names, []).append(point.variant)
    found: dict[_Names, tuple[EvalSetting, list[Cell]]] = {}
    # Settings that share the plans and the number of layers share the resolved plans.
    resolved: dict[str, list[Cell]] = {}
    for of_task, tokenizer in _settings(config, list(variants), models, execute_code):
        alike = list(of_task.values())
        sizes = Sizes(models, alike[0].model.name, _lengths(alike, tokenizer))
        for names, setting in of_task.items():
            # What fits into a number of bytes depends on the lengths of the task, too.
            shared = names[:2] if config.bytes else None
            model = setting.model
            key = repr((model.num_layers, model.attention, variants[names], shared))
            if key not in resolved:
                resolved[key] = build_cells(
                    config.series,
                    num_layers=model.num_layers,
                    attention=model.attention,
                    variants=variants[names],
                    buffer=config.buffer,
                    prefill_buffer=config.prefill_buffer,
                    overrides=overrides,
                    sizes=sizes,
                )
            found[names] = setting, [sized(cell, sizes) for cell in resolved[key]]
    settings: dict[str, EvalSetting] = {}
    cells: dict[str, Cell] = {}
    for names in variants:
        setting, plans = found[names]
        settings.setdefault(setting.id, setting)
        for cell in plans:
            cell = attrs.evolve(cell, setting=setting.id)
            cells.setdefault(cell.id, cell)
    return Sweep(config.name, list(settings.values()), list(cells.values()))


def not_sampled(config: SweepConfig) -> list[str]:
    """The tasks of a sweep that samples for which nothing is sampled, by their names as typed."""
    if config.temperature == 0 and config.attempts == 1:
        return []
    return [name for name in config.tasks if _is_greedy(load_task(name))]


def check_facet(sweep: Sweep, facet: str | None) -> None:
    """Refuse a facet that no example or metric has, before anything is computed.

    Args:
        sweep: The sweep.
        facet: The facet to break the table down by, if any.

    Raises:
        TaskError: Neither an example nor a metric has the facet.
    """
    known = {
        name
        for setting in sweep.settings
        for facets in (setting.task.metric.facets, *(one.facets for one in setting.examples))
        for name in facets
    }
    if facet is not None and facet not in known:
        msg = f"no example of this sweep has a facet '{facet}'"
        raise TaskError(msg + nearest(facet, sorted(known)))


def default_folder(sweep: Sweep) -> Path:
    """Return a results folder whose name is unique to this sweep."""
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in sweep.name)[:60]
    return Path("kvpolicy-ablate") / f"{name}-{digest(sweep.to_dict())[:8]}"


def _settings(
    config: SweepConfig, names: Sequence[_Names], models: ModelProvider, execute_code: bool
) -> Iterator[tuple[dict[_Names, EvalSetting], Any]]:
    """The settings of each model and task, with the model's tokenizer, while it is loaded."""
    tasks = {name: _task(name, execute_code) for name in config.tasks}
    # Examples that are the same for all models are drawn before a model is loaded.
    drawn = {
        (task, seed): _draw(config, tasks[task], task, seed)
        for task, seed in {one[1:] for one in names}
        if not needs_tokenizer(tasks[task])
    }
    # The first model is described last: it runs first, and is then still loaded.
    for model in reversed(dict.fromkeys(config.models)):
        info, tokenizer = models.describe(model)
        settings: dict[str, dict[_Names, EvalSetting]] = {}
        for task, seed in [one[1:] for one in names if one[0] == model]:
            examples = drawn.get((task, seed)) or _draw(
                config, fitted(tasks[task], tokenizer), task, seed
            )
            settings.setdefault(task, {})[model, task, seed] = EvalSetting(
                model=info,
                task=tasks[task],
                examples=wrap(examples, tokenizer),
                split=config.split,
                sampling=_sampling(config, tasks[task], seed),
                seed=seed,
                max_new_tokens=config.max_new_tokens,
                slots=config.slots,
            )
        yield from ((of_task, tokenizer) for of_task in settings.values())


def _lengths(settings: Sequence[EvalSetting], tokenizer: Any) -> Lengths:
    """Those of settings that differ in their seed only, so that all seeds run the same plans."""
    first = settings[0]
    prompts = {
        one if isinstance(one, str) else tuple(one)
        for setting in settings
        for one in encode(setting.examples, tokenizer)
    }
    longest_prompt = max(_num_tokens(one, tokenizer) for one in prompts)
    return Lengths(first.slots, longest_prompt + first.max_new_tokens, longest_prompt)


def _num_tokens(prompt: str | Sequence[int], tokenizer: Any) -> int:
    """Those of a prompt; of a text that has none, 0: its request will fail, and is counted then."""
    try:
        return len(encode_prompt(prompt, tokenizer, sys.maxsize))
    except RequestError:
        return 0


def _task(name: str, execute_code: bool) -> Task:
    task: Task = load_task(name)
    if task.metric.runs_code and not execute_code:
        msg = (
            f"task '{name}' is graded by running the programs that the model writes; "
            "give --execute-code to allow that (docs/how-to/run-a-benchmark.md says how far "
            "they are confined)"
        )
        raise TaskError(msg)
    return task


def _draw(config: SweepConfig, task: Task, name: str, seed: int) -> list[Example]:
    """Select the examples of a task and a seed, each once per attempt."""
    examples = task.examples(config.n, seed=seed, split=config.split)
    if not examples:
        msg = f"task '{name}' has no examples in its {config.split} split"
        raise TaskError(msg)
    attempts = 1 if _is_greedy(task) else config.attempts
    if attempts > 1 and config.temperature == 0:
        msg = (
            f"{attempts} attempts at each example would be identical at temperature 0; "
            "give for example --temperature 0.6 --top-p 0.95"
        )
        raise TaskError(msg)
    numbers = range(attempts)
    return [attrs.evolve(example, attempt=number) for example in examples for number in numbers]


def _sampling(config: SweepConfig, task: Task, seed: int) -> Sampling:
    if _is_greedy(task):
        return Sampling(seed=seed)
    return Sampling(config.temperature, top_p=config.top_p, seed=seed)


def _is_greedy(task: Task) -> bool:
    # A metric of another package may not say.
    return getattr(task.metric, "is_greedy", False)


def _stack(series: Series) -> str:
    entries = series.plan.get("stack", []) if "layers" not in series.plan else []
    return "+".join(e if isinstance(e, str) else str(e.get("policy")) for e in entries)


def _without(series: Series, keys: Sequence[str]) -> Series:
    return attrs.evolve(series, plan={k: v for k, v in series.plan.items() if k not in keys})
