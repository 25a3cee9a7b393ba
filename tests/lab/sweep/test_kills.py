"""A sweep killed at random moments, again and again: no sample lost, none doubled."""

import random
import signal
import sys
import time
from pathlib import Path

import pytest
from resumable_sweep import NUM_CELLS, Bench, N, untimed, wait_for_orphans
from slow_share import share_of

from kvpolicy.lab.store.read import read_run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks its children"),
    pytest.mark.slow,
]

NUM_KILLS = share_of(100)  # a hundred take a quarter of an hour


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_moments_nothing_is_lost_or_doubled(
    tmp_path: Path, model_folder: Path, workers: int
) -> None:
    rng = random.Random(workers)
    undisturbed = Bench(tmp_path, model_folder, "undisturbed")
    begun = time.monotonic()
    assert undisturbed("--workers", workers).status == 0
    whole_s = time.monotonic() - begun
    expected, num_kills, num_runs, torn = untimed(undisturbed.samples()), 0, 0, 0
    while num_kills < NUM_KILLS:
        num_runs += 1
        bench, kept = Bench(tmp_path, model_folder, f"run {num_runs}"), b""
        ended = None
        while ended is None or ended.status != 0:
            # From before anything is loaded until after the last sample.
            ended = bench("--workers", workers, kill_after_s=rng.uniform(0, 1.2 * whole_s))
            assert ended.status in (0, -signal.SIGKILL), ended.err
            wait_for_orphans(ended)
            num_kills += ended.status != 0
            path = bench.output / "samples.jsonl"
            content = path.read_bytes() if path.exists() else b""
            assert content.startswith(kept), "what was kept stays as it was"
            kept = content[: content.rfind(b"\n") + 1]
            torn += kept != content
            if (bench.output / "manifest.json").exists():
                found = read_run(bench.output)
                lines = kept.count(b"\n")
                assert len(found.samples) == lines, "none is done twice"
                assert found.samples.keys() <= expected.keys()
        assert untimed(bench.samples()) == expected
        assert len(read_run(bench.output).items) == N
        assert len(bench.table()) == NUM_CELLS
    print(f"{num_kills} kills in {num_runs} runs, {torn} torn lines")  # noqa: T201
