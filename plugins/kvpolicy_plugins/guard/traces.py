"""Traces of requests for blocks, as text.

The format of `kvpolicy guard record` is JSON lines. The first line is a header, the others are
prompts: the ids of their blocks in the order of the prefix, as a list, or as ``{"blocks": [...],
"predictions": [...]}``. Also read are, by the suffix of the file:

* ``.txt``: an id in each line, and perhaps its prediction behind it; lines that begin with ``#`` do
  not count;
* ``.csv``: the same with commas, under a first line ``block`` or ``block,prediction``;
* ``.json``: a list of ids, or ``{"trace": [...], "predictions": [...]}``;
* ``.npz``: the arrays ``trace`` and ``predictions``; a single other one whose name begins with
  ``predictions`` counts as that.
"""

import csv
import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import attrs
import numpy as np

from kvpolicy import KVPolicyError

FORMAT = "kvpolicy block trace"
VERSION = 1
_LARGEST = 2**63 - 1


@attrs.frozen
class Trace:
    """Requests for blocks.

    Attributes:
        prompts: The blocks of each prompt, in the order of its prefix.
        predictions: The time at which each block is predicted to be asked for again; ``None`` if
            the trace has none.
        header: What the first line of the file says of it.
    """

    prompts: Sequence[Sequence[int]] = attrs.field(repr=False)
    predictions: Sequence[float] | None = attrs.field(default=None, repr=False)
    header: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def blocks(self) -> list[int]:
        """All requests in order."""
        return [block for prompt in self.prompts for block in prompt]


def to_text(trace: Trace) -> str:
    """A trace as JSON lines; its predictions are not part of it."""
    header = {"format": FORMAT, "version": VERSION, **trace.header}
    lines = [json.dumps(header, ensure_ascii=False)]
    lines += [json.dumps(list(prompt), separators=(",", ":")) for prompt in trace.prompts]
    return "\n".join(lines) + "\n"


def parse(content: bytes, suffix: str, name: str) -> Trace:
    """Read a trace.

    Args:
        content: What the file holds.
        suffix: Suffix of its name; any that is not known is read as JSON lines or as ids.
        name: What it is, for messages, such as ``"trace 'a.jsonl'"``.

    Raises:
        KVPolicyError: It is no trace; the message says where.
    """
    if suffix == ".npz":
        trace = _parse_npz(content, name)
    else:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            msg = f"{name} is no text: byte {error.start} is not UTF-8."
            raise KVPolicyError(msg) from error
        trace = _parse_text(text, suffix, name)
    if not any(trace.prompts):
        msg = f"{name} holds no request; record one with `kvpolicy guard record`."
        raise KVPolicyError(msg)
    if trace.predictions is not None and any(np.isnan(trace.predictions)):
        msg = f"{name} has predictions that are no numbers (NaN); give a time for each request."
        raise KVPolicyError(msg)
    return trace


def _parse_text(text: str, suffix: str, name: str) -> Trace:
    if suffix == ".csv":
        return _parse_csv(text, name)
    if suffix == ".json":
        return _parse_json(_loads(text, name), name)
    if suffix != ".txt" and text.lstrip()[:1] in ("{", "["):
        return _parse_json_lines(text.splitlines(), name)
    rows = ((number, line.split()) for number, line in enumerate(text.splitlines(), start=1))
    return _of_rows(((n, cells) for n, cells in rows if cells and cells[0][0] != "#"), name)


def _parse_csv(text: str, name: str) -> Trace:
    rows = [
        (number, [cell.strip() for cell in cells])
        for number, cells in enumerate(csv.reader(io.StringIO(text)), start=1)
        if any(cells)
    ]
    if rows and rows[0][1] in (["block"], ["block", "prediction"]):
        rows = rows[1:]
    return _of_rows(iter(rows), name)


def _of_rows(rows: Iterator[tuple[int, list[str]]], name: str) -> Trace:
    blocks: list[int] = []
    predictions: list[float] = []
    for number, cells in rows:
        where = f"{name}, line {number},"
        if len(cells) > 2:
            _refuse(f"{where} has {len(cells)} fields; give an id, and at most its prediction")
        blocks.append(_id(cells[0], where))
        if len(cells) == 2:
            predictions.append(_time(cells[1], where))
    return _with_predictions([[block] for block in blocks], predictions, {}, name)


def _parse_json_lines(lines: Sequence[str], name: str) -> Trace:
    header: Mapping[str, Any] = {}
    prompts: list[list[int]] = []
    predictions: list[float] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number},"
        value = _loads(line, where)
        if isinstance(value, dict) and "format" in value:
            header = _header(value, where)
            continue
        prompt = _parse_json(value, where)
        prompts.append(prompt.blocks)
        predictions += prompt.predictions or []
    return _with_predictions(prompts, predictions, header, name)


def _header(value: dict[str, Any], where: str) -> dict[str, Any]:
    if value["format"] != FORMAT or value.get("version") != VERSION:
        found = f"{value['format']!r:.60}, version {value.get('version')!r:.20}"
        _refuse(f"{where} says that it is {found}; expected {FORMAT!r}, version {VERSION}")
    return {key: value[key] for key in value if key not in ("format", "version")}


def _parse_json(value: object, where: str) -> Trace:
    predictions: object = []
    if isinstance(value, dict):
        blocks = value.get("trace", value.get("blocks"))
        predictions = value.get("predictions", [])
    else:
        blocks = value
    if not isinstance(blocks, list) or not isinstance(predictions, list):
        _refuse(f"{where} holds no list of block ids; give [1, 2, 3], for example")
    ids = [_id(block, where) for block in blocks]
    times = [_time(one, where) for one in predictions]
    return _with_predictions([ids], times, {}, where)


def _parse_npz(content: bytes, name: str) -> Trace:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files if key[:5] in ("trace", "predi")}
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile) as error:
        msg = f"{name} cannot be read as .npz: {error}."
        raise KVPolicyError(msg) from error
    blocks = arrays.pop("trace", None)
    if blocks is None or blocks.ndim != 1:
        _refuse(f"{name} has no array 'trace' with one axis; store the block ids under this name")
    if not np.issubdtype(blocks.dtype, np.integer):
        _refuse(f"{name} has a 'trace' of {blocks.dtype}; block ids are whole numbers")
    times = arrays.get("predictions", next(iter(arrays.values())) if len(arrays) == 1 else None)
    if times is not None and not (np.issubdtype(times.dtype, np.number) and times.ndim == 1):
        _refuse(f"{name} has predictions of {times.dtype}; they are numbers, one for each request")
    predictions = [] if times is None else times.tolist()
    return _with_predictions([[block] for block in blocks.tolist()], predictions, {}, name)


def _with_predictions(
    prompts: list[list[int]], predictions: list[float], header: Mapping[str, Any], name: str
) -> Trace:
    num_requests = sum(map(len, prompts))
    if predictions and len(predictions) != num_requests:
        _refuse(
            f"{name} has {len(predictions)} predictions for {num_requests} requests; give one for "
            "each, or none"
        )
    return Trace(prompts, predictions or None, header)


def _id(value: object, where: str) -> int:
    if isinstance(value, str) and value.lstrip("-").isascii() and value.lstrip("-").isdigit():
        value = int(value[:30])
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST:
        _refuse(f"{where} has the block id {value!r:.60}; ids are whole numbers of up to 63 bits")
    return value


def _time(value: object, where: str) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        _refuse(f"{where} has the prediction {value!r:.60}; predictions are numbers")


def _loads(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"{where} is not JSON: {error}."
        raise KVPolicyError(msg) from error


def _refuse(problem: str) -> NoReturn:
    raise KVPolicyError(problem + ".")
