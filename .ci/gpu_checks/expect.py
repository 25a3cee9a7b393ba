"""Compute on the CPU what the machine with the GPU is to find: a program of `prepare`."""

import without_numba  # noqa: F401, I001 - before what imports Numba

import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from workload import DRAWN, FULL, QUICK, QUICK_STACKS, STACKS, Sizes, plan_named, prompts_of


def main(folder: Path, sizes: Sizes) -> None:
    """Write ``expected.json``, and print a line for each plan."""
    # A rehearsal has one core: to import torch in another process takes longer than its texts.
    num_processes = 1 if sizes is QUICK else len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        found = {}
        names = QUICK_STACKS if sizes is QUICK else tuple(STACKS)
        for name, one in zip(names, pool.map(_expected, names, [sizes] * len(names)), strict=True):
            found[name] = one
            num = sum(len(text["tokens"]) for text in one["greedy"])
            sys.stdout.write(
                f"{name}: {num} tokens, bf16 differs by {one['bf16_deviation']:.5f} nats,"
                f" {one['seconds']:.1f} s\n"
            )
            sys.stdout.flush()
    versions = {name: version(name) for name in ("torch", "transformers", "numpy")}
    written = {"versions": versions, "plans": found}
    (folder / "expected.json").write_text(json.dumps(written), encoding="utf-8")


def _expected(name: str, sizes: Sizes) -> dict[str, Any]:
    import torch
    from decoding import forced_logprobs, generated_texts
    from kvpolicy_reasoner.model import load_reasoner
    from texts import deviation

    torch.set_num_threads(1)
    started = time.monotonic()
    model, tokenizer = load_reasoner()
    prompts = prompts_of(tokenizer, sizes)
    plan = plan_named(name, sizes)
    texts, logprobs, _ = generated_texts(model, tokenizer, plan, prompts, sizes.new_tokens)
    found: dict[str, Any] = {"greedy": [text.to_dict() for text in texts], "logprobs": logprobs}
    if name in DRAWN:
        drawn, _, _ = generated_texts(model, tokenizer, plan, prompts, sizes.new_tokens, drawn=True)
        found["drawn"] = [text.to_dict() for text in drawn]
    tokens: list[Sequence[int]] = [text.tokens for text in texts]
    rounded = forced_logprobs(model.bfloat16(), tokenizer, plan, prompts, tokens)
    found["bf16_deviation"] = deviation(rounded, logprobs)
    return {**found, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    main(Path(sys.argv[1]), QUICK if "--quick" in sys.argv else FULL)
