"""vLLM runs in another process, and is timed by the difference of two lengths."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench_parts import ROW
from other_engines import interpreter
from tiny import tiny_model
from transformers import PreTrainedModel

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.contenders.contender import Contender
from kvpolicy.lab.bench.contenders.rivals.rival import Room
from kvpolicy.lab.bench.contenders.rivals.vllm import VLLM
from kvpolicy.lab.bench.workload import Decode, Text

FAKE_VLLM = """
import json, pathlib, time
from types import SimpleNamespace

__version__ = "0"
print("a library that prints to the standard output")
STEP_S, clock = 0.002, [0.0]
time.perf_counter = lambda: clock[0]

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, model, **options):
        config = json.loads((pathlib.Path(model) / "config.json").read_text())
        assert config["num_hidden_layers"] == 2
        assert (pathlib.Path(model) / "model.safetensors").exists()
        assert options["skip_tokenizer_init"] and not options["enable_prefix_caching"]
        assert options["kv_transfer_config"]["kv_connector"] == "DecodeBenchConnector"
        assert options["dtype"] == "float32" and options["max_model_len"] == 64

    def generate(self, prompts, wanted, use_tqdm):
        print("generating")
        assert wanted.ignore_eos and wanted.temperature == 0
        clock[0] += 0.2  # whatever precedes the first token
        clock[0] += STEP_S * wanted.max_tokens
        if wanted.max_tokens == 60:
            raise ValueError("too many\\ntokens")
        output = SimpleNamespace(token_ids=[0] * wanted.max_tokens)
        return [SimpleNamespace(outputs=[output]) for _ in prompts]
"""


@contextmanager
def fake_vllm(folder: Path, model: PreTrainedModel, source: str) -> Iterator[Contender]:
    """vLLM of an interpreter that imports another module of that name."""
    python = interpreter(folder, {"vllm": source})
    with VLLM.started(model, python, Room(2**20, 64, 2), forms=["bf16"]) as (contender,):
        yield contender


def test_vllm_is_measured_by_the_difference_of_two_lengths(tmp_path: Path) -> None:
    """The 0.2 s before the first token do not count."""
    model = tiny_model()
    with fake_vllm(tmp_path, model, FAKE_VLLM) as contender:
        done = contender.run(Decode(batch=2, held=10, steps=1))
        text = contender.run(Text(batch=2, prompt_min=3, prompt_max=5, new_tokens=9))
        with pytest.raises(KVPolicyError, match=r"too many.*--vllm-python"):
            contender.run(Text(batch=2, prompt_min=3, prompt_max=5, new_tokens=60))
    for measured in (done, text):
        (step_s,) = measured.steps_s
        assert step_s == pytest.approx(0.002)
    assert done.kv_bytes == 2 * ROW * (10 + 32), "at least 32 steps"
    assert done.read_bytes == 2 * ROW * (10 + 16.5)
    assert contender.supports(Decode(1, 16_384, 1)), "nothing is prefilled"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('no such engine')", "ImportError: no such engine"),
        ("import os, sys; print('gone', file=sys.stderr, flush=True); os._exit(3)", "gone"),
        ("import os; os._exit(3)", "it ended without a word"),
    ],
)
def test_a_vllm_that_does_not_start_is_named(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message), fake_vllm(tmp_path, tiny_model(), source):
        pass
