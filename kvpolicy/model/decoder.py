"""Where in a model its decoder, its layers and their attention are; models differ in names."""

from torch import nn
from transformers import PreTrainedModel

from kvpolicy.errors import ModelError


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part of a model that gives the hidden states which its head makes logits of."""
    start = _text_part(model)
    if isinstance(getattr(start, "layers", None), nn.ModuleList):
        return start
    layers, found = decoder_layers(model), start
    for module in start.modules():  # from the outside in
        if isinstance(module, PreTrainedModel) and any(one is layers for one in module.modules()):
            found = module
    return found


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a model's decoder: a list whose members have attention of their number.

    Raises:
        ModelError: If it has no such list, or several.
    """
    start = _text_part(model)
    layers = getattr(start, "layers", None)
    if isinstance(layers, nn.ModuleList):
        return layers
    found = [
        one
        for one in start.modules()
        if isinstance(one, nn.ModuleList)
        and len(one) > 0
        and all(_numbered(layer, index) for index, layer in enumerate(one))
    ]
    if len(found) != 1:
        which = "no list of decoder layers" if not found else "several lists of decoder layers"
        msg = f"model {type(model).__name__} cannot be run: it has {which}"
        raise ModelError(msg)
    return found[0]


def _text_part(model: PreTrainedModel) -> nn.Module:
    """What a model calls its decoder, or all of it: some call their head so."""
    decoder: nn.Module = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model


def head_counts(layer: nn.Module) -> tuple[int | None, int | None]:
    """Query heads of a layer, and those of a KV head; ``None``: its attention does not say it.

    Attention functions of transformers repeat keys so often. Configurations may not say that layers
    differ.
    """
    groups, heads = set(), set()
    for module in layer.modules():
        if (group := _group_of(module)) is not None:
            groups.add(group)
            heads.add(getattr(module, "num_heads", None))
    (group,) = groups if len(groups) == 1 else (None,)
    (num_heads,) = heads if len(heads) == 1 else (None,)
    return num_heads if isinstance(num_heads, int) else None, group


def _group_of(module: nn.Module) -> int | None:
    """What a module says of it, if it is attention that does not contradict itself."""
    group = getattr(module, "num_key_value_groups", None)
    num_heads, num_kv_heads = (
        getattr(module, name, None) for name in ("num_heads", "num_key_value_heads")
    )
    if isinstance(num_heads, int) and isinstance(num_kv_heads, int) and isinstance(group, int):
        return group if num_kv_heads * group == num_heads else None  # it repeats keys itself
    return group if isinstance(group, int) else None


def _numbered(layer: nn.Module, layer_idx: int) -> list[nn.Module]:
    """The modules within a layer that bear its number."""
    return [
        module
        for module in layer.modules()
        if module is not layer and getattr(module, "layer_idx", None) == layer_idx
    ]


def attention_module(model: PreTrainedModel, layer_idx: int) -> nn.Module:
    """The module that computes the attention of a layer.

    Raises:
        ModelError: If it cannot be told from the others.
    """
    found = _numbered(decoder_layers(model)[layer_idx], layer_idx)
    # A layer may number more of its modules; attention is the one that knows the model.
    found = [module for module in found if hasattr(module, "config")]
    if len(found) != 1:
        msg = (
            f"model {type(model).__name__} cannot be run with policies that read its attention: "
            f"layer {layer_idx} has {len(found)} modules that may be its attention"
        )
        raise ModelError(msg)
    return found[0]
