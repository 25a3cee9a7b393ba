"""Run a tiny random model of every class of transformers that gives text, and say what comes out.

``python tests/support/walk_models.py --json FILE`` walks every ``*ForCausalLM`` and every
vision-language class of the installed transformers; rows that FILE has are not walked again.
``--only NAME`` (several times) walks these. ``--write`` replaces the tables of
``docs/reference/models.md`` by what FILE says.

A class is

* ``equal``: greedy tokens equal those of `generate`, in an `Engine` alone and in batches of unequal
  prompts, and in `generate` with a `PolicyCache`; and under policies that evict, a sequence in a
  batch equals itself alone;
* ``refused``: an `Engine` raises a `KVPolicyError`, in one sentence;
* ``unbuilt``: transformers does not build a tiny one, or its own `generate` fails on text;
* ``WRONG``: other tokens, or log-probabilities;
* ``traceback``: any other exception.

The last two are defects of ours.
"""

import argparse
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from any_model import classes, tiny_random_model, vision_language_classes
from tiny import tiny_tokenizer
from tiny_images import tiny_seeing_model

from kvpolicy import Engine, Plan, PolicyCache, Request
from kvpolicy.compat import cache_argument
from kvpolicy.errors import KVPolicyError, error_summary

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
PROMPTS = [[5, 9, 40, 3, 3, 7, 11], [4, 6], [3, 8] * 6 + [21]]
NEW = 14
POLICIES: dict[str, dict[str, Any]] = {
    "h2o": {"n_recent": 3},
    "snapkv": {"window_size": 3},
    "streaming": {"n_sink": 1},
    "skipkv": {"delimiters": (3, 7), "tau": 0.5, "window_size": 4},
}
TIMEOUT_S = 600

Row = dict[str, Any]


class DiffersError(Exception):
    """Other tokens than expected; the message says whose."""


def walk(name: str) -> Row:
    """What comes of one class."""
    row: Row = {"class": name, "type": classes()[name], "verdict": "unbuilt", "why": ""}
    try:
        with torch.inference_mode(False):
            sees = name in vision_language_classes().values()
            model = tiny_seeing_model(name) if sees else tiny_random_model(name)
    except Exception as error:
        return row | {"why": f"a tiny one is not built: {error_summary(error)}"}
    try:
        expected = [generated(model, prompt) for prompt in PROMPTS]
    except Exception as error:
        return row | {"why": f"its own generate fails on text: {error_summary(error)}"}
    row["distinct"] = len({token for tokens, _ in expected for token in tokens})
    try:
        try:
            row |= _compared(model, expected)
        except DiffersError:
            # Numbers that are nearly equal, such as those of a router, part in the last bits; in
            # double precision they do not.
            model = model.double()
            row |= _compared(model, [generated(model, prompt) for prompt in PROMPTS])
            row["rounding"] = True
        row["verdict"] = "equal"
    except KVPolicyError as error:
        row |= {"verdict": "refused", "why": str(error)}
    except DiffersError as error:
        row |= {"verdict": "WRONG", "why": str(error)}
    except Exception:
        row |= {"verdict": "traceback", "why": traceback.format_exc()}
    return row


Answer = tuple[list[int], list[float]]  # tokens and their log-probabilities


def generated(model: Any, prompt: list[int]) -> Answer:
    """Greedy tokens of the model's own `generate`, with its own cache."""
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    tokens = answer.sequences[0, len(prompt) :].tolist()
    logprobs = [
        score[0].float().log_softmax(dim=-1)[token].item()
        for score, token in zip(answer.scores, tokens, strict=True)
    ]
    return tokens, logprobs


def _compared(model: Any, expected: list[Answer]) -> Row:
    """Raise `DiffersError` if anything differs; what else there is to say."""
    full, found = Plan.uniform("full"), Row()
    try:
        engine = Engine(model, plan=full, slots=2, chunk=5)
    except KVPolicyError as error:
        if "eager=True" not in str(error):
            raise
        found["path"] = "eager"
    options = {"eager": True} if found else {}
    engine = Engine(model, plan=full, slots=2, chunk=5, **options)
    found.setdefault(
        "path", "eager" if engine.open_run(max_len=64).report.path != "static" else "static"
    )
    _same("alone", _answers(Engine(model, plan=full, slots=1, **options), PROMPTS), expected)
    _same("in a batch", _answers(engine, PROMPTS), expected)
    _same_tokens("with a PolicyCache", _padded(model, full), [tokens for tokens, _ in expected])
    tokenizer = tiny_tokenizer(max(61, model.config.get_text_config(decoder=True).vocab_size))
    for policy, knobs in POLICIES.items():
        plan = Plan.uniform(policy, budget=8, buffer=4, knobs={policy: knobs})
        together = _answers(Engine(model, tokenizer, plan, slots=2, chunk=5, **options), PROMPTS)
        singly = _answers(Engine(model, tokenizer, plan, slots=1, **options), PROMPTS)
        _same(f"{policy} in a batch", together, singly)
    return found


def _answers(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    requests = [Request(prompt, max_new_tokens=NEW, logprobs=0, stop_ids=()) for prompt in prompts]
    results = engine.generate(requests).results()
    for result in results:
        if result.error is not None:
            raise RuntimeError(f"an answer ended with an error: {result.error}")
    return [
        (list(result.tokens), [one.logprob for one in result.logprobs or ()]) for result in results
    ]


def _padded(model: Any, plan: Plan) -> list[list[int]]:
    """Tokens of `generate` for all prompts in one batch, padded on the left."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    answer = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        **cache_argument(PolicyCache(model, plan)),
    )
    return answer[:, width:].tolist()


def _same(where: str, found: list[Answer], expected: list[Answer]) -> None:
    _same_tokens(where, [tokens for tokens, _ in found], [tokens for tokens, _ in expected])
    for prompt, (_, logprobs), (_, wanted) in zip(PROMPTS, found, expected, strict=False):
        far = max(abs(one - other) for one, other in zip(logprobs, wanted, strict=True))
        if not far < 1e-2:
            raise DiffersError(
                f"{where}, a prompt of {len(prompt)} tokens gets log-probabilities that differ by "
                f"{far:.2g}"
            )


def _same_tokens(where: str, found: list[list[int]], expected: list[list[int]]) -> None:
    for tokens, wanted in zip(found, expected, strict=True):
        if tokens != wanted:
            raise DiffersError(f"{where}: {tokens} for {wanted}")


# One process for each class


def _in_child(walk: Callable[[str], Row], name: str, sender: Connection) -> None:
    """Walk a class and send its row; whatever it changes or breaks ends with this process."""
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        sender.send(walk(name))


def walked(name: str, timeout: int = TIMEOUT_S, walk: Callable[[str], Row] = walk) -> Row:
    """The row of a class, from a process of its own."""
    began = time.monotonic()
    receiver, sender = get_context("fork").Pipe(duplex=False)
    child = get_context("fork").Process(target=_in_child, args=(walk, name, sender))
    child.start()
    sender.close()
    row: Row = {"class": name, "type": classes()[name], "verdict": "traceback"}
    try:
        if receiver.poll(timeout):
            row = receiver.recv()
        else:
            row["why"] = f"no answer after {timeout} s"
    except EOFError:
        child.join()
        row["why"] = f"its process ended with status {child.exitcode}"
    child.kill()
    child.join()
    return row | {"seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    """Walk, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="rows, one a line; those it has are not repeated")
    parser.add_argument("--only", action="append", help="a class, or a type of model")
    parser.add_argument(
        "--again", action="append", default=[], help="walk rows of this verdict again"
    )
    parser.add_argument("--timeout", type=int, default=TIMEOUT_S, help="seconds for one class")
    parser.add_argument("--write", action="store_true", help="write the tables of the page")
    options = parser.parse_args()
    rows = _read(options.json) if options.json else {}
    names = [
        name
        for name, kind in classes().items()
        if options.only is None or name in options.only or kind in options.only
    ]
    skipped = {
        name
        for name, row in rows.items()
        if options.only is None and row["verdict"] not in options.again
    }
    torch.set_num_threads(1)
    for place, name in enumerate(names, 1):
        if name in skipped:
            continue
        row = rows[name] = walked(name, options.timeout)
        first = (row.get("why") or "").strip().splitlines()[-1:] or [row.get("path", "")]
        print(  # noqa: T201
            f"{place}/{len(names)} {row['type']} {name}: {row['verdict']} {first[0]} "
            f"({row['seconds']} s, {row.get('distinct')} tokens)",
            flush=True,
        )
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        missing = set(classes().values()) - {row["type"] for row in rows.values()}
        PAGE.write_text(page_with(page, rows.values(), missing), encoding="utf-8")
    counts: dict[str, int] = defaultdict(int)
    for row in rows.values():
        counts[row["verdict"]] += 1
    print(dict(counts))  # noqa: T201
    sys.exit(1 if counts["WRONG"] or counts["traceback"] else 0)


# The page

_BEGIN, _END = "<!-- written by tests/support/walk_models.py -->", "<!-- end -->"


def page_with(page: str, rows: Iterable[Row], missing: Iterable[str] = ()) -> str:
    """The page with the tables of some rows, and the types of models that have none."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{tables(rows, missing)}\n\n{_END}{after}"


def tables(rows: Iterable[Row], missing: Iterable[str]) -> str:
    """What came of each class, by what came of it."""
    groups: dict[str, dict[str, set[str]]] = {"equal": {}, "refused": {}, "unbuilt": {}}
    for row in rows:
        reasons = groups[row["verdict"]]  # a WRONG row or a traceback is no part of a page
        reasons.setdefault(_reason(row), set()).add(f"`{row['type']}`")
    counts = {name: sum(map(len, group.values())) for name, group in groups.items()}
    parts = [
        f"Of {sum(counts.values())} types of models of transformers {transformers.__version__}, "
        f"{counts['equal']} run, {counts['refused']} are refused, and of {counts['unbuilt']} "
        "there is no tiny model that generates from text alone."
    ]
    for name, heading in (
        ("equal", "decode steps"),
        ("refused", "refused because"),
        ("unbuilt", "no model because"),
    ):
        lines = [
            f"| {reason} | {', '.join(sorted(kinds))} |"
            for reason, kinds in sorted(groups[name].items(), key=lambda one: (-len(one[1]), one))
        ]
        parts.append("\n".join([f"| {heading} | types |", "|---|---|", *lines]))
    if missing:
        parts.append(f"Not walked yet: {', '.join(f'`{kind}`' for kind in sorted(missing))}.")
    return "\n\n".join(parts)


def _reason(row: Row) -> str:
    """Why, without what differs between classes of one reason."""
    if row["verdict"] == "equal":
        return str(row["path"])
    why = re.sub(r"^(a model with|model) \w+ cannot be run( with these images)?: ", "", row["why"])
    why = why.replace(row["class"], "it").split("\n")[0]
    why = re.sub(r"; give eager=True, which may run it$", "", why)
    why = re.sub(r"\b\d+ of its \d+ layers use", "not all of its layers use", why)
    return why.replace("|", "\\|")


def _read(path: Path) -> dict[str, Row]:
    """The newest row of each class."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines()
    return {row["class"]: row for row in map(json.loads, lines)}


if __name__ == "__main__":
    main()
