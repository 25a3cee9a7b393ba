"""``kvpolicy guard``: record requests for blocks, and replay them with evictions that predict.

With ``--json``, ``replay`` prints ``{"trace", "num_requests", "num_blocks", "header", "seeds",
"rows": [{"algorithm", "predictor", "capacity", "misses", "guards", "hit_rate", "mean_misses",
"mean_misses_low", "mean_misses_high", "ratio_to_opt", "ratio_low", "ratio_high", "bound"}]}``;
``misses`` and ``guards`` have one number for each seed, ``predictor`` is null where none is read,
and ``bound`` is ``2 H(capacity - 1) + 2`` for Guard, else null. ``record`` prints ``{"file",
"num_prompts", "num_requests", "num_blocks", "hit_rate"}``, the share of requests for a block that
was asked for before; ``blow-up`` prints a list of ``{"capacity", "num_requests", "unguarded",
"guard", "opt", "lru"}``.
"""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.options import (
    DEFAULT_MODEL,
    Json,
    Model,
    check_new_file,
    examples,
    parse_ints,
    parse_names,
)
from kvpolicy.cli.output import Progress, info, print_json, print_text, terminal_width
from kvpolicy.cli.text_table import format_table
from kvpolicy.entry_points import nearest
from kvpolicy.errors import KVPolicyError
from kvpolicy.files import atomic_write, read_bytes
from kvpolicy.lab.cli.options import SplitName
from kvpolicy.lab.statistics import Interval, mean
from kvpolicy.quantities import format_count
from kvpolicy.validators import MAX_COUNT
from kvpolicy_plugins.guard.traces import Trace, parse, to_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvpolicy.lab.figure import LegendContent
    from kvpolicy_plugins.guard.simulation import Prediction, Simulation

app = typer.Typer(
    help="Compare evictions of a prefix cache on recorded requests.",
    rich_help_panel="Experiments",
    no_args_is_help=True,
    add_completion=False,
)

_DEFAULT_ALGORITHMS = "opt,lru,marker,unguarded,guard"
_DEFAULT_SHARES = (0.05, 0.1, 0.2, 0.4)  # of the different blocks of a trace
_PROMPTS = 400

# Colours of figures; names of kvpolicy.lab.looks.COLOURS.
_COLOURS = {
    "opt": "ink",
    "lru": "amber",
    "marker": "sky",
    "unguarded": "vermilion",
    "guard": "blue",
    "guard_follow": "indigo",
    "guard_unprotected": "teal",
    "lmarker": "green",
    "predictive_marker": "olive",
}

_Capacity = Annotated[
    str | None,
    typer.Option(
        metavar="N,...",
        help="Blocks that the store holds. [default: 5, 10, 20 and 40 % of the trace's blocks]",
    ),
]


@attrs.frozen
class _Row:
    """One algorithm at one capacity, over all seeds."""

    algorithm: str
    predictor: str | None
    capacity: int
    num_requests: int
    misses: Sequence[int]
    guards: Sequence[int]
    optimum: int

    @property
    def mean_misses(self) -> Interval:
        return mean(self.misses)

    @property
    def ratio(self) -> Interval:
        return mean([misses / self.optimum for misses in self.misses])

    @property
    def miss_rate(self) -> Interval:
        return mean([misses / self.num_requests for misses in self.misses])

    @property
    def series(self) -> str:
        return f"{self.algorithm} {self.predictor}" if self.predictor else self.algorithm

    def to_dict(self) -> dict[str, Any]:
        misses, ratio = self.mean_misses, self.ratio
        return {
            "algorithm": self.algorithm,
            "predictor": self.predictor,
            "capacity": self.capacity,
            "misses": list(self.misses),
            "guards": list(self.guards),
            "hit_rate": 1 - misses.value / self.num_requests,
            "mean_misses": misses.value,
            "mean_misses_low": misses.low,
            "mean_misses_high": misses.high,
            "ratio_to_opt": ratio.value,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "bound": _bound(self.capacity) if self.algorithm == "guard" else None,
        }

    def cells(self) -> list[str]:
        misses, ratio = self.mean_misses, self.ratio
        return [
            self.algorithm,
            self.predictor or "",
            f"{self.capacity}",
            f"{misses.value:,.1f}".removesuffix(".0"),
            f"{misses.low:,.1f}-{misses.high:,.1f}" if misses.high > misses.low else "",
            f"{1 - misses.value / self.num_requests:.1%}",
            f"{ratio.value:.3f}",
            f"{mean(self.guards).value:,.1f}".removesuffix(".0") if any(self.guards) else "",
        ]


_HEADERS = [
    "algorithm",
    "predictor",
    "capacity",
    "misses",
    "95 % CI",
    "hit rate",
    "to OPT",
    "guards",
]


@app.command(
    short_help="Misses of algorithms on a trace of requests.",
    epilog=examples(
        "kvpolicy guard replay trace.jsonl --predictor learned --seeds 0,1,2",
        "kvpolicy guard replay trace.jsonl --capacity 64,256 --plot misses.png",
        "kvpolicy guard replay ids.txt --predictor normal --sigma 50 --json",
    ),
)
def replay(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Requests: .jsonl, .txt, .csv, .json or .npz.")
    ],
    capacity: _Capacity = None,
    algorithm: Annotated[
        str, typer.Option(metavar="A,B", help="What evicts; `all` for all.")
    ] = _DEFAULT_ALGORITHMS,
    predictor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="perfect, normal, lognormal, labels, given, popu, pleco, recency or learned; "
            "may be repeated. [default: popu]",
        ),
    ] = None,
    sigma: Annotated[
        list[float] | None,
        typer.Option(help="Noise of normal, in requests, or of lognormal; may be repeated."),
    ] = None,
    flip: Annotated[
        float, typer.Option(min=0, max=1, help="Probability that one of `labels` is wrong.")
    ] = 0.0,
    relax_times: Annotated[
        int, typer.Option(min=0, help="Guard from this error of a phase on; 0: from the first.")
    ] = 0,
    relax_prob: Annotated[
        float, typer.Option(min=0, max=1, help="Probability that an error is let pass.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed. [default: 0]")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,...", help="Several of them; also FIRST-LAST.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw misses against the capacity: .png, .svg or .pdf."),
    ] = None,
    json: Json = False,
) -> None:
    """Serve the requests of a trace from a store of blocks, and count the misses.

    A block that is not stored is a miss, and another one leaves for it. `opt` is the optimum.
    `unguarded` evicts what the predictions say; `guard` is Guard around it.
    """
    from kvpolicy_plugins.guard.simulation import ALGORITHMS, Simulation

    names = list(ALGORITHMS) if algorithm == "all" else parse_names("--algorithm", algorithm)
    _check_names("--algorithm", names, ALGORITHMS)
    if relax_times and relax_prob:
        msg = "--relax-times and --relax-prob were given; give one of them."
        raise KVPolicyError(msg)
    if plot is not None:
        _check_picture(plot)
    found = _read(trace)
    predictions = _predictions(predictor or [], sigma or [], flip, found)
    all_seeds = _seeds(seed, seeds)
    simulation = Simulation(trace=found.blocks, relax_times=relax_times, relax_prob=relax_prob)
    num_blocks = len(set(found.blocks))
    capacities = _capacities(capacity, num_blocks)
    rows = list(_rows(simulation, names, predictions, capacities, all_seeds))
    if plot is not None:
        _draw(rows, plot, f"{trace.name}: {num_blocks:,} blocks, {len(found.blocks):,} requests")
    if json:
        record = {
            "trace": str(trace),
            "num_requests": len(found.blocks),
            "num_blocks": num_blocks,
            "header": found.header,
            "seeds": all_seeds,
            "rows": [row.to_dict() for row in rows],
        }
        print_json(record, indent=2)
        return
    requests = format_count(len(found.blocks), "request")
    print_text(f"{requests} for {format_count(num_blocks, 'block')}, {_spell_seeds(all_seeds)}\n\n")
    table = format_table(
        _HEADERS,
        [row.cells() for row in rows],
        right=range(2, len(_HEADERS)),
        width=terminal_width(),
    )
    print_text(table + "\n")


@app.command(
    short_help="Record the blocks that prompts of a task ask for.",
    epilog=examples(
        "kvpolicy guard record --task multikey --output trace.jsonl",
        "kvpolicy guard record --task reasoner-needle --n 100 --output trace.jsonl",
    ),
)
def record(
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where the trace goes: .jsonl.")],
    task: Annotated[
        str, typer.Option(metavar="NAME", help="Where prompts come from.")
    ] = "multikey",
    model: Model = DEFAULT_MODEL,
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts.")] = _PROMPTS,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    shared: Annotated[
        int,
        typer.Option(min=1, help="Beginnings that prompts share, for tasks with single questions."),
    ] = 32,
    exponent: Annotated[
        float, typer.Option(min=0, help="How unequally popular these are; 0: equally.")
    ] = 1.0,
    open_conversations: Annotated[
        int,
        typer.Option("--open", min=1, help="Conversations at the same time, for tasks with those."),
    ] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    split: Annotated[SplitName, typer.Option(help="Split of the task.")] = SplitName.test,
    json: Json = False,
) -> None:
    """Record which blocks of tokens the prompts of a task ask a prefix cache for.

    Prompts of tasks with single questions begin with one of some solved problems, as prompts with
    an example do. Those of conversations repeat what was said, and the conversations take turns.
    """
    from kvpolicy.lab.tasks.task import fitted, load_task
    from kvpolicy.model.loading import load_model
    from kvpolicy_plugins.guard.requests import BlockIds

    check_new_file(output, ".jsonl")
    loaded = load_task(task)
    tokenizer = load_model(model)[1]
    loaded = fitted(loaded, tokenizer)
    rng = Random(seed)
    draw: dict[str, Any] = {"seed": seed, "split": split.value}
    options: dict[str, object] = {"task": loaded.name, "model": model, "n": n}
    if hasattr(loaded, "conversations"):
        texts = _turns(loaded, tokenizer, n, open_conversations, rng, draw)
        options |= {"open": open_conversations}
    else:
        texts = _with_beginnings(loaded, n, shared, exponent, rng, draw)
        options |= {"shared": shared, "exponent": exponent}
    options |= {"block-size": block_size, "seed": seed, "split": split.value}
    ids = BlockIds(block_size)
    prompts = [ids.of_prompt(tokenizer(text)["input_ids"]) for text in texts]
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = shlex.join(["kvpolicy", "guard", "record", *words])
    trace = Trace(prompts, header={"command": command})
    if not trace.blocks:
        msg = f"no prompt of task '{task}' fills a block of {block_size} tokens; use smaller ones."
        raise KVPolicyError(msg)
    atomic_write(output, to_text(trace))
    num_requests, num_blocks = len(trace.blocks), len(set(trace.blocks))
    summary = {
        "file": str(output),
        "num_prompts": len(prompts),
        "num_requests": num_requests,
        "num_blocks": num_blocks,
        "hit_rate": 1 - num_blocks / num_requests,
    }
    if json:
        print_json(summary, indent=2)
        return
    print_text(
        f"{output} holds {format_count(len(prompts), 'prompt')}: "
        f"{format_count(num_requests, 'request')} for {format_count(num_blocks, 'block')}; "
        f"{summary['hit_rate']:.1%} ask for a block that was there before.\n"
    )


@app.command(
    "blow-up",
    short_help="The trace that wrong predictions ruin without Guard.",
    epilog=examples("kvpolicy guard blow-up", "kvpolicy guard blow-up --capacity 8 --json"),
)
def blow_up(
    capacity: Annotated[
        str, typer.Option(metavar="N,...", help="Blocks of the store.")
    ] = "4,16,64",
    requests: Annotated[int, typer.Option(min=1, help="Requests after the store is full.")] = 3999,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    json: Json = False,
) -> None:
    """Two blocks in turn, and the worst predictions: what comes next looks as if it came last."""
    from kvpolicy_plugins.guard import instances
    from kvpolicy_plugins.guard.bases import LRU, BlindOracle
    from kvpolicy_plugins.guard.eviction import Guard
    from kvpolicy_plugins.guard.simulation import optimal_misses, simulate

    records = []
    for k in parse_ints("--capacity", capacity):
        _check_capacity(k)
        trace = instances.blow_up(k, requests)
        built: dict[str, Any] = {}
        for name, eviction in {"unguarded": BlindOracle, "guard": Guard}.items():
            worst = instances.reversed_predictor(trace)
            built[name] = eviction(predictor=worst, capacity=k, rng=Random(seed))
        built["lru"] = LRU(capacity=k, rng=Random(seed))
        misses = {name: simulate(trace, k, eviction).misses for name, eviction in built.items()}
        misses["opt"] = optimal_misses(trace, k)
        records.append({"capacity": k, "num_requests": len(trace), **misses})
    if json:
        print_json(records, indent=2)
        return
    headers = ["capacity", "num_requests", "unguarded", "guard", "opt", "lru"]
    cells = [[f"{one[key]:,}" for key in headers] for one in records]
    headers[1] = "requests"
    print_text(format_table(headers, cells, right=range(len(headers))) + "\n")


def _bound(capacity: int) -> float:
    """The most that Guard's expected misses are, as a multiple of the optimum's."""
    return 2 * sum(1 / i for i in range(1, capacity)) + 2


def _check_capacity(k: int) -> None:
    if k > MAX_COUNT:
        msg = f"--capacity was given {k}; expected at most {MAX_COUNT:,} blocks."
        raise KVPolicyError(msg)


def _read(path: Path) -> Trace:
    name = f"trace '{path}'"
    return parse(read_bytes(path, name), path.suffix.lower(), name)


def _capacities(text: str | None, num_blocks: int) -> list[int]:
    if text is None:
        return sorted({max(1, round(share * num_blocks)) for share in _DEFAULT_SHARES})
    found = list(dict.fromkeys(parse_ints("--capacity", text)))
    for k in found:
        _check_capacity(k)
    return found


def _seeds(seed: int | None, seeds: str | None) -> list[int]:
    if seeds is None:
        return [seed or 0]
    if seed is not None:
        msg = "--seed and --seeds were given; give one of them."
        raise KVPolicyError(msg)
    first, dash, last = seeds.partition("-")
    if not dash:
        found = parse_ints("--seeds", seeds, minimum=0)
    else:
        [low], [high] = (parse_ints("--seeds", end, minimum=0)[:1] for end in (first, last))
        if not low <= high < low + 10_000:
            msg = f"--seeds was given {seeds!r:.60}; give FIRST-LAST with at most 10,000 seeds."
            raise KVPolicyError(msg)
        found = list(range(low, high + 1))
    for one in found:
        if one >= 2**32:
            msg = f"--seeds was given {one}; seeds of noise are below 2^32."
            raise KVPolicyError(msg)
    return list(dict.fromkeys(found))


def _spell_seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            msg = f"{option} was given {name!r:.60}{nearest(name, known)}."
            raise KVPolicyError(msg)


def _predictions(
    names: Sequence[str], sigmas: Sequence[float], flip: float, trace: Trace
) -> "list[Prediction]":
    from kvpolicy_plugins.guard.simulation import NOISY, PREDICTORS, Prediction

    split = [part for name in names for part in parse_names("--predictor", name)] or ["popu"]
    _check_names("--predictor", split, PREDICTORS)
    if sigmas and not set(split) & set(NOISY):
        msg = "--sigma needs --predictor normal or lognormal."
        raise KVPolicyError(msg)
    if flip and "labels" not in split:
        msg = "--flip needs --predictor labels."
        raise KVPolicyError(msg)
    found = []
    for name in dict.fromkeys(split):
        if name in NOISY:
            if not sigmas:
                msg = f"--predictor {name} needs its noise: --sigma 50, for example."
                raise KVPolicyError(msg)
            for sigma in sigmas:
                if not 0 <= sigma <= 1e9:
                    msg = f"--sigma was given {sigma}; expected a number from 0 to 1e9."
                    raise KVPolicyError(msg)
                found.append(Prediction(name=name, sigma=sigma))
        elif name == "given" and trace.predictions is None:
            msg = "--predictor given needs a trace with predictions; this one has none."
            raise KVPolicyError(msg)
        else:
            found.append(Prediction(name=name, flip=flip, given=trace.predictions))
    return found


def _rows(
    simulation: "Simulation",
    algorithms: Sequence[str],
    predictions: "Sequence[Prediction]",
    capacities: Sequence[int],
    seeds: Sequence[int],
) -> Iterator[_Row]:
    from kvpolicy_plugins.guard.simulation import PLAIN

    todo = [
        (k, algorithm, prediction)
        for k in capacities
        for algorithm in dict.fromkeys(algorithms)
        for prediction in (predictions[:1] if algorithm in PLAIN else predictions)
    ]
    optima: dict[int, int] = {}
    with Progress(len(todo)) as progress:
        for number, (k, algorithm, prediction) in enumerate(todo):
            progress.update(f"{algorithm}, capacity {k}", number)
            if k not in optima:
                optima[k] = simulation.run("opt", prediction, k, seeds[0]).misses
            random = simulation.is_random(algorithm, prediction)
            outcomes = [
                simulation.run(algorithm, prediction, k, s) for s in seeds[: None if random else 1]
            ]
            outcomes *= 1 if random else len(seeds)
            yield _Row(
                algorithm,
                None if algorithm in PLAIN else str(prediction),
                k,
                len(simulation.trace),
                [one.misses for one in outcomes],
                [one.num_guards for one in outcomes],
                optima[k],
            )


def _turns(
    task: Any, tokenizer: Any, n: int, num_open: int, rng: Random, draw: dict[str, Any]
) -> list[str]:
    """Prompts of conversations: before each question, as much has been said as questions before.

    So a conversation grows from question to question, and the last prompt holds all of it.
    """
    from kvpolicy_plugins.guard.requests import interleaved

    frame = task.frame(tokenizer)
    conversations = task.conversations(n, **draw)
    lengths = [len(one.questions) for one in conversations]
    texts = []
    for number, turn in interleaved(lengths, num_open, rng):
        one = conversations[number]
        num_said = -(-len(one.utterances) * (turn + 1) // lengths[number])
        so_far = attrs.evolve(one, utterances=one.utterances[:num_said])
        texts.append(frame.history(so_far) + frame.question(one.questions[turn]))
        if len(texts) == n:
            break
    return texts


def _with_beginnings(
    task: Any, n: int, num_shared: int, exponent: float, rng: Random, draw: dict[str, Any]
) -> list[str]:
    """Prompts that begin with one of some solved problems, and end with a problem of their own."""
    from kvpolicy_plugins.guard.requests import shared_parts

    items = task.examples(num_shared + n, **draw)
    if len(items) <= num_shared:
        msg = (
            f"task '{task.name}' has {format_count(len(items), 'problem')}; give --shared a "
            "smaller number."
        )
        raise KVPolicyError(msg)
    asked = items[num_shared:]
    parts = shared_parts(len(asked), num_shared, exponent, rng)
    return [
        f"{items[part].prompt}{items[part].answer}\n{item.prompt}"
        for part, item in zip(parts, asked, strict=True)
    ]


def _check_picture(path: Path) -> None:
    from kvpolicy.lab.figure import FORMATS

    if path.suffix.lower() not in FORMATS:
        msg = f"--plot was given {str(path)!r:.200}; end it in {', '.join(FORMATS)}."
        raise KVPolicyError(msg)
    check_new_file(path, option="--plot")


def _draw(rows: Sequence[_Row], path: Path, title: str) -> None:
    """Draw the share of misses against the capacity, a line for each algorithm and predictor."""
    from kvpolicy.lab.figure import FAINT, LegendContent, Size, legend_entry, line_look, save_figure
    from kvpolicy.lab.looks import DASHES, MARKERS, Look

    lines: dict[str, list[_Row]] = {}
    for row in rows:
        lines.setdefault(row.series, []).append(row)
    looks = {}
    predictors = list(dict.fromkeys(row.predictor for row in rows if row.predictor))
    for series, line in lines.items():
        algorithm, predictor = line[0].algorithm, line[0].predictor
        nth = predictors.index(predictor) if predictor else 0
        marker = MARKERS[list(_COLOURS).index(algorithm) % len(MARKERS)]
        dashes = DASHES[1 if algorithm == "opt" else nth % len(DASHES)]
        looks[series] = Look(_COLOURS[algorithm], marker, dashes)

    def draw(figure: "Figure") -> "LegendContent":
        axes = figure.subplots()
        figure.suptitle(title, x=0.012, ha="left", fontsize="medium", color=FAINT)
        for series, line in lines.items():
            points = sorted((row.capacity, row.miss_rate) for row in line)
            axes.errorbar(
                [k for k, _ in points],
                [100 * rate.value for _, rate in points],
                yerr=[
                    [100 * (rate.value - rate.low) for _, rate in points],
                    [100 * (rate.high - rate.value) for _, rate in points],
                ],
                elinewidth=1.0,
                **(line_look(looks[series]) | {"linewidth": 1.6}),
            )
        capacities = sorted({row.capacity for row in rows})
        if capacities[-1] > 6 * capacities[0]:
            axes.set_xscale("log", base=2)
        axes.set_xticks(capacities, [f"{k:,}" for k in capacities])
        axes.minorticks_off()
        axes.set_xlabel("capacity, blocks")
        axes.set_ylabel("misses, % of requests")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        return LegendContent([(series, legend_entry(look)) for series, look in looks.items()])

    save_figure([path], Size(6.9, 4.2, 9.0, dpi=160), draw)
    info(f"{path} shows misses against the capacity.")
