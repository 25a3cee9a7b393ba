"""Prompts with images: what enters the decoder of a vision-language model for each token.

A model of this kind computes embeddings of images, puts them in the place of their tokens, and
calls its decoder with what results. `Embedder` runs this part of it for whole prompts, and stops
where the decoder is called. Chunks of the prompts then enter the decoder with their part of that,
which `embed_chunks` puts in the place of what the model makes of their token ids.

Images are whatever is embedded so: frames of videos and sound, too.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy.errors import ModelError, error_summary
from kvpolicy.model.decoder import decoder_of
from kvpolicy.model.twin import Copies, Twin

# What a decoder is given that says nothing of single tokens, or that a forward of ours says itself.
_NOT_OF_TOKENS = {
    "attention_mask",
    "cache",
    "cache_position",
    "input_ids",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}

# Arguments of a model's forward that are not for images, beside those above.
_NOT_FOR_IMAGES = re.compile(
    r"^(inputs_embeds|labels|router_labels|return_dict|per_layer_inputs)$"
    r"|^(output|decoder|encoder|cross_attention)_|head_mask$|^(kw)?args$"
)

# Fields of a configuration that name the tokens in whose place embeddings of images are put.
_IMAGE_ID = re.compile(r"^(image|video|audio|speech|media_placeholder)_token_(id|index)$")

# Planes of positions: of time, height and width; some models put that of the text before them, and
# some rotate along four axes.
_PLANES = (3, 4)


Tensors = Mapping[Any, Tensor] | tuple[Tensor, ...]


@attrs.frozen(eq=False, slots=False)
class EmbeddedPrompt:
    """What a decoder is given for the tokens of a prompt, or of a part of it.

    Attributes:
        start: Position of its first token in the sequence.
        columns: By the name of an argument, what there is for each of the ``n`` tokens,
            ``[n, ...]``: ``inputs_embeds`` and others.
        marked: By the name of an argument, tensors ``[m, ...]`` for those tokens only that a column
            marks, such as one for each of some layers: the name of this column, and the tensors in
            a mapping or a tuple.
        rope: Positions of the tokens for the rotary embedding in 3 or 4 planes, ``[3, n]``;
            ``None``: those that the tokens have in their sequence.
        rope_offset: What is added to the positions of later tokens, as `KVCache.rope_offset`.
        ahead: How many tokens behind it each token attends to, ``[n]``; ``None``: none does.
    """

    start: int
    columns: Mapping[str, Tensor]
    marked: Mapping[str, tuple[str, Tensors]]
    rope: Tensor | None = None
    rope_offset: int = 0
    ahead: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return len(self.columns["inputs_embeds"])

    def first_cut(self, seen: int) -> int:
        """Tokens of the sequence before the next place at which the prompt may be cut.

        No token before it attends to one behind it.

        Args:
            seen: Tokens of the sequence that are in.
        """
        return int(self._cuts[np.searchsorted(self._cuts, seen, side="right")])

    def last_cut(self, most: int) -> int:
        """Tokens of the sequence before the last such place within so many."""
        return int(self._cuts[np.searchsorted(self._cuts, most, side="right") - 1])

    @cached_property
    def _cuts(self) -> np.ndarray:
        tokens = np.arange(self.num_tokens)
        if self.ahead is None:
            cuts = tokens
        else:  # a token may be the first of a chunk if none before it attends to it
            reached = np.maximum.accumulate(tokens + self.ahead)
            cuts = tokens[np.append(True, reached[:-1] < tokens[1:])]
        return self.start + np.append(cuts, self.num_tokens)

    def part(self, first: int, length: int) -> "EmbeddedPrompt":
        """What belongs to some of its tokens.

        Args:
            first: Position of the first of them in the sequence.
            length: How many.
        """
        begin = first - self.start
        tokens = slice(begin, begin + length)
        marked = {}
        for name, (mask, tensors) in self.marked.items():
            before = int(self.columns[mask][:begin].sum())
            own = slice(before, before + int(self.columns[mask][tokens].sum()))
            marked[name] = mask, _sliced(tensors, own)
        return attrs.evolve(
            self,
            start=first,
            columns={name: column[tokens] for name, column in self.columns.items()},
            marked=marked,
            rope=None if self.rope is None else self.rope[:, tokens],
            ahead=None if self.ahead is None else self.ahead[tokens],
        )

    def after(self, seen: int, rope_offset: int) -> "EmbeddedPrompt":
        """The same behind so many tokens, to whose positions so much is added."""
        begin = seen + rope_offset
        return attrs.evolve(
            self,
            start=self.start + seen,
            rope=None if self.rope is None else self.rope + begin,
            rope_offset=self.rope_offset + rope_offset,
        )


def image_arguments(model: PreTrainedModel) -> frozenset[str]:
    """Arguments of a model's forward that are for images."""
    names = set(inspect.signature(type(model).forward).parameters) - {"self"} - _NOT_OF_TOKENS
    return frozenset(name for name in names if not _NOT_FOR_IMAGES.search(name))


def image_ids(model: PreTrainedModel) -> frozenset[int]:
    """The token ids in whose place a model puts embeddings of images, by its configuration."""
    names = {*vars(model.config), *model.config.attribute_map}
    found = [getattr(model.config, name, None) for name in names if _IMAGE_ID.match(name)]
    return frozenset(one for one in found if type(one) is int and one >= 0)


class _ReachedError(Exception):
    """The decoder was called; with these arguments."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments


class Embedder:
    """Runs a model up to its decoder."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._name = type(model).__name__
        self._model = model
        self._twin = Twin(model, None, self._register)
        rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        self._num_axes = max(len(rope.get("mrope_section") or ()), min(_PLANES))

    def __call__(self, given: Mapping[str, Any], is_real: np.ndarray) -> list[EmbeddedPrompt]:
        """What the decoder is given for prompts, of which it has seen nothing before.

        Args:
            given: Arguments of a forward of the model, by name, without a cache.
            is_real: Which columns of the prompts are no pads, bool ``[B, L]``.

        Raises:
            ModelError: If the model does not take such images, or its decoder is given more than
                can be told apart by tokens.
        """
        arguments = self._reach(given)
        embeds = arguments.get("inputs_embeds")
        if not isinstance(embeds, Tensor) or embeds.shape[:2] != is_real.shape:
            self._refuse("embeds them within its decoder")
        ahead = self._ahead(arguments.get("attention_mask"), is_real)
        columns, marked = self._of_tokens(arguments, is_real.shape)
        planes = self._planes(arguments.get("position_ids"), is_real)
        before = {mask: 0 for mask, _ in marked.values()}  # marked tokens of the rows before
        prompts = []
        for row, real in enumerate(torch.from_numpy(is_real)):
            own = {}
            for name, (mask, tensors) in marked.items():
                count = int(columns[mask][row].sum())
                own[name] = mask, _sliced(tensors, slice(before[mask], before[mask] + count))
            for mask in before:
                before[mask] += int(columns[mask][row].sum())
            kept = {name: one[row, real.to(one.device)] for name, one in columns.items()}
            rope = None if planes is None else planes[:, row, real.to(planes.device)]
            # Of more planes than axes, the first is that of the text.
            offset = 0 if rope is None else int(rope[-self._num_axes :].max()) + 1 - int(real.sum())
            prompts.append(EmbeddedPrompt(0, kept, own, rope, offset, ahead[row]))
        return prompts

    def _reach(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments with which the decoder is called."""
        try:
            self._twin.current().forward(**given, use_cache=False)
        except _ReachedError as reached:
            return reached.arguments
        except Exception as error:  # whatever code of the model may raise
            self._refuse(f"does not embed them: {error_summary(error)}")
        finally:
            self._twin.hand_back()
        self._refuse("does not call its decoder")

    def _planes(self, positions: object, is_real: np.ndarray) -> Tensor | None:
        """Positions of the tokens in planes, ``[3, B, L]``; ``None``: they count the tokens."""
        if not isinstance(positions, Tensor):
            return None
        if positions.dim() == 3 and len(positions) in _PLANES:
            return positions
        if positions.dim() != 2 or not _count_tokens(positions, is_real):
            self._refuse("gives its decoder positions of its own")
        return None

    def _register(self, copies: Copies) -> None:
        """Have a twin stop at its decoder."""
        decoder = copies.hookable(decoder_of(self._model))
        names = list(inspect.signature(type(decoder).forward).parameters)[1:]

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _ReachedError({**dict(zip(names, args, strict=False)), **kwargs})

        decoder.register_forward_pre_hook(stop, with_kwargs=True)
        # Which tokens attend to which is then said by whole masks, which are compared with ours.
        copies.twin.config.get_text_config(decoder=True)._attn_implementation = "eager"

    def _of_tokens(
        self, arguments: Mapping[str, Any], shape: tuple[int, ...]
    ) -> tuple[dict[str, Tensor], dict[str, tuple[str, Tensors]]]:
        """Arguments of the decoder that have a value for each token, or for each that is marked."""
        known = inspect.signature(type(decoder_of(self._model)).forward).parameters
        columns, others = {}, {}
        for name, value in arguments.items():
            if name in _NOT_OF_TOKENS:
                continue
            if isinstance(value, Tensor) and value.shape[:2] == shape:
                columns[name] = value
            elif name in known and isinstance(value, (Tensor, list, tuple, Mapping)):
                others[name] = value
        masks = {
            int(column.sum()): name
            for name, column in columns.items()
            if column.dtype == torch.bool and column[0, 0].numel() == 1
        }
        marked: dict[str, tuple[str, Tensors]] = {}
        for name, value in others.items():
            tensors = [] if isinstance(value, Tensor) else _listed(value)
            lengths = {len(one) if isinstance(one, Tensor) else -1 for one in tensors}
            mask = masks.get(lengths.pop()) if len(lengths) == 1 else None
            if mask is None:
                self._refuse(f"gives its decoder {name} beside the embeddings of tokens")
            marked[name] = mask, dict(value) if isinstance(value, Mapping) else tuple(value)
        return columns, marked

    def _ahead(self, mask: Any, is_real: np.ndarray) -> list[np.ndarray | None]:
        """How many tokens behind it each token of each row attends to; checks what else it does."""
        given = list(mask.values()) if isinstance(mask, Mapping) else [mask]
        # Others hide pads only, and the decoder makes a mask of them.
        masks = [one[:, 0] for one in given if isinstance(one, Tensor) and one.dim() == 4]
        window = getattr(self._model.config.get_text_config(decoder=True), "sliding_window", None)
        ahead: list[np.ndarray | None] = [None] * len(is_real)
        for row, real in enumerate(is_real):
            found: list[np.ndarray] = []
            for one in masks:
                which = torch.from_numpy(real).to(one.device)
                seen = one[row % len(one), which][:, which].cpu()
                if seen.dtype != torch.bool:  # added to the logits
                    seen = seen > torch.finfo(seen.dtype).min / 2
                of_mask = _tokens_ahead(seen, window)
                if of_mask is None or any((of_mask != other).any() for other in found):
                    self._refuse("masks attention to them in a way of its own")
                found.append(of_mask)
            if found and found[0].any():
                ahead[row] = found[0]
        return ahead

    def _refuse(self, what: str) -> NoReturn:
        msg = f"model {self._name} cannot be run with these images: it {what}"
        raise ModelError(msg)


def _listed(tensors: Tensors | list[Tensor]) -> list[Tensor]:
    return [*tensors.values()] if isinstance(tensors, Mapping) else [*tensors]


def _sliced(tensors: Tensors, tokens: slice) -> Tensors:
    """The tensors for some of the tokens that are marked."""
    if isinstance(tensors, Mapping):
        return {key: one[tokens] for key, one in tensors.items()}
    return tuple(one[tokens] for one in tensors)


def _joined(parts: Sequence[Tensors]) -> dict[Any, Tensor] | list[Tensor]:
    """The tensors of several prompts, one behind the other, as a decoder takes them."""
    joined = [torch.cat(one) for one in zip(*map(_listed, parts), strict=True)]
    first = parts[0]
    return dict(zip(first, joined, strict=True)) if isinstance(first, Mapping) else joined


def _count_tokens(positions: Tensor, is_real: np.ndarray) -> bool:
    """Whether positions of columns, ``[1 or B, L]``, rise by one with each token."""
    rows = np.broadcast_to(positions.cpu().numpy(), is_real.shape)
    return all((np.diff(row[real]) == 1).all() for row, real in zip(rows, is_real, strict=True))


def _tokens_ahead(seen: Tensor, window: int | None) -> np.ndarray | None:
    """How many tokens behind it each token sees, ``[n]``, and else all before it or a window.

    Args:
        seen: Which tokens each of them sees, bool ``[n, n]``.
        window: Tokens of the sliding window of some layers.

    Returns:
        ``None`` if it sees others than these.
    """
    token = torch.arange(len(seen))
    last = torch.where(seen, token, -1).amax(dim=1).maximum(token)
    every = token <= last[:, None]
    near = every & (token > token[:, None] - window) if window else every
    return (last - token).numpy() if torch.equal(seen, every) or torch.equal(seen, near) else None


def columns_ahead(
    prompts: Sequence[EmbeddedPrompt | None], lengths: Sequence[int]
) -> np.ndarray | None:
    """How many tokens behind it the token of each column attends to, ``[B, L]``; see `NewTokens`.

    Args:
        prompts: The chunk of each sequence, if it has images.
        lengths: New tokens of each sequence.
    """
    if all(one is None or one.ahead is None for one in prompts):
        return None
    ahead = np.zeros((len(lengths), max(lengths)), dtype=np.int64)
    for row, one in zip(ahead, prompts, strict=True):
        if one is not None and one.ahead is not None:
            row[len(row) - one.num_tokens :] = one.ahead
    return ahead


def embed_chunks(
    prompts: Sequence[EmbeddedPrompt | None], width: int, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a decoder, with what belongs to chunks of prompts put into them.

    Args:
        prompts: The chunk of each sequence; ``None``: it is what the model makes of token ids.
        width: Token columns, of which chunks are the last.
        arguments: What the model gives its decoder for the token ids, by name.
    """
    found = [(row, one) for row, one in enumerate(prompts) if one is not None]
    arguments = dict(arguments)
    embeds = arguments["inputs_embeds"]
    columns = {name: column for _, one in found for name, column in one.columns.items()}
    for name, like in columns.items():
        before = arguments.get(name)
        if before is None:
            before = like.new_zeros(len(embeds), width, *like.shape[1:])
        placed = arguments[name] = before.clone()
        for row, one in found:
            placed[row, width - one.num_tokens :] = one.columns[name].to(placed.device)
    for name in {name for _, one in found for name in one.marked}:
        arguments[name] = _joined([one.marked[name][1] for _, one in found])
    planes = [one.rope for _, one in found if one.rope is not None]
    if planes:
        positions = arguments["position_ids"]
        if positions.dim() == 2:
            positions = positions.expand(len(planes[0]), *positions.shape)
        arguments["position_ids"] = positions = positions.clone()
        for row, one in found:
            if one.rope is not None:
                positions[:, row, width - one.num_tokens :] = one.rope.to(positions.device)
    return arguments
