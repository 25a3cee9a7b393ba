"""How many of the rows that decoding attends to most does a look-ahead keep, beside SnapKV?

    python docs/benchmarks/laq_recall.py                    # 40 texts of each task
    python docs/benchmarks/laq_recall.py --texts 100 --json recall.json

A model generates greedily with the full cache. At some place of a text, the end of a retrieval
prompt or the middle of a thought, its rows are compacted once, and never after that. Of the ``C``
rows to which the queries of all tokens generated later attend most (true softmax weights, summed,
mean over the query heads of a group, no pooling), the recall is the share that a policy keeps with
a budget of ``C``, its window included: the mean over layers and KV heads, with the mean and the
95 % interval over texts. Nothing is drawn at random but the texts, by a seed.

The pseudo queries of LAQ are those of the tokens that the full cache generates, as in the engine,
where the rows are all there until the compaction. ``LAQ, SnapKV's tokens`` has those of the tokens
decoded over the rows that SnapKV keeps with the same budget and a window of 32 (the budget, if that
is less), as published. The first of the tokens generated later are its pseudo tokens: where few
follow, LAQ sees much of what it is compared with.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy import Engine, Plan, Request, hookimpl, load_model, load_policy
from kvpolicy.lab.statistics import mean
from kvpolicy.lab.tasks.task import load_task
from kvpolicy.testing import keep_rows

MODELS = ("reasoner", "reasoner-verbose")
TASKS = ("multikey", "reasoner-needle", "{model}")
BUDGETS = (32, 64, 128)
MOST_TOKENS = 200
LOOKAHEAD = 8
LEAST_LATER = 16  # tokens generated after the compaction

_SNAPKV = {"policy": "snapkv", "phase": "prefill"}
_LAQ = {"policy": "laq", "phase": "prefill", "n_lookahead": LOOKAHEAD}
SERIES: dict[str, dict[str, Any]] = {
    "SnapKV, window 8": {**_SNAPKV, "window_size": 8},
    "SnapKV, window 16": {**_SNAPKV, "window_size": 16},
    "SnapKV, window 32": {**_SNAPKV, "window_size": 32},
    "LAQ": {**_LAQ, "n_local": 0},
    "LAQ++": {**_LAQ, "n_local": 8},
    "LAQ, SnapKV's tokens": {**_LAQ, "n_local": 0},
    "LAQ++, SnapKV's tokens": {**_LAQ, "n_local": 8},
}


@attrs.define(eq=False)
class Records:
    """Copies what each layer holds at its only compaction, when a sequence has ``at`` tokens.

    Attributes:
        at: Tokens.
        window_size: Queries that are copied.
        layers: Keys ``[H_kv, T, D]``, values, queries ``[H_q, W, D]`` and their weights
            ``[H_q, W, T]`` by layer.
    """

    bounded: ClassVar[bool] = False

    at: int
    window_size: int
    layers: dict[int, tuple[Tensor, ...]] = attrs.field(factory=dict)

    @hookimpl
    def due(self, seq_len: Tensor) -> Tensor:
        return seq_len == self.at

    @hookimpl(wrapper=True)
    def score(
        self,
        layer_idx: int,
        keys: Tensor,
        values: Tensor,
        queries: Tensor,
        attn_weights: Tensor,
        seq_len: Tensor,
    ) -> Any:
        if int(seq_len[0]) == self.at:
            tensors = (keys, values, queries, attn_weights)
            self.layers[layer_idx] = tuple(one[0].clone() for one in tensors)
        return (yield)


@attrs.frozen(eq=False)
class Text:
    """What a model generates, and where its rows are compacted."""

    tokens: tuple[int, ...]
    at: int


def read(engine: Engine, task: str, num: int, seed: int) -> Iterator[Text]:
    """Texts of a task as the full cache generates them."""
    prompts = [one.prompt for one in load_task(task).examples(num, seed=seed)]
    encode = engine.tokenizer
    results = engine.generate(prompts, max_new_tokens=MOST_TOKENS).results()
    for prompt, result in zip(prompts, results, strict=True):
        ids = tuple(encode(prompt)["input_ids"])
        # The prompts of the reasoners' own tasks are short: what they thought is compacted, too.
        later = len(result.tokens) // 2 if task.startswith("reasoner") else 0
        if len(result.tokens) - later >= LEAST_LATER:
            yield Text(ids + result.tokens, len(ids) + later)


def recorded(
    model: Any, ids: tuple[int, ...], stack: list[Any], records: Records, **limits: int
) -> dict[int, tuple[Tensor, ...]]:
    """Run one sequence with a recording, which is returned."""
    plan = Plan.uniform(*stack, records, budget=limits["budget"], buffer=16)
    request = Request(ids, limits["tokens"], stop_ids=())
    Engine(model, None, plan, slots=1).generate([request]).results()
    return records.layers


def pseudo_queries(model: Any, text: Text, budget: int) -> dict[int, Tensor]:
    """Queries of tokens decoded over the rows that SnapKV keeps, by layer, ``[H_q, P, D]``."""
    snapkv = load_policy("snapkv", phase="prefill", window_size=min(32, budget))
    records = Records(text.at + LOOKAHEAD, LOOKAHEAD)

    @attrs.define(eq=False)
    class AtBoth:
        @hookimpl(wrapper=True)
        def due(self, seq_len: Tensor, prompt_len: Tensor) -> Any:
            yield
            return (seq_len == prompt_len) | (seq_len == text.at + LOOKAHEAD)

    stack = [snapkv, AtBoth()]
    limits = {"budget": budget, "tokens": LOOKAHEAD + 2}
    layers = recorded(model, text.tokens[: text.at], stack, records, **limits)
    return {layer: queries[:, -LOOKAHEAD:] for layer, (_, _, queries, _) in layers.items()}


def recalls(model: Any, text: Text, budget: int) -> dict[str, float]:
    """The recall of each series in one text, the mean over layers and heads."""
    num_later = len(text.tokens) - text.at
    records = Records(len(text.tokens), len(text.tokens))
    layers = recorded(model, text.tokens, ["streaming"], records, budget=8, tokens=2)
    compressed = pseudo_queries(model, text, budget)
    found: dict[str, list[float]] = {name: [] for name in SERIES}
    for layer_idx, (keys, values, queries, weights) in layers.items():
        rows = slice(0, text.at)
        inputs = [one[None, :, rows] for one in (keys, values, queries)]
        later = weights[:, -num_later:, rows].sum(dim=1)  # [H_q, T]
        used = later.unflatten(0, (len(keys), -1)).mean(dim=1)
        wanted = used.topk(budget, dim=1).indices  # [H_kv, C]
        for name, knobs in SERIES.items():
            ahead = queries[:, text.at : text.at + LOOKAHEAD]
            ahead = compressed[layer_idx] if "tokens" in name else ahead
            policy = load_policy(knobs["policy"], **_knobs(knobs))
            kept = keep_rows(policy, *inputs, budget=budget, lookahead_queries=ahead[None])[0]
            shared = (kept[:, :, None] == wanted[:, None]).any(dim=2).float().mean()
            found[name].append(float(shared))
    return {name: fmean(each) for name, each in found.items()}


def _knobs(series: dict[str, Any]) -> dict[str, Any]:
    return {name: knob for name, knob in series.items() if name != "policy"}


def measure(model_name: str, task: str, budgets: list[int], num: int, seed: int) -> dict[str, Any]:
    """The recalls of every series at every budget."""
    model, tokenizer = load_model(model_name)
    engine = Engine(model, tokenizer, Plan.uniform("full", budget=64), slots=16)
    texts = list(read(engine, task, num, seed))
    table: dict[str, dict[str, list[float]]] = {name: {} for name in SERIES}
    counts = {}
    for budget in budgets:
        longer = [text for text in texts if text.at > budget]  # nothing leaves of the others
        counts[str(budget)] = len(longer)
        each = [recalls(model, text, budget) for text in longer]
        for name in SERIES if each else ():
            interval = mean([one[name] for one in each], least=0, most=1)
            table[name][str(budget)] = [round(x, 4) for x in attrs.astuple(interval)]
    return {"model": model_name, "task": task, "texts": counts, "recall": table}


def show(one: dict[str, Any]) -> None:
    """Print the table of a model and a task."""
    columns = [budget for budget, num in one["texts"].items() if num]
    print(f"\n{one['model']}, {one['task']}\n")
    print("|  | " + " | ".join(f"{c} rows, n = {one['texts'][c]}" for c in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, by_budget in one["recall"].items():
        cells = ["{:.3f} ({:.3f} {:.3f})".format(*by_budget[c]) for c in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main(arguments: list[str] | None = None) -> None:
    """Measure both reasoners on every task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=40, help="texts of each task")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="rows, by commas")
    parser.add_argument("--models", default=",".join(MODELS), help="names of models, by commas")
    parser.add_argument("--tasks", default=",".join(TASKS), help="names of tasks, by commas")
    parser.add_argument("--json", type=Path, help="also write the figures into this file")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    budgets = [int(one) for one in given.budgets.split(",")]
    found = []
    for model in given.models.split(","):
        for task in given.tasks.split(","):
            found.append(measure(model, task.format(model=model), budgets, given.texts, given.seed))
            show(found[-1])
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
