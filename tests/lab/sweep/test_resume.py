"""A sweep can be stopped at any moment, and the same command continues it."""

import shutil
import signal
import sys
from pathlib import Path

import pytest
from resumable_sweep import NUM_CELLS, Bench, N, untimed, wait_for_orphans

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks its children")


@pytest.fixture
def bench(tmp_path: Path, model_folder: Path) -> Bench:
    return Bench(tmp_path, model_folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("undisturbed"), model_folder)
    assert bench("--workers", 1).status == 0
    return bench


@pytest.mark.slow
def test_undisturbed_every_sample_is_there_once(undisturbed: Bench) -> None:
    samples = undisturbed.samples()
    assert len(samples) == len(untimed(samples)) == NUM_CELLS * N
    assert all(row["throughput_tok_s"] > 0 for row in undisturbed.table())
    assert undisturbed.kept().keys() == {one["key"] for one in samples if one["item"] < 2}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_killed_again_and_again_it_ends_with_the_same_samples(
    bench: Bench, undisturbed: Bench, workers: int
) -> None:
    done = [0]
    for compactions in (50, 60):
        bench.fuse.light(compactions, signal.SIGKILL, "self" if workers == 1 else "parent")
        ended = bench("--workers", workers)
        assert ended.status == -signal.SIGKILL, "else there was less left to do than that"
        assert not bench.fuse.is_burning
        wait_for_orphans(ended)
        samples = bench.samples()
        assert len(samples) == len(untimed(samples)), "nothing is done twice"
        assert {one["key"] for one in samples if one["item"] < 2} <= bench.kept().keys()
        done.append(len(samples))
    assert done == sorted(done)
    assert done[-1] > 0, "something was kept"
    bench.fuse.light(10**9, signal.SIGKILL)
    last = bench("--workers", workers)
    assert last.status == 0, last.err
    assert f"{done[-1]} of {NUM_CELLS * N} samples" in last.err
    assert untimed(bench.samples()) == untimed(undisturbed.samples())
    assert bench.kept() == undisturbed.kept()
    for row, whole in zip(bench.table(), undisturbed.table(), strict=True):
        unmeasured = {"throughput_tok_s", "peak_kv_bytes", "policy_share"}
        assert {k: v for k, v in row.items() if k not in unmeasured} == {
            k: v for k, v in whole.items() if k not in unmeasured
        }


@pytest.mark.nightly
def test_a_cell_that_was_interrupted_has_no_speed(bench: Bench) -> None:
    bench.fuse.light(60, signal.SIGKILL)
    assert bench("--workers", 1).status == -signal.SIGKILL
    partly = {sample["plan"] for sample in bench.samples()}
    assert bench("--workers", 1).status == 0
    measured = {row["plan"] for row in bench.table() if row["throughput_tok_s"] is not None}
    assert len(measured) < NUM_CELLS
    assert len(partly | measured) == NUM_CELLS


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_ctrl_c_reports_what_is_kept_and_how_to_continue(bench: Bench, workers: int) -> None:
    bench.fuse.light(9, signal.SIGINT, "self" if workers == 1 else "parent")
    ended = bench("--workers", workers)
    assert ended.status == 130, ended.err
    num_done = len(bench.samples())
    assert f"{num_done} of {NUM_CELLS * N} samples" in ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert bench("--workers", workers).status == 0


@pytest.mark.nightly
def test_a_killed_worker_is_reported_and_finished_samples_are_kept(bench: Bench) -> None:
    bench.fuse.light(9, signal.SIGKILL, "self")
    ended = bench("--workers", 2)
    assert ended.status == 2
    assert "killed" in ended.err
    assert "Traceback" not in ended.err
    assert bench("--workers", 2).status == 0
    assert len(untimed(bench.samples())) == NUM_CELLS * N


@pytest.mark.slow
def test_a_torn_last_line_is_removed_and_its_sample_run_again(
    bench: Bench, undisturbed: Bench
) -> None:
    shutil.copytree(undisturbed.output, bench.output)
    path = bench.output / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    ended = bench("--workers", 1)
    assert ended.status == 0
    assert "incomplete" in ended.err
    assert untimed(bench.samples()) == untimed(undisturbed.samples())


@pytest.mark.slow
def test_a_finished_run_shows_its_table_again_and_computes_nothing(
    bench: Bench, undisturbed: Bench
) -> None:
    shutil.copytree(undisturbed.output, bench.output)
    before = {p.name: p.read_bytes() for p in bench.output.iterdir()}
    bench.fuse.light(1, signal.SIGKILL)
    again = bench("--workers", 1)
    assert again.status == 0
    assert "fused" in again.out
    assert {p.name: p.read_bytes() for p in bench.output.iterdir()} == before


@pytest.mark.nightly
def test_two_workers_find_the_same_samples_as_one(bench: Bench, undisturbed: Bench) -> None:
    assert bench("--workers", 2).status == 0
    assert untimed(bench.samples()) == untimed(undisturbed.samples())
    assert all(row["throughput_tok_s"] > 0 for row in bench.table())
