"""Decodes with vLLM; `worker.py` runs this file in an environment that has it.

The time of a step is the difference of two lengths over the same prompts, divided by the difference
of the lengths.
"""

import time
from collections.abc import Callable
from typing import Any


def start(arguments: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Start vLLM with the arguments of ``vllm.LLM``; returns what decodes."""
    import vllm  # type: ignore[import-not-found,unused-ignore]

    llm = vllm.LLM(**arguments)

    def elapsed_s(prompts: list[dict[str, list[int]]], new_tokens: int) -> float:
        wanted = vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        found = llm.generate(prompts, wanted, use_tqdm=False)
        took_s = time.perf_counter() - started
        lengths = {len(one.outputs[0].token_ids) for one in found}
        if lengths != {new_tokens}:
            msg = f"generated {sorted(lengths)} tokens, not {new_tokens}"
            raise RuntimeError(msg)
        return took_s

    def decode(prompts: list[list[int]], new_tokens: int, form: str) -> dict[str, Any]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        elapsed_s(given, 1)  # warms up
        short, long = elapsed_s(given, 1), elapsed_s(given, new_tokens)
        if long <= short:
            msg = (
                f"it took {long:.3f} s for {new_tokens} tokens and {short:.3f} s for one, which "
                "tells nothing about a step; give more steps with --steps, or a larger --shape"
            )
            raise RuntimeError(msg)
        return {"steps_s": [(long - short) / (new_tokens - 1)]}

    return decode
