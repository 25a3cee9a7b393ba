"""llama.cpp runs in another process, from a GGUF file with the numbers of the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from bench_parts import ROW
from other_engines import interpreter
from tiny import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.contenders.contender import Contender
from kvpolicy.lab.bench.contenders.rivals.llama_cpp import LLAMA_CPP, write_gguf
from kvpolicy.lab.bench.contenders.rivals.rival import Room
from kvpolicy.lab.bench.workload import Decode

pytest.importorskip("gguf")

# Every token is a fixed one. A forward with tokens of prompts takes 300 ms, others 2 ms, and with
# rows in fp16 1 ms.
FAKE = """
import ctypes, pathlib, time
from types import SimpleNamespace

clock = [0.0]
time.perf_counter = lambda: clock[0]
FIRST = int(pathlib.Path(__file__).with_name("first").read_text())
GGML_TYPE_F32, GGML_TYPE_F16 = 0, 1
LOGITS = (ctypes.c_float * 61)()
LOGITS[FIRST] = 1
held = {}

def llama_backend_init(): print("loading")
def llama_model_default_params(): return SimpleNamespace()
def llama_context_default_params(): return SimpleNamespace()
def llama_model_load_from_file(path, options): return pathlib.Path(path.decode()).exists()
def llama_model_get_vocab(model): return None
def llama_vocab_n_tokens(vocab): return 61
def llama_get_memory(context): return context
def llama_memory_clear(memory, data): held.clear()

def llama_init_from_model(model, wanted):
    assert wanted.n_seq_max == 2 and wanted.n_ctx >= 128 and wanted.n_threads >= 1
    return wanted

def llama_batch_init(size, embeddings, sequences):
    fields = {name: [0] * size for name in ("token", "pos", "n_seq_id", "logits")}
    return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(size)], **fields)

def llama_decode(context, batch):
    for i in range(batch.n_tokens):
        sequence = batch.seq_id[i][0]
        assert batch.pos[i] == held.get(sequence, 0), "tokens follow each other"
        held[sequence] = batch.pos[i] + 1
    decodes = batch.n_tokens == len(held)
    clock[0] += (0.002 if context.type_k == GGML_TYPE_F32 else 0.001) if decodes else 0.3
    return 0

def llama_get_logits_ith(context, place):
    return ctypes.cast(LOGITS, ctypes.POINTER(ctypes.c_float))
"""


@contextmanager
def fake(folder: Path, model: PreTrainedModel, first: int) -> Iterator[list[Contender]]:
    """llama.cpp of an interpreter that imports another module of that name."""
    python = interpreter(folder, {"llama_cpp": FAKE})
    (folder / "first").write_text(str(first))
    with LLAMA_CPP.started(model, python, Room(2**20, 64, 2), forms=["bf16"]) as contenders:
        yield contenders


def likeliest(model: PreTrainedModel) -> int:
    (prompt,) = Decode(1, 24, 1).prompts(model.config.vocab_size)
    with torch.inference_mode():
        return int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())


def test_steps_are_timed_one_by_one_in_both_precisions(tmp_path: Path) -> None:
    model = tiny_model()
    with fake(tmp_path, model, likeliest(model)) as (exact, rounded):
        done = exact.run(Decode(batch=2, held=10, steps=1))
        half = rounded.run(Decode(batch=2, held=10, steps=1))
    assert done.steps_s == pytest.approx([0.002] * 31)
    assert half.steps_s == pytest.approx([0.001] * 31)
    assert done.prefill_s == pytest.approx(0.6), "a forward for each prompt"
    assert done.kv_bytes == 2 * ROW * (10 + 32)


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    with (
        pytest.raises(KVPolicyError, match="computes something else"),
        fake(tmp_path, model, (likeliest(model) + 1) % 61),
    ):
        pass


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("llama", torch.bfloat16), ("qwen3", torch.float16)],
)
def test_the_file_has_the_numbers_of_the_model(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """transformers, which undoes what llama.cpp does to a Llama, reads them back."""
    # The reader takes heads of Qwen3 to have its usual size.
    model = tiny_model(family, vocab=64, head_dim=128).to(dtype).float()
    write_gguf(model, tmp_path / "model.gguf", dtype)
    back = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name
    assert back.config.rms_norm_eps == pytest.approx(model.config.rms_norm_eps)


def test_models_of_other_families_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KVPolicyError, match="leave out --llama-cpp-python"):
        write_gguf(tiny_model("qwen2"), tmp_path / "model.gguf", torch.float32)
