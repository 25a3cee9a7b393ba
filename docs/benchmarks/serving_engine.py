"""`Engine.generate` without a server; `serving_throughput.py` starts this file.

The first line on the standard input is a JSON object with the arguments of `load`; an empty object
says that the engine is ready. Each other line has ``{"requests": [...]}`` and is answered like
those of `serving_clients.py`.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpolicy import Engine, Plan, Request, load_model


def load(model: str, plan: str, slots: int, cpu_weights: Any) -> Engine:
    """The engine as ``kvpolicy serve`` builds it.

    Args:
        model: Folder of the model.
        plan: Plan file, or name of an installed plan.
        slots: Sequences decoded together.
        cpu_weights: ``"plain"`` or ``"packed"``.
    """
    loaded, tokenizer = load_model(model, cpu_weights=cpu_weights)
    return Engine(loaded, tokenizer, Plan.load(Path(plan)), slots=slots, on_hook_error="answer")


def generate(engine: Engine, requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Generate for all requests in one run.

    Args:
        engine: The engine.
        requests: ``{"prompt": TEXT, "max_tokens": N}`` each.

    Returns:
        ``{"elapsed_s": ..., "answers": [...]}`` as of the clients; all requests are sent at once.
    """
    times: list[list[float]] = [[] for _ in requests]
    results = []
    start = time.perf_counter()
    run = engine.generate(
        [Request(one["prompt"], max_new_tokens=one["max_tokens"], stop_ids=()) for one in requests]
    )
    while not run.done:
        events = run.step()
        now = time.perf_counter() - start
        for number, _ in events.tokens:
            times[number].append(now)
        results += events.results
    elapsed_s = time.perf_counter() - start
    results.sort(key=lambda result: result.id)
    answers = [
        {"sent_s": 0.0, "times": times[one.id], "text": one.text, "error": one.error}
        for one in results
    ]
    return {"elapsed_s": elapsed_s, "answers": answers}


def main() -> None:
    # Libraries print to the standard output: answers have a stream of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine = load(**json.loads(sys.stdin.readline()))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(engine, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
