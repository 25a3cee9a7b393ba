"""vLLM, as a contender: a subprocess with an interpreter of its own, which has vLLM installed.

The time of a step is the difference of two lengths over the same prompts, divided by the difference
of the lengths. No prompt is prefilled: vLLM's own connector for benchmarks of decoding says that
all but its last token are in the pages, which were filled with random numbers at the start. Every
sequence has pages of its own, since prefixes are not cached.
"""

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.contenders.contender import VLLM, Contender, Measurement
from kvpolicy.lab.bench.models import kv_row_bytes, weight_bytes
from kvpolicy.lab.bench.workload import Decode, Prompts, Text

_WORKER = Path(__file__).with_name("vllm_worker.py")
_STEPS = 32  # at least; with fewer, the difference is small beside the noise
_FILLED = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"startup_fill": True, "fill_mean": 0.0, "fill_std": 1.0},
}


@contextmanager
def vllm_contender(
    model: PreTrainedModel, python: Path, *, kv_bytes: int, most_tokens: int
) -> Iterator[Contender]:
    """Start vLLM; it runs until the block ends.

    Args:
        model: The model, which vLLM gets as a folder.
        python: An interpreter that has vLLM.
        kv_bytes: Bytes for keys and values.
        most_tokens: Tokens of the longest sequence.

    Yields:
        The contender.

    Raises:
        KVPolicyError: The interpreter cannot be started, or vLLM cannot.
    """
    with tempfile.TemporaryDirectory(prefix="kvpolicy-vllm-") as folder:
        arguments = _arguments(model, Path(folder), kv_bytes, most_tokens)
        worker = _Worker(python, _environment(kv_bytes), Path(folder) / "log")
        try:
            worker.ask(arguments)
            yield _contender(model, worker)
        finally:
            worker.close()


class _Worker:
    """The subprocess."""

    def __init__(self, python: Path, environment: Mapping[str, str], log: Path) -> None:
        self._python, self._log = python, log
        try:
            with log.open("wb") as errors:
                self._process = subprocess.Popen(
                    # Isolated: the folder of the worker has modules of other names' meaning.
                    [python, "-I", _WORKER],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
        except OSError as error:
            msg = (
                f"--vllm-python was given {python}, which cannot be started ({error.strerror}); "
                "give the interpreter of an environment with vLLM: VENV/bin/python"
            )
            raise KVPolicyError(msg) from error

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Send one line and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            first, *_ = answer["error"].splitlines() or [""]
            msg = (
                f"vLLM of {self._python} failed: {first:.200}; install it in an environment of its "
                "own as docs/benchmarks/bench.md says, or leave out --vllm-python"
            )
            raise KVPolicyError(msg)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it ended without a word")


def _contender(model: PreTrainedModel, worker: _Worker) -> Contender:
    row_bytes = kv_row_bytes(model)

    def step_s(prompts: Prompts, new_tokens: int) -> float:
        def elapsed_s(num: int) -> float:
            answer = worker.ask({"prompts": prompts, "new_tokens": num})
            return float(answer["elapsed_s"])

        elapsed_s(1)  # warms up
        short, long = elapsed_s(1), elapsed_s(new_tokens)
        if long <= short:
            msg = (
                f"vLLM took {long:.3f} s for {new_tokens} tokens and {short:.3f} s for one, which "
                "tells nothing about a step; give more steps with --steps, or a larger --shape"
            )
            raise KVPolicyError(msg)
        return (long - short) / (new_tokens - 1)

    def decode(work: Decode) -> Measurement:
        seconds = step_s(work.prompts(model.config.vocab_size), work.steps + 1)
        tokens = work.batch * work.held
        return Measurement(
            (seconds,),
            kv_bytes=(tokens + work.batch * work.steps) * row_bytes,
            read_bytes=(tokens + work.batch * (work.steps + 1) / 2) * row_bytes,
        )

    def text(work: Text) -> Measurement:
        prompts = work.prompts(model.config.vocab_size)
        seconds = step_s(prompts, work.new_tokens)
        tokens = sum(map(len, prompts))
        return Measurement(
            (seconds,),
            kv_bytes=(tokens + work.batch * work.new_tokens) * row_bytes,
            read_bytes=(tokens + work.batch * work.new_tokens / 2) * row_bytes,
        )

    return Contender(VLLM, decode, text, period=_STEPS, is_outside=True)


def _arguments(
    model: PreTrainedModel, folder: Path, kv_bytes: int, most_tokens: int
) -> dict[str, Any]:
    """The arguments of ``vllm.LLM``; the model is written to a folder."""
    common = {
        "model": str(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": most_tokens,
        "enable_prefix_caching": False,
        "kv_transfer_config": _FILLED,
        "skip_tokenizer_init": True,
    }
    if model.device.type == "cpu":
        model.save_pretrained(folder)
        return {**common, "enforce_eager": True}
    model.config.save_pretrained(folder)
    # The other contenders' model stays on the device meanwhile.
    total = torch.cuda.get_device_properties(model.device).total_memory
    share = min(0.9, (kv_bytes + 1.3 * weight_bytes(model)) / total)
    return {**common, "load_format": "dummy", "gpu_memory_utilization": share}


def _environment(kv_bytes: int) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(kv_bytes / 2**30) + 1),  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
