"""A twin of a model: the same parameters, with a configuration and hooks of its own.

The engine needs a model whose configuration names our attention function. Changing the model's
own configuration, even for the length of a forward, would give other threads wrong tokens. The
twin is a second tree of modules:

* Modules that hold a configuration, or contain one that does, are copied without their tensors:
  the twin has the same dictionaries of parameters, buffers and hooks. So ``.to()``, ``.half()``,
  tied weights, offloading and hooks registered later take effect in both.
* All other modules (linear layers, norms, quantised layers, adapters) are the very same objects.
* What `torch.compile` has wrapped is copied as it was before.
* A ``forward`` that was replaced on an instance, as accelerate does for a ``device_map``, is
  bound to the twin instead of the model.

Before every forward, `Twin.current` compares the model with what it was when the twin was made:
a few pointers for each copied module. Where a module was replaced, wrapped or removed, or an
attribute changed, as when an adapter is loaded, the twin is made again.
"""

from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from operator import is_
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvpolicy.model.wrappers import uncompiled

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)

# What transformers notes on a model once it has registered hooks that capture outputs of its parts.
_CAPTURES = "_output_capturing_hooks_installed"


class Twin:
    """Keeps a twin of a model that is up to date."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: str | None,
        add_hooks: Callable[["Copies"], None],
    ) -> None:
        """Note the model; the twin is made when it is first needed.

        Args:
            model: The model.
            attention: Name of the attention function that the twin calls; ``None`` for its own.
            add_hooks: Registers hooks on each new twin.
        """
        self._model = model
        self._attention = attention
        self._add_hooks = add_hooks
        self._copies: Copies | None = None

    def current(self) -> PreTrainedModel:
        """The twin of the model as it is now."""
        copies = self._copies
        if copies is not None:
            for live, values in copies.seen:
                if len(live) != len(values) or not all(map(is_, live.values(), values)):
                    break
            else:
                return copies.twin
        copies = Copies(self._model, self._attention)
        self._add_hooks(copies)
        self._copies = copies
        return copies.twin

    def hand_back(self) -> None:
        """Note on the model what transformers has noted on the twin during a forward.

        Parts of a model that capture outputs, as vision towers do, register hooks for it when they
        are first called. They are in tables that model and twin share: had the model no note of
        them, its next forward, or that of the next twin, would register and capture all twice.
        """
        if self._copies is not None:
            for original, copied in self._copies.models:
                if vars(copied).get(_CAPTURES) and not vars(original).get(_CAPTURES):
                    setattr(original, _CAPTURES, True)


class Copies:
    """One twin, and what the model was when it was made.

    Attributes:
        twin: The twin.
        seen: Dictionaries of the model, each with the values that it had.
        models: The models in the tree, each with its copy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: str | None,
        replaced: Mapping[int, nn.Module] | None = None,
    ) -> None:
        """Make a twin.

        Args:
            model: The model.
            attention: Name of the attention function that the twin calls; ``None`` for its own.
            replaced: Modules to stand in the place of others, by the ``id`` of these.
        """
        self.seen: list[tuple[Mapping[str, Any], list[Any]]] = []
        self.models: list[tuple[nn.Module, nn.Module]] = []
        self._attention = attention
        self._configs: dict[int, PreTrainedConfig] = {}
        self._modules: dict[int, nn.Module] = dict(replaced or {})
        self.twin: PreTrainedModel = self._module(model)  # type: ignore[assignment]

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The twin's configurations, which may be changed."""
        return [*self._configs.values()]

    def hookable(self, original: nn.Module) -> nn.Module:
        """The copy of a module, with hook tables of its own and the hooks of the original."""
        original = uncompiled(original)
        copied = self._modules[id(original)]
        for name in _HOOKS:
            hooks = vars(original)[name]
            if vars(copied)[name] is hooks:  # else it was asked for before, and has ours already
                vars(copied)[name] = hooks.copy()
                self._watch(hooks)
        return copied

    def _watch(self, live: Mapping[str, Any]) -> None:
        self.seen.append((live, list(live.values())))

    def _module(self, original: nn.Module) -> nn.Module:
        original = uncompiled(original)
        if id(original) in self._modules:  # a module that stands in several places of the tree
            return self._modules[id(original)]
        children = {
            name: None if child is None else self._module(child)
            for name, child in original._modules.items()
        }
        attributes = dict(vars(original))  # another thread may set one meanwhile
        has_config = any(isinstance(one, PreTrainedConfig) for one in attributes.values())
        if not has_config and all(map(is_, children.values(), original._modules.values())):
            self._modules[id(original)] = original
            return original
        twin = object.__new__(type(original))
        self._modules[id(original)] = twin
        if isinstance(original, PreTrainedModel):
            self.models.append((original, twin))
        self._watch(vars(original))
        self._watch(original._modules)
        vars(twin).update(
            {name: self._attribute(value, original, twin) for name, value in attributes.items()}
        )
        vars(twin)["_modules"] = type(original._modules)(children)
        if "gradient_checkpointing" in attributes:  # drops the cache, and there are no gradients
            vars(twin)["gradient_checkpointing"] = False
        vars(twin)["_compiled_call_impl"] = None  # see `uncompiled`
        return twin

    def _attribute(self, value: Any, original: nn.Module, twin: nn.Module) -> Any:
        value = uncompiled(value)
        if isinstance(value, PreTrainedConfig):
            return self._config(value)
        if isinstance(value, MethodType) and value.__self__ is original:
            return MethodType(value.__func__, twin)
        if isinstance(value, partial) and any(one is original for one in value.args):
            args = [twin if one is original else one for one in value.args]
            return update_wrapper(partial(value.func, *args, **value.keywords), value)
        return value

    def _config(self, original: PreTrainedConfig) -> PreTrainedConfig:
        if id(original) not in self._configs:
            config = object.__new__(type(original))
            self._configs[id(original)] = config
            self._watch(vars(original))
            vars(config).update(
                {
                    name: self._config(value) if isinstance(value, PreTrainedConfig) else value
                    for name, value in vars(original).items()
                }
            )
            if self._attention is not None:
                config._attn_implementation = self._attention
        return self._configs[id(original)]
