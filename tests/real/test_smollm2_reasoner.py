"""The bundled adapter on SmolLM2: what a user gets by its name, and that it solves its task.

PEFT, which adds an adapter while it computes, is the oracle of the merged weights. Skipped where
SmolLM2 is not installed; nothing is trained.
"""

import pytest
import torch
from kvpolicy_reasoner import SMOLLM2_REASONER, bundled_path
from kvpolicy_reasoner.problems import problems_of
from shell import Shell
from transformers import AutoTokenizer

from kvpolicy import Engine, Plan
from kvpolicy.errors import ModelError
from kvpolicy.lab.models import fingerprint
from kvpolicy.lab.tasks.task import grader_of, load_task
from kvpolicy.model.installed import model_folder, registered_model
from kvpolicy.model.loading import load_model
from kvpolicy.toolkit.steering_vectors import load_steering_vector

pytestmark = pytest.mark.slow

BASE = "smollm2"
STEERED = "skipkv-smollm2-reasoner"  # the plan that names the vectors
# The most by which logits of this model, which are of size 20, may differ between two orders of
# sums in single precision.
ROUNDING = 1e-3


@pytest.fixture(autouse=True)
def _needs_base() -> None:
    try:
        model_folder(BASE, registered_model(BASE))
    except ModelError as error:
        pytest.skip(str(error))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_merged_adapter_computes_what_peft_computes() -> None:
    peft = pytest.importorskip("peft")
    model, tokenizer = load_model(SMOLLM2_REASONER, device="cpu")
    assert model.dtype == torch.float32
    problem = problems_of(SMOLLM2_REASONER).draw(1, seed=0)[0]
    ids = torch.tensor([tokenizer(problem.prompt + problem.trace)["input_ids"]])
    base, _ = load_model(BASE, device="cpu")
    with torch.inference_mode():
        found = model(ids).logits
        plain = base(ids).logits
        theirs = peft.PeftModel.from_pretrained(base, bundled_path(SMOLLM2_REASONER))(ids).logits
    torch.testing.assert_close(found, theirs, atol=ROUNDING, rtol=0)
    assert (found - plain).abs().max() > 1
    # It was trained on such traces: the untrained model predicts few of their tokens.
    right = [(one[0, :-1].argmax(-1) == ids[0, 1:]).float().mean() for one in (found, plain)]
    assert right[0] > 0.8 > right[1]


def test_bundled_tokenizer_is_that_of_the_recipe() -> None:
    adapter = pytest.importorskip("kvpolicy_reasoner.train.adapter")
    shipped = AutoTokenizer.from_pretrained(bundled_path(SMOLLM2_REASONER))
    built = adapter.build_chat_tokenizer()
    assert shipped.chat_template == built.chat_template
    for problem in problems_of(SMOLLM2_REASONER).draw(20, seed=0):
        text = problem.prompt + problem.trace
        assert shipped(text)["input_ids"] == built(text)["input_ids"]


def test_short_chains_are_solved(kvpolicy: Shell) -> None:
    n = 4
    words = ["sample", "--name", SMOLLM2_REASONER, "--depth", 3, "--n", n]
    answer = kvpolicy("reasoner", *words, "--generate", "--json")
    assert answer.status == 0, answer.err
    assert sum(one["right"] for one in answer.json) >= n - 1
    assert all(one["finished"] for one in answer.json)


def test_a_budget_bounds_its_rows_and_the_task_grades_its_answers() -> None:
    model, tokenizer = load_model(SMOLLM2_REASONER, device="cpu", cpu_weights="packed")
    item = load_task(SMOLLM2_REASONER).examples(1, seed=0)[0]
    plan = Plan.uniform("h2o", budget=64, buffer=16, prefill_buffer=64)
    (result,) = Engine(model, tokenizer, plan).generate([item.prompt], max_new_tokens=80).results()
    assert result.rows_evicted
    assert result.peak_rows <= 64 + 64
    assert load_task(SMOLLM2_REASONER).grade(f"\\boxed{{{item.answer}}}", item)


def test_bundled_vectors_belong_to_the_model_and_to_the_plan() -> None:
    model, _ = load_model(SMOLLM2_REASONER, device="cpu", dtype="bfloat16")
    vector = load_steering_vector(SMOLLM2_REASONER)
    assert vector.calibration.fingerprint == fingerprint(model)
    assert (vector.calibration.task, vector.calibration.split) == (SMOLLM2_REASONER, "train")
    assert vector.vector.shape == (model.config.hidden_size,)
    layers = Plan.load(STEERED).resolve(model.config.num_hidden_layers).layers
    (policy,) = layers[vector.layer].stack
    assert policy.knobs["layer"] == vector.layer
    assert policy.knobs["delimiter"] == vector.calibration.delimiter


def test_the_plan_with_the_vectors_shortens_an_answer_that_stays_correct() -> None:
    model, tokenizer = load_model(SMOLLM2_REASONER, device="cpu", cpu_weights="packed")
    task = load_task(SMOLLM2_REASONER)
    (item,) = task.examples(1, seed=0)
    steered = Plan.load(STEERED)
    answers = []
    for plan in (steered, Plan.uniform("skipkv", budget=steered.budget, buffer=steered.buffer)):
        engine = Engine(model, tokenizer, plan, slots=1)
        answers += engine.generate([item.prompt], max_new_tokens=200).results()
    assert grader_of(task)(answers[0].text, item)
    assert [answer.finish_reason for answer in answers] == ["stop", "length"]
