"""Turning keys to other positions: RoPE depends on differences only, so a key can be moved.

A key stored after RoPE at position p, rotated by d, is the key of the same token at p + d. The
rotation is the model's own: its rotary embedding gives the angles, its modelling file applies
them, so that partial and interleaved embeddings are turned as the model turns them.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpolicy.cache.layout import StepLayout
from kvpolicy.cache.slab import Cache, Slab
from kvpolicy.errors import ModelError

if TYPE_CHECKING:
    from kvpolicy.model.adapter import ModelAdapter

# Where a token stands when the rotation is tried, and how far it is moved.
_STANDS, _MOVES = 3, 100


class Rotation:
    """A model's own rotation of keys, tried on the model itself before it is used."""

    def __init__(self, adapter: "ModelAdapter") -> None:
        """Note the model; nothing is looked at before the first key is to be moved."""
        self._adapter = adapter
        self._layers: list[Callable[[Tensor, Tensor], Tensor]] | None = None

    def __call__(self, layer_idx: int, keys: Tensor, by: Tensor) -> Tensor:
        """Move keys of one layer.

        Args:
            layer_idx: Decoder layer, counted from 0.
            keys: Keys after RoPE, ``[B, H_kv, K, D]``.
            by: Positions to add, ``[B, H_kv, K]``, int64.

        Returns:
            ``[B, H_kv, K, D]``, in the dtype of ``keys``.

        Raises:
            ModelError: If the model's keys cannot be moved.
        """
        if self._layers is None:
            self._layers = self._tried_layers()
        return self._layers[layer_idx](keys, by)

    def _tried_layers(self) -> list[Callable[[Tensor, Tensor], Tensor]]:
        """For each layer the first way of rotating that moves a real token as the model does.

        A sequence of one token attends to itself only. Whatever its position, it enters every
        layer with the same state, and its keys differ by the rotation alone.
        """
        model = self._adapter.model
        rotary = _rotary_embedding(model)
        moves = min(_MOVES, self._adapter.max_positions - _STANDS - 1)
        here, there = (self._keys_at(position) for position in (_STANDS, _STANDS + moves))
        found = []
        for layer_idx, (before, after) in enumerate(zip(here, there, strict=True)):
            ways = _candidates(model, rotary, layer_idx)
            way = next((way for way in ways if _is_right(way, before, after, moves)), None)
            if way is None:
                reason = f"those of layer {layer_idx} do not change as its rotary embedding says"
                raise _refusal(model, reason)
            found.append(way)
        return found

    def _keys_at(self, position: int) -> list[Tensor]:
        """Keys of every layer for one token that stands alone at a position."""
        shapes = self._adapter.layer_shapes()
        cache = Cache(shapes, [Slab(1)] * len(shapes), 1)
        cache.seq_len[0] = position
        # Not the padding, whose state may be zero, and so its keys.
        padding = self._adapter.model.config.get_text_config(decoder=True).pad_token_id
        token = torch.tensor([[1 if padding == 0 else 0]])
        self._adapter.forward(token, StepLayout(cache, 0, [1]))
        # All processes that hold the model are to find the same way.
        return [layer.shape.peers.all_gather(layer.keys) for layer in cache.layers]


def rotate_halves(layer_idx: int, keys: Tensor, by: Tensor, theta: float = 10_000.0) -> Tensor:
    """Plain RoPE as Llama has it, for keys that belong to no model; see `Rotation.__call__`.

    Number i of the first half of a head is paired with number i of the second half; the last
    number of an odd head is left alone.
    """
    half = keys.shape[3] // 2
    frequencies = theta ** (-torch.arange(half, device=keys.device) / half)
    angles = by[..., None].float() * frequencies  # [B, H_kv, K, D / 2]
    first, second, rest = keys.float().split([half, half, keys.shape[3] - 2 * half], dim=3)
    cos, sin = angles.cos(), angles.sin()
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return torch.cat(turned, dim=3).to(keys.dtype)


def _refusal(model: Any, reason: str) -> ModelError:
    msg = (
        f"keys of model {type(model).__name__} cannot be moved to other positions: {reason}; "
        "leave the policy that moves them out of the plan"
    )
    return ModelError(msg)


def _rotary_embedding(model: Any) -> Any:
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None or not hasattr(_modelling_file(model), "apply_rotary_pos_emb"):
        raise _refusal(model, "it has no rotary embedding")
    kinds = getattr(rotary, "rope_type", "default")
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    changing = sorted(kinds & {"dynamic", "longrope"})
    if changing:
        raise _refusal(model, f"its rotary embedding, '{changing[0]}', changes with the length")
    return rotary


def _modelling_file(model: Any) -> Any:
    return sys.modules[type(model.get_decoder()).__module__]


def _candidates(
    model: Any, rotary: Any, layer_idx: int
) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """Ways in which models rotate: the whole head, its first numbers only, or not this layer."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    takes_kind = "layer_type" in inspect.signature(type(rotary).forward).parameters
    options = {"layer_type": kinds[layer_idx]} if takes_kind and kinds else {}
    apply = _modelling_file(model).apply_rotary_pos_emb
    for is_partial in (False, True):
        yield partial(_rotate, apply, rotary, options, is_partial)
    yield lambda keys, by: keys


def _rotate(
    apply: Callable[..., Any],
    rotary: Any,
    options: dict[str, Any],
    is_partial: bool,
    keys: Tensor,
    by: Tensor,
) -> Tensor:
    """Rotate in fp32: what is rounded to the dtype of the keys is the outcome only."""
    with torch.inference_mode():
        flat = keys.float().flatten(0, 1)[:, None]  # [B * H_kv, 1, K, D]
        cos, sin = rotary(flat, by.flatten(0, 1), **options)  # [B * H_kv, K, R]
        # Some embeddings scale attention by scaling both; a moved key is scaled already.
        scale = _scale(rotary, options)
        width = cos.shape[-1] if is_partial else keys.shape[3]
        turned, left = flat[..., :width], flat[..., width:]
        _, turned = apply(turned, turned, cos / scale, sin / scale)
        return torch.cat([turned, left], dim=-1)[:, 0].view(keys.shape).to(keys.dtype)


def _scale(rotary: Any, options: dict[str, Any]) -> float:
    name = "attention_scaling"
    if options:
        name = f"{options['layer_type']}_{name}"
    return float(getattr(rotary, name, 1.0))


def _is_right(
    way: Callable[[Tensor, Tensor], Tensor], before: Tensor, after: Tensor, moves: int
) -> bool:
    """Whether a way of rotating moves the keys of a token as the model does."""
    try:
        moved = way(before, torch.full(before.shape[:3], moves, device=before.device))
    except (RuntimeError, TypeError, ValueError):
        return False  # not made for heads of this shape
    error, change = (float((keys.float() - after.float()).norm()) for keys in (moved, before))
    size = float(after.float().norm())
    # Rounding, of angles in fp32 and of keys in their own dtype; and much less than the change
    # itself, which in half precision drowns where few numbers are large.
    noise = max(8 * torch.finfo(after.dtype).eps, 1e-5) * size
    return size > 0 and error <= min(noise, change / 4)
