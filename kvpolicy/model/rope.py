"""Moving keys to other positions by rotary position embedding (RoPE).

A key stored after RoPE at position p, rotated by d, is the key of the same token at p + d. The
rotation is the model's own: its rotary embedding gives the angles and its modelling file applies
them, so partial and interleaved embeddings are rotated as in the model.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.errors import ModelError
from kvpolicy.model.decoder import decoder_of
from kvpolicy.model.rope_types import depends_on_length, rope_types

# Position of the token with which a rotation is tested, and how far it is moved.
_POSITION, _DISTANCE = 3, 100


class Rotation:
    """A model's own rotation of keys, tested on the model itself before it is used."""

    def __init__(
        self,
        model: PreTrainedModel,
        keys_at: Callable[[int], list[Tensor]],
        max_positions: int,
    ) -> None:
        """Note the model; it is inspected when the first key is moved.

        Args:
            model: The model.
            keys_at: Keys of every layer for one token that stands alone at a position.
            max_positions: Positions of the model.
        """
        self._model = model
        self._keys_at = keys_at
        self._max_positions = max_positions
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
            self._layers = self._find_layers()
        return self._layers[layer_idx](keys, by)

    def _find_layers(self) -> list[Callable[[Tensor, Tensor], Tensor]]:
        """For each layer the first candidate that moves a real token as the model does.

        A sequence of one token attends to itself only. At any position it enters every layer
        with the same state, and its keys differ by the rotation alone.
        """
        rotary = _rotary_embedding(self._model)
        distance = min(_DISTANCE, self._max_positions - _POSITION - 1)
        positions = (_POSITION, _POSITION + distance)
        before, after = (self._keys_at(position) for position in positions)
        found = []
        for layer_idx, keys in enumerate(zip(before, after, strict=True)):
            candidates = _candidates(self._model, rotary, layer_idx)
            rotate = next((one for one in candidates if _is_correct(one, *keys, distance)), None)
            if rotate is None:
                reason = f"those of layer {layer_idx} do not change as its rotary embedding says"
                raise _refusal(self._model, reason)
            found.append(rotate)
        return found


def rotate_halves(layer_idx: int, keys: Tensor, by: Tensor, theta: float = 10_000.0) -> Tensor:
    """Plain RoPE as in Llama, for keys without a model; see `Rotation.__call__`.

    Number i of the first half of a head is paired with number i of the second half; the last
    number of an odd head is not rotated.
    """
    half = keys.shape[3] // 2
    frequencies = theta ** (-torch.arange(half, device=keys.device) / half)
    angles = by[..., None].float() * frequencies  # [B, H_kv, K, D / 2]
    first, second, rest = keys.float().split([half, half, keys.shape[3] - 2 * half], dim=3)
    cos, sin = angles.cos(), angles.sin()
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return torch.cat(rotated, dim=3).to(keys.dtype)


def _refusal(model: Any, reason: str) -> ModelError:
    msg = (
        f"keys of model {type(model).__name__} cannot be moved to other positions: {reason}; "
        "leave the policy that moves them out of the plan"
    )
    return ModelError(msg)


def _rotary_embedding(model: Any) -> Any:
    rotary = getattr(decoder_of(model), "rotary_emb", None)
    if rotary is None or not hasattr(_modelling_file(model), "apply_rotary_pos_emb"):
        raise _refusal(model, "it has no rotary embedding")
    if depends_on_length(rotary):
        kind = " and ".join(sorted(rope_types(rotary)))
        raise _refusal(model, f"its rotary embedding, '{kind}', changes with the length")
    return rotary


def _modelling_file(model: Any) -> Any:
    return sys.modules[type(decoder_of(model)).__module__]


def _candidates(
    model: Any, rotary: Any, layer_idx: int
) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """How models rotate: the whole head, its first numbers only, or not in this layer."""
    options = _options(model, rotary, layer_idx)
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
    """Rotate in fp32: only the result is rounded to the dtype of the keys."""
    with torch.inference_mode():
        flat = keys.float().flatten(0, 1)[:, None]  # [B * H_kv, 1, K, D]
        cos, sin = rotary(flat, by.flatten(0, 1), **options)  # [B * H_kv, K, R]
        # Some embeddings scale attention through cos and sin; a stored key is scaled already.
        scale = _scale(rotary, options)
        width = cos.shape[-1] if is_partial else keys.shape[3]
        rotated, rest = flat[..., :width], flat[..., width:]
        _, rotated = apply(rotated, rotated, cos / scale, sin / scale)
        return torch.cat([rotated, rest], dim=-1)[:, 0].reshape(keys.shape).to(keys.dtype)


def rotary_scale(model: PreTrainedModel, layer_idx: int) -> float:
    """What a model's rotary embedding multiplies with at every position, beside rotating."""
    rotary = getattr(decoder_of(model), "rotary_emb", None)
    return 1.0 if rotary is None else _scale(rotary, _options(model, rotary, layer_idx))


def _options(model: Any, rotary: Any, layer_idx: int) -> dict[str, Any]:
    """Arguments of a rotary embedding that differs between layers."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    takes_kind = "layer_type" in inspect.signature(type(rotary).forward).parameters
    return {"layer_type": kinds[layer_idx]} if takes_kind and kinds else {}


def _scale(rotary: Any, options: dict[str, Any]) -> float:
    name = "attention_scaling"
    if options:
        name = f"{options['layer_type']}_{name}"
    return float(getattr(rotary, name, 1.0))


def _is_correct(
    rotate: Callable[[Tensor, Tensor], Tensor], before: Tensor, after: Tensor, distance: int
) -> bool:
    """Whether a candidate moves the keys of a token as the model does."""
    try:
        moved = rotate(before, torch.full(before.shape[:3], distance, device=before.device))
    except (RuntimeError, TypeError, ValueError):
        return False  # not made for heads of this shape
    error, change = (float((keys.float() - after.float()).norm()) for keys in (moved, before))
    size = float(after.float().norm())
    # Rounding of angles in fp32 and of keys in their own dtype; and much less than the change
    # itself, which in half precision is lost where few numbers are large.
    noise = max(8 * torch.finfo(after.dtype).eps, 1e-5) * size
    return size > 0 and error <= min(noise, change / 4)
