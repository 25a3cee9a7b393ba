"""How long does a prompt take under each policy, beside the model's own forward?

    python docs/benchmarks/prefill.py                            # some minutes on a CPU
    python docs/benchmarks/prefill.py --lengths 8192 --threads 8

A model with random weights, of the shape of SmolLM2 with fewer layers, takes a prompt and draws one
token. In each round all take turns: one forward of transformers with its SDPA attention, which
keeps all keys and values, and the engine under each plan. Times are seconds of the processor in
one thread, so that others who use the machine do not count; of more threads, seconds of a clock.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpolicy import Engine, Plan

BUDGET, BUFFER = 512, 128
PLANS = ("full", "streaming", "snapkv", "h2o")


def new_model(layers: int) -> LlamaForCausalLM:
    """A model of the shape of SmolLM2-135M but for its layers and tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=40_000,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    """Print a table for each length, a row as soon as all rounds are over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--chunk", type=int, default=1024, help="tokens of a forward, and the prefill_buffer"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    model = new_model(args.layers)
    for length in args.lengths:
        prompt = torch.randint(
            5, 2000, (length,), generator=torch.Generator().manual_seed(1)
        ).tolist()
        work = {"transformers": lambda prompt=prompt: own_forward(model, prompt)}
        for name in args.plans:
            evicts = (
                {}
                if name == "full"
                else {"budget": BUDGET, "buffer": BUFFER, "prefill_buffer": args.chunk}
            )
            engine = Engine(model, None, Plan.uniform(name, **evicts), slots=1, chunk=args.chunk)
            work[name] = lambda engine=engine, prompt=prompt: prefill(engine, prompt)
        times: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(args.rounds):
            for name, run in work.items():
                times[name].append(timed(run, clock))
        print(f"\n| {length:,} tokens | seconds | of transformers' forward |\n|---|--:|--:|")
        for name, found in times.items():
            of_own = [a / b for a, b in zip(found, times["transformers"], strict=True)]
            print(f"| {name} | {median(found):.2f} | {median(of_own):.2f} |", flush=True)


def timed(run: Callable[[], None], clock: Callable[[], float]) -> float:
    """Seconds."""
    start = clock()
    run()
    return clock() - start


@torch.inference_mode()
def own_forward(model: LlamaForCausalLM, prompt: list[int]) -> None:
    """The model's own forward of all tokens."""
    model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)


def prefill(engine: Engine, prompt: list[int]) -> None:
    """The engine's, and one token."""
    engine.generate([prompt], max_new_tokens=1, stop_ids=()).results()


if __name__ == "__main__":
    main()
