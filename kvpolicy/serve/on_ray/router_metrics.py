"""Metrics of a router, and those of all its replicas.

A router counts what only it sees: retries and broken streams. Replicas count the rest; their
metrics are passed on with a label for the replica, so that Prometheus adds them up.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvpolicy.serve.record import Record


class RouterMetrics:
    """The metrics of one router, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._responses = Counter(
            "kvpolicy_router_responses", "Answers by status.", ["status"], registry=registry
        )
        self._retries = Counter(
            "kvpolicy_router_retries",
            "Requests that were passed to another replica, because one was lost or has refused.",
            ["reason"],
            registry=registry,
        )
        for reason in ("lost", "refused"):
            self._retries.labels(reason)
        self._broken = Counter(
            "kvpolicy_router_broken_streams",
            "Streams that ended with an error because their replica was lost.",
            registry=registry,
        )
        self._replicas = Gauge(
            "kvpolicy_router_replicas", "Replicas that have told their metrics.", registry=registry
        )

    def note(self, record: Record, status: int) -> None:
        """Count a request that has ended.

        Args:
            record: Its record.
            status: The status of its answer.
        """
        self._responses.labels(str(status)).inc()

    def note_retry(self, reason: Literal["lost", "refused"]) -> None:
        """Count a request that is passed to another replica."""
        self._retries.labels(reason).inc()

    def note_broken_stream(self) -> None:
        """Count a stream that has ended because its replica is lost."""
        self._broken.inc()

    def text(self, replicas: Iterable[tuple[str, bytes]]) -> bytes:
        """All metrics in Prometheus' text format.

        Args:
            replicas: Name and metrics of each replica.
        """
        found = list(replicas)
        self._replicas.set(len(found))
        merged = CollectorRegistry()
        merged.register(_ReplicaCollector(found))
        return generate_latest(self._registry) + generate_latest(merged)


class _ReplicaCollector(Collector):
    """Metrics of several replicas, each sample with the name of its replica."""

    def __init__(self, replicas: Iterable[tuple[str, bytes]]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """All families, each once."""
        families: dict[str, Metric] = {}
        for name, text in self._replicas:
            for family in text_string_to_metric_families(text.decode()):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={**sample.labels, "replica": name})
                    for sample in family.samples
                ]
        yield from families.values()
