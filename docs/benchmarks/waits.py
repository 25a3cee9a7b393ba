"""How long do running answers wait for their next token while prompts enter?

    python docs/benchmarks/waits.py                  # some minutes on a CPU
    python docs/benchmarks/waits.py --layers 4 --threads 8

Four sequences of an open run are decoded when prompts arrive: one of 8,192 tokens, or four of 2,048
at once. For each bound on the prompt tokens of a forward, the time between two tokens of the
running sequences is measured until the last of these prompts has its first token. The model is that
of `prefill.py`, and so are the seconds.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from prefill import new_model
from transformers import LlamaForCausalLM

from kvpolicy import Engine, Plan, Request

NUM_RUNNING = 4
ARRIVING = {"1 x 8,192": [8192], "4 x 2,048": [2048] * 4}


def main() -> None:
    """Print a row for each bound, as soon as it is measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bounds", type=int, nargs="+", default=[8192, 1024, 512, 256, 128])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    model = new_model(args.layers)
    print("| prompts | most tokens | ms between tokens: median, longest | first tokens after, s |")
    print("|---|--:|--:|--:|")
    for name, lengths in ARRIVING.items():
        gaps, until = measured(model, lengths, clock, 8192, takes_turns=False)
        print(row(name, "prompts first", gaps, until), flush=True)
        for bound in args.bounds:
            gaps, until = measured(model, lengths, clock, bound)
            print(row(name, f"{bound:,}", gaps, until), flush=True)


def row(prompts: str, bound: str, gaps: list[float], until: float) -> str:
    """A row of the table."""
    milliseconds = [1000 * gap for gap in gaps]
    return (
        f"| {prompts} | {bound} | {median(milliseconds):,.0f}, {max(milliseconds):,.0f} "
        f"| {until:.1f} |"
    )


def measured(
    model: LlamaForCausalLM,
    lengths: list[int],
    clock: Callable[[], float],
    bound: int,
    *,
    takes_turns: bool = True,
) -> tuple[list[float], float]:
    """Seconds between two tokens of running sequences while prompts enter, and until they are in.

    Args:
        model: The model.
        lengths: Tokens of the prompts.
        clock: Tells the time.
        bound: The most prompt tokens of a forward.
        takes_turns: Whether decode steps come in between.
    """
    slots = NUM_RUNNING + len(lengths)
    engine = Engine(
        model, None, Plan.uniform("full"), slots=slots, chunk=bound, max_tokens_per_forward=bound
    )
    run = engine.open_run(max_len=max(lengths) + 1000)
    run.scheduler.takes_turns = takes_turns
    for number in range(NUM_RUNNING):
        run.submit(Request([5 + number] * 16, 900, stop_ids=()))
    while any(len(seq.tokens) < 4 for seq in run.active) or not run.active:
        run.step()
    arriving = {run.submit(Request([7] * length, 1, stop_ids=())) for length in lengths}
    start = last = clock()
    gaps: list[float] = []
    while arriving:
        events = run.step()
        if any(number < NUM_RUNNING for number, _ in events.tokens):
            gaps.append(clock() - last)
            last += gaps[-1]
        arriving -= {one.id for one in events.results}
    until = clock() - start
    while not gaps:
        if run.step().tokens:
            gaps.append(clock() - last)
            last += gaps[-1]
    return gaps, until


if __name__ == "__main__":
    main()
