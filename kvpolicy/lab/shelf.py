"""Models that are loaded when they are asked for, one at a time."""

import gc
from typing import Any

import attrs
import torch

from kvpolicy.lab.card import ModelInfo, describe_model
from kvpolicy.lab.models import open_model


@attrs.define
class ModelCache:
    """Opens models, each in the same way, and holds the last one.

    Attributes:
        dtype: Precision, as in `open_model`.
        device: Where they are put, likewise.
        trust_remote_code: Whether to run code that comes with a model.
    """

    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False
    _name: str | None = attrs.field(default=None, init=False)
    _held: tuple[Any, Any] | None = attrs.field(default=None, init=False)

    def open(self, name: str) -> tuple[Any, Any]:
        """Load a model and its tokenizer, or give those that are held.

        The model before is let go of first: nothing here needs memory for two.

        Args:
            name: A bundled reasoner's name, a hub id or a local folder.

        Raises:
            ModelError: It cannot be loaded.
        """
        if self._held is None or self._name != name:
            self._name, self._held = name, None
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self._held = open_model(
                name,
                dtype=self.dtype,
                device=self.device,
                trust_remote_code=self.trust_remote_code,
            )
        return self._held

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Load a model, or take the one that is held, and describe it.

        Args:
            name: As for `open`.

        Returns:
            What a run has to know of it, and its tokenizer.

        Raises:
            ModelError: It cannot be loaded.
        """
        model, tokenizer = self.open(name)
        return describe_model(name, model), tokenizer
