"""How long does a decode step take over rows in integers, beside one over rows as they are?

    python docs/benchmarks/integer_rows.py            # some minutes on a CPU
    python docs/benchmarks/integer_rows.py --threads 1 --held 4096

The model has the shape of SmolLM2-135M and random weights, which are packed, and one sequence, or
more, with a full cache of random rows. All forms of rows take a step in turn, so that they meet
the same machine; printed is the least time of each, and its ratio to that of plain rows: with one
thread the processor's time, so that other processes count for less, else the clock's.
"""

import argparse
import time

import torch
from transformers import PreTrainedModel

from kvpolicy import Engine, Plan, Run, packed_model
from kvpolicy.lab.bench.contenders.engine import filled_run
from kvpolicy.lab.bench.models import SHAPES, random_model
from kvpolicy.lab.bench.workload import Decode

FORMS = {
    "plain": "model",
    "int8": "int8",
    "int8, int4": {"keys": "int8", "values": "int4"},
}


def main() -> None:
    """Print a row for each number of tokens held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--held", type=int, nargs="+", default=[576, 4096, 16384])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = new_model()
    print(f"| held | {' | '.join(f'{form}, ms' for form in FORMS)} |")
    print(f"|--:|{'--:|' * len(FORMS)}")
    for held in args.held:
        least = least_ms(model, args.batch, held, args.steps)
        plain = least["plain"]
        cells = [f"{ms:.1f} ({ms / plain:.2f})" for ms in least.values()]
        print(f"| {held:,} | {' | '.join(cells)} |", flush=True)


def new_model() -> PreTrainedModel:
    """A model of the shape of SmolLM2-135M."""
    return packed_model(random_model(SHAPES["135m"], seed=0, max_positions=32768), release=True)


def least_ms(model: PreTrainedModel, batch: int, held: int, steps: int) -> dict[str, float]:
    """Milliseconds of a step over each form of rows."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    work = Decode(held=held, batch=batch, steps=steps + 1)
    runs: dict[str, Run] = {}
    for form, rows in FORMS.items():
        engine = Engine(model, None, Plan.uniform("full", rows=rows), slots=batch)
        runs[form] = filled_run(engine, work, steps=steps + 1)
        runs[form].step()
    least = dict.fromkeys(FORMS, float("inf"))
    for _ in range(steps):
        for form, run in runs.items():
            start = clock()
            run.step()
            least[form] = min(least[form], 1000 * (clock() - start))
    return least


if __name__ == "__main__":
    main()
