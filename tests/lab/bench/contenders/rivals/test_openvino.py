"""OpenVINO runs in another process, each step is timed, and its first token is looked at."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from bench_parts import ROW
from other_engines import interpreter
from tiny import tiny_model
from transformers import PreTrainedModel

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.contenders.contender import Contender
from kvpolicy.lab.bench.contenders.rivals.openvino import OPENVINO
from kvpolicy.lab.bench.contenders.rivals.rival import Room
from kvpolicy.lab.bench.workload import Decode, Text

TENSOR = """
class Tensor:
    def __init__(self, array):
        assert array.dtype == "int64" and array.ndim == 2
        self.array = array
"""
# Its texts begin with the token that a file beside it has. A step takes 2 ms, in bf16 1 ms, and
# the one with prompts 300 ms.
GENAI = """
import pathlib, time
from types import SimpleNamespace

clock = [0.0]
time.perf_counter = lambda: clock[0]
FIRST = int(pathlib.Path(__file__).with_name("first").read_text())

class SchedulerConfig(SimpleNamespace):
    pass

class GenerationConfig(SimpleNamespace):
    def set_eos_token_id(self, token):
        self.eos_token_id = token

class Handle:
    def __init__(self, wanted):
        assert wanted.ignore_eos and wanted.eos_token_id > 10_000
        self.left, self.token, self.ready = wanted.max_new_tokens, FIRST, []

    def can_read(self):
        return bool(self.ready)

    def read(self):
        return {0: SimpleNamespace(generated_ids=[self.ready.pop()])}

class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, properties):
        print("loading")
        assert (pathlib.Path(model) / "exported").exists() and device == "CPU"
        assert scheduler.max_num_seqs == 2 and scheduler.max_num_batched_tokens >= 128
        self.exact = properties.get("INFERENCE_PRECISION_HINT") == "f32"
        assert self.exact == ("KV_CACHE_PRECISION" in properties)
        assert properties["INFERENCE_NUM_THREADS"] >= 1
        self.handles = []

    def add_request(self, number, token_ids, wanted):
        self.handles.append(Handle(wanted))
        return self.handles[-1]

    def has_non_finished_requests(self):
        return any(one.left for one in self.handles)

    def step(self):
        begins = any(one.token == FIRST for one in self.handles if one.left)
        clock[0] += 0.3 if begins else 0.002 if self.exact else 0.001
        for one in self.handles:
            if one.left:
                one.ready.append(one.token)
                one.token, one.left = -1, one.left - 1
"""
EXPORT = """
import pathlib

def main_export(model, output, task, device):
    assert (pathlib.Path(model) / "model.safetensors").exists()
    output.mkdir()
    (output / "exported").touch()
"""


def likeliest(model: PreTrainedModel) -> int:
    (prompt,) = Decode(1, 24, 1).prompts(model.config.vocab_size)
    with torch.inference_mode():
        return int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())


@contextmanager
def fake(
    folder: Path, model: PreTrainedModel, first: int, genai: str = GENAI
) -> Iterator[list[Contender]]:
    """OpenVINO of an interpreter that imports other modules of these names."""
    modules = {"openvino": TENSOR, "openvino_genai": genai, "optimum.exporters.openvino": EXPORT}
    python = interpreter(folder, modules)
    (folder / "first").write_text(str(first))
    room = Room(2**20, 64, 2)
    with OPENVINO.started(model, python, room, forms=["", "packed", "bf16"]) as contenders:
        yield contenders


def test_steps_are_timed_one_by_one_in_both_precisions(tmp_path: Path) -> None:
    model = tiny_model()
    with fake(tmp_path, model, likeliest(model)) as contenders:
        exact, rounded = contenders
        done = exact.run(Decode(batch=2, held=10, steps=1))
        text = rounded.run(Text(batch=2, prompt_min=3, prompt_max=5, new_tokens=9))
    assert [one.name for one in contenders] == ["OpenVINO", "OpenVINO, bf16"]
    assert done.steps_s == pytest.approx([0.002] * 31), "the first of 32 warms up"
    assert text.steps_s == pytest.approx([0.001] * 7)
    assert done.prefill_s == pytest.approx(0.3)
    assert done.kv_bytes == 2 * ROW * (10 + 32)
    assert not exact.supports(Decode(1, 4096, 1)), "its prompts are prefilled"


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    with (
        pytest.raises(KVPolicyError, match="computes something else"),
        fake(tmp_path, model, (likeliest(model) + 1) % model.config.vocab_size),
    ):
        pass


def test_an_engine_that_loses_tokens_is_named(tmp_path: Path) -> None:
    model = tiny_model()
    genai = GENAI.replace("one.ready.append(one.token)", "")
    with (
        pytest.raises(KVPolicyError, match=r"OpenVINO of .*--openvino-python"),
        fake(tmp_path, model, 0, genai),
    ):
        pass


def test_a_gpu_is_refused(tmp_path: Path) -> None:
    model = tiny_model().to("meta")
    with (
        pytest.raises(KVPolicyError, match="leave out --openvino-python"),
        fake(tmp_path, model, 0),
    ):
        pass
