"""vLLM, as a rival.

No prompt is prefilled: vLLM's own connector for benchmarks of decoding says that all but its last
token are in the pages, which were filled with random numbers at the start. Every sequence has pages
of its own, since prefixes are not cached.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from kvpolicy.lab.bench.contenders.contender import VLLM as NAME
from kvpolicy.lab.bench.contenders.rivals.rival import Rival, Room, beside, common_environment
from kvpolicy.lab.bench.models import weight_bytes

_FILLED = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"startup_fill": True, "fill_mean": 0.0, "fill_std": 1.0},
}


def _arguments(
    model: PreTrainedModel, _forms: Sequence[str], folder: Path, room: Room
) -> dict[str, Any]:
    """The arguments of ``vllm.LLM``; the model is written to a folder."""
    common = {
        "model": str(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": room.most_tokens,
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
    share = min(0.9, (room.kv_bytes + 1.3 * weight_bytes(model)) / total)
    return {**common, "load_format": "dummy", "gpu_memory_utilization": share}


def _environment(room: Room) -> dict[str, str]:
    return {
        **common_environment(room),
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(room.kv_bytes / 2**30) + 1),  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


VLLM: Final = Rival(
    NAME,
    "--vllm-python",
    beside("vllm_worker.py"),
    _arguments,
    _environment,
    devices=("cpu", "cuda"),
    same_tokens=False,
)
