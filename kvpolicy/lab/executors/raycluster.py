"""Workers that are given a place in a Ray cluster."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import attrs

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.executors.ray_worker import Setting, Worker
from kvpolicy.lab.executors.raystart import connect, start
from kvpolicy.lab.executors.room import Room, words, words_of_nodes
from kvpolicy.lab.executors.shards import Shard
from kvpolicy.lab.models import ModelCache, ModelInfo
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.grid import Cell
from kvpolicy.lab.sweep.probe import Probe

_PATIENCE_S = 30.0  # before we say that nothing happens
_MOST_FAILURES = 3  # of workers in a row that end before they have begun


@attrs.define(eq=False)
class Hand:
    """One worker, as seen from here.

    Attributes:
        actor: Its handle, of a `Worker`.
        begun: A reference to the name of its machine, ready once it has a place and has begun.
        host: That name, if we have heard it.
        model: Name of the model that it holds.
        shard: What it works on.
        stream: What it tells of that.
    """

    actor: Any
    begun: Any
    host: str | None = None
    model: str | None = None
    shard: Shard | None = None
    stream: Any = None


class RayCluster:
    """A cluster for the time of a ``with`` block, and the workers that were placed in it.

    It describes models (`kvpolicy.lab.models.ModelProvider`), so that this process needs neither
    their files nor memory for them.

    Attributes:
        ray: The module.
        workers: Workers side by side, at most.
        hands: Those there are.
        tell: Tells the user what is not a result.
    """

    def __init__(
        self,
        address: str | None,
        room: Room,
        shelf: ModelCache,
        *,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Connect to a cluster, or start one on this machine.

        Args:
            address: ``HOST:PORT`` of its head, or ``"auto"`` for the one that this machine is
                part of. Without any, a cluster is started for as long as the block lasts.
            room: How many workers, and what each of them takes.
            shelf: How workers open models; this one stays empty.
            tell: Tells the user what is not a result.

        Raises:
            KVPolicyError: Ray is not installed, the cluster cannot be reached, or has no room.
        """
        self.tell, self.hands, self._told = tell, list[Hand](), ""
        self._failed = 0
        if address is None:
            tell("no Ray cluster was named, so one is started on this machine.")
            self.ray = start(cpus=(room.workers or 1) * room.cpus)
        else:
            self.ray = connect(address)
        try:
            nodes = self._nodes()
            self._takes = {"CPU": room.cpus, "GPU": room.gpus_of_each(nodes, shelf.device)}
            self.workers = room.how_many(nodes, shelf.device)
        except BaseException:
            self.ray.shutdown()
            raise
        self._setting = self.ray.put(Setting.here(shelf, threads=room.cpus))
        self._actor = self.ray.remote(
            # Never repeated by Ray: what is done again is for us to decide.
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            num_cpus=self._takes["CPU"],
            num_gpus=self._takes["GPU"],
        )(Worker)

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Have a worker load a model and describe it; see `ModelCache.describe`."""
        answer = self._ask("describe", name)
        self.hands[0].model = name
        return answer

    def probe(self, comparison: Comparison, cell: Cell, limit_s: float) -> Probe:
        """Have a worker try a cell; see `kvpolicy.lab.sweep.probe.probe`."""
        return self._ask("probe", comparison, cell, limit_s)

    def machine(self) -> dict[str, Any]:
        """Have a worker describe what it computes with; all of them are alike."""
        return self._ask("machine")

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Have the first worker that has begun answer something."""
        hand = self.hands[0] if self.hands else self.hire()
        while hand.host is None:
            self.wait([])
            hand = self.hands[0] if self.hands else self.hire()
        try:
            answer = self.ray.get(getattr(hand.actor, method).remote(*arguments))
        except self.ray.exceptions.RayError as error:
            self.dismiss(hand)
            if self.is_hopeless(error):
                raise cannot_work(error) from error
            msg = (
                f"the worker on {hand.host} was lost before it was given any samples "
                f"({type(error).__name__}), perhaps for lack of memory; give each worker more "
                "of a machine."
            )
            raise KVPolicyError(msg) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def hire(self) -> Hand:
        """Ask for one worker more; it may have to wait for its place."""
        actor = self._actor.remote(self._setting)
        hand = Hand(actor, actor.host.remote())
        self.hands.append(hand)
        return hand

    def dismiss(self, hand: Hand) -> None:
        """End a worker, in whatever state it is."""
        self.hands.remove(hand)
        self.ray.kill(hand.actor)

    def wait(self, streams: Sequence[Any]) -> list[Any]:
        """Wait for something to happen, and greet the workers that have begun.

        Args:
            streams: What busy workers tell.

        Returns:
            Those of the streams in which there is something new; it may be none.

        Raises:
            KVPolicyError: Workers cannot begin.
        """
        waiting = [hand for hand in self.hands if hand.host is None]
        refs = [*streams, *(hand.begun for hand in waiting)]
        if not self.ray.wait(refs, timeout=_PATIENCE_S)[0]:
            self._tell_of_waiting()
            return []
        # All there is, so that one who speaks all the time drowns out nobody.
        ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=0)
        for hand in waiting:
            if any(hand.begun is ref for ref in ready):
                self._greet(hand)
        return [stream for stream in streams if any(stream is ref for ref in ready)]

    def _greet(self, hand: Hand) -> None:
        try:
            hand.host = self.ray.get(hand.begun)
        except self.ray.exceptions.RayError as error:
            self.dismiss(hand)
            self._failed += 1
            if self._failed < _MOST_FAILURES and not self.is_hopeless(error):
                return  # a machine that was lost, perhaps
            raise cannot_work(error) from error
        self._failed = 0

    def _tell_of_waiting(self) -> None:
        """Say why nothing happens, if it is because no worker has begun."""
        if any(hand.host is not None for hand in self.hands):
            return
        message = (
            f"no worker has begun yet: each takes {words(self._takes)}, and the Ray cluster has "
            f"{words_of_nodes(self._nodes())}; `ray status` tells what is free."
        )
        if message != self._told:
            self._told = message
            self.tell(message)

    def is_hopeless(self, error: Exception) -> bool:
        """Whether an error would be the same on every worker: it is one of Python, not a loss."""
        did_not_begin = getattr(error, "actor_init_failed", False)
        return did_not_begin or isinstance(error, self.ray.exceptions.RayTaskError)

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for hand in list(self.hands):
            self.dismiss(hand)
        self.ray.shutdown()


def cannot_work(error: Exception) -> KVPolicyError:
    """What to raise where a worker cannot even read what it is to do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return KVPolicyError(
        f"workers on Ray cannot begin: {lines[-1]}; kvpolicy, and the packages that tasks and "
        "policies come from, must be installed for the Python of every node."
    )
