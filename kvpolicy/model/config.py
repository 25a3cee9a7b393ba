"""What a model's configuration says about its layers, and which models cannot be run."""

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from kvpolicy.cache.shape import LayerShape, StateShape
from kvpolicy.compat import has_states, layer_configs
from kvpolicy.errors import ModelError
from kvpolicy.model.rope_types import max_positions

_SLIDING = ("sliding_attention", "hybrid_sliding")

# Kinds of layers, as `layer_types` of a configuration names them.
_WITH_ROWS = ("full_attention", *_SLIDING, "hybrid")
_WITH_STATES = ("conv", "linear_attention", "hybrid", "hybrid_sliding")
_WITH_NOTHING = ("mlp", "moe")


def check_runs(model: PreTrainedModel, config: Any) -> None:
    """Check that the engine can run a model.

    Args:
        model: The model.
        config: The configuration of its decoder.

    Raises:
        ModelError: If it cannot, with the reason.
    """
    reason = None
    num_layers = getattr(config, "num_hidden_layers", None)
    layers = layer_configs(config) if isinstance(num_layers, int) else []
    if getattr(model.config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder; the engine runs decoder-only models"
    elif not layers:
        reason = "its configuration does not give the number of its layers"
    elif not all(isinstance(getattr(one, "num_attention_heads", None), int) for one in layers):
        reason = "its configuration names no attention heads; the engine evicts keys and values"
    elif not isinstance(getattr(config, "max_position_embeddings", None), int):
        reason = "its configuration does not give the number of positions of a sequence"
    elif getattr(model, "get_output_embeddings", lambda: None)() is None:
        reason = "it has no head that gives logits of tokens; load it with AutoModelForCausalLM"
    else:
        reason = _unknown_attention(config)
    if reason is not None:
        msg = f"model {type(model).__name__} cannot be run: {reason}"
        raise ModelError(msg)


def _unknown_attention(config: Any) -> str | None:
    """Why some layers see other tokens than those before them; ``None`` if none does."""
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = kinds - {*_WITH_ROWS, *_WITH_STATES, *_WITH_NOTHING}
    if unknown:
        return (
            f"it has {' and '.join(sorted(unknown))} layers; only full and sliding attention over "
            "keys and values, and states of fixed size, are supported"
        )
    if kinds and not kinds & {*_WITH_ROWS}:
        return "no layer of it has attention; the engine evicts keys and values"
    if kinds & {*_WITH_STATES} and not has_states():
        return (
            "its layers have states of fixed size, which the installed transformers keeps in a way "
            "of this model; install transformers 5.17 or newer"
        )
    if getattr(config, "use_bidirectional_attention", None):
        return "its tokens also attend to later tokens"
    return None


def layer_shape(
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    sliding_window: int | None = None,
    num_shards: int = 1,
    *,
    heads: tuple[int | None, int | None] = (None, None),
    latent: bool = False,
    states: tuple[StateShape, ...] = (),
    num_readers: int = 1,
) -> LayerShape:
    """Shape of the keys and values of a layer, from the model's configuration.

    Args:
        config: The configuration of the layer.
        dtype: Precision of keys and values.
        device: Device of keys and values.
        sliding_window: Tokens that a query sees; ``None`` for all.
        num_shards: Processes that share its heads.
        heads: Query heads, and those of a KV head; ``None``: the configuration says it.
        latent: Whether it stores latents, as rows of one head, see `kvpolicy.model.latent`.
        states: Its states of fixed size.
        num_readers: Layers that attend to its rows.
    """
    num_heads: int = heads[0] or config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    if heads[1] is not None:
        num_kv_heads = num_heads // heads[1]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    if latent:
        num_kv_heads, value_dim = num_shards, config.kv_lora_rank
        head_dim = value_dim + config.qk_rope_head_dim
    elif getattr(config, "kv_lora_rank", None):  # releases that store what latents are expanded to
        num_kv_heads, head_dim = num_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    num_heads, num_kv_heads = num_heads // num_shards, num_kv_heads // num_shards
    return LayerShape(
        num_heads * num_readers,
        num_kv_heads,
        head_dim,
        dtype,
        device,
        sliding_window,
        states,
        value_dim=value_dim,
        num_readers=num_readers,
    )


def sliding_windows(config: Any) -> list[int | None]:
    """Tokens that the queries of each layer see, their own included; ``None`` for all.

    Configurations without ``layer_types`` (Mistral, Phi-3, Starcoder2) pass their window to
    every layer. A layer that asks its attention function for another window is refused then.
    """
    windows = [
        hiding_window(getattr(layer, "sliding_window", None), layer)
        for layer in layer_configs(config)
    ]
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return windows if getattr(config, "use_sliding_window", True) else [None] * len(windows)
    return [
        window if kind in _SLIDING else None for window, kind in zip(windows, kinds, strict=True)
    ]


def row_sources(config: Any) -> list[int | None]:
    """The layer whose keys and values each layer attends to; ``None``: it has no attention.

    Of the last layers of some models each attends to those of the newest layer of its kind before
    them.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = _WITH_ROWS[:1] * len(layer_configs(config))
    num_own = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    newest = {kind: index for index, kind in enumerate(kinds[:num_own])}
    return [
        None if kind not in _WITH_ROWS else index if index < num_own else newest[kind]
        for index, kind in enumerate(kinds)
    ]


def layers_with_rows(config: Any) -> list[bool]:
    """Which layers cache keys and values."""
    return [index == source for index, source in enumerate(row_sources(config))]


def has_state_layers(config: Any) -> bool:
    """Whether some layers have states of fixed size."""
    return any(kind in _WITH_STATES for kind in getattr(config, "layer_types", None) or ())


def hiding_window(window: int | None, config: Any) -> int | None:
    """A window, or ``None`` if it hides nothing from the longest sequence of the model."""
    if not window:
        return None
    if getattr(config, "max_position_embeddings", None) is None:
        return window
    return None if window >= max_positions(config) else window


def counts_positions(model: PreTrainedModel) -> bool:
    """Whether `generate` gives a model no positions of tokens, so that it counts them itself."""
    prepare = getattr(type(model), "prepare_inputs_for_generation", None)
    if prepare in (None, GenerationMixin.prepare_inputs_for_generation):
        return False
    ids = torch.zeros(1, 2, dtype=torch.int64)
    given = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(2)[None]}
    try:
        found = prepare(model, ids, **given, use_cache=True, is_first_iteration=True)
    except Exception:  # it wants more than text; how it runs is seen in a forward
        return False
    return found.get("position_ids") is None


def check_loaded(model: PreTrainedModel) -> None:
    """Check that a model has its weights, or that accelerate's hooks bring them.

    torch computes with weights on ``meta``, on some devices without an error, and what comes out
    is whatever was in memory.

    Raises:
        ModelError: If it has not.
    """
    missing = [
        name
        for name, weight in model.named_parameters()
        if weight.is_meta and type(weight) is nn.Parameter  # subclasses may store data elsewhere
    ]
    if missing and not any(hasattr(module, "_hf_hook") for module in model.modules()):
        msg = (
            f"model {type(model).__name__} cannot be run: {len(missing)} of its weights, "
            f"{missing[0]} first, are not loaded: they are on the device 'meta'; load them with "
            "load_model(NAME)"
        )
        raise ModelError(msg)


def stop_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Tokens that end a generation, from the model's own configuration.

    Raises:
        ModelError: If they are no token ids, so that no generation would end.
    """
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = getattr(model.config, "eos_token_id", None) if ids is None else ids
    if ids is None:
        return ()
    found = ids if isinstance(ids, (list, tuple)) else (ids,)
    if not all(isinstance(one, int) for one in found):
        msg = (
            f"model {type(model).__name__} cannot be run: its configuration names {ids!r:.60} as "
            "eos_token_id; expected token ids"
        )
        raise ModelError(msg)
    return tuple(found)
