"""kvpress is given what the policies have, or left out with a reason."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from bench_parts import SIZE, cells, jobs_at
from tiny import tiny_model

from kvpolicy.lab.bench.contenders import kvpress
from kvpolicy.lab.bench.contenders.build import build_contenders
from kvpolicy.lab.bench.contenders.contender import (
    CONTINUOUS,
    FORWARD,
    GENERATE,
    KVPRESS,
    LIMIT,
    MODEL_ALONE,
    PRODUCTS_ALONE,
    Contender,
)
from kvpolicy.lab.bench.contenders.form import Form
from kvpolicy.lab.bench.contenders.kvpress import presses_for
from kvpolicy.lab.bench.models import kv_row_bytes
from kvpolicy.lab.bench.rounds.summary import summarize
from kvpolicy.lab.bench.rounds.turns import measure
from kvpolicy.lab.bench.workload import Decode, Text
from kvpolicy.lab.sweep.grid import Cell, build_cells
from kvpolicy.lab.sweep.sweep_file import Series

# Contenders that are left out where a press is compared with policies.
NOT_COMPARED = (LIMIT, PRODUCTS_ALONE, CONTINUOUS)


def fake_kvpress() -> tuple[ModuleType, list[Any]]:
    made: list[Any] = []

    class ScorerPress:
        pass

    @dataclass
    class SnapKVPress(ScorerPress):
        compression_ratio: float = 0.0
        window_size: int = 64

    class KnormPress:  # the right name, but no scorer
        pass

    class DecodingPress:
        def __init__(self, **given: Any) -> None:
            made.append(given)

        @contextmanager
        def __call__(self, model: Any) -> Iterator[None]:
            yield

    module = ModuleType("kvpress")
    for one in (ScorerPress, SnapKVPress, KnormPress, DecodingPress):
        setattr(module, one.__name__, one)
    return module, made


def contenders_of(mine: list[Cell]) -> tuple[Contender, ...]:
    found = build_contenders([Form.plain(tiny_model())], mine, without=NOT_COMPARED)
    assert found.absent == {}
    return tuple(one for one in found.all if one.decode is not None)


def test_a_press_gets_budget_interval_and_knobs_of_its_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, made = fake_kvpress()
    monkeypatch.setitem(sys.modules, "kvpress", library)
    mine = cells("snapkv", "knorm", "h2o", "snapkv+protect", budget=24, buffer=6)
    contenders = contenders_of(mine)
    names = [one.name for one in contenders]
    assert names[:4] == [MODEL_ALONE, GENERATE, "snapkv", "kvpress SnapKVPress"]
    assert names[4:] == ["knorm", "h2o", "snapkv+protect"]
    assert [one.references.get(KVPRESS) for one in contenders[2:4]] == ["kvpress SnapKVPress", None]
    assert contenders[3].period == 6
    done = contenders[3].run(Decode(2, 60, 4))
    row = kv_row_bytes(tiny_model())
    assert done.read_bytes == 2 * row * (24 + 1 + 3.5), "its budget is held, not the text"
    (given,) = made
    assert (given["target_size"], given["compression_interval"]) == (24, 6)
    assert given["base_press"].window_size == 8, "the engine's, not 64"


def test_plans_that_differ_in_knobs_only_have_separate_presses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, made = fake_kvpress()
    monkeypatch.setitem(sys.modules, "kvpress", library)
    plans = {
        label: {"stack": [{"policy": "snapkv", "window_size": size}]}
        for label, size in (("wide", 8), ("narrow", 4))
    }
    series = [Series(label, plan) for label, plan in plans.items()]
    mine = build_cells(series, num_layers=2, budgets=[24], buffer=6)
    contenders = contenders_of(mine)
    presses = ["kvpress SnapKVPress (wide)", "kvpress SnapKVPress (narrow)"]
    names = [MODEL_ALONE, GENERATE, "wide", presses[0], "narrow", presses[1]]
    assert [one.name for one in contenders] == names
    jobs = jobs_at(list(contenders))
    found = {one.name: one for one in summarize(measure(jobs, rounds=1), jobs, SIZE)}
    assert list(found) == names, "the round is complete"
    assert [contender.references[KVPRESS] for contender in contenders[2::2]] == presses
    assert found["wide"].ratios[KVPRESS].median > 0
    assert {one["base_press"].window_size for one in made} == {8, 4}


def test_a_missing_kvpress_is_reported_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    found = build_contenders([Form.plain(tiny_model())], cells("knorm"), without=NOT_COMPARED)
    assert [one.name for one in found.all] == [MODEL_ALONE, GENERATE, FORWARD, "knorm"]
    assert "cannot be imported" in found.absent["kvpress"]
    assert ".[benchmarks]" in found.absent["kvpress"]


def test_a_kvpress_that_needs_other_transformers_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It can be imported with any transformers, and fails when it decodes."""
    library, _ = fake_kvpress()
    monkeypatch.setitem(sys.modules, "kvpress", library)
    lines = ["torch>=2", "transformers<4,>=3; python_version > '3'"]
    monkeypatch.setattr(kvpress, "requires", lambda _: lines)
    absent = presses_for(tiny_model(), cells("snapkv"))[1]
    assert absent is not None
    assert "transformers<4,>=3" in absent
    monkeypatch.setattr(kvpress, "requires", lambda _: ["transformers>=3"])
    assert presses_for(tiny_model(), cells("snapkv"))[1] is None


@pytest.mark.filterwarnings("ignore")  # from its imports
def test_kvpress_itself_stays_within_budget_and_interval() -> None:
    model = tiny_model()
    presses, absent = presses_for(model, cells("knorm", budget=12, buffer=4))
    if absent is not None:
        pytest.skip(absent)
    (mine,) = presses.values()
    done = mine.run(Text(2, 2, 4, 40))
    row = 2 * kv_row_bytes(model)
    assert len(done.steps_s) == 38
    # It counts steps, not rows: a cache may exceed budget and interval by what it began with.
    assert row * 12 < done.kv_bytes <= row * (12 + 4)
    assert done.read_bytes < done.kv_bytes
    held = mine.run(Decode(2, 100, 9))
    assert len(held.steps_s) == 12, "three intervals"
    assert row * 12 < held.kv_bytes <= row * (12 + 4 + 1)
