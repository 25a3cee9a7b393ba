"""Metrics for Prometheus.

What happens to requests is counted where it happens; what an engine does is read from its own
counts when Prometheus asks.
"""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from kvpolicy.engine.requests.results import EngineStats, RunReport
from kvpolicy.engine.reuse.store import PrefixStore, StoreStats
from kvpolicy.hooks.timing import KINDS
from kvpolicy.serve.plans import ServedModel, ServedPlan
from kvpolicy.serve.record import Record

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, model: ServedModel) -> None:
        """Begin to count.

        Args:
            model: The model that is served.
        """
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model.plans))
        if model.prefix_store is not None:
            self._registry.register(_PrefixCollector(model.plans, model.prefix_store))
        registry = self._registry
        self._responses = Counter(
            "kvpolicy_http_responses", "Answers by status.", ["status"], registry=registry
        )
        self._requests = Counter(
            "kvpolicy_requests",
            "Completions and chats by how they ended.",
            ["plan", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "kvpolicy_request_seconds",
            "Seconds from the arrival of a request to the end of its answer.",
            ["plan"],
            buckets=_REQUEST_S,
            registry=registry,
        )
        self._first_token = Histogram(
            "kvpolicy_time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token.",
            ["plan"],
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self._token = Histogram(
            "kvpolicy_time_per_token_seconds",
            "Seconds for each token after the first, in the mean of a choice.",
            ["plan"],
            buckets=_TOKEN_S,
            registry=registry,
        )
        self._prompt_tokens = Histogram(
            "kvpolicy_prompt_tokens",
            "Tokens of the prompts of a request.",
            ["plan"],
            buckets=_TOKENS,
            registry=registry,
        )
        self._new_tokens = Histogram(
            "kvpolicy_new_tokens",
            "Tokens generated for a request.",
            ["plan"],
            buckets=_TOKENS,
            registry=registry,
        )

    def note(self, record: Record, status: int) -> None:
        """Count a request that has ended.

        Args:
            record: Its record.
            status: The status of its answer.
        """
        self._responses.labels(str(status)).inc()
        if record.outcome is None:
            return
        self._requests.labels(record.plan, record.outcome).inc()
        if record.outcome == "completed":
            self._seconds.labels(record.plan).observe(record.elapsed_s)
        if record.first_token_s is not None:
            self._first_token.labels(record.plan).observe(record.first_token_s)
            self._prompt_tokens.labels(record.plan).observe(record.prompt_tokens)
            self._new_tokens.labels(record.plan).observe(record.new_tokens)
        for seconds in record.per_token_s:
            self._token.labels(record.plan).observe(seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the counts of the engines."""

    def __init__(self, plans: Sequence[ServedPlan]) -> None:
        self._plans = plans

    def collect(self) -> Iterator[Metric]:
        """All metrics of all engines."""
        found = {plan.name: plan.stats for plan in self._plans}
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"kvpolicy_{name}", text, labels=["plan"])
            for plan, stats in found.items():
                gauge.add_metric([plan], read(stats))
            yield gauge
        rows = GaugeMetricFamily(
            "kvpolicy_rows", "Rows held, of one KV head.", labels=["plan", "layer"]
        )
        for plan, stats in found.items():
            for layer, num in enumerate(stats.rows):
                rows.add_metric([plan, str(layer)], num)
        yield rows
        for name, text, total in _TOTALS:
            counter = CounterMetricFamily(f"kvpolicy_{name}", text, labels=["plan"])
            for plan, stats in found.items():
                counter.add_metric([plan], total(stats.report))
            yield counter
        seconds = CounterMetricFamily(
            "kvpolicy_policy_hook_seconds", "Seconds of policies.", labels=["plan", "hook"]
        )
        for plan, stats in found.items():
            for hook in KINDS:
                seconds.add_metric([plan, hook], getattr(stats.report, f"{hook}_s"))
        yield seconds


class _PrefixCollector(Collector):
    """Reads the counts of a prefix store, and what each plan has reused."""

    def __init__(self, plans: Sequence[ServedPlan], store: PrefixStore) -> None:
        self._plans, self._store = plans, store

    def collect(self) -> Iterator[Metric]:
        """All metrics of the store."""
        stats = self._store.stats
        for name, text, read in _STORE_GAUGES:
            yield GaugeMetricFamily(f"kvpolicy_prefix_{name}", text, read(stats))
        for name, text, total in _STORE_TOTALS:
            yield CounterMetricFamily(f"kvpolicy_prefix_{name}", text, total(stats))
        reports = {plan.name: plan.stats.report for plan in self._plans}
        for name, text, of_report in _REUSE_TOTALS:
            counter = CounterMetricFamily(f"kvpolicy_prefix_{name}", text, labels=["plan"])
            for plan, report in reports.items():
                counter.add_metric([plan], of_report(report))
            yield counter


_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("requests_waiting", "Choices that wait for a slot.", lambda stats: stats.waiting),
    ("requests_running", "Choices with a slot.", lambda stats: stats.running),
    ("slots", "Sequences that can be decoded together.", lambda stats: stats.slots),
    ("held_bytes", "Bytes of keys and values in the rows held.", lambda stats: stats.held_bytes),
    (
        "cache_bytes",
        "Bytes that the cache has taken at most, with all that belongs to its slots.",
        lambda stats: stats.report.peak_kv_bytes,
    ),
    (
        "longest_gap_seconds",
        "Longest time between two tokens of a sequence while prompts of others were prefilled.",
        lambda stats: stats.report.longest_gap_s,
    ),
)

_TOTALS: tuple[tuple[str, str, Callable[[RunReport], float]], ...] = (
    (
        "engine_prompt_tokens",
        "Prompt tokens of choices, prefilled or reused.",
        lambda report: report.prompt_tokens,
    ),
    ("engine_new_tokens", "Tokens generated.", lambda report: report.new_tokens),
    ("compactions", "Compactions of a layer of a sequence.", lambda report: report.compactions),
    ("rows_evicted", "Rows evicted of choices that ended.", lambda report: report.rows_evicted),
    ("prefill_seconds", "Seconds in prefill.", lambda report: report.prefill_s),
    ("decode_seconds", "Seconds in decode steps.", lambda report: report.decode_s),
    ("policy_seconds", "Seconds of all policies.", lambda report: report.policy_s),
    (
        "decode_policy_seconds",
        "Seconds of policies within decode steps.",
        lambda report: report.decode_policy_s,
    ),
)

_STORE_GAUGES: tuple[tuple[str, str, Callable[[StoreStats], float]], ...] = (
    ("capacity_bytes", "The most bytes of memory.", lambda stats: stats.capacity),
    ("held_bytes", "Bytes held in memory.", lambda stats: stats.num_bytes),
    ("blocks", "Blocks held in memory.", lambda stats: stats.num_blocks),
    ("spilled_bytes", "Bytes of files.", lambda stats: stats.spilled_bytes),
    ("spilled_blocks", "Blocks in files.", lambda stats: stats.spilled_blocks),
    (
        "failed",
        "1 if nothing is stored any more, or nothing is written to files now, after an error.",
        lambda stats: float(bool(stats.problem or stats.spill_problem)),
    ),
)

_STORE_TOTALS: tuple[tuple[str, str, Callable[[StoreStats], float]], ...] = (
    ("hits", "Blocks that choices have found.", lambda stats: stats.hits),
    ("misses", "Blocks that choices have computed.", lambda stats: stats.misses),
    ("evictions", "Blocks that have left memory.", lambda stats: stats.evictions),
    ("refused", "Blocks that were not stored.", lambda stats: stats.refused),
    ("spill_loads", "Blocks read from files.", lambda stats: stats.spill_loads),
    ("turns", "Choices that went on with a conversation.", lambda stats: stats.turns),
)

_REUSE_TOTALS: tuple[tuple[str, str, Callable[[RunReport], float]], ...] = (
    ("reused_tokens", "Prompt tokens that were reused.", lambda report: report.reused_tokens),
    ("computed_tokens", "Prompt tokens that were computed.", lambda report: report.computed_tokens),
)
