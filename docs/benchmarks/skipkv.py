"""Test SkipKV's claims about sentences on the results of an ablation.

    kvpolicy ablate --preset skipkv --output RESULTS
    python docs/benchmarks/skipkv.py paired RESULTS MORE_RESULTS
    python docs/benchmarks/skipkv.py sentences RESULTS --rules reasoner
    python docs/benchmarks/skipkv.py fragments RESULTS --budgets 91,181
    python docs/benchmarks/skipkv.py slots RESULTS --budgets 91

`paired`: one policy minus another at every budget, as by ``kvpolicy results compare``, corrected
for all comparisons of all runs given; in bold where p is below 0.05 after that.
`sentences`: per cell, for correct and incorrect answers: the shares of non-execution sentences and
of repeated sentences (similarity above tau), and the mean length.
`fragments`: how many sentences a compaction leaves in pieces, for R-KV and SkipKV.
`slots`: speed with as many slots as fit into the memory of 4, 8, 16 and 32 of the full cache.

Each prints a table and writes JSON into RESULTS.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy import Engine, Memory, Plan, hookimpl, load_model
from kvpolicy.lab.analysis.compare import adjust_p_values, compare_cells
from kvpolicy.lab.analysis.pooling import pool
from kvpolicy.lab.analysis.select import open_runs
from kvpolicy.lab.steer.thoughts import load_rules
from kvpolicy.lab.tasks.task import ACCURACY, load_task
from skipkv_plugin.policy import SkipKV
from skipkv_plugin.redundancy import SentenceVectors, redundant
from skipkv_plugin.sentences import Delimiters, Segmenter

SIGNIFICANT = 0.05
TAU = 0.95
BATCH = 32
BUFFER = 16


@attrs.define
class Cell:
    """The samples of one series at one budget."""

    series: str
    budget: float | None
    samples: list[dict[str, Any]] = attrs.field(factory=list)


def read_cells(folder: Path, n: int) -> tuple[dict[str, Any], list[Cell]]:
    """Settings of the run, which has one group, and the first ``n`` items of every cell."""
    run = json.loads((folder / "manifest.json").read_text())["run"]
    (group,) = run["groups"]
    cells = {cell["cell"]: Cell(cell["series"], cell["budget"]) for cell in run["cells"]}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        if sample["item"] < n and sample["error"] is None:
            cells[sample["cell"]].samples.append(sample)
    return {**run, **group}, list(cells.values())


class Reader:
    """Splits texts into sentences and finds those that are repeated later."""

    def __init__(self, model: Any, tokenizer: Any, rules: str) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.rules = load_rules(rules)
        self.delimiters = Delimiters.of(SkipKV().delimiters, tokenizer)

    def read(self, prompts: Sequence[str], texts: Sequence[str]) -> list[dict[str, int]]:
        """Sentence counts of each text, without its prompt."""
        found = []
        for first in range(0, len(texts), BATCH):
            batch = slice(first, first + BATCH)
            ids = [
                (self.tokenizer(prompt)["input_ids"], self.tokenizer(text)["input_ids"])
                for prompt, text in zip(prompts[batch], texts[batch], strict=True)
            ]
            states = self._states([prompt + text for prompt, text in ids])
            found += [self._count(*pair, of) for pair, of in zip(ids, states, strict=True)]
        return found

    def _states(self, rows: Sequence[list[int]]) -> Iterable[Tensor]:
        """Last hidden states of each row under full attention, padded on the right."""
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        with torch.inference_mode():
            states = self.model.get_decoder()(ids, use_cache=False).last_hidden_state
        return (one[: len(row)] for one, row in zip(states, rows, strict=True))

    def _count(self, prompt: list[int], text: list[int], states: Tensor) -> dict[str, int]:
        segmenter, vectors = Segmenter(self.delimiters), SentenceVectors()
        finished = segmenter.feed(prompt + text)
        num = vectors.feed(states, 0, [one for one, _ in finished], segmenter.begin)
        assert vectors.vectors is not None
        again = redundant(vectors.vectors, num, TAU, "max")
        generated = [
            (number, ids)
            for number, (sentence, ids) in enumerate(finished)
            if sentence.begin >= len(prompt)
        ]
        kinds = [self.rules.kind_of(self.tokenizer.decode(ids).strip()) for _, ids in generated]
        return {
            "sentences": len(generated),
            "non_execution": sum(kind != "execution" for kind in kinds),
            "similar": sum(number in again for number, _ in generated),
        }


def sentences(folder: Path, n: int, rules: str) -> list[dict[str, Any]]:
    """One record for each cell."""
    run, cells = read_cells(folder, n)
    reader = Reader(*load_model(run["model"]), rules)
    task = load_task(run["task"])
    prompts = [one.prompt for one in task.examples(n, seed=run["seed"], split=run["split"])]
    records = []
    for cell in cells:
        counts = reader.read(
            [prompts[one["item"]] for one in cell.samples], [one["text"] for one in cell.samples]
        )
        record: dict[str, Any] = {"series": cell.series, "budget": cell.budget}
        for name, wanted in (("all", None), ("correct", True), ("incorrect", False)):
            chosen = [
                (count, one["num_tokens"])
                for count, one in zip(counts, cell.samples, strict=True)
                if wanted is None or one["correct"] == wanted
            ]
            record[name] = summary(chosen)
        records.append(record)
    return records


# What the page compares; pairs of which a run has only one series are left out.
PAIRS = [
    ("SkipKV 0.1", "R-KV 0.1"),
    ("SkipKV 0.5", "R-KV 0.5"),
    ("SkipKV 0.1, no steering", "R-KV 0.1"),
    ("SkipKV 0.5, no steering", "R-KV 0.5"),
    ("SkipKV 0.1", "R-KV 0.1 + SEAL"),
    ("SkipKV 0.1", "H2O"),
    ("SkipKV 0.1", "H2O of the paper's code"),
    ("R-KV 0.1", "H2O of the paper's code"),
    ("H2O", "H2O of the paper's code"),
    ("H2O sums, R-KV redundancy", "H2O"),
    ("H2O sums, R-KV redundancy", "R-KV 0.1"),
    ("H2O sums, R-KV redundancy, 48 recent", "H2O"),
    ("H2O sums, R-KV redundancy, 48 recent", "R-KV 0.1"),
    ("H2O sums, R-KV redundancy", "H2O, 8 recent"),
    # The presets skipkv and skipkv-verbose:
    ("SkipKV", "R-KV"),
    ("SkipKV", "SnapKV"),
    ("SkipKV", "H2O"),
    ("SkipKV", "SkipKV, no steering"),
    ("SkipKV, no steering", "R-KV"),
]


def paired(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """One record for each model and pair of policies: the difference at every budget, in points."""
    cells = pool(open_runs([str(folder) for folder in folders], warn=print))
    by_name = {(cell.group.model, cell.series, cell.budget): cell for cell in cells if cell.samples}
    found = [
        compare_cells(cell, by_name[model, other, budget], ACCURACY)
        for one, other in PAIRS
        for (model, series, budget), cell in by_name.items()
        if series == one and (model, other, budget) in by_name
    ]
    records: dict[tuple[str, str], dict[str, Any]] = {}
    print(f"{len(found)} comparisons")
    for one in sorted(adjust_p_values(found), key=lambda one: one.a.cell.budget or 0):
        assert one.difference is not None
        assert one.p_holm is not None
        name = one.a.cell.group.model, f"{one.a.cell.series} - {one.b.cell.series}"
        record = records.setdefault(name, {"model": name[0], "difference": name[1]})
        points = [100 * x for x in attrs.astuple(one.difference)]
        text = "{:+.1f} ({:+.1f} {:+.1f})".format(*points)
        record[f"{one.a.cell.budget:.0f}"] = f"**{text}**" if one.p_holm < SIGNIFICANT else text
    return sorted(records.values(), key=lambda record: (record["model"], list(record)))


def summary(chosen: Sequence[tuple[dict[str, int], int]]) -> dict[str, float | int | None]:
    """Mean length, and shares of all sentences pooled, so that short texts have little weight."""
    total = sum(count["sentences"] for count, _ in chosen)
    return {
        "n": len(chosen),
        "length": fmean(length for _, length in chosen) if chosen else None,
        "sentences": total,
        **{
            name: sum(count[name] for count, _ in chosen) / total if total else None
            for name in ("non_execution", "similar")
        },
    }


@attrs.define(eq=False)
class Fragments:
    """Wraps any policy and counts how much of each sentence a compaction leaves, per head."""

    delimiters: Delimiters
    seen: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(("whole", "part", "gone"), 0))

    @hookimpl
    def observe(self, token_ids: Tensor, memory: Memory) -> None:
        (notes,) = memory.of(self)
        notes.setdefault("segmenter", Segmenter(self.delimiters)).feed(token_ids.tolist())

    @hookimpl(wrapper=True)
    def select(self, positions: Tensor, memory: Memory) -> Any:
        keep = yield
        kept = positions.gather(2, keep)
        for b, notes in enumerate(memory.of(self)):
            spans = [(one.begin, one.end) for one in notes["segmenter"].sentences]
            for head in kept[b]:
                places = torch.tensor(spans).T.contiguous()
                low, high = torch.searchsorted(head, places[0]), torch.searchsorted(head, places[1])
                left, length = high - low, places[1] - places[0]
                self.seen["whole"] += int((left == length).sum())
                self.seen["gone"] += int((left == 0).sum())
                self.seen["part"] += int(((left > 0) & (left < length)).sum())
        return keep


def fragments(folder: Path, n: int, budgets: Sequence[int]) -> list[dict[str, Any]]:
    """One record for each policy and budget."""
    run, _ = read_cells(folder, 0)
    model, tokenizer = load_model(run["model"])
    items = load_task(run["task"]).examples(n, seed=run["seed"])
    stacks = {cell["series"]: cell["resolved"]["layers"][0]["stack"] for cell in run["cells"]}
    records = []
    for series in ("R-KV", "SkipKV, no steering"):
        for budget in budgets:
            counts = Fragments(Delimiters.of(SkipKV().delimiters, tokenizer))
            plan = Plan.from_dict({"stack": stacks[series], "budget": budget, "buffer": BUFFER})
            plan = attrs.evolve(plan, stack=(*plan.stack, *Plan.uniform(counts).stack))
            engine = Engine(model, tokenizer, plan, slots=run["slots"])
            prompts = [item.prompt for item in items]
            engine.generate(prompts, max_new_tokens=run["max_new_tokens"]).results()
            left = counts.seen["whole"] + counts.seen["part"]
            records.append(
                {
                    "series": series,
                    "budget": budget,
                    **counts.seen,
                    "part_of_those_left": counts.seen["part"] / left,
                    "part_of_all": counts.seen["part"] / (left + counts.seen["gone"]),
                }
            )
    return records


def slots(folder: Path, n: int, budgets: Sequence[int]) -> list[dict[str, Any]]:
    """One record for each policy and memory size. Run it on an idle machine."""
    run, _ = read_cells(folder, 0)
    model, tokenizer = load_model(run["model"])
    prompts = [item.prompt for item in load_task(run["task"]).examples(n, seed=run["seed"])]
    longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
    longest += run["max_new_tokens"]
    stacks = {cell["series"]: cell["resolved"]["layers"][0]["stack"] for cell in run["cells"]}
    records = []
    for num_full in (4, 8, 16, 32):
        for series in ("full cache", "SEAL", "R-KV", "SkipKV, no steering", "SkipKV"):
            bounded = series not in ("full cache", "SEAL")
            for budget in budgets if bounded else (None,):
                num = num_full * longest // (budget + BUFFER) if budget else num_full
                plan = Plan.from_dict(
                    {"stack": stacks[series], "buffer": BUFFER}
                    | ({"budget": budget} if budget else {})
                )
                serving = Engine(model, tokenizer, plan, slots=min(num, n)).generate(
                    prompts, max_new_tokens=run["max_new_tokens"]
                )
                serving.results()
                report = serving.report
                records.append(
                    {
                        "memory of": num_full,
                        "series": series,
                        "budget": budget,
                        "slots": min(num, n),
                        "KV MiB": report.peak_kv_bytes / 2**20,
                        "tok/s": round(report.throughput_tok_s),
                        "samples/min": round(60 * n / report.elapsed_s),
                        "policy share": report.policy_share,
                    }
                )
                print(records[-1])
    return records


def show(records: Sequence[dict[str, Any]]) -> None:
    """Print records as Markdown, one table for those with the same columns."""
    flat = [
        {
            f"{name}.{key}" if isinstance(value, dict) else name: cell
            for name, value in record.items()
            for key, cell in (value.items() if isinstance(value, dict) else [("", value)])
        }
        for record in records
    ]
    for names, some in groupby(flat, key=list):
        print("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names))
        for record in some:
            cells = [f"{x:.3f}" if isinstance(x, float) else str(x) for x in record.values()]
            print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["paired", "sentences", "fragments", "slots"])
    parser.add_argument("results", type=Path, nargs="+", help="several for `paired` only")
    parser.add_argument("--n", type=int, default=100, help="items of each cell")
    parser.add_argument("--rules", default="published", help="keyword rules, a name or a file")
    parser.add_argument("--budgets", default="91,181")
    given = parser.parse_args()
    (results, *more) = given.results
    if more and given.what != "paired":
        parser.error(f"'{given.what}' reads one folder of results.")
    if given.what == "paired":
        records = paired(given.results)
    elif given.what == "sentences":
        records = sentences(results, given.n, given.rules)
    else:
        budgets = [int(budget) for budget in given.budgets.split(",")]
        measure = fragments if given.what == "fragments" else slots
        records = measure(results, given.n, budgets)
    (results / f"{given.what}.json").write_text(json.dumps(records, indent=1) + "\n")
    show(records)


if __name__ == "__main__":
    main()
