"""Moving keys to other positions by rotary position embedding (RoPE).

A key stored after RoPE at position p, rotated by d, is the key of the same token at p + d. The
rotation is the model's own: its rotary embedding gives the angles and its modelling file applies
them, so partial and interleaved embeddings are rotated as in the model.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
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
        keys_at: Callable[[int], Mapping[int, Tensor]],
        max_positions: int,
    ) -> None:
        """Note the model; it is inspected when the first key is moved.

        Args:
            model: The model.
            keys_at: Keys of every layer with rows, by its number, for one token that stands alone
                at a position.
            max_positions: Positions of the model.
        """
        self._model = model
        self._keys_at = keys_at
        self._max_positions = max_positions
        self._layers: Mapping[int, Callable[[Tensor, Tensor], Tensor]] | None = None

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

    def _find_layers(self) -> Mapping[int, Callable[[Tensor, Tensor], Tensor]]:
        """For each layer the first candidate that moves a real token as the model does.

        A sequence of one token attends to itself only. At any position it enters every layer
        with the same state, and its keys differ by the rotation alone.
        """
        rotary = _rotary_embedding(self._model)
        distance = min(_DISTANCE, self._max_positions - _POSITION - 1)
        positions = (_POSITION, _POSITION + distance)
        before, after = (self._keys_at(position) for position in positions)
        found = {}
        for layer_idx in before:
            keys = before[layer_idx], after[layer_idx]
            candidates = _candidates(self._model, rotary, layer_idx)
            rotate = next((one for one in candidates if _is_correct(one, *keys, distance)), None)
            if rotate is None and rotary is None:
                raise _refusal(self._model, "it has no rotary embedding")
            if rotate is None:
                reason = f"those of layer {layer_idx} do not change as its rotary embedding says"
                raise _refusal(self._model, reason)
            found[layer_idx] = rotate
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


def _embedding_of(model: Any) -> Any:
    """The rotary embedding of a decoder; ``None``: it has none."""
    names = ("rotary_emb", "pos_emb")
    found = (getattr(decoder_of(model), name, None) for name in names)
    return next((one for one in found if one is not None), None)


def _rotary_embedding(model: Any) -> Any:
    rotary = _embedding_of(model)
    if rotary is not None and depends_on_length(rotary):
        kind = " and ".join(sorted(rope_types(rotary)))
        raise _refusal(model, f"its rotary embedding, '{kind}', changes with the length")
    return rotary


# Rotates numbers [B, 1, K, R] by their cosines and sines [B, K, R].
_Apply = Callable[[Tensor, Tensor, Tensor], Tensor]


def _apply_halves(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As in Llama; also for keys whose pairs the model has put into halves before."""
    first, second = keys.chunk(2, dim=-1)
    return keys * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def _applies(model: Any) -> Iterator[_Apply]:
    """How the modelling file of a model rotates, as far as is known."""
    own = getattr(sys.modules[type(decoder_of(model)).__module__], "apply_rotary_pos_emb", None)
    if own is not None and list(inspect.signature(own).parameters)[1] == "cos":
        yield own
    elif own is not None:
        yield lambda keys, cos, sin: own(keys, keys, cos, sin)[1]
    yield _apply_halves


def _candidates(
    model: Any, rotary: Any, layer_idx: int
) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """How models rotate: the whole head, its first or last numbers only, or not in this layer."""
    options = _options(model, rotary, layer_idx)
    for apply in () if rotary is None else _applies(model):
        for part in ("all", "first", "last"):
            yield partial(_rotate, apply, rotary, options, part)
    yield lambda keys, by: keys


def _rotate(
    apply: _Apply, rotary: Any, options: dict[str, Any], part: str, keys: Tensor, by: Tensor
) -> Tensor:
    """Rotate in fp32: only the result is rounded to the dtype of the keys."""
    with torch.inference_mode():
        flat = keys.float().flatten(0, 1)[:, None]  # [B * H_kv, 1, K, D]
        cos, sin = rotary(flat, by.flatten(0, 1), **options)  # [B * H_kv, K, R]
        # Some embeddings scale attention through cos and sin; a stored key is scaled already.
        scale = _scale(rotary, options)
        size = keys.shape[3]
        width = size if part == "all" else cos.shape[-1]
        start = size - width if part == "last" else 0
        before, rotated, after = flat.split([start, width, size - start - width], dim=3)
        rotated = apply(rotated, cos / scale, sin / scale)
        return torch.cat([before, rotated, after], dim=3)[:, 0].reshape(keys.shape).to(keys.dtype)


def rotary_scale(model: PreTrainedModel, layer_idx: int) -> float:
    """What a model's rotary embedding multiplies with at every position, beside rotating."""
    rotary = _embedding_of(model)
    return 1.0 if rotary is None else _scale(rotary, _options(model, rotary, layer_idx))


def _options(model: Any, rotary: Any, layer_idx: int) -> dict[str, Any]:
    """Arguments of a rotary embedding that differs between layers."""
    if rotary is None:
        return {}
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
