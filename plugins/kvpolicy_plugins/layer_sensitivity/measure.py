"""How much the keys of each layer change when a text is prefilled in blocks.

    sigma_l = mean over texts, KV heads h and positions i of
              cos(k_full[l, h, i], k_block[l, h, i]),          s_l = 1 - sigma_l

``k_full`` are the keys of a causal forward over the whole text; ``k_block`` those of a forward in
which a token sees the tokens of its own block only, up to itself, at the same positions. Keys are
as the cache holds them, rotated. EpiCache (arXiv 2509.17396), equation of its layer sensitivity.

The authors' code lets a block see 128 sink tokens and half of the block before, and compares
windows of 100 tokens flattened into one vector; here it is the paper's equation. A forward with a
block mask equals one forward for each block at its own positions, which needs no mask and works
for every decoder model that caches keys.
"""

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import KVPolicyError
from kvpolicy.toolkit import cache_argument


@attrs.frozen
class TextSensitivity:
    """Sums over one text.

    Attributes:
        cosines: Sum of the cosines over KV heads and positions, for each layer.
        counts: Number of cosines, for each layer.
        num_tokens: Tokens of the text.
    """

    cosines: tuple[float, ...]
    counts: tuple[int, ...]
    num_tokens: int


def measure_texts(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], *, block: int
) -> Iterator[TextSensitivity]:
    """Compare the two forwards of each text.

    Args:
        model: A decoder model.
        texts: Token ids of texts, none of them empty.
        block: Tokens of a block.

    Yields:
        The sums of each text.

    Raises:
        KVPolicyError: The model caches no keys.
    """
    for ids in texts:
        full = _keys(model, ids, 0)
        sums, counts = [0.0] * len(full), [0] * len(full)
        for start in range(0, len(ids), block):
            part = ids[start : start + block]
            for layer, found in enumerate(_keys(model, part, start)):
                whole = full[layer][:, :, start : start + len(part)]
                cosines = torch.cosine_similarity(whole.double(), found.double(), dim=-1)
                sums[layer] += float(cosines.sum())
                counts[layer] += cosines.numel()
        yield TextSensitivity(tuple(sums), tuple(counts), len(ids))


def sensitivities(measured: Sequence[TextSensitivity]) -> list[float]:
    """``1 - sigma`` of each layer over all texts; rounding never makes it negative.

    Args:
        measured: At least one text.
    """
    cosines = [sum(of_texts) for of_texts in zip(*(one.cosines for one in measured), strict=True)]
    counts = [sum(of_texts) for of_texts in zip(*(one.counts for one in measured), strict=True)]
    return [max(0.0, 1 - total / n) for total, n in zip(cosines, counts, strict=True)]


@torch.inference_mode()
def _keys(model: PreTrainedModel, ids: Sequence[int], start: int) -> list[Tensor]:
    """Keys of a forward over tokens from a position on: in each layer ``[1, H_kv, T, D]``."""
    tokens = torch.tensor([list(ids)], device=model.device)
    positions = torch.arange(start, start + len(ids), device=model.device)[None]
    # Without the model's configuration, layers with a sliding window keep all keys, too.
    cache = DynamicCache()
    model(input_ids=tokens, position_ids=positions, use_cache=True, **cache_argument(cache))
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    if not keys or any(one is None or one.ndim != 4 or one.shape[2] != len(ids) for one in keys):
        kind = model.config.model_type
        msg = f"model type '{kind}' does not cache a key for each token in every layer"
        raise KVPolicyError(msg)
    return [one for one in keys if one is not None]
