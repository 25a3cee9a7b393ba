"""Generates with vLLM, in an environment of its own; `contenders.vllm` starts this file.

It imports nothing of kvpolicy. Every line on its standard input is a JSON object: the first has the
arguments of ``vllm.LLM``, every other one prompts and a number of new tokens. It answers each with
one line: ``{"version"}``, ``{"elapsed_s"}``, or ``{"error"}`` at its end.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> int:
    """Serve until the standard input ends."""
    # vLLM and its libraries print to the standard output: answers have a stream of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        import vllm  # type: ignore[import-not-found,unused-ignore]

        llm = vllm.LLM(**json.loads(sys.stdin.readline()))
        answer(version=vllm.__version__)
        for line in sys.stdin:
            asked = json.loads(line)
            prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
            wanted = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=asked["new_tokens"],
                ignore_eos=True,
                detokenize=False,
            )
            start = time.perf_counter()
            found = llm.generate(prompts, wanted, use_tqdm=False)
            elapsed_s = time.perf_counter() - start
            lengths = {len(one.outputs[0].token_ids) for one in found}
            if lengths != {asked["new_tokens"]}:
                msg = f"generated {sorted(lengths)} tokens, not {asked['new_tokens']}"
                raise RuntimeError(msg)
            answer(elapsed_s=elapsed_s)
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
