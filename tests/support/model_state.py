"""The state of a model, to compare before and after."""

from typing import Any

from torch import nn


def state_of(model: nn.Module) -> list[Any]:
    """All attributes of a model that a forward could change."""
    found: list[Any] = []
    for module in model.modules():
        attributes = {name: value for name, value in vars(module).items() if name != "_modules"}
        hooks = [len(value) for name, value in attributes.items() if name.endswith("_hooks")]
        found.append((type(module), list(module._modules.values()), attributes, hooks))
        config = attributes.get("config")
        found.append(None if config is None else dict(vars(config)))
    return found
