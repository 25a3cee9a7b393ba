"""Kernels compiled for sm_90 without a GPU: sizes, spills, shared memory, order of accesses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra 'kernels' is not installed")

PROGRAM = Path(__file__).parents[1] / "support/compile_kernels.py"

# An H100 has 228 KiB of shared memory and 65,536 registers per multiprocessor.
SHARED_BYTES = 228 * 1024
REGISTERS = 65_536
# Instructions of a kernel without tensor cores, whose products are unrolled, are 500 KB.
MOST_CODE_BYTES = 250_000

FORMS = {
    *("in 8 bits", "in 8 and 4 bits", "in 4 bits", "in 8 bits with plain values"),
    *("of 64 in 4 bits", "of 96 and 64", "of 256"),
}
MULTIPLY = {
    *(f"attend to rows {form}" for form in FORMS),
    "attend",
    "attend with sums",
    "attend with short heads",
    "attend in a window",
    "attend alone",
    "attend alone with sums",
    "attend alone with every track and sinks",
    "attend in segments",
    "attend from prompts",
    "attend from prompts in a window",
    "attend from prompts with long heads",
    "add up",
    "add up in a window with every track",
    "add up with long heads",
    "exempt pairs",
    "exempt pairs of 256",
}
IN_PLACE = {"compact", "compact behind prompts", "compact from a staging area", "drop oldest"}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_is_compiled(kernels) -> None:
    source = Path(__file__).parents[2] / "kvpolicy"
    if not source.is_dir():
        pytest.skip("the sources are not here: these tests run against a wheel")
    launched = {
        name
        for file in source.rglob("*.py")
        if "triton" in str(file.relative_to(source))
        for name in re.findall(r"^ +(_\w+)\[", file.read_text(encoding="utf-8"), re.M)
    }
    assert {kernel["kernel"] for kernel in kernels.values()} == launched


def test_no_kernel_spills_registers(kernels) -> None:
    assert {name for name, kernel in kernels.items() if kernel["stack"]} == set()


def test_three_programs_of_each_kernel_fit_on_a_multiprocessor(kernels) -> None:
    """One alone would wait for memory most of the time."""
    for name, kernel in kernels.items():
        assert 3 * kernel["shared"] <= SHARED_BYTES, name
        assert 3 * 32 * kernel["warps"] * kernel["registers"] <= REGISTERS, name


def test_no_kernel_is_unrolled_into_much_code(kernels) -> None:
    assert {name for name, kernel in kernels.items() if kernel["cubin"] > MOST_CODE_BYTES} == set()


def test_products_of_16_bit_types_are_made_by_tensor_cores(kernels) -> None:
    assert {name for name, kernel in kernels.items() if kernel["tensor_cores"]} == MULTIPLY


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_thread_reads_no_byte_of_rows_alone(kernels, form) -> None:
    """Strides of rows in bytes are given such that more of them are known to lie side by side."""
    of_live_slot = 1
    assert kernels[f"attend to rows {form}"]["single_bytes"] == of_live_slot


@pytest.mark.parametrize("name", sorted(IN_PLACE))
def test_rows_move_only_after_all_threads_have_read_them(kernels, name) -> None:
    order = " ".join(kernels[name]["accesses"])
    assert re.fullmatch(r"(ld\.global )+bar\.sync( st\.global)+", order), order


def test_logits_are_read_only_after_all_threads_have_stored_them(kernels) -> None:
    """Between the last store of attention and the first load of what accumulates."""
    order = " ".join(kernels["attend alone with sums"]["accesses"])
    assert re.search(
        r"st\.global( bar\.sync)+( ld\.global)+( bar\.sync| ld\.global)*( st\.global)+$", order
    )


def test_kernels_are_compiled_once_for_prompts_of_any_length() -> None:
    """Or twice: each new number of tokens, sequences or rows would else wait for the compiler."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = PROGRAM.with_name("kernel_variants.py")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    variants = json.loads(done.stdout)
    once = ("_rotate", "_add_up", "_units", "_exempt_pairs", "_totals", "_compact")
    assert variants == {**dict.fromkeys(once, 1), "_attend_queries": 2}


def test_rotations_round_each_product(kernels) -> None:
    """As models do: a product that is added to another one unrounded gives other keys."""
    assert kernels["rotate"]["fused"] == 0
