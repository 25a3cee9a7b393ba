"""Run a tiny random model of every vision-language class of transformers with images.

``python tests/support/walk_images.py --json FILE`` walks every class that gives text for images and
text; rows that FILE has are not walked again. ``--only NAME`` (several times) walks these.
``--write`` replaces the table of images in ``docs/reference/models.md`` by what FILE says. The
towers of three classes are timm's, which kvpolicy does not install.

A class is

* ``equal``: in `generate` with a `PolicyCache`, tokens for a prompt with an image equal those with
  the model's own cache, alone and in a batch of unequal prompts with and without images; and under
  policies that evict, a row in a batch equals itself alone;
* ``refused``: a `PolicyCache` raises a `KVPolicyError`, in one sentence;
* ``blind``: its forward takes no image and no sound;
* ``unbuilt``: there is no tiny model, or none of the forms of `tiny_images` is an image for it;
* ``WRONG``, ``traceback``: defects of ours.
"""

import argparse
import json
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from any_model import classes, vision_language_classes
from batches import padded
from tiny import tiny_tokenizer
from tiny_images import AUDIO, IMAGE, Image, image_of, of_images, tiny_seeing_model
from walk_models import PAGE, POLICIES, DiffersError, Row, _read, _reason, walked

from kvpolicy import Plan, PolicyCache
from kvpolicy.compat import cache_argument
from kvpolicy.errors import KVPolicyError, error_summary
from kvpolicy.model.embedded import image_arguments

NEW = 6
_BEGIN, _END = "<!-- written by tests/support/walk_images.py -->", "<!-- end of images -->"


def walk(name: str) -> Row:
    """What comes of one class."""
    row: Row = {"class": name, "type": classes()[name], "verdict": "unbuilt", "why": ""}
    try:
        with torch.inference_mode(False):
            model = tiny_seeing_model(name)
    except Exception as error:
        return row | {"why": f"a tiny one is not built: {error_summary(error)}"}
    try:
        PolicyCache(model, Plan.uniform("full"))
    except KVPolicyError as error:
        return row | {"verdict": "refused", "why": str(error)}
    if not image_arguments(model):
        return row | {"verdict": "blind"}
    images = image_of(model), image_of(model, seed=1)
    if None in images:
        return row | {"why": "no tiny image was found for it"}
    first, second = images
    prompts = [first.prompt([5, 9, 40, 3], [7, 11]), [4, 6, 8], second.prompt([3], [8, 9, 21, 7])]
    given = [[first], [], [second]]
    try:
        expected = [answers(model, [one], own)[0] for one, own in zip(prompts, given, strict=True)]
    except Exception as error:
        return row | {"why": f"its own generate fails with an image: {error_summary(error)}"}
    row["seen"] = answers(model, prompts[:1], [second])[0] != expected[0]
    try:
        _compare(model, prompts, given, expected)
        row["verdict"] = "equal"
    except KVPolicyError as error:
        row |= {"verdict": "refused", "why": str(error)}
    except DiffersError as error:
        row |= {"verdict": "WRONG", "why": str(error)}
    except Exception:
        row |= {"verdict": "traceback", "why": traceback.format_exc()}
    return row


def answers(
    model: Any,
    prompts: list[list[int]],
    images: list[Image],
    plan: Plan | None = None,
) -> list[list[int]]:
    """Greedy tokens of `generate` for prompts in one batch, which have these images, in order."""
    inputs = padded(prompts)
    ids, options = inputs["input_ids"], {}
    if plan is not None:
        size = model.config.get_text_config(decoder=True).vocab_size
        options = cache_argument(PolicyCache(model, plan, tiny_tokenizer(max(61, size))))
    settings = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [IMAGE, AUDIO]}
    with torch.no_grad():
        found = model.generate(**inputs, **of_images(images, ids), **settings, **options)
    return found[:, ids.shape[1] :].tolist()


def _compare(
    model: Any, prompts: list[list[int]], given: list[list[Image]], expected: list[list[int]]
) -> None:
    """Raise `DiffersError` if anything differs.

    The code of some models sees other things in an image beside another one: then there is nothing
    to compare a batch with but their own `generate` for it.
    """
    together = [image for own in given for image in own]
    plans = {"full": Plan.uniform("full")} | {
        name: Plan.uniform(
            name, budget=8, buffer=max(4, together[0].num_tokens), knobs={name: knobs}
        )
        for name, knobs in POLICIES.items()
    }
    is_apart = False
    for name, plan in plans.items():
        alone = [
            answers(model, [one], own, plan)[0] for one, own in zip(prompts, given, strict=True)
        ]
        if name == "full" and alone != expected:
            raise DiffersError(f"alone: {alone} for {expected}")
        found = alone if is_apart else answers(model, prompts, together, plan)
        if found != alone and name == "full":
            is_apart = found == answers(model, prompts, together)
        if found != alone and not is_apart:
            raise DiffersError(f"{name} in a batch: {found} for {alone}")


def main() -> None:
    """Walk, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="rows, one a line; those it has are not repeated")
    parser.add_argument("--only", action="append", help="a class, or a type of model")
    parser.add_argument("--write", action="store_true", help="write the table of the page")
    options = parser.parse_args()
    rows = _read(options.json) if options.json else {}
    seeing = set(vision_language_classes().values())
    names = [name for name in classes() if name in seeing]
    wanted = [
        name
        for name in names
        if name not in rows
        and (options.only is None or name in options.only or classes()[name] in options.only)
    ]
    torch.set_num_threads(1)
    for name in wanted:
        row = rows[name] = walked(name, walk=walk)
        why = (row.get("why") or "").strip().splitlines()[-1:] or [""]
        print(name, row["verdict"], why[0], f"({row['seconds']} s)", flush=True)  # noqa: T201
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if options.write:
        missing = {classes()[name] for name in names} - {row["type"] for row in rows.values()}
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(_BEGIN)
        after = rest.partition(_END)[2]
        written = f"{before}{_BEGIN}\n\n{table(rows.values(), missing)}\n\n{_END}{after}"
        PAGE.write_text(written, encoding="utf-8")
    sys.exit(any(row["verdict"] in ("WRONG", "traceback") for row in rows.values()))


def table(rows: Iterable[Row], missing: Iterable[str]) -> str:
    """What came of each class with an image, by what came of it."""
    groups: dict[tuple[int, str], set[str]] = defaultdict(set)
    order = {
        "equal": "runs",
        "refused": "is refused",
        "blind": "its forward takes neither image nor sound",
        "unbuilt": "is not tried",
    }
    for row in rows:
        if row["verdict"] in order:
            why = f": {_reason(row)}" if row["why"] else ""
            kind = [*order].index(row["verdict"]), f"{order[row['verdict']]}{why}"
            groups[kind].add(f"`{row['type']}`")
    lines = [
        f"| {text} | {', '.join(sorted(kinds))} |" for (_, text), kinds in sorted(groups.items())
    ]
    found = "\n".join(["| with an image | types |", "|---|---|", *lines])
    if missing:
        found += f"\n\nNot walked yet: {', '.join(f'`{kind}`' for kind in sorted(missing))}."
    return found


if __name__ == "__main__":
    main()
