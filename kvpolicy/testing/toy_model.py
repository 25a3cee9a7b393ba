"""A small random decoder with the interface of `ModelAdapter`, and a small tokenizer.

It runs real attention over the engine's slabs without transformers: a step takes a fraction of a
millisecond, so that many cases can be checked.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.shape import LayerShape, Rotate
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.errors import ModelError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.annotating import annotate_static_rows, annotate_stored_rows
from kvpolicy.model.attention import attend
from kvpolicy.model.forward_input import ForwardInput
from kvpolicy.model.packed import PackedWeights
from kvpolicy.model.rope import rotate_halves
from kvpolicy.state import LayerWeights

#: Kinds of keys: of all lengths; equal for equal tokens; often zero; nearly equal; large.
NUMBERS = ("plain", "equal", "zeros", "alike", "large")

_MAX_POSITIONS = 1024
_NUM_TOKENS = 24


class ToyModel(ModelAdapter):
    """A random decoder that is cheap to run; equal arguments give equal weights.

    Its first ``num_layers`` layers hold rows. Behind them, with ``num_readers`` above 1, come as
    many that attend to the rows of these, and so on, until each has as many readers.
    """

    vocab_size: int = 0

    def __init__(
        self,
        *,
        num_layers: int,
        num_readers: int = 1,
        hidden_size: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        dtype: torch.dtype,
        numbers: str,
        vocab_size: int,
        token_ids: tuple[int, ...],
        seed: int,
    ) -> None:
        self._sources = list(range(num_layers)) * num_readers
        self.num_layers, self.hidden_size = len(self._sources), hidden_size
        self._num_readers = num_readers
        self.vocab_size, self.max_positions = vocab_size, _MAX_POSITIONS
        self.stop_ids = ()
        self._annotated: frozenset[int] = frozenset()
        self._device = torch.device("cpu")
        self.model = SimpleNamespace(device=self._device, dtype=dtype)  # type: ignore[assignment]
        self._shape = LayerShape(kv_heads * group, kv_heads, head_dim, dtype, self._device)
        self._active_ids = torch.tensor(token_ids)
        rng = torch.Generator().manual_seed(seed)
        normal = partial(torch.randn, generator=rng, dtype=torch.float64)
        self._embedding = normal(vocab_size, hidden_size)
        self._positions = normal(_MAX_POSITIONS, hidden_size) * 0.7
        width = 1 / hidden_size**0.5
        # Queries, keys and values, side by side.
        self._num_heads = (kv_heads * group, kv_heads, kv_heads)
        self._in = [
            normal(hidden_size, sum(self._num_heads) * head_dim) * width * 2 for _ in self._sources
        ]
        self._out = [
            normal(kv_heads * group * head_dim, hidden_size) * width for _ in self._sources
        ]
        self._unembedding = normal(hidden_size, len(token_ids))
        self._shape_keys(numbers)
        self._cast(dtype)

    def _shape_keys(self, numbers: str) -> None:
        """Change the weights so that keys are of one kind of `NUMBERS`."""
        if numbers in ("equal", "zeros"):
            self._positions.zero_()
        if numbers == "zeros":
            self._embedding[self._active_ids[::3]] = 0
        if numbers == "alike":
            self._embedding.mul_(0.2).add_(1)
        if numbers == "large":
            first, num = self._num_heads[0] * self._shape.head_dim, self._shape.head_dim
            for weight in self._in:
                weight[:, first : first + self._num_heads[1] * num] *= 100

    def _cast(self, dtype: torch.dtype) -> None:
        self._embedding, self._positions = (
            self._embedding.to(dtype),
            self._positions.to(dtype),
        )
        self._in = [weight.to(dtype) for weight in self._in]
        self._out = [weight.to(dtype) for weight in self._out]
        self._unembedding = self._unembedding.to(dtype)

    def layer_shapes(self) -> list[LayerShape]:
        """Equal shapes in every layer that holds rows."""
        own, num = self._shape, self._num_readers
        with_rows = attrs.evolve(own, num_heads=own.num_heads * num, num_readers=num)
        of_reader = partial(LayerShape, 0, 0, 0, own.dtype, own.device)
        num_own = self.num_layers // num
        return [
            with_rows if reader == 0 else of_reader(source=index, reader=reader)
            for reader in range(num)
            for index in range(num_own)
        ]

    def fingerprint(self) -> str:
        """The same for all: a store of a trial serves one model."""
        return type(self).__name__

    def rotation(self) -> Rotate:
        """Plain RoPE; the model itself does not rotate keys."""
        return rotate_halves

    def layer_weights(self, layers: Sequence[int]) -> Iterator[LayerWeights]:
        """The projections of some layers."""
        if self._num_readers > 1:
            msg = "weights of layers whose rows several layers attend to are not given to policies"
            raise ModelError(msg)
        dim = self._shape.head_dim
        for layer_idx in layers:
            by_head = self._in[layer_idx].T.unflatten(0, (-1, dim))
            q, k, v = by_head.split(self._num_heads)
            out = self._out[layer_idx].unflatten(0, (-1, dim)).transpose(1, 2)
            rotate = partial(self.rotation(), layer_idx)
            yield LayerWeights(q=q, k=k, v=v, o=out, scaling=dim**-0.5, rotate=rotate)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return self._device

    last_device = device

    def check_forward(self, *, static: bool) -> None:
        """Do nothing: it can be run."""

    @property
    def eager_reason(self) -> str | None:
        """Why decode steps are eager, as of `ModelAdapter`."""
        return "its layers attend to keys and values of others" if self._num_readers > 1 else None

    weights = PackedWeights(0, 0, 0, 0)

    def add_hooks(
        self, *, steered: Collection[int], states: bool, annotated: Collection[int] = ()
    ) -> None:
        """Note which rows are annotated; `forward` itself steers and returns hidden states."""
        self._annotated |= frozenset(annotated)

    def forward(self, given: ForwardInput) -> tuple[Tensor, Tensor | None]:
        """Forward pass over the new tokens of a step, see `ModelAdapter.forward`."""
        step = given.step
        ids = step.position_ids
        positions = ids if isinstance(ids, Tensor) else torch.from_numpy(ids)
        shapes = self.layer_shapes()
        states = self._embedding[given.token_ids] + self._positions[positions]
        for layer_idx, (into, out) in enumerate(zip(self._in, self._out, strict=True)):
            if given.steer is not None:
                change = given.steer(layer_idx, states[:, -1])
                states = states if change is None else states + change[:, None]
            heads = (states @ into).unflatten(2, (-1, self._shape.head_dim)).transpose(1, 2)
            queries, keys, values = heads.split(self._num_heads, dim=1)
            scaling = self._shape.head_dim**-0.5
            if layer_idx in self._annotated and given.annotating is not None:
                given.attention_input = states
            if (source := shapes[layer_idx].source) is not None:
                assert isinstance(step, EagerStep), "see `eager_reason`"
                rows = step.shared_rows[source]
                found = attend(step, layer_idx, queries, *rows, scaling)
            elif isinstance(step, StaticStep):
                found = step.attend(layer_idx, queries, keys, values, scaling)
                annotate_static_rows(given, layer_idx, keys, values)
            else:
                all_keys, all_values = step.store(layer_idx, keys, values)
                annotate_stored_rows(given, layer_idx, keys, values)
                found = attend(step, layer_idx, queries, all_keys, all_values, scaling)
            states = states + found.transpose(1, 2).flatten(2) @ out
        states = states if given.wants_states else states[:, -1:]
        size = (states.float().square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
        states = (states / size).to(self._shape.dtype)
        logits = torch.full((len(states), self.vocab_size), -torch.inf, dtype=states.dtype)
        logits[:, self._active_ids] = states[:, -1] @ self._unembedding
        wanted = states if given.wants_states else None
        if isinstance(step, StaticStep) and given.draws:
            step.finish(logits, wanted)
        return logits, wanted


@lru_cache(maxsize=1)
def toy_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose line breaks merge with punctuation, with think tags."""
    merges = [("Ċ", "Ċ"), (".", "Ċ"), (".", "ĊĊ"), (")", "ĊĊ"), ("?", "ĊĊ")]
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def active_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """The token ids of prompts and answers: some with line breaks, some special, some others.

    They are few, so that tokens repeat and sentences end within a dozen tokens.
    """
    size = len(tokenizer)
    texts = tokenizer.batch_decode([[i] for i in range(size)], skip_special_tokens=False)
    breaks = [i for i, text in enumerate(texts) if "\n" in text]
    added = sorted(i for i in getattr(tokenizer, "added_tokens_decoder", {}) if i < size)
    chosen = dict.fromkeys([*breaks[:6], *added[:6]])
    step = max(size // _NUM_TOKENS, 1)
    for i in range(0, size, step):
        if len(chosen) < _NUM_TOKENS:
            chosen[i] = None
    return tuple(chosen)
