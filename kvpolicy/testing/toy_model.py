"""A small random decoder with the interface of `ModelAdapter`, and a small tokenizer.

It runs real attention over the engine's slabs without transformers: a step takes a fraction of a
millisecond, so that many cases can be checked.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.shape import LayerShape, Rotate, StateShape
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.errors import ModelError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.annotating import annotate_static_rows, annotate_stored_rows
from kvpolicy.model.attention import attend
from kvpolicy.model.embedded import EmbeddedPrompt, embed_chunks
from kvpolicy.model.forward_input import ForwardInput
from kvpolicy.model.packed import PackedWeights
from kvpolicy.model.rope import rotate_halves
from kvpolicy.state import LayerWeights

#: Kinds of keys: of all lengths; equal for equal tokens; often zero; nearly equal; large.
NUMBERS = ("plain", "equal", "zeros", "alike", "large")

#: Kinds of models: attention in every layer; a state of fixed size instead in one of them; rows of
#: one head for all query heads, whose values are a part of the keys; and prompts with images.
KINDS = ("attention", "hybrid", "latent", "images")

_MAX_POSITIONS = 1024
_NUM_TOKENS = 24
_ROTATED = 2  # numbers of a latent's key beyond the latent
_DECAY = 0.6  # of a state with each token


class ToyModel(ModelAdapter):
    """A random decoder that is cheap to run; equal arguments give equal weights.

    ``num_layers`` layers hold rows. Before them, a hybrid has a layer with a state of fixed size.
    Behind them, with ``num_readers`` above 1, come as many that attend to the rows of these, and so
    on, until each has as many readers.
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
        kind: str = "attention",
        image_id: int = 0,
    ) -> None:
        layers: list[int | None] = [None] * (kind == "hybrid")  # the first one, then
        layers += range(len(layers), len(layers) + num_layers)
        self._sources = layers + layers[-num_layers:] * (num_readers - 1)
        self.num_layers, self.hidden_size = len(self._sources), hidden_size
        self._num_readers, self.kind = num_readers, kind
        sees = kind == "images"
        self.embedder = self._embed if sees else None  # type: ignore[assignment]
        self.image_ids = frozenset({image_id} if sees else ())
        self.vocab_size, self.max_positions = vocab_size, _MAX_POSITIONS
        self.stop_ids = ()
        self._annotated: frozenset[int] = frozenset()
        self._device = torch.device("cpu")
        self.model = SimpleNamespace(device=self._device, dtype=dtype)  # type: ignore[assignment]
        value_dim = head_dim
        if kind == "latent":
            kv_heads, head_dim = 1, head_dim + _ROTATED
        num_heads = kv_heads * group
        self._shape = LayerShape(
            num_heads, kv_heads, head_dim, dtype, self._device, value_dim=value_dim
        )
        self._active_ids = torch.tensor(token_ids)
        rng = torch.Generator().manual_seed(seed)
        normal = partial(torch.randn, generator=rng, dtype=torch.float64)
        self._embedding = normal(vocab_size, hidden_size)
        self._positions = normal(_MAX_POSITIONS, hidden_size) * 0.7
        width = 1 / hidden_size**0.5
        # Queries, keys and values, side by side; a latent is the value and a part of the key.
        self._num_heads = (num_heads, kv_heads, 0 if kind == "latent" else kv_heads)
        sizes = [
            (hidden_size, hidden_size)
            if source is None
            else (sum(self._num_heads) * head_dim, num_heads * value_dim)
            for source in self._sources
        ]
        self._in = [normal(hidden_size, size) * width * 2 for size, _ in sizes]
        self._out = [normal(size, hidden_size) * width for _, size in sizes]
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
            for layer_idx in self.attention_layers:
                self._in[layer_idx][:, first : first + self._num_heads[1] * num] *= 100
                if self.kind == "latent":  # values are large, too; states of layers are not to be
                    self._out[layer_idx] /= 100

    def _cast(self, dtype: torch.dtype) -> None:
        self._embedding, self._positions = (
            self._embedding.to(dtype),
            self._positions.to(dtype),
        )
        self._in = [weight.to(dtype) for weight in self._in]
        self._out = [weight.to(dtype) for weight in self._out]
        self._unembedding = self._unembedding.to(dtype)

    def _embed(self, given: Mapping[str, Any], is_real: np.ndarray) -> list[EmbeddedPrompt]:
        """What enters the layers for prompts, as `Embedder.__call__`.

        Args:
            given: ``input_ids``, ``[B, L]``; ``looks``, tokens as which those of images look,
                ``[B, L]``; and ``ahead``, how many tokens behind it each attends to, ``[B, L]``.
            is_real: Which columns are no pads, bool ``[B, L]``.
        """
        is_image = torch.isin(given["input_ids"], torch.tensor([*self.image_ids]))
        embeds = self._embedding[torch.where(is_image, given["looks"], given["input_ids"])]
        rows = zip(embeds, given["ahead"].numpy(), is_real, strict=True)
        return [
            EmbeddedPrompt(0, {"inputs_embeds": row[torch.from_numpy(real)]}, {}, ahead=ahead[real])
            for row, ahead, real in rows
        ]

    def layer_shapes(self) -> list[LayerShape]:
        """Shapes of what each layer holds, alike in all that hold rows."""
        own, num = self._shape, self._num_readers
        with_rows = attrs.evolve(own, num_heads=own.num_heads * num, num_readers=num)
        none = partial(LayerShape, 0, 0, 0, own.dtype, own.device)
        state = StateShape("recurrent.0", (self.hidden_size,), own.dtype)
        shapes = []
        for index, source in enumerate(self._sources):
            if source is None:
                shapes.append(none(states=(state,)))
            elif source == index:
                shapes.append(with_rows)
            else:
                reader = self._sources[:index].count(source)
                shapes.append(none(source=source, reader=reader))
        return shapes

    def fingerprint(self) -> str:
        """The same for all: a store of a trial serves one model."""
        return type(self).__name__

    def rotation(self) -> Rotate:
        """Plain RoPE; the model itself does not rotate keys. Those of latents cannot be moved."""
        return _refuse_to_rotate if self.kind == "latent" else rotate_halves

    def layer_weights(self, layers: Sequence[int]) -> Iterator[LayerWeights]:
        """The projections of some layers.

        Raises:
            ModelError: If they are not all that reads the rows, as in `ModelAdapter`.
        """
        if self._num_readers > 1:
            msg = "weights of layers whose rows several layers attend to are not given to policies"
            raise ModelError(msg)
        if self.kind == "latent":
            msg = (
                "weights of a model with latent attention cannot be given to policies that "
                "implement bind()"
            )
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
        if None in self._sources:
            return "its layers have states of fixed size"
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
        states = self._embedding[given.token_ids]
        if given.embedded is not None:
            whole = {"inputs_embeds": states}
            states = embed_chunks(given.embedded, states.shape[1], whole)["inputs_embeds"]
        states = states + self._positions[positions]
        for layer_idx, (into, out) in enumerate(zip(self._in, self._out, strict=True)):
            if given.steer is not None:
                change = given.steer(layer_idx, states[:, -1])
                states = states if change is None else states + change[:, None]
            if self._sources[layer_idx] is None:
                assert isinstance(step, EagerStep), "see `eager_reason`"
                states = states + _recurrence(step.states[layer_idx], states @ into) @ out
                continue
            heads = (states @ into).unflatten(2, (-1, self._shape.head_dim)).transpose(1, 2)
            queries, keys, values = heads.split(self._num_heads, dim=1)
            if self.kind == "latent":
                values = keys[..., : self._shape.value_dim]
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


def _recurrence(opened: Any, inputs: Tensor) -> Tensor:
    """What a state gives for each token, ``[B, L, M]``, token by token, so alike in all chunks."""
    state = opened.recurrent_states.get(0)
    state = torch.zeros_like(inputs[:, 0]) if state is None else state
    states = []
    for column in inputs.unbind(1):
        state = _DECAY * state + column
        states.append(state)
    opened.update_recurrent_state(state)
    return torch.stack(states, dim=1).tanh()


def _refuse_to_rotate(layer_idx: int, keys: Tensor, by: Tensor) -> Tensor:
    del layer_idx, keys, by
    msg = (
        "keys of a model with latent attention cannot be moved to other positions; leave the "
        "policy that moves them out of the plan"
    )
    raise ModelError(msg)


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
