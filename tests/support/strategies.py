"""Hypothesis strategies: shapes and seeds are drawn, tensors are filled from a generator.

Hypothesis shrinks sizes and knobs, and never single floats. Options are keyword arguments;
``None`` means that the value is drawn.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import attrs
import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy import Plan, installed_policies
from kvpolicy.plan.spec import LayerGroup, PolicySpec

KINDS = ("gauss", "dup", "mean")

#: For properties of whole runs, whose examples take half a second each: two thirds as many.
costly = settings(max_examples=settings.default.max_examples * 2 // 3)

seeds = st.integers(0, 2**16)


@attrs.frozen
class Drawn:
    """Keys, values ``[B, H_kv, T, D]`` and the last queries ``[B, H_q, W, D]``."""

    keys: Tensor = attrs.field(repr=lambda t: f"{t.dtype}{list(t.shape)}")
    values: Tensor = attrs.field(repr=False)
    queries: Tensor = attrs.field(repr=lambda t: f"{list(t.shape)}")
    kind: str
    seed: int

    @property
    def num_rows(self) -> int:
        return self.keys.shape[2]

    def row(self, b: int) -> "Drawn":
        """One sequence alone."""
        one = slice(b, b + 1)
        return attrs.evolve(
            self, keys=self.keys[one], values=self.values[one], queries=self.queries[one]
        )


def fill(shape: tuple[int, ...], kind: str, seed: int, scale: float = 1.0) -> Tensor:
    """Gaussian rows; ``dup``: most are noisy copies of earlier ones; ``mean``: shifted mean."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=rng) * scale
    if kind == "mean":
        return 0.8 * x + 1
    if kind == "dup":
        for t in range(1, shape[2]):
            if torch.rand((), generator=rng) < 0.6:
                source = int(torch.randint(t, (), generator=rng))
                noise = torch.randn(x[:, :, t].shape, generator=rng)
                x[:, :, t] = x[:, :, source] + 0.15 * noise
    return x


@st.composite
def caches(
    draw: st.DrawFn,
    *,
    batch: int | None = None,
    num_kv_heads: int | None = None,
    group: int | None = None,
    num_rows: int | None = None,
    min_rows: int = 1,
    max_rows: int = 32,
    num_queries: int | None = None,
    head_dim: int | None = None,
    kind: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Drawn:
    """One layer's rows and the queries of the newest tokens.

    ``num_queries=None`` gives a query for every row, so that any window fits.
    """
    batch = draw(st.integers(1, 3)) if batch is None else batch
    num_kv_heads = draw(st.integers(1, 3)) if num_kv_heads is None else num_kv_heads
    group = draw(st.sampled_from([1, 2, 3, 4])) if group is None else group
    num_rows = draw(st.integers(min_rows, max_rows)) if num_rows is None else num_rows
    head_dim = draw(st.sampled_from([2, 3, 4, 8])) if head_dim is None else head_dim
    kind = draw(st.sampled_from(KINDS)) if kind is None else kind
    num_queries = num_rows if num_queries is None else num_queries
    seed = draw(seeds)
    rows = (batch, num_kv_heads, num_rows, head_dim)
    queries = (batch, num_kv_heads * group, num_queries, head_dim)
    return Drawn(
        keys=fill(rows, kind, seed).to(dtype),
        values=fill(rows, "gauss", seed + 1).to(dtype),
        queries=fill(queries, "gauss", seed + 2, scale=1.5).to(dtype),
        kind=kind,
        seed=seed,
    )


def budgets(num_rows: int, *, min_budget: int = 1) -> st.SearchStrategy[int]:
    """Budgets around the number of rows: often one less, equal or one more."""
    edges = [b for b in (min_budget, num_rows - 1, num_rows, num_rows + 1) if b >= min_budget]
    return st.sampled_from(edges) | st.integers(min_budget, max(min_budget, num_rows))


@st.composite
def rounds(draw: st.DrawFn, num_rows: int, *, prompt: int | None = None) -> dict[str, Any]:
    """A prompt length and the token counts at which a stream is compacted."""
    prompt = draw(st.integers(1, num_rows)) if prompt is None else prompt
    counts = st.lists(st.integers(prompt, num_rows), min_size=1, max_size=4, unique=True)
    return {"prompt": prompt, "compact_at": sorted(draw(counts))}


@st.composite
def prompts(
    draw: st.DrawFn,
    *,
    count: int | None = None,
    vocab: int = 61,
    min_len: int = 1,
    max_len: int = 24,
) -> list[list[int]]:
    """Prompts of different lengths, as token ids."""
    count = draw(st.integers(1, 5)) if count is None else count
    lengths = draw(st.lists(st.integers(min_len, max_len), min_size=count, max_size=count))
    rng = torch.Generator().manual_seed(draw(seeds))
    return [torch.randint(vocab, (n,), generator=rng).tolist() for n in lengths]


#: Knobs for small budgets; other policies use their defaults.
SMALL_KNOBS: dict[str, tuple[dict[str, Any], ...]] = {
    "streaming": ({"n_sink": 0}, {"n_sink": 2}, {"n_sink": 4}),
    "h2o": ({}, {"n_recent": 3}, {"n_recent": 2, "every": 1}, {"every": 3}),
    "tova": ({}, {"every": None, "n_recent": 1}, {"every": 3}),
    "knorm": ({}, {"n_recent": 0}, {"n_recent": 2, "skip_layers": (0,)}),
    "keydiff": ({}, {"n_recent": 3}),
    "lazy_eviction": ({"window_size": 4}, {"window_size": 2, "alpha": 0.1}),
    "random": ({}, {"seed": 7}),
    "pyramidkv": (
        {"window_size": 4},
        {"window_size": 2, "beta": 1.5, "kernel_size": 3},
        {"window_size": 3, "phase": "prefill", "group_reduce": "max"},
    ),
    "snapkv": (
        {"window_size": 4},
        {"window_size": 1, "kernel_size": 3},
        {"window_size": 4, "pooling": "avgpool"},
        {"window_size": 3, "phase": "prefill"},
    ),
    "rkv": (
        {"window_size": 4},
        {"window_size": 8, "mix_lambda": 0.5},
        {"window_size": 2, "retain_direction": "first"},
    ),
    "skipkv": (
        {"delimiters": (3, 7), "tau": 0.5, "window_size": 4},
        {"delimiters": tuple(range(20)), "tau": 0.1, "window_size": 2, "pair": "last"},
    ),
    "protect": ({"n_sink": 2, "n_recent": 3}, {"n_sink": 0, "n_recent": 1}, {}),
    "mix": (
        {},
        {"of": ["streaming", {"policy": "snapkv", "window_size": 4, "weight": 3}]},
        {"of": [{"policy": "rkv", "window_size": 4}, "streaming"], "normalise": "zscore"},
    ),
    "caote": ({}, {"fast": True}, {"greedy": True}),
    "obcache": (
        {"window_size": 4},
        {"window_size": 2, "host": "accumulate", "saliency": "vk", "kernel_size": 1, "n_sink": 1},
        {"window_size": 1, "n_recent": 0, "saliency": "v", "every": 2},
        {"window_size": 3, "phase": "prefill", "pooling": "avgpool", "group_reduce": "max"},
    ),
    "obcache_history": (
        {"n_recent": 2},
        {"n_recent": 3, "n_sink": 1, "saliency": "k", "window_size": 4},
        {"n_recent": 0, "saliency": "vk", "every": 2},
    ),
    "trimkv": (
        {},
        {"retention_gate": "rg2", "n_recent": 3, "horizon": 8, "seed": 5},
        {"retention_gate": "rg3", "n_recent": 0, "key_norms": True, "floor_ratio": 0.5},
        {"newest_age": 2, "threshold": 0.99, "whole_prompt": True},
    ),
    "merge": ({}, {"beta": 0.3}, {"weights": "mean"}),
    "expected_attention": (
        {},
        {"window_size": 6, "n_future": 9, "n_sink": 0, "epsilon": 0.02},
        {"use_covariance": False, "use_vnorm": False, "n_sink": 2},
    ),
    "laq": (
        {},
        {"n_lookahead": 3, "n_local": 0},
        {"n_local": 4, "compat_mask": True, "pooling": "avgpool"},
        {"n_lookahead": 0, "n_local": 2, "kernel_size": 3},
        {"n_lookahead": 2, "n_local": 2, "phase": "prefill", "group_reduce": "max"},
    ),
    "epicache": (
        {"prompt": [3, 7, 5]},
        {"prompt": [], "n_last": 4, "n_sink": 1},
        {"prompt": [3, 7], "n_last": 2, "n_recent": 3},
    ),
}

#: Policies that only steer and need a tokenizer and a vector of the model's size.
STEERING = ("seal",)

#: Policies that change the keys or values of kept rows.
REWRITING = ("merge", "rerotate")

#: Policies that must be listed with one that scores, and such a one.
BASES: dict[str, tuple[PolicySpec, ...]] = {"caote": (PolicySpec("h2o", {"n_recent": 2}),)}

#: No stack of `stacks` protects more rows than this.
MOST_PROTECTED = 12


@cache
def _installed_names() -> list[str]:
    return [policy.name for policy in installed_policies()]


@st.composite
def stacks(
    draw: st.DrawFn, *, extra: Sequence[object] = (), verbatim: bool = False
) -> tuple[PolicySpec, ...]:
    """Any policy that selects rows, sometimes with ``protect``, and the ``extra`` ones.

    If ``verbatim``, no policy changes kept rows.
    """
    excluded = (*STEERING, *REWRITING) if verbatim else STEERING
    names = [name for name in _installed_names() if name not in excluded]
    chosen = [draw(st.sampled_from(names))]
    if draw(st.booleans()) and "protect" not in chosen:
        chosen.append("protect")
    specs = [
        PolicySpec(name, draw(st.sampled_from(SMALL_KNOBS.get(name, ({},))))) for name in chosen
    ]
    return (*BASES.get(chosen[0], ()), *specs, *(PolicySpec.of(policy) for policy in extra))


@st.composite
def plans(
    draw: st.DrawFn,
    *,
    num_layers: int,
    min_budget: int = MOST_PROTECTED,
    max_budget: int = MOST_PROTECTED + 8,
    extra: Sequence[object] = (),
    verbatim: bool = False,
) -> Plan:
    """A stack, a budget and a buffer per layer, or one for all layers."""
    groups = [f"{i}:{i + 1}" for i in range(num_layers)] if draw(st.booleans()) else ["all"]
    return Plan(
        layers=tuple(
            LayerGroup(
                where=where,
                stack=draw(stacks(extra=extra, verbatim=verbatim)),
                budget=draw(st.integers(min_budget, max_budget)),
                buffer=draw(st.integers(1, 8)),
            )
            for where in groups
        )
    )


@st.composite
def roomy_plans(draw: st.DrawFn, *, num_layers: int, rows: int) -> Plan:
    """A plan that gives every layer at least ``rows`` rows."""
    plan = draw(plans(num_layers=num_layers, min_budget=rows, max_budget=rows + 16))
    # Policies that distribute rows among layers give some layers fewer.
    budgets = [layer.budget for layer in plan.resolve(num_layers).layers]
    assume(min(budget for budget in budgets if budget is not None) >= rows)
    return plan
