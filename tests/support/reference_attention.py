"""Retained attention and output error in plain loops; takes a name only from kvpolicy."""

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from kvpolicy.compat import cache_in


def held_attention(
    model: PreTrainedModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    gone_at: Mapping[tuple[int, int, int], int],
    first: int,
) -> tuple[float, float]:
    """Output error and retained attention, means over the queries of an answer.

    Args:
        model: The model, with ``attn_implementation="eager"``.
        prompt: Tokens of the prompt.
        answer: Tokens of the answer; the model does not see the last.
        gone_at: By layer, KV head and position of a row: position of the first query that does
            not see it.
        first: Position of the first query that counts.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    with torch.inference_mode():
        seen = model(ids, output_attentions=True, use_cache=True)
    errors, shares = [], []
    for layer, weights in enumerate(seen.attentions):
        values = cache_in(seen).layers[layer].values[0]
        num_heads, num_kv_heads = weights.shape[1], values.shape[0]
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            for query in range(max(first, len(prompt)), ids.shape[1]):
                share = 0.0
                full, left = [0.0] * values.shape[2], [0.0] * values.shape[2]
                for row in range(query + 1):
                    weight = float(weights[0, head, query, row])
                    held = query < gone_at.get((layer, kv_head, row), 10**9)
                    share += weight * held
                    for place, value in enumerate(values[kv_head, row].tolist()):
                        full[place] += weight * value
                        left[place] += weight * held * value
                gap = sum((a - b / share) ** 2 for a, b in zip(full, left, strict=True))
                errors.append((gap / sum(a * a for a in full)) ** 0.5)
                shares.append(share)
    return sum(errors) / len(errors), sum(shares) / len(shares)
