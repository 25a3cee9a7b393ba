"""Decodes with llama.cpp; `worker.py` runs this file in an environment with llama-cpp-python.

A step gives every sequence one token, the likeliest one, and is timed with its choice.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

_MOST_TOKENS = 512  # in a forward


def start(arguments: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Load the model in each form; returns what decodes."""
    import llama_cpp  # type: ignore[import-not-found,unused-ignore]
    import numpy as np

    llama_cpp.llama_backend_init()
    most, batch = arguments["tokens"], arguments["batch"]
    engines = {}
    for form, file in arguments["files"].items():
        options = llama_cpp.llama_model_default_params()
        # A copy of the weights in another order, for faster products, is its default.
        model = llama_cpp.llama_model_load_from_file(file["path"].encode(), options)
        if not model:
            msg = f"{file['path']} cannot be loaded"
            raise RuntimeError(msg)
        wanted = llama_cpp.llama_context_default_params()
        wanted.n_seq_max = batch
        wanted.n_ctx = batch * (-(-most // 256) * 256)
        wanted.n_batch = wanted.n_ubatch = max(_MOST_TOKENS, batch)
        wanted.n_threads = wanted.n_threads_batch = arguments["threads"]
        wanted.type_k = wanted.type_v = getattr(llama_cpp, f"GGML_TYPE_{file['rows']}")
        context = llama_cpp.llama_init_from_model(model, wanted)
        if not context:
            msg = f"there is no memory for {batch} sequences of {most} tokens"
            raise RuntimeError(msg)
        engines[form] = model, context
    room = llama_cpp.llama_batch_init(max(_MOST_TOKENS, batch), 0, 1)

    def decode(prompts: list[list[int]], new_tokens: int, form: str) -> dict[str, Any]:
        model, context = engines[form]
        size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

        def forward(entries: Sequence[tuple[int, int, int, bool]]) -> None:
            """Run tokens, each with its position, its sequence, and whether one follows it."""
            room.n_tokens = len(entries)
            for i, (token, position, sequence, is_last) in enumerate(entries):
                room.token[i], room.pos[i] = token, position
                room.n_seq_id[i], room.seq_id[i][0] = 1, sequence
                room.logits[i] = is_last
            if status := llama_cpp.llama_decode(context, room):
                msg = f"llama_decode returned {status}"
                raise RuntimeError(msg)

        def drawn(place: int) -> int:
            logits = llama_cpp.llama_get_logits_ith(context, place)
            return int(np.ctypeslib.as_array(logits, (size,)).argmax())

        times = [time.perf_counter()]
        found: list[list[int]] = []
        for sequence, prompt in enumerate(prompts):
            last = len(prompt) - 1
            for first in range(0, len(prompt), _MOST_TOKENS):
                part = range(first, min(first + _MOST_TOKENS, len(prompt)))
                forward([(prompt[i], i, sequence, i == last) for i in part])
            found.append([drawn(len(part) - 1)])
        times.append(time.perf_counter())
        for _ in range(new_tokens - 1):
            forward(
                [
                    (tokens[-1], len(prompt) + len(tokens) - 1, sequence, True)
                    for sequence, (prompt, tokens) in enumerate(zip(prompts, found, strict=True))
                ]
            )
            for sequence, tokens in enumerate(found):
                tokens.append(drawn(sequence))
            times.append(time.perf_counter())
        prefill_s, *steps_s = (after - before for before, after in pairwise(times))
        # The first step after the prompts warms up the others.
        return {"steps_s": steps_s[1:] or steps_s, "prefill_s": prefill_s, "tokens": found}

    return decode
