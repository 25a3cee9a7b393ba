"""Attention on a CPU runs in Numba where it can, and in torch elsewhere."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from decode_cases import TOLERANCE, Case, assert_as_expected, cases, expected
from fresh_process import run_fresh
from hypothesis import assume, given
from torch import Tensor

from kvpolicy.attention import choose
from kvpolicy.attention.base import DecodeLayer
from kvpolicy.attention.choose import backend_for
from kvpolicy.attention.numba_backend.backend import NumbaBackend

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="needs the extra cpu")


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    def forget() -> None:
        if find_spec("numba") is not None:
            from kvpolicy.numba_common import can_run

            can_run.cache_clear()

    forget()
    yield
    forget()


def attend(layer: DecodeLayer, **new: Any) -> Tensor:
    return backend_for(CPU, layer.keys.dtype).bind(layer)(**new)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_numba_attends_in_usual_precisions_where_it_is_installed(
    installed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "HAS_NUMBA", installed)
    chosen = isinstance(backend_for(CPU, dtype), NumbaBackend)
    assert chosen == (installed and dtype != torch.float64)


@needs_numba
@pytest.mark.parametrize("layer", ["omp", "tbb", "workqueue"])
def test_threads_are_shared_with_torch_or_numba_is_not_used(
    layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba

    from kvpolicy.numba_common import can_run

    monkeypatch.setattr(numba, "threading_layer", lambda: layer)
    assert can_run() == (layer == "omp")


@needs_numba
def test_torch_keeps_its_number_of_threads() -> None:
    # In a new process, since Numba starts its threads once.
    code = (
        "import torch; torch.set_num_threads(1); import kvpolicy.attention.numba_backend.decode; "
        "print(torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@needs_numba
def test_first_token_does_not_wait_for_the_import_of_numba(tmp_path: Path) -> None:
    code = """
import sys
from tiny import tiny_model
from kvpolicy import Engine, Plan
engine = Engine(tiny_model(), plan=Plan.uniform("h2o", budget=12, buffer=4))
for num in (1, 2):
    engine.generate([[1, 2, 3]], max_new_tokens=num).results()
    print("numba" in sys.modules)
"""
    done = run_fresh(code, folder=tmp_path)
    assert done.out.split() == ["False", "True"], done.err


@needs_numba
def test_numba_shares_the_threads_of_torch() -> None:
    from kvpolicy.numba_common import can_run

    assert can_run()


@needs_numba
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_torch_attends_in_a_forked_process() -> None:
    def attended() -> Tensor:
        keys, values, new = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), torch.ones(1, 2, 8)
        counts = (torch.zeros(1, 2).long(), torch.zeros(1).long(), torch.ones(1) > 0)
        layer = DecodeLayer(keys, values, torch.full((1, 2, 4), -1), *counts)
        return attend(layer, query=torch.randn(1, 4, 8), key=new, value=new, scaling=1.0)

    assert torch.equal(attended(), torch.ones(1, 4, 8))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # those that torch had do not survive either
        os.write(write, str(attended().tolist()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == str(torch.ones(1, 4, 8).tolist())
    assert os.waitpid(child, 0)[1] == 0


def attended_alone(case: Case, slot: int) -> Tensor:
    """The output of a case that has one of its slots only."""

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[slot : slot + 1].clone()

    layer, new = case.layer, case.new
    names = ("keys", "values", "positions", "window", "rows", "seq_len", "live")
    own = attrs.evolve(
        layer,
        tracks=[cut(track) for track in layer.tracks],
        accumulated=[cut(track) for track in layer.accumulated],
        **{name: cut(getattr(layer, name)) for name in names},
    )
    return attend(own, **new | {name: cut(new[name]) for name in ("query", "key", "value")})


@needs_numba
@given(case=cases(adjacent=True, capacities=[300]))
def test_rows_that_are_attended_to_in_parts_are_those_of_loops(case: Case) -> None:
    wanted = expected(case)
    output = attend(case.layer, **case.new)
    assert output.dtype == case.dtype
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])


@needs_numba
@given(case=cases(adjacent=True, dims=[16, 80, 128], groups=[2, 5, 7]))
def test_heads_and_groups_of_other_sizes_are_those_of_loops(case: Case) -> None:
    wanted = expected(case)
    output = attend(case.layer, **case.new)
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])


@needs_numba
@given(case=cases(adjacent=True, capacities=[1, 9, 70, 300]))
def test_a_slot_equals_itself_alone_to_the_bit(case: Case) -> None:
    alone = [attended_alone(case, slot) for slot in range(len(case.layer.keys))]
    assert torch.equal(attend(case.layer, **case.new), torch.cat(alone))


@needs_numba
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_numbers_of_16_bits_are_read_as_they_are(dtype: torch.dtype) -> None:
    """A sequence with one row attends to it only, so that its output is the value."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = torch.where(every.isfinite(), every, torch.zeros_like(every))
    values = every.view(1, 2**10, 1, 64)
    for size in (64, 20):  # with whole vectors, and with a rest
        new = values[0, :, :, :size]
        slots = len(new)
        slabs = [torch.zeros(slots, 1, 3, dim, dtype=dtype) for dim in (8, size)]
        counts = torch.zeros(slots, 1).long(), torch.zeros(slots).long(), torch.ones(slots) > 0
        layer = DecodeLayer(*slabs, torch.full((slots, 1, 3), -1), *counts)
        key = torch.zeros(slots, 1, 8, dtype=dtype)
        output = attend(layer, query=key, key=key, value=new, scaling=1.0)
        assert torch.equal(output, new)
        assert torch.equal(layer.values[:, :, 0], new)


@needs_numba
@given(case=cases(adjacent=True))
def test_nan_and_infinity_stay_in_their_slot(case: Case) -> None:
    live = case.layer.live
    assume(bool(live[0]))
    before = attended_alone(case, len(live) - 1)
    for bad in (torch.nan, torch.inf):
        layer, new = copy.deepcopy((case.layer, case.new))
        new["query"][0] = bad
        output = attend(layer, **new)
        assert output[0].isnan().all()
        if len(live) > 1:
            assert torch.equal(output[-1:], before)
