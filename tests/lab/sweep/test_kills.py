"""A sweep killed at any of its steps, again and again: no sample lost, none doubled."""

import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from child_process import Kill
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resumable_sweep import NUM_CELLS, Bench, N, untimed, wait_for_orphans

from kvpolicy.lab.store.read import read_run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks its children"),
    pytest.mark.nightly,
]

NUM_STEPS = 110  # more than a run has: one for a sample, one for its kept rows, and those of files


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("undisturbed"), model_folder)
    assert bench("--workers", 1).status == 0
    return bench


@pytest.mark.parametrize("workers", [1, 2])
@given(
    kills=st.lists(
        st.builds(Kill, st.integers(1, NUM_STEPS), st.booleans()), min_size=1, max_size=4
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_killed_at_any_steps_nothing_is_lost_or_doubled(
    tmp_path: Path, model_folder: Path, undisturbed: Bench, workers: int, kills: list[Kill]
) -> None:
    expected = untimed(undisturbed.samples())
    with TemporaryDirectory(dir=tmp_path) as folder:
        bench, kept = Bench(Path(folder), model_folder), b""
        path = bench.output / "samples.jsonl"
        for kill in [*kills, None]:
            ended = bench("--workers", workers, kill=kill)
            assert ended.status in (0, -signal.SIGKILL), ended.err
            wait_for_orphans(ended)
            content = path.read_bytes() if path.exists() else b""
            assert content.startswith(kept), "what was kept stays as it was"
            kept = content[: content.rfind(b"\n") + 1]
            if (bench.output / "manifest.json").exists():
                found = read_run(bench.output)
                assert len(found.samples) == kept.count(b"\n"), "none is done twice"
                assert found.samples.keys() <= expected.keys()
        assert ended.status == 0
        assert untimed(bench.samples()) == expected
        assert len(read_run(bench.output).items) == N
        assert len(bench.table()) == NUM_CELLS
