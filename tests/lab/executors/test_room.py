"""Workers go where there is room for them, and a cluster without room is refused in a sentence."""

import pytest

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.executors.room import Room

CPUS = [{"CPU": 8.0, "memory": 1e9}, {"CPU": 3.0}, {}]
GPUS = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 2.0, "GPU": 4.0}, {"CPU": 16.0}]


@pytest.mark.parametrize(
    ("room", "nodes", "device", "gpus", "workers"),
    [
        (Room(), CPUS, None, 0, 11),
        (Room(cpus=4), CPUS, None, 0, 2),
        (Room(), GPUS, None, 1, 6),
        (Room(gpus=0.5), GPUS, None, 0.5, 10),
        (Room(gpus=2), GPUS, None, 2, 4),
        (Room(), GPUS, "cpu", 0, 26),
        (Room(), GPUS, "cuda", 1, 6),
        (Room(gpus=0), GPUS, None, 0, 26),
        (Room(workers=7), CPUS, None, 0, 7),
        (Room(workers=7, gpus=1), CPUS, None, 1, 7),
    ],
)
def test_as_many_as_there_is_room_for(
    room: Room, nodes: list[dict[str, float]], device: str | None, gpus: float, workers: int
) -> None:
    assert room.gpus_of_each(nodes, device) == gpus
    assert room.how_many(nodes, device) == workers


@pytest.mark.parametrize(
    ("room", "device", "takes"),
    [(Room(cpus=9), None, "9 CPU and 0 GPU"), (Room(), "cuda:0", "1 CPU and 1 GPU")],
)
def test_no_room_is_told(room: Room, device: str | None, takes: str) -> None:
    with pytest.raises(KVPolicyError) as told:
        room.how_many(CPUS, device)
    assert f"takes {takes}; there are 11 CPU and 0 GPU on 3 nodes" in str(told.value)


@pytest.mark.parametrize("gpus", [1.5, 0.00001, -1.0, float("inf"), float("nan")])
def test_gpus_are_whole_or_a_part_of_one(gpus: float) -> None:
    with pytest.raises(KVPolicyError, match=r"--gpus-per-worker was given \S+; .* 0\.5, 1 or 2"):
        Room(gpus=gpus)
