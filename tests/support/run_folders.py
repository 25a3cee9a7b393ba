"""Run folders of format 2 with synthetic samples: no model is run."""

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ACCURACY = {
    "name": "accuracy",
    "title": "accuracy",
    "heading": "Accuracy",
    "is_share": True,
    "more_is_better": True,
}
NLL = {"name": "nll", "title": "nats/token", "heading": "Loss", "is_share": False}
FULL = ("full cache", None)

# Fields of a sample to change, given its cell, item and attempt.
MakeOutcome = Callable[[dict[str, Any], int, int], dict[str, Any]]


def digest(*parts: object, length: int = 16) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:length]


def write_run(
    folder: Path,
    *,
    name: str = "made-up",
    models: Sequence[str] = ("reasoner",),
    tasks: Sequence[str] = ("reasoner",),
    seeds: Sequence[int] = (0,),
    plans: Sequence[tuple[str, float | None]] = (FULL, ("H2O", 64), ("H2O", 96)),
    n: int = 8,
    attempts: int = 1,
    outcome: MakeOutcome = lambda cell, item, attempt: {},
    timed: bool = True,
    only_first: int | None = None,
    recorded: int = 0,
    num_layers: int = 2,
    version: str = "0.1.0",
    buffer: int = 16,
    **group_changes: Any,
) -> Path:
    """Write a run folder of format 2, with a sample for every item of every cell.

    Args:
        folder: The folder; it is created.
        name: Name of the run.
        models: Names of the models.
        tasks: Names of the tasks.
        seeds: The seeds; each model, task and seed is a group.
        plans: Series and budget of the plans; each is a cell in every group.
        n: Items of a group.
        attempts: Attempts at each.
        outcome: Changes of samples, which are correct for even items.
        timed: Whether cells have a timing.
        only_first: Number of finished samples; all if not given.
        recorded: Number of items whose first attempt has a record of kept rows.
        num_layers: Layers of a record.
        version: Version of kvpolicy in the manifest.
        buffer: Buffer of the plans that evict.
        group_changes: Other values of fields of the groups.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = (name, models, tasks, seeds, plans, n, attempts, version, buffer)
    run = make_run(*settings, **group_changes)
    groups, cells = run["groups"], run["cells"]
    by_id = {group["group"]: group for group in groups}
    session = {
        "started": "2026-01-02T03:04:05+00:00",
        "command": "kvpolicy ablate",
        "versions": {"python": "3.11.0", "kvpolicy": version},
        "workers": 1,
        "record": recorded,
        "threads": 1,
        "cpus": 2,
        "device": "cpu",
    }
    manifest = {"format": 2, "run": run, "sessions": [session]}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    samples = [
        sample(by_id[cell["group"]], cell, number, attempt, outcome(cell, number, attempt), version)
        for cell in cells
        for number in range(n)
        for attempt in range(attempts)
    ]
    items = [item(group, i) for group in groups for i in range(n)]
    write_lines(folder / "samples.jsonl", samples[:only_first])
    write_lines(folder / "items.jsonl", items)
    done = [one["cell"] for one in samples[:only_first]]
    complete = [cell for cell in cells if done.count(cell["cell"]) == n * attempts]
    timings = [timing(cell, n * attempts) for cell in complete] if timed else []
    write_lines(folder / "timings.jsonl", timings)
    chosen = [s for s in samples[:only_first] if s["item"] < recorded and s["attempt"] == 0]
    write_lines(folder / "kept.jsonl", [kept(one, num_layers) for one in chosen])
    return folder


def make_run(
    name: str = "made-up",
    models: Sequence[str] = ("reasoner",),
    tasks: Sequence[str] = ("reasoner",),
    seeds: Sequence[int] = (0,),
    plans: Sequence[tuple[str, float | None]] = (FULL, ("H2O", 64), ("H2O", 96)),
    n: int = 8,
    attempts: int = 1,
    version: str = "0.1.0",
    buffer: int = 16,
    **group_changes: Any,
) -> dict[str, Any]:
    """The entry ``run`` of a manifest; see `write_run`."""
    places = itertools.product(models, tasks, seeds)
    groups = [_group(*place, n, attempts, **group_changes) for place in places]
    cells = [_cell(group, *plan, buffer) for group in groups for plan in plans]
    return {"name": name, "version": version, "groups": groups, "cells": cells}


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text(text, encoding="utf-8")


def _group(
    model: str, task: str, seed: int, n: int, attempts: int, **changes: Any
) -> dict[str, Any]:
    group = {
        "group": "",
        "model": model,
        "model_fingerprint": digest("model", model),
        "device": "cpu",
        "dtype": "float32",
        "task": task,
        "seed": seed,
        "split": "test",
        "n": n,
        "attempts": attempts,
        "prompt_hash": digest("prompts", task, seed, n),
        "sampling": "greedy" if attempts == 1 else "temperature 0.6, top-p 0.95",
        "temperature": 0.0 if attempts == 1 else 0.6,
        "top_p": 1.0 if attempts == 1 else 0.95,
        "max_new_tokens": 100,
        "slots": 4,
        "measure": "answers",
        "columns": [ACCURACY],
        **changes,
    }
    return {**group, "group": digest(*group.values())}


def _cell(
    group: dict[str, Any], series: str, budget: float | None, buffer: int | None
) -> dict[str, Any]:
    stack = [{"policy": series.split()[0].lower()}]
    buffer = None if budget is None else buffer
    layer = {"layer": 0, "stack": stack, "budget": budget, "buffer": buffer}
    resolved = {"layers": [layer], "schedule": []}
    plan = digest(resolved)
    return {
        "cell": digest(group["group"], plan),
        "group": group["group"],
        "series": series,
        "budget": budget,
        "buffer": buffer,
        "knobs": {},
        "plan": plan,
        "resolved": resolved,
        "bytes_per_sequence": None,
        "byte_limits": [],
    }


def item(group: dict[str, Any], number: int) -> dict[str, Any]:
    """Item ``number`` of a group, with its own prompt and two facets."""
    return {
        **{name: group[name] for name in ("group", "model", "task", "seed")},
        "item": number,
        "prompt": f"{group['task']} {group['seed']}: what is {number}?",
        "answer": str(number),
        "reference": None,
        "facets": facets(number),
    }


def facets(number: int) -> dict[str, int | str]:
    return {"depth": 3 + number % 2, "kind": "sums" if number < 4 else "chains"}


def sample(
    group: dict[str, Any],
    cell: dict[str, Any],
    number: int,
    attempt: int = 0,
    changes: dict[str, Any] | None = None,
    version: str = "0.1.0",
) -> dict[str, Any]:
    """A finished sample, correct if ``number`` is even."""
    num_tokens = 20 + number
    return {
        "key": key_of(group, cell, item(group, number), attempt, version),
        "cell": cell["cell"],
        **{name: group[name] for name in ("group", "model", "task", "seed")},
        **{name: cell[name] for name in ("series", "budget", "buffer", "plan")},
        "item": number,
        "attempt": attempt,
        "correct": number % 2 == 0,
        "ungraded": None,
        "finish_reason": "stop",
        "error": None,
        "prompt_len": 10,
        "num_tokens": num_tokens,
        "compactions": 0 if cell["budget"] is None else 2,
        "rows_evicted": 0 if cell["budget"] is None else 32,
        "peak_rows": 10 + num_tokens,
        "peak_bytes": 1024 * (10 + num_tokens),
        "prefill_s": 0.01,
        "decode_s": 0.2,
        "facets": facets(number),
        "values": {},
        "breakdowns": {},
        "text": f"thinking about {number}\n\\boxed{{{number}}}",
        **(changes or {}),
    }


def key_of(
    group: dict[str, Any],
    cell: dict[str, Any],
    item: dict[str, Any],
    attempt: int = 0,
    version: str = "0.1.0",
) -> str:
    """The key of a sample of this item."""
    return digest(
        cell["plan"],
        *(group[name] for name in ("model_fingerprint", "task", "measure")),
        item["item"],
        json.dumps([item["prompt"], item["answer"], item["reference"]]),
        attempt,
        *(group[name] for name in ("seed", "sampling", "max_new_tokens")),
        version,
        length=32,
    )


def complete_edit(folder: Path) -> None:
    """Give the samples of an edited folder the keys and names that its other files imply."""
    run = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["run"]
    groups = {group["group"]: group for group in run["groups"]}
    cells = {cell["cell"]: cell for cell in run["cells"]}
    samples, items = (
        [json.loads(line) for line in (folder / name).read_bytes().split(b"\n")[:-1]]
        for name in ("samples.jsonl", "items.jsonl")
    )
    by_number = {(item["group"], item["item"]): item for item in items}
    for sample in samples:
        group, cell = groups[sample["group"]], cells[sample["cell"]]
        item = by_number[sample["group"], sample["item"]]
        sample |= {name: group[name] for name in ("model", "task", "seed")}
        sample |= {name: cell[name] for name in ("series", "budget", "buffer", "plan")}
        sample["key"] = key_of(group, cell, item, sample["attempt"], run["version"])
    lines = (json.dumps(sample) + "\n" for sample in samples)
    (folder / "samples.jsonl").write_text("".join(lines), encoding="utf-8")


def kept(sample: dict[str, Any], num_layers: int = 2, num_heads: int = 2) -> dict[str, Any]:
    """A record of a sample's rows: each is evicted by one of three compactions, or kept."""
    num_tokens = sample["prompt_len"] + sample["num_tokens"]
    at = [num_tokens * i // 4 for i in (1, 2, 3)] if sample["compactions"] else []
    rng = random.Random(sample["key"])

    def leaves(p: int) -> int:
        return rng.choice([-1, *(step for step, time in enumerate(at) if time > p)])

    layers = [
        {
            "layer": layer,
            "window": None,
            "at": at,
            "left_at": [[leaves(p) for p in range(num_tokens)] for _ in range(num_heads)],
        }
        for layer in range(num_layers)
    ]
    return {
        **{name: sample[name] for name in ("key", "cell", "item", "attempt")},
        "num_prompt": sample["prompt_len"],
        "tokens": [f"item{sample['item']}-{p} " for p in range(num_tokens)],
        "layers": layers,
    }


def timing(cell: dict[str, Any], num_requests: int) -> dict[str, Any]:
    return {
        "cell": cell["cell"],
        "num_requests": num_requests,
        "new_tokens": 20 * num_requests,
        "elapsed_s": 2.0,
        "policy_s": 0.05,
        "decode_s": 1.0,
        "peak_kv_bytes": 1 << 20,
        "compile_s": 0.0,
    }
