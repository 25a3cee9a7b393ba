"""What a prefix store saves: prompt tokens that are computed, and the time to the first token.

    python docs/benchmarks/prefix_reuse.py                      # 2,000 tokens and 50 questions
    python docs/benchmarks/prefix_reuse.py --shape tiny --questions 5 --json reuse.json

A system prompt is followed by one question after the other, each with random tokens. Every question
is asked of two engines of the same plan in turn, one without a store and one with it, so that both
meet the same machine. Then a conversation is held with both: each turn is the whole text so far and
some tokens more. Last come prompts that share nothing, so all that the store does for them is to
store. A figure is that with the store, divided by that without, in the same run: of the tokens
computed in all, and of the time to the first token in the median. The first question, which finds
nothing, is not in this median.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import attrs

from kvpolicy import Engine, Plan, PrefixStore, Request, Result
from kvpolicy.lab.bench.models import random_model, shape_named

PLANS: dict[str, dict[str, Any]] = {
    "full": {"stack": ["full"]},
    "snapkv, prompt kept": {"stack": ["snapkv"], "budget": 256, "buffer": 64, "prompt": "keep"},
    "h2o, prompt kept": {"stack": ["h2o"], "budget": 256, "buffer": 64, "prompt": "keep"},
    "h2o, prompt evicted": {"stack": ["h2o"], "budget": 256, "buffer": 64},
    "skipkv, prompt evicted": {
        "stack": [{"policy": "skipkv", "delimiters": [7, 11]}],
        "budget": 256,
        "buffer": 64,
    },
}

Tokens = list[int]


@attrs.frozen
class Asked:
    """What one prompt has cost without a store, and with it.

    Attributes:
        computed: Prompt tokens that were computed.
        first_s: Seconds to the first token.
    """

    computed: tuple[int, int]
    first_s: tuple[float, float]


def ask(
    engine: Engine, prompt: Tokens, num_new: int, clock: Callable[[], float]
) -> tuple[float, Result]:
    """Seconds to the first token, and the result."""
    run = engine.generate([Request(prompt, num_new, stop_ids=())])
    start, results = clock(), []
    while not (events := run.step()).tokens:
        results += events.results
    seconds = clock() - start
    (result,) = [*results, *events.results, *run.results()]
    assert result.error is None, result.error
    return seconds, result


def ask_both(
    engines: tuple[Engine, Engine],
    prompts: tuple[Tokens, Tokens],
    num_new: int,
    clock: Callable[[], float],
) -> tuple[Asked, list[Result]]:
    """Ask both engines in turn."""
    answers = [ask(*pair, num_new, clock) for pair in zip(engines, prompts, strict=True)]
    computed = [result.prompt_len - result.reused_tokens for _, result in answers]
    seconds = [seconds for seconds, _ in answers]
    return Asked(tuple(computed), tuple(seconds)), [result for _, result in answers]


def measure(
    engines: tuple[Engine, Engine], options: argparse.Namespace, clock: Callable[[], float]
) -> dict[str, list[Asked]]:
    """The questions, the turns of a conversation, and prompts that share nothing."""
    rng = Random(0)
    vocab = engines[0].adapter.vocab_size

    def drawn(num: int) -> Tokens:
        return [rng.randrange(vocab) for _ in range(num)]

    ask_both(engines, (drawn(64), drawn(64)), 1, clock)  # the first forward of a process is slow
    system = drawn(options.system)
    questions = []
    for _ in range(options.questions):
        prompt = [*system, *drawn(options.question)]
        questions.append(ask_both(engines, (prompt, prompt), options.answer, clock)[0])
    turns, texts = [], (system, system)
    for _ in range(options.turns):
        new = drawn(options.question)
        texts = ([*texts[0], *new], [*texts[1], *new])
        asked, results = ask_both(engines, texts, options.answer, clock)
        pairs = zip(texts, results, strict=True)
        first, second = ([*text, *result.tokens] for text, result in pairs)
        texts = (first, second)
        turns.append(asked)
    fresh = [drawn(len(system) + options.question) for _ in range(options.fresh)]
    stored = [ask_both(engines, (one, one), options.answer, clock)[0] for one in fresh]
    return {"questions": questions, "turns": turns, "fresh": stored}


def summary(asked: list[Asked], first: int = 0) -> dict[str, float]:
    """The ratios of some prompts: with a store over without.

    Args:
        asked: The prompts.
        first: The first one whose time counts.
    """
    before, after = (sum(one.computed[index] for one in asked) for index in (0, 1))
    timed = asked[first:]
    return {
        "computed_without": before,
        "computed": after,
        "computed_ratio": after / before,
        "first_token_without_s": median(one.first_s[0] for one in timed),
        "first_token_s": median(one.first_s[1] for one in timed),
        "first_token_ratio": median(one.first_s[1] / one.first_s[0] for one in timed),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row for each plan."""
    lines = [
        "| plan | questions: computed | first token | turns: computed | first token | "
        "nothing shared: first token |",
        "|---|" + "--:|" * 5,
    ]
    for name, one in found.items():
        cells = [
            f"{one[kind][figure]:.3f}"
            for kind in ("questions", "turns")
            for figure in ("computed_ratio", "first_token_ratio")
        ]
        cells.append(f"{one['fresh']['first_token_ratio']:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a prefix store saves.")
    parser.add_argument("--shape", default="30m", help="sizes of the model, as of kvpolicy bench")
    parser.add_argument("--plans", help="names of the plans, with semicolons between them")
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--questions", type=int, default=50, help="questions")
    parser.add_argument("--question", type=int, default=32, help="tokens of a question or turn")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=8, help="turns of the conversation")
    parser.add_argument("--fresh", type=int, default=5, help="prompts that share nothing")
    parser.add_argument("--block", type=int, default=64, help="tokens of a block")
    parser.add_argument("--device", default="cpu", help="device of the model")
    parser.add_argument("--json", type=Path, help="a file for every measurement")
    options = parser.parse_args(arguments)
    names = list(PLANS) if options.plans is None else options.plans.split(";")
    longest = options.system + options.turns * (options.question + options.answer) + 64
    model = random_model(
        shape_named(options.shape), 0, max_positions=longest + 1, device=options.device
    )
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        plan = Plan.from_dict(PLANS[name])
        store = PrefixStore(2**32, block_tokens=options.block)
        engines = (Engine(model, plan=plan), Engine(model, plan=plan, prefix_store=store))
        asked = measure(engines, options, time.perf_counter)
        found[name] = {kind: summary(one, kind == "questions") for kind, one in asked.items()}
        found[name]["store"] = store.stats.to_dict()
        found[name]["asked"] = {
            kind: [attrs.asdict(one) for one in some] for kind, some in asked.items()
        }
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
