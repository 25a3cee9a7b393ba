"""The command: tables, JSON, folders that continue, and refused input."""

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_parts import measurement, needs_meta_forwards
from shell import Shell, refusal

from kvpolicy import compat
from kvpolicy.cli.options import SOME_FAILED
from kvpolicy.lab.bench.contenders.contender import (
    FORWARD,
    GENERATE,
    LIMIT,
    MODEL_ALONE,
    PRODUCTS_ALONE,
    Contender,
)
from kvpolicy.lab.bench.operating_points.largest_batch import LARGEST
from kvpolicy.lab.bench.roofline import Machine
from kvpolicy.lab.bench.rounds.turns import Turn, measure
from kvpolicy.lab.bench.workload import Prefill, Text
from kvpolicy.lab.cli.bench_run import workloads_of
from kvpolicy.lab.cli.bench_sizes import choose_sizes, without_effect

pytestmark = pytest.mark.usefixtures("little_work_for_the_limit")

SIZES = ("--shape", "tiny", "--batch", 2, "--prompt-min", 4, "--prompt-max", 9)
OPTIONS = (*SIZES, "--new-tokens", 14, "--budget", 8, "--buffer", 4, "--steps", 2)
NO_SIZES: dict[str, Any] = dict.fromkeys(
    [
        *("shape", "batch", "steps", "prompt_min", "prompt_max", "new_tokens", "budget", "buffer"),
        *("rounds", "lengths", "memory_limit", "prefill", "batches"),
    ]
)
FEW = ("--without", "generate_batch,kvpress")


@pytest.mark.slow
@pytest.mark.needs_reasoner
def test_the_command_prints_writes_and_continues(kvpolicy: Shell, tmp_path: Path) -> None:
    output, plot = tmp_path / "speed", tmp_path / "bench.svg"
    more = ("--policies", "full,streaming", "--lengths", "12,20", *FEW, "--output", output)
    found = kvpolicy("bench", *OPTIONS, *more, "--rounds", 1, "--plot", plot, "--json")
    assert found.status == 0, found.err
    assert found.out == (output / "bench.json").read_text(encoding="utf-8")
    names = [LIMIT, PRODUCTS_ALONE, MODEL_ALONE, GENERATE, "full", "streaming"]
    works = ["12 held", "20 held"]
    standings = found.json["standings"]
    assert [(one["work"], one["name"]) for one in standings] == [
        (work, name) for work in works for name in names
    ]
    for one in standings:
        for ratio in one["ratios"].values():
            assert ratio["low"] <= ratio["median"] <= ratio["high"]
        assert 0 < one["step_ms"] <= one["step_p95_ms"]
        assert one["limit_share"] > 0
        assert (one["compactions"] or 0) == (4 if one["name"] == "streaming" else 0)
    assert found.json["shape"]["name"] == "tiny"
    assert plot.read_text(encoding="utf-8").startswith("<?xml")
    turns = (output / "turns.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(turns) == 1 + 12

    again = kvpolicy("bench", *OPTIONS, *more, "--rounds", 2)
    assert again.status == 0, again.err
    assert "round 2" in again.err
    assert "round 1" not in again.err, "its turns were kept"
    for word in (
        "ms per step",
        "speed / generate's",
        "12 held",
        "20 held",
        "compactions in",
    ):
        assert word in again.out
    message = refusal(kvpolicy("bench", *OPTIONS, *more, "--rounds", 2, "--seed", 1))
    assert "--output" in message


@pytest.mark.slow
@pytest.mark.needs_reasoner
def test_a_real_model_is_measured_in_place_of_a_shape(kvpolicy: Shell) -> None:
    more = ("--policies", "full,knorm", "--lengths", 20, *FEW, "--rounds", 1, "--json")
    sizes = ("--batch", 2, "--budget", 8, "--buffer", 4, "--steps", 2)
    found = kvpolicy("bench", "--model", "reasoner", *sizes, *more)
    assert found.status == 0, found.err
    assert found.json["shape"]["name"] == "reasoner"
    assert found.json["num_parameters"] < 2e6
    names = [one["name"] for one in found.json["standings"]]
    assert names == [LIMIT, PRODUCTS_ALONE, MODEL_ALONE, GENERATE, "full", "knorm"]


def test_texts_and_memory_have_tables(kvpolicy: Shell, tmp_path: Path) -> None:
    plain = kvpolicy("bench", *OPTIONS, "--text", "--rounds", 1, "--policies", "knorm", *FEW)
    assert plain.status == 0, plain.err
    for word in ("x generate", "p95", "of limit", "knorm", MODEL_ALONE, "range"):
        assert word in plain.out
    memory = ("--memory", "--lengths", "9,30", "--policies", "knorm", "--output", tmp_path / "new")
    found = kvpolicy("bench", *OPTIONS, *memory)
    assert found.status == 0, found.err
    assert len(json.loads((tmp_path / "new" / "bench.json").read_text())["readings"]) == 2
    head, _, *rows = found.out.splitlines()
    assert "if all stayed" in head
    assert [row.split()[:2] for row in rows] == [["knorm", "9"], ["knorm", "30"]]


@pytest.mark.nightly
def test_counts_have_a_table(kvpolicy: Shell) -> None:
    arguments = ("bench", "--launches", *OPTIONS, "--policies", "full,knorm", "--lengths", 20)
    found = kvpolicy(*arguments)
    assert found.status == 0, found.err
    for word in (MODEL_ALONE, "full", "knorm", "devices.py:read", "1 + 0"):
        assert word in found.out
    found = kvpolicy(*arguments, "--json").json
    (alone, *mine) = found["launches"]
    assert all(one["operations"] > alone["operations"] for one in mine)
    assert [one["name"] for one in found["kernels"]] == ["full", "knorm"]


@needs_meta_forwards
def test_kernels_are_counted_without_memory(kvpolicy: Shell) -> None:
    arguments = ("bench", "--launches", *OPTIONS, "--policies", "knorm", "--device", "meta")
    found = kvpolicy(*arguments, "--lengths", 20, "--json").json
    (kernels,) = found["kernels"]
    assert found["launches"] == []
    assert sum(kernels["plain"].values()) > sum(kernels["fused"].values()) > 20
    (prompts,) = found["prompts"]
    assert prompts["plain"]["of_layer"].keys() == kernels["plain"].keys()
    assert prompts["plain"]["once"] > prompts["fused"]["once"] > 0
    table = kvpolicy(*arguments, "--lengths", 20).out
    assert "each layer" in table
    assert f"knorm, {prompts['tokens']:g} tokens" in table


@needs_meta_forwards
def test_kernels_of_plans_that_are_for_this_number_of_layers_are_counted(
    kvpolicy: Shell, tmp_path: Path
) -> None:
    plan = tmp_path / "mixed.toml"
    stacks = {"0:3": "knorm", "3:": "full"}  # of four layers
    plan.write_text(
        "".join(
            f'[[layers]]\nwhere = "{where}"\nstack = ["{stack}"]\n'
            for where, stack in stacks.items()
        )
    )
    arguments = ("bench", "--launches", *OPTIONS, "--plan", plan, "--device", "meta")
    found = kvpolicy(*arguments, "--shape", "5m", "--lengths", 20, "--json").json
    assert [one["name"] for one in found["prompts"]] == ["mixed"]


@pytest.mark.parametrize("mode", [(), ("--launches",)])
def test_what_cannot_be_counted_without_memory_is_refused(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch, mode: tuple[str, ...]
) -> None:
    monkeypatch.setattr(compat, "has_meta_forwards", lambda: False)
    arguments = ("bench", *mode, *OPTIONS, "--policies", "knorm", "--device", "meta")
    assert "--device meta" in refusal(kvpolicy(*arguments, "--lengths", 20))


def test_largest_batches_are_within_the_memory(kvpolicy: Shell, tmp_path: Path) -> None:
    arguments = (*OPTIONS, "--max-batch", "--lengths", 40, "--rounds", 1, "--policies", "knorm")
    limit = ("--memory-limit", 0.0002, "--json", "--output", tmp_path / "largest")
    found = kvpolicy("bench", *arguments, *limit, *FEW)
    assert found.status == 0, found.err
    generate, knorm = found.json["standings"]
    assert (generate["name"], knorm["name"]) == (GENERATE, "knorm")
    assert all(one["batch"] and one["kv_bytes"] <= 200e3 for one in (generate, knorm))
    message = refusal(kvpolicy("bench", *arguments, "--memory-limit", 0.000001, *FEW))
    assert "raise --memory-limit" in message


def test_what_is_left_out_is_not_compared_with(kvpolicy: Shell) -> None:
    arguments = ("--rounds", 1, "--policies", "knorm", "--lengths", 12)
    without = ("--without", "generate,generate_batch,kvpress,machine limit,products alone")
    plain, found = (
        kvpolicy("bench", *OPTIONS, *arguments, *without, *m) for m in ((), ("--json",))
    )
    assert plain.status == found.status == 0, plain.err
    assert "x generate" not in plain.out
    assert [one["name"] for one in found.json["standings"]] == [MODEL_ALONE, "knorm"]
    assert [list(one["ratios"]) for one in found.json["standings"]] == [[], [MODEL_ALONE]]


@pytest.mark.usefixtures("packs_small_products")
def test_like_stands_beside_like_with_packed_weights(kvpolicy: Shell) -> None:
    arguments = ("--rounds", 1, "--policies", "knorm", "--lengths", 12, "--json")
    found = kvpolicy("bench", *OPTIONS, *arguments, "--cpu-weights", "packed", *FEW)
    assert found.status == 0, found.err
    assert "packed 15 linear layers" in found.err
    ratios = {
        one["name"]: one["ratios"].get(GENERATE, {}).get("median")
        for one in found.json["standings"]
    }
    plain = [PRODUCTS_ALONE, MODEL_ALONE, GENERATE, "knorm"]
    assert list(ratios) == [LIMIT, *plain, *(f"{name}, packed" for name in plain)]
    assert [ratios[GENERATE], ratios[f"{GENERATE}, packed"]] == pytest.approx([1, 1])


@pytest.mark.nightly
@pytest.mark.usefixtures("no_compiler")
def test_like_stands_beside_like_with_compiled_steps(kvpolicy: Shell) -> None:
    arguments = ("--rounds", 1, "--policies", "knorm", "--lengths", 12, "--compile")
    without = ("--without", f"{PRODUCTS_ALONE},{MODEL_ALONE},generate_batch,kvpress", "--json")
    found = kvpolicy("bench", *OPTIONS, *arguments, *without)
    assert found.status == 0, found.err
    standings = {one["name"]: one for one in found.json["standings"]}
    plain = [GENERATE, "knorm"]
    mine = [f"{name}, compiled" for name in plain]
    assert list(standings) == [LIMIT, *plain, *mine]
    assert [name for name, one in standings.items() if one["compile_s"]] == mine
    assert standings[f"{GENERATE}, compiled"]["ratios"][GENERATE]["median"] == pytest.approx(1)
    assert standings["knorm, compiled"]["path"] == "static, compiled"


def test_a_missing_compiler_is_answered_before_anything_is_measured(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse() -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", refuse)
    arguments = ("--compile", "--policies", "knorm", *FEW, "--output", tmp_path / "speed")
    message = refusal(kvpolicy("bench", *OPTIONS, *arguments))
    assert "C++ compiler" in message
    assert not (tmp_path / "speed" / "turns.jsonl").exists()


def test_contenders_with_equal_names_are_refused(kvpolicy: Shell, tmp_path: Path) -> None:
    """Results are looked up by name."""
    plan = tmp_path / f"{GENERATE}.toml"
    plan.write_text('stack = ["snapkv"]\n')
    output = tmp_path / "speed"
    words = ("--rounds", 1, "--plan", plan, "--output", output)
    message = refusal(kvpolicy("bench", *OPTIONS, *words))
    assert f"'{GENERATE}'" in message
    assert "rename one" in message
    assert not (output / "bench.json").exists()


@pytest.mark.needs_reasoner
def test_complete_rounds_count_after_an_interrupt(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(jobs: Any, **_: object) -> Iterator[Turn]:
        for number, job in enumerate([*jobs, *jobs][: 2 * len(jobs) - 1]):
            yield Turn(number // len(jobs), job.name, measurement(1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpolicy.lab.cli.bench_run.measure", measure)
    output = tmp_path / "speed"
    found = kvpolicy("bench", *SIZES, "--rounds", 2, "--output", output)
    assert found.status == 130
    assert "1 of 2 rounds" in found.err
    standings = json.loads((output / "bench.json").read_text(encoding="utf-8"))["standings"]
    assert {tuple(one["rounds"]) for one in standings} == {(2.0,)}


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--shape", "9b"), ("'9b'", "100m")),
        (("--dtype", "int8"), ("int8", "float32")),
        (("--dtype", "auto"), ("auto", "float32")),
        (("--device", "nowhere"), ("nowhere",)),
        (("--plot", "speed.gif"), ("speed.gif", ".png")),
        (("--plot", "speed.png", "--memory"), ("--plot", "--memory")),
        (("--lengths", "1,x", "--memory"), ("--lengths", "'x'")),
        (("--lengths", "64,128", "--max-batch"), ("--max-batch", "--lengths")),
        (("--prefill", "64"), ("--prefill", "--gpu")),
        (("--batches", "2"), ("--batches", "--gpu")),
        (("--minutes", "1", "--memory"), ("--minutes", "--memory")),
        (("--memory", "--cpu-weights", "packed"), ("--memory", "leave out --cpu-weights")),
        (("--cpu-weights", "packed,fp4"), ("--cpu-weights", "'fp4'", "packed, bf16, int8")),
        (("--launches", "--compile"), ("--launches", "leave out --compile")),
        (("--text", "--memory"), ("--text and --memory",)),
        (("--without", "nobody"), ("'nobody'", "generate_batch")),
        (("--at-accuracy", "0.02"), ("--sweep FOLDER",)),
        (("--at-accuracy", "0.02", "--sweep", "x", "--policies", "h2o"), ("--policies",)),
        (("--output", "/dev/null/speed"), ("/dev/null/speed", "cannot be written")),
        (("--vllm-python", "no-such-python"), ("no-such-python", "--vllm-python")),
        (("--openvino-python", "no-such-python"), ("no-such-python", "--openvino-python")),
        (("--model", "reasoner", "--shape", "tiny"), ("--model and --shape",)),
        (("--model", "reasoner", "--lengths", "99999"), ("reasoner", "positions", "--lengths")),
    ],
)
@pytest.mark.needs_reasoner
def test_wrong_input_is_refused_with_a_sentence(
    kvpolicy: Shell, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    message = refusal(kvpolicy("bench", "--quick", *arguments))
    assert all(part in message for part in parts), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_a_gpu_benchmark_needs_a_gpu(kvpolicy: Shell) -> None:
    message = refusal(kvpolicy("bench", "--gpu", "--quick", "--policies", "knorm"))
    assert "--gpu" in message


GPU = ("bench", "--gpu", "--device", "cpu", "--quick", "--dtype", "float32")
GPU_SIZES = (
    "--lengths",
    40,
    "--batches",
    "2,1",
    "--prefill",
    "24,40",
    "--budget",
    16,
    "--buffer",
    4,
    "--steps",
    2,
)
GPU_WORKS = ["batch 2", "prompt of 24", "batch 1", "prompt of 40", "largest batch"]


@pytest.fixture
def gpu_walk(kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs `kvpolicy bench --gpu` on a CPU, in a folder of its own."""
    monkeypatch.setattr("kvpolicy.lab.bench.diagnostics.checks.TEXT", Text(1, 3, 30, 3))
    monkeypatch.chdir(tmp_path)
    plans = ("--policies", "full,knorm", "--memory-limit", 0.0004)
    return lambda *more: kvpolicy(*GPU, *GPU_SIZES, *plans, *more)


@pytest.fixture
def measures_nothing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Contenders answer at once; their names are noted."""
    ran: list[str] = []

    def run(self: Contender, work: Any) -> Any:
        ran.append(self.name)
        machine = Machine(1e12, 1e12) if self.name == LIMIT else None
        return measurement(1e-3, machine=machine)

    def passes(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr(Contender, "run", run)
    for check in ("check_tokens", "check_compactions"):
        monkeypatch.setattr(f"kvpolicy.lab.cli.bench_run.{check}", passes)
    return ran


def turns_in(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "turns.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines[1:]) if "round" in one]


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_can_be_walked_through_on_a_cpu(gpu_walk: Any) -> None:
    found = gpu_walk()
    assert found.status == 0, found.err
    assert "checking tokens and compactions on cpu" in found.err
    tables = found.out.split("\n\n")
    titles = [table.splitlines()[0] for table in tables]
    batches = ["batch 1", "batch 2", "largest batch"]
    assert [title for title in titles if title in batches] == batches
    of = dict(zip(titles, tables, strict=True))
    for word in ("rows", "limit ms", "of limit", "x full cache", "path"):
        assert word in of["largest batch"]
    for word in ("launches", "kernels", "gaps", "attention", "products", MODEL_ALONE, "knorm"):
        assert word in of["batch 1: what runs in a step, ms"]
    for word in (f"x {FORWARD}", "tok/s", "24", "40", "full", "knorm"):
        assert word in of["prefill"]

    (folder,) = Path("kvpolicy-bench").iterdir()
    turns = turns_in(folder)
    assert list(dict.fromkeys(one["work"] for one in turns)) == GPU_WORKS
    again = gpu_walk("--json")
    assert again.status == 0, again.err
    assert turns_in(folder) == turns, "nothing is measured twice"
    assert f"{len(turns)} turns" in again.err
    assert "checking" not in again.err
    assert again.out == (folder / "bench.json").read_text(encoding="utf-8")
    prefills = again.json["prefills"]
    assert [(one["name"], one["num_tokens"]) for one in prefills] == [
        (name, num) for num in (24, 40) for name in (FORWARD, "full", "knorm")
    ]
    assert all(one["over_forward"]["median"] > 0 for one in prefills)
    assert again.json["missing"] == []


@pytest.mark.usefixtures("measures_nothing")
def test_speeds_are_measured_although_a_check_has_failed(
    gpu_walk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: Any, cells: Any, **_: Any) -> None:
        if cells[0].series == "knorm":
            msg = "a kernel could not be compiled"
            raise RuntimeError(msg)

    with monkeypatch.context() as patch:
        patch.setattr("kvpolicy.lab.cli.bench_run.check_tokens", fails)
        found = gpu_walk("--json", "--output", "here")
    assert found.status == SOME_FAILED
    (missing,) = found.json["missing"]
    assert (missing["job"], missing["failed"]) == (["knorm", "tokens"], True)
    assert "could not be compiled" in missing["reason"]
    assert {one["work"] for one in turns_in(Path("here"))} == set(GPU_WORKS)
    again = gpu_walk("--json", "--output", "here")
    assert (again.status, again.json["missing"]) == (0, [])
    assert "checking" in again.err


@pytest.mark.usefixtures("measures_nothing")
def test_an_interrupted_benchmark_of_a_gpu_has_all_that_it_measured_and_goes_on(
    gpu_walk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops_in_the_middle(*args: Any, **options: Any) -> Iterator[Any]:
        yield from islice(measure(*args, **options), 8)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvpolicy.lab.cli.bench_run.measure", stops_in_the_middle)
        found = gpu_walk("--json", "--output", "here")
    assert found.status == 130
    before = turns_in(Path("here"))
    assert before
    shown = {(one["name"], one["work"]) for one in found.json["standings"]}
    assert shown == {
        (one["contender"], one["work"]) for one in before if "prompt" not in one["work"]
    }
    again = gpu_walk("--output", "here")
    assert again.status == 0, again.err
    after = turns_in(Path("here"))
    assert after[: len(before)] == before
    assert len({(one["contender"], one["work"]) for one in after}) == len(after) > len(before)


def test_what_there_is_no_time_for_is_left_out_and_measured_later(
    gpu_walk: Any, measures_nothing: list[str]
) -> None:
    found = gpu_walk("--minutes", 0, "--output", "here")
    assert found.status == 0, found.err
    assert (turns_in(Path("here")), measures_nothing) == ([], [])
    for work in GPU_WORKS[:-1]:
        assert f"knorm, {work}: left out" in found.err
    again = gpu_walk("--minutes", 60, "--output", "here", "--json")
    assert again.status == 0, again.err
    assert {one["work"] for one in turns_in(Path("here"))} == set(GPU_WORKS)
    assert again.json["missing"] == []
    assert len(measures_nothing) == len(turns_in(Path("here")))


def test_batches_come_before_long_prompts_and_the_largest_batch_is_last() -> None:
    sizes = {"batch": 8, "lengths": [40], "steps": 2, "prefill": [4, 8, 16], "batches": [5, 3, 2]}
    names = [work.name for work in workloads_of("gpu", sizes, 0)]
    prompts = ["prompt of 4", "prompt of 8", "prompt of 16"]
    batches = ["batch 5", "batch 3", "batch 2"]
    assert names == [batches[0], prompts[0], *batches[1:], *prompts[1:], LARGEST]


@pytest.mark.usefixtures("measures_nothing")
def test_what_does_not_fit_is_left_out_without_a_trial(gpu_walk: Any) -> None:
    found = gpu_walk("--batches", "2,400", "--output", "here", "--json")
    assert found.status == 0, found.err
    missing = found.json["missing"]
    assert [one["job"] for one in missing] == [["full", "batch 400"], ["knorm", "batch 400"]]
    assert not any(one["failed"] for one in missing)
    assert "does not fit" in missing[0]["reason"]
    alone = [one for one in turns_in(Path("here")) if one["work"] == "batch 400"]
    assert {one["contender"] for one in alone} == {LIMIT, PRODUCTS_ALONE, MODEL_ALONE}


def test_what_fails_on_a_gpu_stops_nothing_else(
    gpu_walk: Any, measures_nothing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Contender.run

    def fails_at_prompts(self: Contender, work: Any) -> Any:
        if self.name == "knorm" and isinstance(work, Prefill):
            msg = "an illegal instruction was encountered"
            raise RuntimeError(msg)
        return run(self, work)

    monkeypatch.setattr(Contender, "run", fails_at_prompts)
    found = gpu_walk("--output", "here", "--json")
    assert found.status == 1
    assert "an illegal instruction was encountered" in found.err
    failed = [one["job"] for one in found.json["missing"] if one["failed"]]
    assert failed == [["knorm", "prompt of 24"], ["knorm", "prompt of 40"]]
    names = {(one["contender"], one["work"]) for one in turns_in(Path("here"))}
    assert ("knorm", GPU_WORKS[-1]) in names
    assert ("knorm", GPU_WORKS[-2]) not in names
    monkeypatch.setattr(Contender, "run", run)
    found = gpu_walk("--output", "here")
    assert found.status == 0, found.err
    assert ("knorm", GPU_WORKS[-2]) in {
        (one["contender"], one["work"]) for one in turns_in(Path("here"))
    }


@pytest.mark.parametrize(
    ("mode", "given", "named"),
    [
        ("decode", {"new_tokens": 9, "prompt_min": 4}, ["--prompt-min", "--new-tokens"]),
        ("decode", {"batch": 2, "lengths": [9], "rounds": 1}, []),
        ("text", {"lengths": [9], "new_tokens": 9}, ["--lengths"]),
        ("memory", {"rounds": 2, "prompt_max": 9}, ["--rounds"]),
        ("launches", {"steps": 9, "batch": 2}, ["--steps"]),
        ("max_batch", {"batch": 9, "memory_limit": 1.0}, ["--batch"]),
        ("gpu", {"batch": 9, "batches": [9]}, ["--batch"]),
    ],
)
def test_sizes_that_change_nothing_are_named(
    mode: str, given: dict[str, Any], named: list[str]
) -> None:
    nothing = dict.fromkeys(choose_sizes(mode, at_accuracy=False, quick=True, **NO_SIZES))
    note = without_effect(mode, **(nothing | given)) or ""
    assert re.findall(r"--[a-z-]+(?= and|:)", note) == named


def test_a_size_that_changes_nothing_is_told(kvpolicy: Shell) -> None:
    words = ("--shape", "tiny", "--lengths", 9, "--policies", "knorm", "--new-tokens", 9)
    found = kvpolicy("bench", "--memory", *words)
    assert found.status == 0, found.err
    assert "--new-tokens" in found.err
