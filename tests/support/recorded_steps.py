"""How long does a decode step take on a CPU with the Python of the model, recorded, and fused?

    python tests/support/recorded_steps.py            # some minutes on a CPU

Each model takes a step in turn in all ways, so that they meet the same machine; printed is the
least time of each in milliseconds of one thread's processor time, which other processes change
little. Caches are full, of random rows. Packed weights alone are fused, where Numba is installed.

    python tests/support/recorded_steps.py packed,bf16 1,8    # forms, batches of the larger model
"""

import sys
import time

import torch
from transformers import PreTrainedModel

from kvpolicy import Engine, Plan, Run, load_model, packed_model
from kvpolicy.lab.bench.contenders.engine import filled_run
from kvpolicy.lab.bench.models import SHAPES, random_model
from kvpolicy.lab.bench.workload import Decode
from kvpolicy.model.recorded import STEPS_BEFORE

STEPS = 40


def main() -> None:
    """Print a row for each model, batch and number of rows held."""
    torch.set_num_threads(1)
    sys.stdout.write(
        "| model | weights | batch | rows | the model's Python, ms | recorded, ms | fused, ms |\n"
    )
    sys.stdout.write("|---|---|--:|--:|--:|--:|--:|\n")
    forms, batches = sys.argv[1:3] or ("plain,packed,bf16,int8", "1,8")
    if len(sys.argv) < 2:
        reasoner, _ = load_model("reasoner")
        for batch in (1, 8):
            say(row("`reasoner`", "plain", reasoner, batch, held=100))
    for form in forms.split(","):
        model = shape_of_smollm2(form)
        for batch in map(int, batches.split(",")):
            say(row("SmolLM2-135M's shape", form, model, batch, held=576))


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def shape_of_smollm2(form: str) -> PreTrainedModel:
    """A model of random weights in a form."""
    model = random_model(SHAPES["135m"], seed=0, max_positions=8192)
    return packed_model(model, cpu_weights=form, release=True)


def row(name: str, form: str, model: PreTrainedModel, batch: int, held: int) -> str:
    """Measure both ways in turn."""
    steps = STEPS_BEFORE + STEPS + 2
    runs: dict[str, Run] = {}
    for way in ("python", "recorded", "fused"):
        engine = Engine(model, None, Plan.uniform("full"), slots=batch)
        runs[way] = filled_run(engine, Decode(batch=batch, held=held, steps=steps), steps=steps)
    runs["python"].core.runner.recorded = None
    recorded = runs["recorded"].core.runner.recorded
    assert recorded is not None
    recorded.fuses = False
    least = dict.fromkeys(runs, float("inf"))
    for number in range(steps):
        for way, run in runs.items():
            start = time.thread_time()
            run.step()
            if number > STEPS_BEFORE + 1:
                least[way] = min(least[way], 1000 * (time.thread_time() - start))
    python, recorded_ms, fused = (least[way] for way in runs)
    times = f"{python:.2f} | {recorded_ms:.2f} | {fused:.2f} ({fused / recorded_ms:.2f})"
    return f"| {name} | {form} | {batch} | {held} | {times} |"


if __name__ == "__main__":
    main()
