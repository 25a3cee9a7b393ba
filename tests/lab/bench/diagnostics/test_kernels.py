"""Kernels that a GPU launches in a step are counted, of models of any size."""

import attrs
import pytest
from bench_parts import cell, needs_meta_forwards
from transformers import PreTrainedModel

from kvpolicy.lab.bench.diagnostics.kernels import kernels_of
from kvpolicy.lab.bench.models import random_model, shape_named
from kvpolicy.lab.bench.workload import Decode
from kvpolicy.lab.sweep.grid import build_cells
from kvpolicy.lab.sweep.sweep_file import Series


def model(name: str, device: str, dtype: str = "bfloat16") -> PreTrainedModel:
    shape = attrs.evolve(shape_named(name), num_layers=2)
    return random_model(shape, 0, max_positions=9000, dtype=dtype, device=device)


@needs_meta_forwards
@pytest.mark.parametrize(("held", "attention"), [(64, 2 * 2), (8704, 3 * 2)])
def test_a_step_of_a_large_model_needs_no_memory(held: int, attention: int) -> None:
    """Of one sequence, whose long slab is cut into chunks."""
    found = kernels_of(model("8b", "meta"), cell("full"), Decode(1, held, 1))
    assert found.plain["products"] == 7 * 2 + 1
    assert found.plain["attention"] == found.fused["attention"] == attention
    assert found.plain["others"] > 60
    fused = {**found.fused, "others": 0}
    assert fused == {
        "products": 4 * 2 + 1,
        "attention": attention,
        "norms": 2 * 2 + 1,
        "RoPE": 2,
        "gates": 2,
        "others": 0,
    }
    assert found.fused["others"] < 40


@needs_meta_forwards
def test_numbers_do_not_matter() -> None:
    """Casts to fp32, which half precision needs, are kernels."""
    work = Decode(2, 40, 1)
    here, nowhere, wide = (
        kernels_of(model("tiny", *kind), cell("h2o"), work)
        for kind in (("cpu",), ("meta",), ("cpu", "float32"))
    )
    assert here == nowhere
    assert wide.plain["others"] < here.plain["others"]
    assert wide.fused["norms"] == here.fused["norms"] == 5


@needs_meta_forwards
@pytest.mark.parametrize("rows", ["int8", "int4"])
def test_rows_in_integers_need_no_kernel_more(rows: str) -> None:
    """The kernel that stores a new row makes its integers, and the one that attends reads them."""
    plan = {"stack": ["full"], "rows": rows}
    (of_integers,) = build_cells([Series("full", plan)], num_layers=2, budgets=[None], buffer=8)
    work = Decode(2, 40, 1)
    plain, found = (
        kernels_of(model("tiny", "meta"), one, work) for one in (cell("full"), of_integers)
    )
    assert found == plain
