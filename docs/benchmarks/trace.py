"""Cost of a recording: CPU time of runs with recording, divided by that without.

    python docs/benchmarks/trace.py

Runs alternate, and ratios are computed within a round, so that other load on the machine affects
all runs equally.
"""

import time
from contextlib import nullcontext
from statistics import median

import torch
from kvpolicy_reasoner.model import load_reasoner
from kvpolicy_reasoner.task import make_problems

from kvpolicy import Engine, Plan, recording

ROUNDS = 7


def cpu_s(engine: Engine, prompts: list[str], how: str) -> float:
    """Seconds of one run."""
    block = {
        "off": nullcontext(),
        "on": recording(engine),
        "with kept rows": recording(engine, kept=True),
    }
    begun = time.process_time()
    with block[how]:
        engine.generate(prompts, max_new_tokens=150, stop_ids=()).results()
    return time.process_time() - begun


def main() -> None:
    """Measure two stacks: one is called in every step, the other at compactions only."""
    torch.set_num_threads(1)
    model, tokenizer = load_reasoner()
    prompts = [problem.prompt for problem in make_problems(8, seed=1)]
    for stack in (["h2o", "protect"], ["rkv", "protect"]):
        engine = Engine(model, tokenizer, Plan.uniform(*stack, budget=64, buffer=32))
        cpu_s(engine, prompts, "off")
        ratios: dict[str, list[float]] = {"on": [], "with kept rows": []}
        for _ in range(ROUNDS):
            off = cpu_s(engine, prompts, "off")
            for how, found in ratios.items():
                found.append(cpu_s(engine, prompts, how) / off)
        for how, found in ratios.items():
            spread = f"{min(found):.2f} to {max(found):.2f}"
            print(f"{'+'.join(stack)}, {how}: {median(found):.2f} ({spread}) times without")


if __name__ == "__main__":
    main()
