"""How long does `kvpolicy run` take to the first token, against transformers alone?

    python docs/benchmarks/first_token.py FOLDER                # of a model with a chat template
    python docs/benchmarks/first_token.py FOLDER --pairs 8

The other program loads the model and its tokenizer by `from_pretrained`, applies the chat template
and computes one forward. Both start from nothing, one after the other, in each pair. On a machine
that does other work, compare the seconds of processor time.
"""

import argparse
import os
import resource
import subprocess
import sys
import time

ALONE = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
turns = [{"role": "user", "content": "hi"}]
options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
with torch.inference_mode():
    logits = model(**tokenizer.apply_chat_template(turns, **options)).logits
print(tokenizer.decode(logits[0, -1].argmax()))
"""


def main() -> None:
    """Print a row for each pair, as soon as it is measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--pairs", type=int, default=4)
    args = parser.parse_args()
    run = ["-m", "kvpolicy", "run", "hi", "--model", args.folder, "--max-new-tokens", "1"]
    print(
        "| kvpolicy, s | transformers, s | ratio | kvpolicy, CPU s | transformers, CPU s | ratio |"
    )
    print("|--:|--:|--:|--:|--:|--:|")
    for _ in range(args.pairs):
        ours, alone = seconds(run), seconds(["-c", ALONE, args.folder])
        numbers = (f"{a:.2f} | {b:.2f} | {a / b:.2f}" for a, b in zip(ours, alone, strict=True))
        print(f"| {' | '.join(numbers)} |", flush=True)


def seconds(words: list[str]) -> tuple[float, float]:
    """How long a Python program takes, and how much processor time."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, *words], env=environment, capture_output=True, check=True)
    elapsed, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
