"""The projections of a model's attention by head, for policies that implement `bind`.

Models name and lay out their projections in their own ways. What is found here is tested on the
model itself before a policy sees it: the keys and values of a token are computed from the weights
and compared with those that the model stores.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy.cache.shape import LayerShape, Rotate
from kvpolicy.errors import ModelError
from kvpolicy.model.decoder import attention_module
from kvpolicy.model.packed import PackedLinear
from kvpolicy.model.rope import rotary_scale
from kvpolicy.model.wrappers import has_adapters, uncompiled
from kvpolicy.state import LayerWeights

# Names of projections in the models of transformers: one for each of queries, keys and values, or
# one for all three.
_SEPARATE = ("q_proj", "k_proj", "v_proj")
_FUSED = ("qkv_proj", "query_key_value", "W_pack", "Wqkv")
_OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "wo")

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Share of its length by which what is computed from the weights may differ from what the model
# stores: the rounding of half precision. Weights in another order differ by as much as themselves.
_MOST_ERROR = 0.05

# A weight and its bias, which it may not have.
_Linear = tuple[Tensor, Tensor | None]


@attrs.frozen(eq=False)
class StoredToken:
    """What one token at position 0 leaves in a layer.

    Attributes:
        states: What enters the attention, ``[1, M]``.
        keys: Keys after RoPE, ``[1, H_kv, D]``.
        values: Values, ``[1, H_kv, D]``.
    """

    states: Tensor
    keys: Tensor
    values: Tensor


def layer_weights(
    model: PreTrainedModel, layer_idx: int, shape: LayerShape, rotate: Rotate, stored: StoredToken
) -> LayerWeights:
    """The projections of a layer's attention.

    Args:
        model: The model.
        layer_idx: Decoder layer, counted from 0.
        shape: Shape of the layer.
        rotate: Moves keys to other positions.
        stored: What the model has stored for a token, to compare with.

    Raises:
        ModelError: If they cannot be read, with the reason.
    """
    module = attention_module(model, layer_idx)
    parts, problem = _parts(model, module), None
    if isinstance(parts, str):
        problem = parts
    elif shape.num_readers > 1:
        problem = "other layers attend to its rows, too, with queries of their own"
    else:
        scale = rotary_scale(model, layer_idx)
        for candidate in _candidates(module, parts, shape, partial(rotate, layer_idx), scale):
            if _is_correct(candidate, stored):
                return candidate
        problem = "its keys and values are not those of its projections, as far as is known"
    msg = (
        f"the weights of layer {layer_idx} of {type(model).__name__} cannot be given to policies "
        f"that implement bind(): {problem}"
    )
    raise ModelError(msg)


def _parts(model: PreTrainedModel, module: nn.Module) -> dict[str, _Linear] | str:
    """The linear layers of an attention module by name, or why they cannot be read."""
    if (getattr(model, "tp_size", None) or 1) > 1:
        return "several processes share them; load the model in one"
    if has_adapters(model):
        return "the model has adapters; merge them first, by merge_and_unload()"
    fused = next((name for name in _FUSED if hasattr(module, name)), None)
    names = _SEPARATE if fused is None else (fused,)
    output = next((name for name in _OUTPUT if hasattr(module, name)), None)
    found: dict[str, _Linear] = {}
    for name in (*names, output):
        layer = uncompiled(getattr(module, name, None)) if name is not None else None
        if not isinstance(layer, nn.Linear):
            kind = "it has none" if layer is None else f"it is {type(layer).__name__}"
            return f"no linear layer of torch is its {name or 'output projection'}; {kind}"
        weight = layer.weight
        if isinstance(layer, PackedLinear):
            weight = nn.Parameter(layer.multiplied(), requires_grad=False)
        if type(weight) is not nn.Parameter or weight.dtype not in _DTYPES:
            return (
                f"{name} is quantised; load the model in bfloat16 or float32 to use such policies"
            )
        if weight.is_meta:
            return f"{name} is offloaded; load the model on one device"
        bias = None if layer.bias is None else layer.bias.detach()
        found["out" if name == output else str(name)] = weight.detach(), bias
    return found


def _candidates(
    module: nn.Module,
    parts: dict[str, _Linear],
    shape: LayerShape,
    rotate: Callable[[Tensor, Tensor], Tensor],
    scale: float,
) -> Iterator[LayerWeights]:
    """What the layer's weights may be; those of fused projections may be in several orders."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    dim, scaling = shape.head_dim, getattr(module, "scaling", None)
    out, out_bias = parts["out"]
    if out.shape[1] != heads[0] * dim:
        return
    separate = [parts[name] for name in _SEPARATE if name in parts]
    for three in [separate] if separate else _split(parts, heads, dim):
        if all(len(weight) == num * dim for (weight, _), num in zip(three, heads, strict=True)):
            (q, q_bias), (k, k_bias), (v, v_bias) = (
                (weight.unflatten(0, (-1, dim)), None if bias is None else bias.reshape(-1, dim))
                for weight, bias in three
            )
            yield LayerWeights(
                q=q,
                k=k,
                v=v,
                o=out.unflatten(1, (heads[0], dim)).transpose(0, 1),
                q_bias=q_bias,
                k_bias=k_bias,
                v_bias=v_bias,
                o_bias=out_bias,
                q_norm=_norm_of(module, ("q_norm", "q_layernorm", "query_layernorm")),
                k_norm=_norm_of(module, ("k_norm", "k_layernorm", "key_layernorm")),
                rotary_scale=scale,
                scaling=dim**-0.5 if scaling is None else float(scaling),
                rotate=rotate,
            )


def _split(parts: dict[str, _Linear], heads: Sequence[int], dim: int) -> Iterator[list[_Linear]]:
    """A fused projection in its possible orders: all queries first, or head by head."""
    weight, bias = next(one for name, one in parts.items() if name != "out")
    if len(weight) != sum(heads) * dim:
        return
    sizes = [num * dim for num in heads]
    biases = [None] * 3 if bias is None else bias.split(sizes)
    yield list(zip(weight.split(sizes), biases, strict=True))
    if len(set(heads)) == 1:  # the query, key and value of each head beside each other
        by_head = weight.unflatten(0, (heads[0], 3, dim)).unbind(1)
        biases = [None] * 3 if bias is None else bias.reshape(heads[0], 3, dim).unbind(1)
        yield [
            (one.flatten(0, 1), None if own is None else own.flatten())
            for one, own in zip(by_head, biases, strict=True)
        ]


def _norm_of(module: nn.Module, names: Sequence[str]) -> Callable[[Tensor], Tensor] | None:
    """The norm of queries or keys ``[N, H, D]`` before RoPE; ``None`` if there is none."""
    norm: Any = next(filter(None, (getattr(module, name, None) for name in names)), None)
    if norm is None:
        return None

    weight = getattr(norm, "weight", None)

    def apply(heads: Tensor) -> Tensor:
        """Norm each head, or all heads together, as the model does."""
        together = weight is not None and weight.shape[-1] != heads.shape[-1]
        normed: Tensor = norm(heads.flatten(-2) if together else heads)
        return normed.reshape(heads.shape)

    return apply


def _is_correct(weights: LayerWeights, stored: StoredToken) -> bool:
    """Whether keys and values of a token at position 0, where RoPE turns nothing, are these."""
    try:
        values, keys = weights.values(stored.states), weights.keys(stored.states)
        weights.queries(stored.states)
    except RuntimeError:  # of shapes that do not fit
        return False
    pairs = ((values, stored.values), (keys, stored.keys))
    return all(_differs(*pair) < _MOST_ERROR for pair in pairs)


def _differs(found: Tensor, expected: Tensor) -> float:
    """Length of the difference, relative to what is expected."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())
