"""Contents of plan files: valid plans, valid plans with changes, and arbitrary tables."""

import copy
import itertools
import string
from typing import Any

from hypothesis import strategies as st

STACKS: tuple[list[Any], ...] = (
    ["full"],
    ["streaming"],
    ["h2o"],
    ["h2o", "protect"],
    [{"policy": "rkv", "mix_lambda": 0.5}],
    [{"policy": "snapkv", "window_size": 4}, {"policy": "protect", "n_sink": 2}],
    [{"policy": "skipkv", "delimiters": [3, 7], "tau": 0.5}],
)

counts = st.integers(16, 400)
shares = st.integers(1, 400).map(lambda tenths: f"{tenths / 4:g}%")
budgets = counts | shares  # with a length of at least 6,400, the least share is 16 rows
lengths = st.integers(6400, 100_000)
_MIXED = {"values": "int4"}, {"keys": "int4", "exact": 3}
formats = st.sampled_from(["model", "int8", "int4", *_MIXED]).map(copy.deepcopy)
stacks = st.sampled_from(STACKS).map(copy.deepcopy)


@st.composite
def wheres(draw: st.DrawFn, num_layers: int) -> list[Any]:
    """Lists of ``where`` values that cover every layer exactly once."""
    cuts = draw(st.lists(st.integers(1, num_layers - 1), unique=True, max_size=3))
    edges = [0, *sorted(cuts), num_layers]
    spans = list(itertools.pairwise(edges))
    return [
        draw(_where_of_span(first, end, num_layers)) for first, end in draw(st.permutations(spans))
    ]


def _where_of_span(first: int, end: int, num_layers: int) -> st.SearchStrategy[Any]:
    listed = st.permutations(range(first, end)).map(list)
    negative = listed.map(lambda layers: [layer - num_layers for layer in layers])
    slices = [f"{first}:{end}"] + ([f"{first - num_layers}:"] if end == num_layers else [])
    slices += ["all"] if (first, end) == (0, num_layers) else []
    return st.sampled_from(slices) | listed | negative


@st.composite
def plan_data(draw: st.DrawFn, *, num_layers: int = 4) -> dict[str, Any]:
    """A valid plan for a model with ``num_layers`` layers, as the contents of its file."""
    data: dict[str, Any] = {"budget": draw(budgets), "length": draw(lengths)}
    if draw(st.booleans()):
        data["buffer"] = draw(st.integers(1, 64))
    if draw(st.booleans()):
        data["schedule"] = [{"policy": "skipkv_batches"}]
    data["padding"] = draw(st.sampled_from(["none", "stored"]))
    prompts = st.sampled_from(["evict", "keep"] if data["padding"] == "none" else ["evict"])
    if draw(st.booleans()):
        data["prompt"] = draw(prompts)
    if draw(st.booleans()):
        data["rows"] = draw(formats)
    if draw(st.booleans()):
        data["stack"] = draw(stacks)
        return data
    data["layers"] = []
    for where in draw(wheres(num_layers)):
        group = {"where": where, "stack": draw(stacks)}
        group |= {"budget": draw(budgets)} if draw(st.booleans()) else {}
        group |= {"buffer": draw(st.integers(1, 64))} if draw(st.booleans()) else {}
        group |= {"prompt": draw(prompts)} if draw(st.booleans()) else {}
        group |= {"rows": draw(formats)} if draw(st.booleans()) else {}
        data["layers"].append(group)
    return data


_WORDS = (
    *("stack", "budget", "buffer", "layers", "schedule", "padding", "length", "extends", "where"),
    *("policy", "name", "sampling", "steering", "h2o", "rkv", "snapkv", "protect", "streaming"),
    *("prompt", "keep", "evict", "rows", "model", "int8", "int4", "keys", "values", "exact"),
    *("full", "mix_lambda", "window_size", "n_sink", "instance", "knobs", "self", "all", "none"),
    *("0:2", "-1:", "::0", ":", "25%", "0%", "1000%", "25.5.5%", "skipkv", "a.toml", "", "\0"),
)
texts = st.sampled_from(_WORDS) | st.text(string.printable + "é\u2028\ud800", max_size=6)
numbers = st.integers() | st.integers(-3, 40) | st.floats() | st.booleans()
anything = st.recursive(
    numbers | texts | st.none() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
#: Tables whose keys are often those of plans, with arbitrary values.
tables = st.dictionaries(texts, anything, max_size=5)


@st.composite
def mutated(draw: st.DrawFn, *, num_layers: int = 4) -> dict[str, Any]:
    """A valid plan in which entries were added, replaced or removed."""
    data = draw(plan_data(num_layers=num_layers))
    for _ in range(draw(st.integers(1, 3))):
        container: Any = data
        while True:
            inner = [one for one in _values(container) if isinstance(one, (dict, list)) and one]
            if not inner or draw(st.booleans()):
                break
            container = draw(st.sampled_from(inner))
        _change(draw, container)
    return data


def _values(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else container


def _change(draw: st.DrawFn, container: Any) -> None:
    keys: list[Any] = (
        list(container) if isinstance(container, dict) else list(range(len(container)))
    )
    kind = draw(st.sampled_from(["add", "replace", "remove"]))
    if kind == "add" or not keys:
        if isinstance(container, dict):
            container[draw(texts)] = draw(anything)
        else:
            container.append(draw(anything))
        return
    key = draw(st.sampled_from(keys))
    if kind == "replace":
        container[key] = draw(anything)
    else:
        del container[key]
