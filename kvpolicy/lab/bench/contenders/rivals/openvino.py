"""OpenVINO GenAI, as a rival: its engine with continuous batching, full cache.

The model as it is is computed in its own precision; the form ``bf16`` of one in fp32 is what it
does by default on a processor that multiplies bfloat16: weights and rows in 16 bits. Prompts are
prefilled.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from kvpolicy.lab.bench.contenders.contender import OPENVINO as NAME
from kvpolicy.lab.bench.contenders.rivals.rival import Rival, Room, beside, common_environment

_MOST_HELD = 2048  # a prefill of more takes minutes in every round
_BLOCK = 32  # tokens, on a CPU
# Names of OpenVINO.
_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def _arguments(
    model: PreTrainedModel, forms: Sequence[str], folder: Path, room: Room
) -> dict[str, Any]:
    model.save_pretrained(folder / "model")
    own = _PRECISIONS[model.dtype]
    # Rows are as wide as weights unless that is said otherwise; fp32 has to be said.
    exact = {"INFERENCE_PRECISION_HINT": own, "KV_CACHE_PRECISION": own}
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    return {
        "model": str(folder / "model"),
        "exported": str(folder / "exported"),
        "forms": {form: {**threads, **({} if form else exact)} for form in forms},
        "blocks": room.batch * (-(-room.most_tokens // _BLOCK) + 1),
        "batch": room.batch,
        "tokens": room.batch * room.most_tokens,
    }


OPENVINO: Final = Rival(
    NAME,
    "--openvino-python",
    beside("openvino_worker.py"),
    _arguments,
    common_environment,
    forms=("bf16",),
    most_held=_MOST_HELD,
)
