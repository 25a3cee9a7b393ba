"""The models of a sweep: what is known of one, how it is identified, and which one is loaded."""

import gc
import hashlib
import json
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import torch
from torch import nn
from transformers import PreTrainedModel

from kvpolicy.engine.engine import Engine
from kvpolicy.engine.memory.footprint import footprint
from kvpolicy.engine.requests.request import default_length
from kvpolicy.lab.shared import Shared
from kvpolicy.model.config import layers_with_rows
from kvpolicy.model.fingerprint import model_fingerprint, tokenizer_fingerprint
from kvpolicy.model.loading import load_model
from kvpolicy.model.packed import packed_weights
from kvpolicy.model.tensor_parallel import refuse_several_processes
from kvpolicy.model.weight_forms import CpuWeights
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.resolved import ResolvedPlan

# Fields of a generation config that a request replaces in any case, or that change no token.
_OF_REQUESTS = (
    *("version", "transformers_version"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "max_length"),
    "use_cache",
)


@attrs.frozen
class ModelInfo:
    """What a sweep records of a model.

    Attributes:
        name: Its name, hub id or folder, as the user typed it.
        fingerprint: Hash of its configuration and weights.
        device: Its device.
        dtype: Its precision, and the `forms` in which it is computed: ``"float32, packed"``.
        num_layers: Number of decoder layers.
        num_parameters: Number of parameters.
        attention: Numbers of the layers that have attention; ``None``: all.
    """

    name: str
    fingerprint: str
    device: str
    dtype: str
    num_layers: int
    num_parameters: int
    attention: tuple[int, ...] | None = None


@attrs.frozen
class Lengths:
    """Sequences that are decoded together.

    Attributes:
        slots: How many.
        longest: Tokens of the longest one.
        longest_prompt: Tokens of the longest prompt.
    """

    slots: int
    longest: int
    longest_prompt: int


class ModelProvider(Protocol):
    """Describes models: a `ModelCache` in this process, or workers on a cluster."""

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Describe a model and return its tokenizer; see `ModelCache.describe`."""

    def bytes_per_sequence(self, name: str, plan: ResolvedPlan, lengths: Lengths) -> int:
        """What a plan allocates for a sequence; see `ModelCache.bytes_per_sequence`."""


@attrs.frozen
class LoadedModel:
    """A model in memory, and how it is computed.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        compile: Whether its decode steps are compiled.
        shared: What cells that run with it in this process share.
    """

    model: PreTrainedModel
    tokenizer: Any
    compile: bool = False
    shared: Shared = attrs.field(factory=Shared, eq=False, repr=False)

    def engine(self, plan: Plan | ResolvedPlan, *, slots: int, **options: Any) -> Engine:
        """An engine that computes the model in this way.

        Args:
            plan: Its plan.
            slots: Its number of slots.
            options: Further arguments of `Engine`.

        Raises:
            KVPolicyError: As for `Engine`.
        """
        options |= {"slots": slots, "compile": self.compile}
        return Engine(self.model, self.tokenizer, plan, **options)


@attrs.define
class ModelCache:
    """Loads models with the same options, and keeps the last one in memory.

    Attributes:
        dtype: Precision, as in `kvpolicy.model.loading.load_model`.
        device: Device, as in `load_model`.
        trust_remote_code: Whether to run code that comes with a model.
        cpu_weights: Form of the weights, as in `load_model`.
        compile: Whether decode steps are compiled, as in `Engine`.
        load: Loads a model by its name.
    """

    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False
    cpu_weights: CpuWeights = "plain"
    compile: bool = False
    load: Callable[..., tuple[Any, Any]] = attrs.field(default=load_model, eq=False, repr=False)
    _name: str | None = attrs.field(default=None, init=False)
    _loaded: LoadedModel | None = attrs.field(default=None, init=False)

    def open(self, name: str) -> LoadedModel:
        """Return a model, loading it if another one is in memory.

        The other model is released first, so that memory for one is enough.

        Args:
            name: Name of an installed model, hub id or local folder.

        Raises:
            ModelError: The model cannot be loaded, or not be compiled.
        """
        if self._loaded is None or self._name != name:
            refuse_several_processes()
            self._name, self._loaded = name, None
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            model, tokenizer = self.load(
                name,
                dtype=self.dtype,
                device=self.device,
                trust_remote_code=self.trust_remote_code,
                cpu_weights=self.cpu_weights,
            )
            loaded = LoadedModel(model, tokenizer, self.compile)
            if self.compile:
                # Refuses what cannot be compiled, before a sweep and its workers begin.
                loaded.engine(Plan.full_cache(), slots=1)
            self._loaded = loaded
        return self._loaded

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Describe a model, loading it if necessary, and return its tokenizer.

        Args:
            name: As for `open`.

        Raises:
            ModelError: The model cannot be loaded, or not be compiled.
        """
        loaded = self.open(name)
        return describe_model(name, loaded), loaded.tokenizer

    def bytes_per_sequence(self, name: str, plan: ResolvedPlan, lengths: Lengths) -> int:
        """Bytes that a plan allocates for each sequence.

        Args:
            name: As for `open`.
            plan: The plan.
            lengths: The sequences that are decoded together, on whose number depends how many
                rows beside the slots they share.

        Returns:
            Bytes of the whole cache divided by the number of slots, rounded up.

        Raises:
            KVPolicyError: The plan does not fit the model.
        """
        found = footprint(
            plan,
            self.open(name).model,
            slots=lengths.slots,
            longest=lengths.longest,
            longest_prompt=lengths.longest_prompt,
            longest_entering=lengths.longest_prompt,
        )
        return -(-found.num_bytes // lengths.slots)

    def default_length(self, name: str) -> int:
        """The most tokens to generate where the user gives no limit: the model's, or 1024.

        Args:
            name: As for `open`.

        Raises:
            ModelError: As for `open`.
        """
        return default_length(self.open(name).model)


def describe_model(name: str, loaded: LoadedModel) -> ModelInfo:
    """Describe a loaded model.

    Args:
        name: Its name as the user typed it.
        loaded: The model.
    """
    model = loaded.model
    precision = str(model.dtype).removeprefix("torch.")
    with_rows = layers_with_rows(model.config.get_text_config(decoder=True))
    attention = tuple(index for index, has_rows in enumerate(with_rows) if has_rows)
    return ModelInfo(
        name=name,
        fingerprint=fingerprint(model, loaded.tokenizer, compiled=loaded.compile),
        device=str(model.device),
        dtype=", ".join([precision, *forms(model, compiled=loaded.compile)]),
        num_layers=model.config.get_text_config(decoder=True).num_hidden_layers,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        attention=None if all(with_rows) else attention,
    )


def forms(model: nn.Module, *, compiled: bool) -> list[str]:
    """The forms in which a model is computed, which change its answers by rounding.

    Args:
        model: A Hugging Face model.
        compiled: Whether its decode steps are compiled.

    Returns:
        The form of its weights unless they are plain, such as ``"packed"`` or ``"int8"``, and
        ``"compiled"``.
    """
    weights = packed_weights(model).form
    return [*([] if weights == "plain" else [weights]), *(["compiled"] if compiled else [])]


def fingerprint(model: nn.Module, tokenizer: Any = None, *, compiled: bool = False) -> str:
    """Hash a model's weights, configuration, generation config and `forms` of computing.

    The name and the folder do not count.

    Args:
        model: A Hugging Face model.
        tokenizer: Its tokenizer, which counts, too, if it is given.
        compiled: Whether its decode steps are compiled.

    Returns:
        16 hexadecimal digits.

    Raises:
        ModelError: Weights are not in memory.
    """
    config = getattr(model, "config", None)
    settings = config.to_dict() if config is not None else {}
    generation = getattr(model, "generation_config", None)
    given = {} if generation is None else generation.to_diff_dict()
    given = {k: v for k, v in given.items() if k not in _OF_REQUESTS and v != settings.get(k)}
    found = [model_fingerprint(model), *forms(model, compiled=compiled)]
    if tokenizer is not None:
        found.append(tokenizer_fingerprint(tokenizer))
    if given:  # its keys may be tuples, which JSON does not have
        found.append(repr(sorted(given.items())))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def fingerprint_texts(texts: list[str]) -> str:
    """Hash texts in order.

    Args:
        texts: The texts.

    Returns:
        16 hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
