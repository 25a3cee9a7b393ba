"""Compiled steps give the same tokens, and are compiled before the measured ones."""

import pytest
import torch
from bench_parts import cell
from tiny import greedy_tokens, tiny_model
from torch._dynamo.utils import counters

from kvpolicy.lab.bench.contenders.contender import Contender
from kvpolicy.lab.bench.contenders.engine import engine_under
from kvpolicy.lab.bench.contenders.form import Form
from kvpolicy.lab.bench.contenders.generate import generate
from kvpolicy.lab.bench.contenders.model_alone import model_alone
from kvpolicy.lab.bench.rounds.turns import Job, measure
from kvpolicy.lab.bench.workload import Decode, Text, Workload

pytestmark = pytest.mark.usefixtures("no_compiler")

STEPS, TEXT = Decode(2, 30, 5), Text(2, 5, 9, 12)


def num_graphs(*_: object) -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.nightly
def test_generate_compiles_its_steps_and_prefills_as_it_is() -> None:
    model = tiny_model("qwen2", seed=3)
    called = Form.compiled(model).called
    prompt = [5, 9, 40, 2, 7]
    with torch.inference_mode():
        called(input_ids=torch.tensor([prompt]))
        assert num_graphs() == 0
        found = called.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert found[0, len(prompt) :].tolist() == greedy_tokens(model, prompt, 12)
    assert num_graphs() == 1, "one for steps over eleven lengths"
    assert "forward" not in vars(model), "the model is left as it is"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("engine", STEPS),
        ("generate", STEPS),
        ("engine", TEXT),
        ("generate", TEXT),
        ("model alone", STEPS),
    ],
)
def test_nothing_is_compiled_in_measured_steps(
    monkeypatch: pytest.MonkeyPatch, name: str, work: Workload
) -> None:
    """The clock counts graphs."""
    for module in ("engine", "generate", "model_alone"):
        monkeypatch.setattr(f"kvpolicy.lab.bench.contenders.{module}.synchronized_time", num_graphs)
    contender = compiled(name)
    (first, again) = measure([Job(contender, work)], rounds=2)
    assert num_graphs() > 0
    assert set(first.measured.steps_s) == {0.0}
    assert first.measured.compile_s > 0
    assert again.measured.compile_s == 0, "the turn before has compiled it"


def compiled(name: str) -> Contender:
    form = Form.compiled(tiny_model())
    if name == "engine":
        return engine_under(form.model, cell("knorm"), compile=True)
    return generate(form.called) if name == "generate" else model_alone(form.called)
