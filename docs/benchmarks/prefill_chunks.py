"""How long does a prompt take to enter, in chunks of several sizes?

    python docs/benchmarks/prefill_chunks.py
    python docs/benchmarks/prefill_chunks.py --shape 30m --tokens 8192 --budget 1024 --rounds 5

A model with random weights is given one prompt of random tokens and draws one token, under each
policy with each ``prefill_buffer``, of which the first is the plan's buffer. Sizes take turns. A
cell is the least processor time of its rounds, of one thread, and behind it how many times as fast
it is as chunks of the buffer in the same round, the median of the rounds.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

from kvpolicy import Engine, Plan, Request
from kvpolicy.lab.bench.models import SHAPES, random_model

SIZES = (128, 256, 512, 1024, 2048, 4096)
POLICIES = "streaming,h2o,snapkv,rkv"


def seconds(engine: Engine, prompt: list[int]) -> float:
    """Processor time until the first token of a prompt is drawn."""
    run = engine.generate([Request(prompt, 1, stop_ids=())])
    start = time.process_time()
    run.results()
    return time.process_time() - start


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="host", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes, shape = [int(size) for size in given.sizes.split(",")], SHAPES[given.shape]
    model = random_model(shape, 0, max_positions=given.tokens + 8)
    rng = torch.Generator().manual_seed(0)
    prompt = torch.randint(shape.vocab_size, (given.tokens,), generator=rng).tolist()
    times: dict[str, list[list[float]]] = {one: [] for one in given.policies.split(",")}
    for policy, rounds in times.items():
        sized = {"budget": given.budget, "buffer": sizes[0]}
        plans = [Plan.uniform(policy, **sized, prefill_buffer=size) for size in sizes]
        for _ in range(given.rounds):
            rounds.append([])
            for plan, size in zip(plans, sizes, strict=True):
                engine = Engine(model, plan=plan, slots=1, chunk=size)
                rounds[-1].append(seconds(engine, prompt))
                print(f"{policy} {size}: {rounds[-1][-1]:.2f} s", flush=True)
    print("\n" + " ".join(["policy", *map(str, sizes)]))
    for policy, rounds in times.items():
        least = [min(of_size) for of_size in zip(*rounds, strict=True)]
        faster = [median(one[0] / one[i] for one in rounds) for i in range(len(sizes))]
        cells = [f"{a:.2f} ({b:.2f} x)" for a, b in zip(least, faster, strict=True)]
        print(" ".join([policy, *cells]))
    if given.json is not None:
        given.json.write_text(json.dumps({"sizes": sizes, "seconds": times}))


if __name__ == "__main__":
    main()
