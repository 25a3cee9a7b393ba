"""What `retention` measures, in plain loops over NumPy arrays; takes a name only from kvpolicy."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from kvpolicy.compat import cache_argument, cache_in


@attrs.define
class Tally:
    """Sums over queries: what falls on rows held, and what on all."""

    held: float = 0.0
    all: float = 0.0
    error: float = 0.0
    look_backs_held: int = 0
    look_backs: int = 0
    num: int = 0

    def values(self) -> dict[str, float]:
        found = {
            "retained_attention": self.held / self.all,
            "output_error": self.error / max(self.num, 1),
            "look_backs": self.look_backs,
        }
        if self.look_backs:
            found["look_backs_held"] = self.look_backs_held / self.look_backs
        return found


def retention_by_hand(
    model: PreTrainedModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    gone_at: Mapping[tuple[int, int, int], int],
    first: int,
    *,
    weight: float,
    distance: int,
    cache: DynamicCache | None = None,
) -> dict[tuple[Any, ...], Tally]:
    """Tallies of all queries of an answer from some position on.

    Args:
        model: The model, with ``attn_implementation="eager"``.
        prompt: Tokens of the prompt.
        answer: Tokens of the answer; the model does not see the last.
        gone_at: By layer, KV head and position of a row: position of the first query that does
            not see it.
        first: Position of the first query that counts.
        weight: The least weight of a strong look-back.
        distance: How many tokens it goes back at least.
        cache: An empty cache that keeps rows outside of windows; ``None``: of layers with rows.

    Returns:
        By ``()``, ``("layer", LAYER)``, ``("head", LAYER, HEAD)`` and ``("distance", LEAST)``,
        where the last is ``"first 4"`` for the first four tokens.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    with torch.inference_mode():  # a cache without a configuration keeps rows outside of windows
        new = DynamicCache() if cache is None else cache
        seen = model(ids, output_attentions=True, **cache_argument(new))
    found: dict[tuple[Any, ...], Tally] = defaultdict(Tally)
    rows = {
        layer: one.values
        for layer, one in enumerate(cache_in(seen).layers)
        if getattr(one, "values", None) is not None
    }
    for (layer, held_values), attentions in zip(rows.items(), seen.attentions, strict=True):
        weights = attentions[0].double().numpy()
        values = held_values[0].double().numpy()
        for head in range(len(weights)):
            kv_head = head // (len(weights) // len(values))
            for query in range(max(first, len(prompt)), ids.shape[1]):
                places = [(), ("layer", layer), ("head", layer, head)]
                share, num, num_held = 0.0, 0, 0
                full, left = np.zeros(values.shape[2]), np.zeros(values.shape[2])
                for row in range(query + 1):
                    one, back = weights[head, query, row], query - row
                    held = query < gone_at.get((layer, kv_head, row), 10**9)
                    is_far = bool(one >= weight and back >= distance and row > 3)
                    least = max(at for at in (0, 16, 64, 256, 1024, 4096) if at <= back)
                    part = found["distance", least if row > 3 else "first 4"]
                    part.held, part.all = part.held + one * held, part.all + one
                    part.look_backs += is_far
                    part.look_backs_held += is_far and held
                    share, num, num_held = (
                        share + one * held,
                        num + is_far,
                        num_held + (is_far and held),
                    )
                    full += one * values[kv_head, row]
                    left += one * held * values[kv_head, row]
                error = np.linalg.norm(full - left / share) / np.linalg.norm(full)
                for place in places:
                    tally = found[place]
                    tally.held, tally.all = tally.held + share, tally.all + 1
                    tally.error, tally.num = tally.error + error, tally.num + 1
                    tally.look_backs += num
                    tally.look_backs_held += num_held
    return found
