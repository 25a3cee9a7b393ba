"""Decodes with OpenVINO GenAI; `worker.py` runs this file in an environment that has it.

All prompts come in in one forward, so that every step after it decodes all sequences.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

_NO_TOKEN = 2**31 - 1


def start(arguments: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Export a model, and start a pipeline for each form; returns what decodes."""
    import numpy as np
    import openvino  # type: ignore[import-not-found,unused-ignore]
    import openvino_genai  # type: ignore[import-not-found,unused-ignore]

    exported = Path(arguments["exported"])
    _export(arguments["model"], exported)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = arguments["blocks"]
    scheduler.max_num_seqs = arguments["batch"]
    scheduler.max_num_batched_tokens = arguments["tokens"]
    scheduler.enable_prefix_caching = False
    pipelines = {
        form: openvino_genai.ContinuousBatchingPipeline(exported, scheduler, "CPU", properties)
        for form, properties in arguments["forms"].items()
    }
    number = 0

    def decode(prompts: list[list[int]], new_tokens: int, form: str) -> dict[str, Any]:
        nonlocal number
        pipeline = pipelines[form]
        wanted = openvino_genai.GenerationConfig()
        wanted.max_new_tokens = new_tokens
        # No token ends a text; that of a model without one would be -1, which is refused.
        wanted.set_eos_token_id(_NO_TOKEN)
        wanted.ignore_eos = True
        handles = []
        for prompt in prompts:
            number += 1
            token_ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(pipeline.add_request(number, token_ids, wanted))
        found: list[list[int]] = [[] for _ in prompts]
        times = [time.perf_counter()]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            times.append(time.perf_counter())
            for tokens, handle in zip(found, handles, strict=True):
                while handle.can_read():
                    tokens += [one for part in handle.read().values() for one in part.generated_ids]
            if {len(tokens) for tokens in found} != {len(times) - 1}:
                msg = f"after {len(times) - 1} steps there are {list(map(len, found))} tokens"
                raise RuntimeError(msg)
        prefill_s, *steps_s = (after - before for before, after in pairwise(times))
        # The first step after the prompts warms up the others.
        return {"steps_s": steps_s[1:] or steps_s, "prefill_s": prefill_s, "tokens": found}

    return decode


def _export(model: str, exported: Path) -> None:
    """Write a model of transformers as OpenVINO's."""
    from optimum.exporters.openvino import (  # type: ignore[import-not-found,unused-ignore]
        main_export,
    )

    main_export(model, output=exported, task="text-generation-with-past", device="cpu")
