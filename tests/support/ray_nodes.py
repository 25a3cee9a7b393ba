"""A program that runs a Ray cluster of two nodes on this machine, for tests.

It prints ``{"address": ..., "nodes": [pid of a raylet, ...]}`` on stdout, and again after each line
on stdin: ``kill N`` kills node N and all its workers at once, like a power failure, and starts
a replacement. The program exits when its stdin closes.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

_SMALL = {"object_store_memory": 80_000_000, "include_dashboard": False}


def children_of(pid: int) -> list[int]:
    """The child processes of a process."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text("utf-8").split()]


def raylet_of(node: Any) -> int:
    """Process of a node that starts its workers."""
    return node.all_processes["raylet"][0].process.pid


def kill(cluster: Cluster, node: Any) -> None:
    """Kill a node and its workers."""
    raylet = raylet_of(node)
    for pid in [raylet, *children_of(raylet)]:
        os.kill(pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def main() -> None:
    cluster = Cluster()
    cluster.add_node(num_cpus=0, **_SMALL)
    nodes = [cluster.add_node(num_cpus=1, **_SMALL) for _ in range(2)]
    while True:
        state = {"address": cluster.address, "nodes": [raylet_of(node) for node in nodes]}
        print(json.dumps(state), flush=True)  # noqa: T201 - a program
        line = sys.stdin.readline()
        if not line:
            break
        number = int(line.split()[1])
        kill(cluster, nodes[number])
        nodes[number] = cluster.add_node(num_cpus=1, **_SMALL)
    cluster.shutdown()


if __name__ == "__main__":
    main()
