"""A folder of turns continues."""

from pathlib import Path

import pytest
from bench_parts import measurement

from kvpolicy.errors import OutputError
from kvpolicy.lab.bench.profile import Kernel, StepProfile
from kvpolicy.lab.bench.roofline import Machine
from kvpolicy.lab.bench.rounds.turn_file import open_turns
from kvpolicy.lab.bench.rounds.turns import Turn


def test_a_folder_of_turns_continues(tmp_path: Path) -> None:
    first = Turn(0, ("a", "w"), measurement([1.0, 2.5], policy_share=0.25, compacted=(3, 0)))
    kernels = (Kernel("gemm", 2.0, 1.5),)
    profile = StepProfile(2.0, 1.5, 0.25, 2.0, {"products": 1.5}, kernels)
    machine = Machine(2.0, 3.0)
    second = Turn(0, ("b", "w"), measurement(4.0, machine=machine, compile_s=1.5, profile=profile))
    described = {"shape": {"name": "tiny"}, "threads": 2}
    with open_turns(tmp_path / "new" / "folder", described) as file:
        file.add(first)
        file.add_passed("kernels")
    lines = tmp_path / "new" / "folder" / "turns.jsonl"
    with lines.open("a") as torn:
        torn.write('{"round": 0, "contender": "b", "wo')  # killed in the middle of a line
    with open_turns(tmp_path / "new" / "folder", described) as file:
        assert file.turns == [first]
        assert file.passed == {"kernels"}
        assert (file.batch_of(("a", "w")), file.batch_of(("b", "w"))) == (2, None)
        file.add(second)
    with open_turns(tmp_path / "new" / "folder", described) as file:
        assert file.turns == [first, second]
    message = "threads is 2, and here it is 4"
    with (
        pytest.raises(OutputError, match=message),
        open_turns(tmp_path / "new" / "folder", described | {"threads": 4}),
    ):
        pass
