"""What the supported releases of transformers do differently; no other module knows which did.

``docs/reference/models.md`` says which they are. Where our classes can serve all of them alike,
they do, and nothing is asked:

* models call ``Cache.update(k, v, layer_idx, cache_kwargs)``, later without the last argument;
* models make ``cache_position`` from ``Cache.get_seq_length()`` and build masks with it, later not;
  either way they build no mask for an attention function without a mask function of its name;
* caches answer ``max_batch_size`` and ``get_max_cache_shape``, later ``batch_size`` and
  ``get_max_length``;
* pipelines set ``tokenizer.padding_side``, which older ones leave as it is.

What a release calls differently is found by looking at it, not by its number: a fork may have what
its number does not say.
"""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from copy import copy
from typing import Any


@functools.cache
def _cache_name() -> str:
    """``past_key_values``, since transformers 5.24 ``cache``."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    names = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
    return "cache" if "cache" in names else "past_key_values"


def cache_argument(cache: object) -> dict[str, Any]:
    """A cache under the name that models and their `generate` take it by, and return it by.

    Args:
        cache: A cache of transformers: ``model(input_ids, **cache_argument(cache))``.
    """
    return {_cache_name(): cache}


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among a model's arguments, or in its output; ``None`` without one.

    Args:
        given: Arguments or output, by name. Users may name it as older or newer releases do.
    """
    cache = given.get("cache")
    return given.get("past_key_values") if cache is None else cache


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer of a decoder; they differ in some models."""
    if getattr(config, "is_heterogeneous", False):  # transformers 5.23
        return list(config.per_layer_config)
    if getattr(config, "global_head_dim", None):  # Gemma-4 before transformers 5.23
        full = copy(config)
        full.head_dim = config.global_head_dim
        # Configurations without this setting take it for true, as transformers 5.23 does.
        if getattr(config, "attention_k_eq_v", True) and config.num_global_key_value_heads:
            full.num_key_value_heads = config.num_global_key_value_heads
        sliding = "sliding_attention"
        return [config if kind == sliding else full for kind in config.layer_types]
    return [config] * config.num_hidden_layers


@functools.cache
def has_states() -> bool:
    """Whether one interface serves the states of all hybrid models: transformers 5.17 or newer."""
    from transformers import cache_utils

    layer = getattr(cache_utils, "LinearAttentionLayer", None)
    return layer is not None and "number_of_states" in inspect.signature(layer).parameters


@functools.cache
def has_meta_forwards() -> bool:
    """Whether models compute on the device ``meta``: transformers 5.2 asks it for autocast."""
    from transformers.utils import generic

    maybe_autocast = getattr(generic, "maybe_autocast", None)
    try:
        if maybe_autocast is not None:
            maybe_autocast(device_type="meta", enabled=False)
        return True
    except RuntimeError:  # of torch, which has none there
        return False


def chooses_experts_on_device(config: Any) -> None:
    """Have experts be computed without a look at which were chosen, as on the device ``meta``.

    Args:
        config: A configuration, which is changed.
    """
    config._experts_implementation = "batched_mm"


def dequantising() -> dict[str, Any]:
    """Arguments of `from_pretrained` by which weights of a GGUF file become plain tensors.

    transformers 5.23 leaves those of some architectures as they are, where it has kernels for them.
    """
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
