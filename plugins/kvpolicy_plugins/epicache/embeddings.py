"""Embeddings of texts by the model itself: no other model, and no download."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy import Engine, KVPolicyError, Memory, Plan, Request, hookimpl
from kvpolicy_plugins.epicache.episodes import Vectors, normalised

KINDS = ("inputs", "states")

# Of the mean variance of input embeddings, added to that of each direction.
_LEAST_SHARE = 0.01

# A user's function from texts to vectors, ``[N, D]``.
Embed = Callable[[Sequence[str]], Any]


@attrs.frozen(eq=False)
class Embedding:
    """Turns texts into vectors of length 1, as the windows of one conversation call for it.

    The vector of a text is the weighted mean of the vectors of its tokens, minus that of the
    windows. A token weighs ``log(N / n)`` if ``n`` of the ``N`` windows have it (its inverse
    document frequency), so that words that all windows have, and words of a question that none
    has, do not decide what a text is about. Models that were trained to embed sentences need
    neither.

    Attributes:
        kind: ``"states"``: vectors of tokens are the last hidden states of a text that is read on
            its own; ``"inputs"``: they are the input embeddings, for which nothing is run, whitened
            over the vocabulary (Su et al., 2021, arXiv 2103.15316): without that, all words of one
            kind are alike, and names are told apart from numbers, but not from each other.
        centre: The mean of the windows, ``[D]``.
        weights: Of each token; ``None``: all tokens weigh the same.
        own: A user's function, in place of the means.
    """

    kind: str
    centre: Vectors
    weights: Mapping[int, float] | None = None
    own: Embed | None = None
    _whitening: list[tuple[Tensor, Tensor]] = attrs.field(factory=list, init=False, repr=False)

    @classmethod
    def fitted(
        cls,
        engine: Engine,
        windows: Sequence[str],
        kind: str,
        *,
        weighted: bool = True,
        own: Embed | None = None,
    ) -> "Embedding":
        """The embedding for some windows.

        Args:
            engine: Its model and tokenizer are used.
            windows: Their texts.
            kind: See `Embedding`.
            weighted: Whether tokens have weights.
            own: A function that embeds texts instead; its vectors are taken as they are.
        """
        if own is not None:
            (size,) = _checked(own(windows[:1]), 1).shape[1:]
            return cls(kind, np.zeros(size), own=own)
        if kind not in KINDS:
            msg = f"embeddings were asked for as {kind!r:.40}; choose one of {', '.join(KINDS)}"
            raise KVPolicyError(msg)
        weights = _document_weights([encoded(engine, text) for text in windows])
        plain = cls(kind, np.zeros(1), weights if weighted else None)
        raw = plain._means(engine, windows)
        # A single window has nothing to differ from.
        centre = raw.mean(axis=0) if len(raw) > 1 else np.zeros(raw.shape[1])
        return attrs.evolve(plain, centre=centre)

    def vectors(self, engine: Engine, texts: Sequence[str]) -> Vectors:
        """Vectors of texts, ``[N, D]``, of length 1."""
        if self.own is not None:
            return normalised(_checked(self.own(texts), len(texts)))
        return normalised(self._means(engine, texts) - self.centre)

    def _means(self, engine: Engine, texts: Sequence[str]) -> Vectors:
        ids = [encoded(engine, text) for text in texts]
        of_tokens = _states(engine, ids) if self.kind == "states" else self._inputs(engine, ids)
        means = [
            (vectors * shares[:, None]).sum(dim=0).numpy()
            for vectors, shares in zip(of_tokens, map(self._shares, ids), strict=True)
        ]
        return _checked(np.stack(means), len(texts))

    @torch.no_grad()
    def _inputs(self, engine: Engine, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Whitened input embeddings of texts, ``[L, M]`` each."""
        layer: Any = engine.adapter.model.get_input_embeddings()
        table = layer.weight.detach().cpu().double()
        if not self._whitening:
            self._whitening.append(_whitened(table))
        ((mean, matrix),) = self._whitening
        return [(table[list(ids)] - mean) @ matrix for ids in texts]

    def _shares(self, ids: Sequence[int]) -> Tensor:
        """The share of each token in the mean of a text, ``[L]``."""
        weights = [1.0 if self.weights is None else self.weights.get(token, 0.0) for token in ids]
        total = math.fsum(weights)
        # Without a word that tells windows apart, all words are as good.
        even = [1 / len(ids)] * len(ids)
        return torch.tensor([weight / total for weight in weights] if total else even).double()


def encoded(engine: Engine, text: str, *, begins: bool = False) -> list[int]:
    """Token ids of a text.

    Args:
        engine: Its tokenizer is used.
        text: The text.
        begins: Whether it begins a sequence, so that the tokenizer adds its special tokens.

    Raises:
        KVPolicyError: The engine has no tokenizer, or this one has no token for the text.
    """
    if engine.tokenizer is None:
        msg = "episodes are made of texts, and the engine has no tokenizer; give Engine one"
        raise KVPolicyError(msg)
    ids: list[int] = list(engine.tokenizer(text, add_special_tokens=begins)["input_ids"])
    if not ids:
        msg = f"the tokenizer has no token for the text {text!r:.60}; give another"
        raise KVPolicyError(msg)
    return ids


def _document_weights(windows: Sequence[Sequence[int]]) -> dict[int, float]:
    """``log(N / n)`` of each token that ``n`` of ``N`` windows have."""
    counts = Counter(token for ids in windows for token in set(ids))
    return {token: math.log(len(windows) / count) for token, count in sorted(counts.items())}


@attrs.define(eq=False)
class _Keep:
    """Keeps the last hidden states of a text."""

    @hookimpl
    def observe(self, hidden_states: Tensor, memory: Memory) -> None:
        (own,) = memory.of(self)
        own.setdefault("states", []).append(hidden_states.double().cpu())


def _states(engine: Engine, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Last hidden states of texts, ``[L, M]`` each."""
    reader = Engine(
        engine.adapter,
        engine.tokenizer,
        Plan.uniform(_Keep()),
        slots=engine.num_slots,
        chunk=engine.chunk,
        max_tokens_per_forward=engine.max_tokens_per_forward,
    )
    requests = [Request(ids, 1, stop_ids=(), snapshot=True) for ids in texts]
    states = []
    for result in reader.generate(requests).results():
        if result.snapshot is None:
            msg = f"a text cannot be embedded: {result.error}"
            raise KVPolicyError(msg)
        (notes,) = result.snapshot.memory.values()
        states.append(torch.cat(notes["states"]))
    return states


def _whitened(table: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of input embeddings ``[V, M]``, and what makes their covariance the identity."""
    mean = table.mean(dim=0)
    sizes, axes = torch.linalg.eigh((table - mean).T @ (table - mean) / len(table))
    # Directions that hardly any word has are not enlarged to those that words have.
    scale = (sizes.clamp(min=0) + _LEAST_SHARE * sizes.mean()).rsqrt()
    return mean, axes * scale @ axes.T


def _checked(vectors: Any, num_texts: int) -> Vectors:
    given = np.asarray(vectors, dtype=np.float64)
    if given.ndim != 2 or len(given) != num_texts or not np.isfinite(given).all():
        msg = (
            f"embeddings of {num_texts} texts have shape {list(given.shape)}; expected finite "
            f"numbers, [{num_texts}, D]"
        )
        raise KVPolicyError(msg)
    return given
