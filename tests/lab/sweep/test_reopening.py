"""A run that is stored is the same run when the same command is given again."""

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_sweeps import built
from strategies import BASES, SMALL_KNOBS, STEERING

from kvpolicy import installed_policies
from kvpolicy.errors import KVPolicyError, OutputError
from kvpolicy.lab.store.store import Store, finished
from kvpolicy.lab.sweep.sweep_file import Series

pytestmark = pytest.mark.needs_reasoner  # whose task the sweeps have

NAMES = [policy.name for policy in installed_policies() if policy.name not in STEERING]
#: What a knob may be in a plan made in Python, or in a default.
KNOBS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 20), inner, max_size=3)
    ),
    max_leaves=6,
)


def series_of(name: str, knobs: dict[str, Any]) -> Series:
    bases = [attrs.asdict(base, recurse=False) for base in BASES.get(name, ())]
    stack = [{"policy": base["policy"], **base["knobs"]} for base in bases]
    return Series(label=name, plan={"stack": [*stack, {"policy": name, **knobs}]})


@pytest.mark.few(6)
@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_of_any_policy_is_continued(name: str, tmp_path: Path) -> None:
    for number, knobs in enumerate([{}, *SMALL_KNOBS.get(name, ())]):
        try:
            sweep = built(series=(series_of(name, knobs),))
        except KVPolicyError:
            if knobs:
                raise
            continue  # a knob has no default
        run, folder = sweep.to_dict(), tmp_path / str(number)
        for _ in range(2):
            Store(folder, run, sweep.example_records()).close()
        assert finished(folder, run, sweep.example_records()) == ({}, set())
        for cell in sweep.cells:
            data = cell.resolved.to_dict()
            assert json.loads(json.dumps(data)) == data


@cache
def _run() -> dict[str, Any]:
    return built().to_dict()


@given(knob=KNOBS)
def test_a_run_with_any_knob_is_the_same_run_and_no_other(knob: object) -> None:
    def run_with(value: object) -> dict[str, Any]:
        run = copy.deepcopy(_run())
        run["cells"][0]["resolved"]["layers"][0]["stack"][0]["knob"] = value
        return run

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "run"
        Store(folder, run_with(knob)).close()
        Store(folder, run_with(knob)).close()
        with pytest.raises(OutputError, match="cells"):
            Store(folder, run_with([knob, "more"]))
