"""Oracle of greedy decoding with eviction, also in sliding-window layers, in plain lists.

One sequence, one token at a time; keys and values are lists of numbers, attention is a loop.
The model computes everything else. Of kvpolicy it knows the name of an argument only.
"""

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
from families import attention_implementation
from torch import Tensor
from transformers import AttentionInterface, Cache, PreTrainedModel

from kvpolicy.compat import cache_argument

#: Rows of each head that stay, by their index, from scores of all rows of each and the budget.
Share = Callable[[list[list[float]], int], list[list[int]]]

#: Whether a layer is due for a compaction at this number of tokens.
Due = Callable[[int], bool]


@attrs.define(eq=False)
class ListLayer:
    """One layer: its settings, and the rows of each KV head as (position, key, value)."""

    window: int | None
    budget: int
    buffer: int
    rate: Callable[[int, int], float]  # (head, position) -> score
    due: Due
    num_staying: int = 0  # first tokens whose rows are not counted or chosen from: a kept prompt
    heads: list[list[tuple[int, list[float], list[float]]]] = attrs.field(factory=list)
    num_compactions: int = 0
    share: Share | None = None  # heads have the budget together
    num_rows: int = 0  # of a head in the mean

    def store(self, position: int, keys: Tensor, values: Tensor) -> None:
        self.num_rows += 1
        for head in range(keys.shape[0]):
            if len(self.heads) <= head:
                self.heads.append([])
            self.heads[head].append((position, keys[head].tolist(), values[head].tolist()))

    def sees(self, query_position: int, position: int) -> bool:
        return self.window is None or query_position - position < self.window

    def compact(self, seq_len: int, *, prefill_done: bool) -> None:
        """After a token: compact the layer if it is full or due."""
        slides = self.window is not None and self.budget + self.buffer >= self.window
        if self.share is not None:
            self._compact_together()
            return
        full = not slides and self.num_candidates >= self.budget + self.buffer
        is_due = prefill_done and self.due(seq_len)
        if not (full or is_due) or self.num_candidates <= self.budget:
            return
        outside = [[not self.sees(seq_len, row[0]) for row in rows] for rows in self.heads]
        num_outside = min(sum(flags) for flags in outside)
        self.heads = [rows[num_outside:] for rows in self.heads]
        if self.num_candidates <= self.budget:
            return
        self.num_compactions += 1
        for head, rows in enumerate(self.heads):
            staying = [row for row in rows if row[0] < self.num_staying]
            ranked = sorted(
                [row for row in rows if row[0] >= self.num_staying],
                key=lambda row: (
                    self.rate(head, row[0]) if self.sees(seq_len, row[0]) else -math.inf,
                    row[0],
                ),
                reverse=True,
            )
            self.heads[head] = staying + sorted(ranked[: self.budget])

    @property
    def num_candidates(self) -> int:
        return sum(row[0] >= self.num_staying for row in self.heads[0])

    def _compact_together(self) -> None:
        if self.num_rows < self.budget + self.buffer:
            return
        self.num_compactions += 1
        scores = [[self.rate(h, row[0]) for row in rows] for h, rows in enumerate(self.heads)]
        pairs = zip(self.heads, self.share(scores, self.budget), strict=True)
        self.heads = [[rows[index] for index in indices] for rows, indices in pairs]
        self.num_rows = self.budget


class _ListCache(Cache):
    """The cache object that is passed to the model."""

    def __init__(self, layers: list[ListLayer]) -> None:
        super().__init__(layers=[])
        self.lists = layers
        self.seen = 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.lists[layer_idx].store(self.seen, keys[0, :, 0], values[0, :, 0])
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    list_cache: Any = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    layer = list_cache.lists[module.layer_idx]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    group = query.shape[1] // key.shape[1]
    answer = torch.zeros(1, 1, query.shape[1], query.shape[-1], dtype=query.dtype)
    for head in range(query.shape[1]):
        query_vector = query[0, head, 0].tolist()
        rows = [r for r in layer.heads[head // group] if layer.sees(list_cache.seen, r[0])]
        logits = [scaling * sum(map(float.__mul__, query_vector, row[1])) for row in rows]
        if softcap is not None:
            logits = [softcap * math.tanh(logit / softcap) for logit in logits]
        sink = [] if s_aux is None else [float(s_aux[head])]
        peak = max(logits + sink)
        shares = [math.exp(logit - peak) for logit in logits + sink]
        for share, (_, _, value_vector) in zip(shares, rows, strict=False):
            for d, number in enumerate(value_vector):
                answer[0, 0, head, d] += share / sum(shares) * number
    return answer, None


def reference_tokens(
    model: PreTrainedModel, layers: list[ListLayer], prompt: list[int], max_new_tokens: int
) -> list[int]:
    """Greedy tokens, with eviction in each layer by its settings."""
    AttentionInterface.register("list_reference", _attend)
    cache, tokens = _ListCache(layers), list(prompt)
    with torch.no_grad(), attention_implementation(model, "list_reference"):
        while True:
            logits = model(
                input_ids=torch.tensor([[tokens[cache.seen]]]),
                position_ids=torch.tensor([[cache.seen]]),
                **cache_argument(cache),
                use_cache=True,
                list_cache=cache,
            ).logits
            cache.seen += 1
            if cache.seen == len(tokens):
                tokens.append(int(logits[0, -1].argmax()))
                if len(tokens) == len(prompt) + max_new_tokens:
                    return tokens[len(prompt) :]
            for layer in layers:
                layer.compact(cache.seen, prefill_done=cache.seen >= len(prompt))
