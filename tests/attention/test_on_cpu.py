"""Attention on a CPU runs in Numba where it can, and in torch elsewhere."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import attrs
import pytest
import torch
from decode_cases import Case, cases
from hypothesis import assume, given
from torch import Tensor

from kvpolicy.attention import choose
from kvpolicy.attention.choose import attend_on_cpu, has_numba
from kvpolicy.attention.torch_backend.decode import Counts, DecodeSlabs

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="needs the extra cpu")


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    has_numba.cache_clear()
    yield
    has_numba.cache_clear()


def test_torch_attends_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda _: None)
    assert not has_numba()


@needs_numba
@pytest.mark.parametrize("layer", ["omp", "tbb", "workqueue"])
def test_threads_are_shared_with_torch_or_numba_is_not_used(
    layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba

    monkeypatch.setattr(numba, "threading_layer", lambda: layer)
    assert has_numba() == (layer == "omp")


@needs_numba
def test_torch_keeps_its_number_of_threads() -> None:
    # In a new process, since Numba starts its threads once.
    code = (
        "import torch; torch.set_num_threads(1); import kvpolicy.attention.numba_backend; "
        "print(torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@needs_numba
def test_numba_attends_in_fp32() -> None:
    assert has_numba()


@needs_numba
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_torch_attends_in_a_forked_process() -> None:
    def attend() -> Tensor:
        keys, values, new = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), torch.ones(1, 2, 8)
        slabs = DecodeSlabs(keys, values, torch.full((1, 2, 4), -1))
        counts = Counts(torch.zeros(1, 2).long(), torch.zeros(1).long(), torch.ones(1) > 0)
        return attend_on_cpu(torch.randn(1, 4, 8), new, new, slabs, counts, scaling=1.0)

    assert torch.equal(attend(), torch.ones(1, 4, 8))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # those that torch had do not survive either
        os.write(write, str(attend().tolist()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == str(torch.ones(1, 4, 8).tolist())
    assert os.waitpid(child, 0)[1] == 0


def with_only(case: Case, slot: int) -> dict[str, Any]:
    """The arguments of a case for one of its slots."""

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[slot : slot + 1].clone()

    arguments, slabs, counts = case.arguments, case.slabs, case.arguments["counts"]
    assert isinstance(counts, Counts)
    names = ("keys", "values", "positions", "window")
    own = attrs.evolve(
        slabs,
        tracks=[cut(track) for track in slabs.tracks],
        accumulated=[cut(track) for track in slabs.accumulated],
        **{name: cut(getattr(slabs, name)) for name in names},
    )
    new = {name: cut(arguments[name]) for name in ("query", "key", "value")}
    of_slot = Counts(*(cut(one) for one in (counts.rows, counts.seq_len, counts.live)))
    return {**arguments, **new, "slabs": own, "counts": of_slot}


@needs_numba
@given(case=cases(adjacent=True))
def test_a_slot_equals_itself_alone_to_the_bit(case: Case) -> None:
    assume(case.dtype == torch.float32)
    alone = [attend_on_cpu(**with_only(case, slot)) for slot in range(len(case.slabs.keys))]
    assert torch.equal(attend_on_cpu(**case.arguments), torch.cat(alone))


@needs_numba
@given(case=cases(adjacent=True))
def test_nan_and_infinity_stay_in_their_slot(case: Case) -> None:
    assume(case.dtype == torch.float32)
    live = case.arguments["counts"].live
    assume(bool(live[0]))
    before = attend_on_cpu(**with_only(case, len(live) - 1))
    for bad in (torch.nan, torch.inf):
        arguments = copy.deepcopy(case.arguments)
        arguments["query"][0] = bad
        output = attend_on_cpu(**arguments)
        assert output[0].isnan().all()
        if len(live) > 1:
            assert torch.equal(output[-1:], before)
