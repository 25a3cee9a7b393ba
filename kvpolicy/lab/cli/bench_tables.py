"""Tables of ``kvpolicy bench``."""

from collections.abc import Callable, Mapping, Sequence
from math import floor, log10

from kvpolicy.cli.output import terminal_width
from kvpolicy.cli.text_table import format_table
from kvpolicy.lab.bench.contenders.contender import (
    FORWARD,
    FULL,
    GENERATE,
    KVPRESS,
    MODEL_ALONE,
    RIVALS,
)
from kvpolicy.lab.bench.diagnostics import kernels, prompt_kernels
from kvpolicy.lab.bench.diagnostics.launches import Launches
from kvpolicy.lab.bench.diagnostics.memory import Reading
from kvpolicy.lab.bench.operating_points.at_accuracy import Choice
from kvpolicy.lab.bench.operating_points.largest_batch import LARGEST
from kvpolicy.lab.bench.profile import KINDS, OTHERS
from kvpolicy.lab.bench.rounds.summary import BenchResult, PrefillResult, Spread
from kvpolicy.lab.statistics import Interval
from kvpolicy.quantities import format_bytes


def _share_of_alone(one: BenchResult) -> str:
    """Milliseconds of the model alone, as a share of this contender's."""
    return _share(one.ratios.get(MODEL_ALONE))


def _compiling(one: BenchResult) -> str:
    """How long torch compiled."""
    return f"{one.compile_s:.0f} s" if one.compile_s else ""


def _over(rival: str) -> Callable[[BenchResult], str]:
    """Speed relative to another engine."""
    return lambda one: _ratio_to(one, rival)


def _over_in_rounds(rival: str) -> Callable[[BenchResult], str]:
    """The same with the least and the most of the rounds."""
    return lambda one: _ratio(one.ratios.get(rival))


_RATIOS = {f"x {rival}": _over(rival) for rival in RIVALS}

# Columns of the table of one work; those without any value are left out.
_COLUMNS: Mapping[str, Callable[[BenchResult], str]] = {
    "": lambda one: one.name,
    "budget": lambda one: "all" if one.budget is None else f"{one.budget:g}",
    "batch": lambda one: f"{one.batch:,}",
    "tok/s": lambda one: f"{one.decode_tok_s:.0f}",
    f"x {GENERATE}": lambda one: _ratio_to(one, GENERATE),
    "range": lambda one: _span(one.ratios.get(GENERATE)),
    **_RATIOS,
    f"x {FULL}": lambda one: _ratio_to(one, FULL),
    "ms/step": lambda one: _ms(one.step_ms),
    "p95": lambda one: _ms(one.step_p95_ms),
    f"of {MODEL_ALONE}": _share_of_alone,
    "prefill tok/s": lambda one: _number(one.prefill_tok_s, ".0f"),
    "policy": lambda one: _number(one.policy_share, ".1%"),
    "over first plan": lambda one: _share(one.policy_cost),
    "compactions": lambda one: _number(one.compactions, ",.0f"),
    "compacting step": lambda one: _times(one.compacting_ratio),
    "compiling": _compiling,
    "KV cache": lambda one: format_bytes(one.kv_bytes),
    "GPU memory": lambda one: "" if one.device_bytes is None else format_bytes(one.device_bytes),
    "of limit": lambda one: _number(one.limit_share, ".0%"),
}
# Those of a GPU: how near to the limit, and what the policy costs.
_GPU_COLUMNS: Mapping[str, Callable[[BenchResult], str]] = {
    "": lambda one: one.name,
    "batch": lambda one: f"{one.batch:,}",
    "rows": lambda one: f"{one.rows_mean:,.0f}",
    "ms/step": lambda one: _ms(one.step_ms),
    "p95": lambda one: _ms(one.step_p95_ms),
    "limit ms": lambda one: "" if one.limit_ms is None else _ms(one.limit_ms),
    "of limit": lambda one: _number(one.limit_share, ".0%"),
    "policy": lambda one: _number(one.policy_share, ".1%"),
    "over first plan": lambda one: _share(one.policy_cost),
    "tok/s": lambda one: f"{one.decode_tok_s:,.0f}",
    f"x {FULL}": lambda one: _ratio_to(one, FULL),
    **_RATIOS,
    "peak": lambda one: "" if one.device_bytes is None else format_bytes(one.device_bytes),
    "compiling": _compiling,
    "path": lambda one: one.path,
}

# Tables of several works: a title, and the values of their cells.
_BY_WORK: Mapping[str, Callable[[BenchResult], str]] = {
    "ms per step: median over rounds, and half of their range": lambda one: _milliseconds(
        one.mean_ms
    ),
    "speed / generate's: median over rounds, least - most": lambda one: _ratio(
        one.ratios.get(GENERATE)
    ),
    **{
        f"speed / that of {rival}, which has the full cache": _over_in_rounds(rival)
        for rival in RIVALS
    },
    "share of what the model alone allows: its ms / ms": _share_of_alone,
    "share of the machine's limit: least ms for the rows that are read / ms": lambda one: _number(
        one.limit_share, ".0%"
    ),
    "cost of the policy: (ms - ms of the first plan with as many rows) / ms": lambda one: _share(
        one.policy_cost
    ),
    "a step that compacts a sequence / one that does not": lambda one: _times(one.compacting_ratio),
    "compiling before the steps, in the round with most of it": _compiling,
    "compactions in the measured steps, of one sequence in one layer": lambda one: _number(
        one.compactions, ",.0f"
    ),
}


def speed_tables(found: Sequence[BenchResult]) -> str:
    """Milliseconds and ratios of all contenders: a column for each work, or details of one."""
    works = list(dict.fromkeys(one.work for one in found))
    if len(works) == 1:
        parts = [_details(found, _COLUMNS)]
    else:
        tables = {
            title: _by_work(found, works, format_value) for title, format_value in _BY_WORK.items()
        }
        parts = [f"{title}\n{table}" for title, table in tables.items() if table]
    comparisons = [
        f"{one.name}, {one.work}: {ratio.median:.2f} x the speed of {KVPRESS} ({_span(ratio)})"
        for one in found
        if (ratio := one.ratios.get(KVPRESS)) is not None
    ]
    return "\n\n".join([*parts, *(["\n".join(comparisons)] if comparisons else [])])


def gpu_tables(found: Sequence[BenchResult], prefills: Sequence[PrefillResult]) -> str:
    """Of a GPU: how near to the limit steps are, what it does in them, and prompts."""
    # The largest batch of each contender comes last.
    batches = {one.work: (one.work == LARGEST, one.batch) for one in found}
    parts = []
    for work in sorted(batches, key=lambda name: batches[name]):
        of_work = [one for one in found if one.work == work]
        parts.append(f"{work}\n{_details(of_work, _GPU_COLUMNS)}")
        if any(one.profile for one in of_work):
            parts.append(f"{work}: what runs in a step, ms\n{_profile_table(of_work)}")
    if prefills:
        parts.append(f"prefill\n{_prefill_table(prefills)}")
    return "\n\n".join(parts)


def _profile_table(found: Sequence[BenchResult]) -> str:
    """Launches of a step, milliseconds of all kernels and of each kind, and those without any."""
    kinds = [*KINDS, OTHERS]
    headers = ["", "launches", "kernels", "gaps", "profiled", *kinds]
    rows = []
    for one in found:
        profile = one.profile
        if profile is None:
            continue
        if profile.problem:
            rows.append([f"{one.name} ({profile.problem})", *["-"] * (len(headers) - 1)])
            continue
        times = [profile.kernels_ms, profile.gaps_ms, profile.profiled_ms]
        times += [profile.kinds_ms.get(kind, 0.0) for kind in kinds]
        rows.append([one.name, f"{profile.launches:,.0f}", *(f"{ms:.3g}" for ms in times)])
    return format_table(headers, rows, right=range(1, len(headers)), width=terminal_width())


def _prefill_table(prefills: Sequence[PrefillResult]) -> str:
    """Seconds of prompts, and how many times as long as the model's own forward they take."""
    headers = ["", "tokens", "s", "tok/s", f"x {FORWARD}", "KV cache", "peak", "path"]
    rows = [
        [
            one.name,
            f"{one.num_tokens:,}",
            f"{one.seconds.median:.3g}",
            f"{one.tok_s:,.0f}",
            _times(one.over_forward) or "-",
            format_bytes(one.kv_bytes),
            "-" if one.device_bytes is None else format_bytes(one.device_bytes),
            one.path or "-",
        ]
        for one in sorted(prefills, key=lambda one: one.num_tokens)
    ]
    return format_table(headers, rows, right=range(1, len(headers) - 1), width=terminal_width())


def choices_table(choices: Sequence[Choice], margin: float) -> str:
    """What a sweep says about the budget of each policy."""
    headers = ["", "budget", "accuracy", "- full cache", "compacted"]
    rows = [
        [
            one.series,
            "none found" if one.budget is None else f"{one.budget:g}",
            "-" if one.accuracy is None else f"{one.accuracy.value:.1%}",
            _points(one.difference),
            f"{one.num_compacted} of {one.num_items}",
        ]
        for one in choices
    ]
    table = format_table(headers, rows, right=range(1, len(headers)), width=terminal_width())
    return f"smallest budget at most {margin:.1%} below the full cache, by its interval\n{table}"


def launches_table(found: Sequence[Launches]) -> str:
    """What a step asks of a device, and where the host reads values."""
    headers = [
        "",
        "operations",
        "to compact a sequence",
        "values read",
        "to compact a sequence",
        "rows read",
        "graphs",
        "breaks",
        "path",
    ]
    rows = [
        [
            one.name,
            f"{one.operations:,}",
            "-" if one.compacting is None else f"{one.compacting:+,}",
            f"{sum(one.reads.values())}",
            "-" if one.compacting is None else f"{sum(one.compacting_reads.values()):+}",
            format_bytes(one.read_bytes),
            _number(one.graphs, "d") or "-",
            _number(one.breaks, "d") or "-",
            one.path or "-",
        ]
        for one in found
    ]
    table = format_table(headers, rows, right=range(1, 8), width=terminal_width())
    places = list(
        dict.fromkeys(place for one in found for place in (*one.reads, *one.compacting_reads))
    )
    of_places = [[place, *(_reads_at(one, place) for one in found)] for place in places]
    where = format_table(
        ["values read in a step + to compact", *(one.name for one in found)],
        of_places,
        right=range(1, len(found) + 1),
        width=terminal_width(),
    )
    return "\n\n".join([table, *([where] if places else [])])


def kernels_table(found: Sequence[kernels.Kernels]) -> str:
    """Kernels that a GPU launches in a step, before fusing and after."""
    headers = ["kernels of a step on a GPU", "", "all", *kernels.KINDS]
    rows = [
        [
            one.name,
            form,
            f"{sum(counts.values()):,}",
            *(f"{counts[kind]:,}" for kind in kernels.KINDS),
        ]
        for one in found
        for form, counts in (("plain", one.plain), ("fused", one.fused))
    ]
    return format_table(headers, rows, right=range(2, len(headers)), width=terminal_width())


def prompt_kernels_table(found: Sequence[prompt_kernels.PromptKernels], num_layers: int) -> str:
    """Kernels that a GPU launches for a chunk of a prompt, before fusing and after."""
    head = "kernels of a chunk of a prompt"
    headers = [head, "", "all", "once", "each layer", *kernels.KINDS, "values read"]
    rows = []
    for one in found:
        for form, counts in (("plain", one.plain), ("fused", one.fused)):
            each = sum(counts.of_layer.values())
            cells = [num_layers * each + counts.once, counts.once, each]
            cells += [counts.of_layer[kind] for kind in kernels.KINDS]
            cells.append(sum(counts.reads.values()))
            name = f"{one.name}, {one.tokens:,.6g} tokens"
            rows.append([name, form, *(f"{cell:,.6g}" for cell in cells)])
    return format_table(headers, rows, right=range(2, len(headers)), width=terminal_width())


def _reads_at(one: Launches, place: str) -> str:
    counts = one.reads.get(place, 0), one.compacting_reads.get(place, 0)
    return f"{counts[0]} + {counts[1]}" if any(counts) else "-"


def memory_table(readings: Sequence[Reading]) -> str:
    """Sizes of cache and process while texts grow."""
    headers = ["", "tokens", "KV cache", "if all stayed", "process", "ms/step"]
    rows = [
        [
            one.name,
            f"{one.new_tokens:,}",
            format_bytes(one.kv_bytes),
            format_bytes(one.full_bytes),
            format_bytes(one.rss_bytes),
            f"{one.step_ms:.2f}",
        ]
        for one in readings
    ]
    return format_table(headers, rows, right=range(1, len(headers)), width=terminal_width())


def _details(
    found: Sequence[BenchResult], shown_columns: Mapping[str, Callable[[BenchResult], str]]
) -> str:
    columns = {
        header: [format_value(one) for one in found]
        for header, format_value in shown_columns.items()
    }
    shown = {header: cells for header, cells in columns.items() if any(cells)}
    rows = [[cell or "-" for cell in row] for row in zip(*shown.values(), strict=True)]
    return format_table(list(shown), rows, right=range(1, len(shown)), width=terminal_width())


def _by_work(
    found: Sequence[BenchResult], works: Sequence[str], format_value: Callable[[BenchResult], str]
) -> str:
    """One row for each contender that has a value, and one column for each work; or nothing."""
    cells = {(one.name, one.work): format_value(one) for one in found}
    names = list(dict.fromkeys(one.name for one in found))
    rows = [[name, *(cells.get((name, work)) or "-" for work in works)] for name in names]
    shown = [row for row in rows if set(row[1:]) != {"-"}]
    if not shown:
        return ""
    return format_table(["", *works], shown, right=range(1, len(works) + 1), width=terminal_width())


def _milliseconds(spread: Spread) -> str:
    half = (spread.high - spread.low) / 2
    decimals = _decimals(spread.median, digits=4)
    return f"{spread.median:.{decimals}f} ± {half:.{decimals}f}"


def _ms(value: float) -> str:
    return f"{value:.{_decimals(value, digits=3)}f}"


def _decimals(value: float, digits: int) -> int:
    """Decimals with which a positive value has at least so many digits that count."""
    return max(0, digits - 1 - floor(log10(value)))


def _ratio(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f} ({_span(spread)})"


def _ratio_to(one: BenchResult, reference: str) -> str:
    ratio = one.ratios.get(reference)
    return "" if ratio is None else f"{ratio.median:.2f}"


def _share(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.1%}"


def _times(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f}"


def _points(difference: Interval | None) -> str:
    if difference is None:
        return "-"
    return f"{difference.value:+.1%} [{difference.low:+.1%}, {difference.high:+.1%}]"


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _span(ratio: Spread | None) -> str:
    return "" if ratio is None else f"{ratio.low:.2f} - {ratio.high:.2f}"
