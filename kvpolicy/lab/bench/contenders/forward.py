"""The model's own forward over a prompt, as a contender: what a prefill is compared with."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from kvpolicy.lab.bench.contenders.contender import FORWARD, Contender, Measurement
from kvpolicy.lab.bench.models import kv_row_bytes
from kvpolicy.lab.bench.timing import synchronized_time
from kvpolicy.lab.bench.workload import Prefill

_LONG_S = 3  # what takes longer is not done twice


def forward(model: PreTrainedModel) -> Contender:
    """One forward of transformers, with a cache that keeps all rows."""

    def prefill(work: Prefill) -> Measurement:
        token_ids = torch.tensor(work.prompts(model.config.vocab_size), device=model.device)

        @torch.inference_mode()
        def bring_in() -> None:
            model(input_ids=token_ids, use_cache=True, logits_to_keep=1)

        seconds = better_of_two(bring_in, model.device)
        kv_bytes = token_ids.numel() * kv_row_bytes(model)
        return Measurement((seconds,), kv_bytes=kv_bytes, read_bytes=0, prefill_s=seconds)

    return Contender(FORWARD, prefill=prefill, references={FORWARD: FORWARD})


def better_of_two(act: Callable[[], object], device: torch.device) -> float:
    """Seconds that something takes: the better of two times, or the only one of what is long."""
    first = _seconds(act, device)
    return first if first > _LONG_S else min(first, _seconds(act, device))


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    started = synchronized_time(device)
    act()
    return synchronized_time(device) - started
