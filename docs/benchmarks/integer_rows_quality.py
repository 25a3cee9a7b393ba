"""What do rows in integers cost? The perplexity of SmolLM2 over them.

    kvpolicy models install smollm2
    python docs/benchmarks/integer_rows_quality.py            # a minute for each form on a CPU
    python docs/benchmarks/integer_rows_quality.py model int4 int4:16 int8/int4:0

A form is ``KEYS/VALUES`` or one of them for both, and behind a colon how many newest tokens stay
exact. The text is English technical prose, the help of Python on `assert`, `if`, `with`, `class`
and `for`, which the model reads with a full cache in fp32. What a token reads does not depend on
how many are read together. Printed is the perplexity of each form, its ratio to that of the first
one, and for how many tokens the likeliest next one is the same.
"""

import argparse
import math
import time
from pydoc_data.topics import topics

import torch

from kvpolicy import Engine, Plan, Request, load_model

FORMS = ["model", "int8", "int8/int4", "int4"]


def main() -> None:
    """Print a row for each form of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("forms", nargs="*", default=FORMS)
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model, dtype="float32")
    text = "\n\n".join(topics[name] for name in ("assert", "if", "with", "class", "for"))
    token_ids = tokenizer(text).input_ids[: args.tokens]
    print("| rows | perplexity | of the first | same next token | s |\n|---|--:|--:|--:|--:|")
    first: tuple[float, list[int]] | None = None
    for form in args.forms:
        start = time.monotonic()
        engine = Engine(model, None, Plan.uniform("full", rows=rows_of(form)), slots=1)
        request = Request(token_ids, 1, prompt_logprobs=1)
        (result,) = engine.generate([request]).results()
        assert result.prompt_logprobs is not None, result.error
        loss = -sum(one.logprob for one in result.prompt_logprobs) / len(result.prompt_logprobs)
        likeliest = [one.top[0][0] for one in result.prompt_logprobs]
        first = first or (loss, likeliest)
        same = sum(a == b for a, b in zip(likeliest, first[1], strict=True)) / len(likeliest)
        ratio, took = math.exp(loss - first[0]), time.monotonic() - start
        print(
            f"| {form} | {math.exp(loss):.3f} | {ratio:.4f} | {same:.1%} | {took:.0f} |", flush=True
        )


def rows_of(form: str) -> str | dict[str, str | int]:
    """What a plan says for a text such as ``int8/int4:64``."""
    sides, _, exact = form.partition(":")
    keys, _, values = sides.partition("/")
    rows: dict[str, str | int] = {"keys": keys, "values": values or keys}
    return rows | {"exact": int(exact)} if exact else rows


if __name__ == "__main__":
    main()
