"""A pool of workers on a Ray cluster, which may be lost and replaced while they work.

A worker is a Ray actor. It holds one model, is given shard after shard, and what it measures
streams back as it is known; only this process writes. Ray repeats nothing by itself: what
becomes of the work of a lost worker is decided by the `Ledger`, so that no item is told of
twice.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs

from kvpolicy.lab.executors.raycluster import Hand, RayCluster, cannot_work
from kvpolicy.lab.executors.shards import Ledger, cut
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.group import Group
from kvpolicy.lab.sweep.jobs import Job, JobDone, News


@attrs.frozen
class RayPool:
    """Does the jobs of a comparison on a cluster.

    Attributes:
        cluster: The cluster.
        comparison: What the jobs are parts of.
    """

    cluster: RayCluster
    comparison: Comparison

    def serve(self, jobs: Sequence[Job]) -> Iterator[News]:
        """Do jobs in shards, each as soon as a worker is free for it.

        Args:
            jobs: The jobs, in the order in which they are begun.

        Yields:
            What happens.

        Raises:
            KVPolicyError: A job failed, or worker after worker was lost with the same work.
        """
        cluster = self.cluster
        ledger = Ledger(jobs, workers=cluster.workers, slots=self._slots)
        comparison = cluster.ray.put(self.comparison)
        try:
            while not ledger.is_done:
                self._hand_out(ledger, comparison)
                for hand in self._who_speaks():
                    yield from self._hear(ledger, hand)
        finally:
            for hand in [one for one in cluster.hands if one.shard is not None]:
                cluster.dismiss(hand)

    def pieces(self, jobs: Sequence[Job]) -> list[Job]:
        """Jobs in the parts in which workers are given them while none is lost.

        Args:
            jobs: The jobs.
        """
        shards = cut(jobs, workers=self.cluster.workers, slots=self._slots)
        return [part for parts in shards for part in parts]

    def _hand_out(self, ledger: Ledger, comparison: Any) -> None:
        """Give every free worker a shard, if possible of the model that it holds.

        One that has not begun yet is given nothing: it may never get a place.
        """
        cluster = self.cluster
        num_busy = sum(hand.shard is not None for hand in cluster.hands)
        while len(cluster.hands) < min(cluster.workers, num_busy + ledger.num_waiting):
            cluster.hire()
        for hand in cluster.hands:
            if hand.host is None or hand.shard is not None:
                continue
            hand.shard = ledger.take(partial(self._is_of, hand.model))
            if hand.shard is None:
                return
            hand.model = self._model(hand.shard.job)
            hand.stream = hand.actor.serve.remote(comparison, hand.shard.as_job())

    def _who_speaks(self) -> list[Hand]:
        """Wait until something happens, and tell which workers have something to tell."""
        busy = [hand for hand in self.cluster.hands if hand.shard is not None]
        ready = self.cluster.wait([hand.stream for hand in busy])
        return [hand for hand in busy if any(hand.stream is stream for stream in ready)]

    def _hear(self, ledger: Ledger, hand: Hand) -> Iterator[News]:
        """Take down what a worker tells, or that it has gone."""
        shard, cluster = hand.shard, self.cluster
        assert shard is not None, "only the busy are listened to"
        try:
            news = cluster.ray.get(next(hand.stream))
        except (StopIteration, cluster.ray.exceptions.RayError) as error:
            cluster.dismiss(hand)
            if cluster.is_hopeless(error):
                raise cannot_work(error) from error
            cluster.tell(
                f"a worker on {hand.host} was lost ({type(error).__name__}); its "
                f"{len(shard.left)} unfinished samples are done again."
            )
            yield from ledger.lose(shard)
            return
        if isinstance(news, Exception):
            raise news
        if isinstance(news, JobDone):
            hand.shard = hand.stream = None
        yield from ledger.hear(shard, news)

    def _model(self, job: Job) -> str:
        return self._group_of(job).model.name

    def _is_of(self, model: str | None, job: Job) -> bool:
        return self._model(job) == model

    def _slots(self, job: Job) -> int:
        return self._group_of(job).slots

    def _group_of(self, job: Job) -> Group:
        return self.comparison.group_of(self.comparison.cell(job.cell))
