"""How many workers a cluster has room for."""

from collections.abc import Mapping, Sequence

import attrs

from kvpolicy.errors import KVPolicyError

Resources = Mapping[str, float]

_LEAST_GPUS = 0.0001  # Ray counts no finer


@attrs.frozen
class Room:
    """How many workers are wanted, and what each of them takes.

    Attributes:
        workers: Workers side by side; as many as there is room for if ``None``.
        cpus: Processors of each, and the threads it computes with.
        gpus: GPUs of each; 1 where there are any, else 0, if ``None``. A part of one is shared
            with other workers.

    Raises:
        KVPolicyError: Ray does not give out so many GPUs.
    """

    workers: int | None = None
    cpus: int = 1
    gpus: float | None = None

    def __attrs_post_init__(self) -> None:
        gpus = self.gpus
        if gpus is None or gpus == 0 or _LEAST_GPUS <= gpus <= 1:
            return
        if not (gpus > 1 and float(gpus).is_integer()):
            msg = (
                f"--gpus-per-worker was given {gpus:g}; Ray gives a worker whole GPUs, or a "
                "part of one: try 0.5, 1 or 2."
            )
            raise KVPolicyError(msg)

    def gpus_of_each(self, nodes: Sequence[Resources], device: str | None) -> float:
        """GPUs of each worker.

        Args:
            nodes: What each node has in all, by Ray's names: ``"CPU"``, ``"GPU"``.
            device: Where models are to be put, if the user says so.
        """
        if self.gpus is not None:
            return self.gpus
        if device is not None:
            return float(device.startswith("cuda"))
        return float(any(node.get("GPU", 0) >= 1 for node in nodes))

    def how_many(self, nodes: Sequence[Resources], device: str | None) -> int:
        """Workers side by side.

        Args:
            nodes: As in `gpus_of_each`.
            device: Likewise.

        Raises:
            KVPolicyError: No node has room for one, and nobody said that others will come.
        """
        if self.workers is not None:
            return self.workers
        wanted = {"CPU": self.cpus, "GPU": self.gpus_of_each(nodes, device)}
        found = sum(
            int(min(node.get(name, 0) / each for name, each in wanted.items() if each))
            for node in nodes
        )
        if not found:
            msg = (
                f"no node of the Ray cluster has room for a worker, which takes {words(wanted)}; "
                f"there are {words_of_nodes(nodes)}: give --cpus-per-worker or "
                "--gpus-per-worker, or --workers if nodes are still to come."
            )
            raise KVPolicyError(msg)
        return found


def words(resources: Resources) -> str:
    """Such as ``"1 CPU and 0.5 GPU"``."""
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"


def words_of_nodes(nodes: Sequence[Resources]) -> str:
    """What all nodes have together, such as ``"8 CPU and 0 GPU on 2 nodes"``."""
    both = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    return f"{words(both)} on {len(nodes)} node{'s' * (len(nodes) != 1)}"
