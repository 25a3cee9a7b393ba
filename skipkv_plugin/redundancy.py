"""Redundant sentences: sentences that a later one repeats, by last hidden states."""

from collections.abc import Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor

from skipkv_plugin.sentences import Sentence

Pair = Literal["max", "last"]


@attrs.define
class SentenceVectors:
    """The unit mean of the last hidden states of every finished sentence of a sequence.

    SkipKV, eq. 2. Vectors stay after the rows of their sentence have been evicted, so that of a
    chain of repetitions only the latest sentence stays.

    Attributes:
        vectors: ``[n, M]``, fp32.
    """

    vectors: Tensor | None = None
    _open_sum: Tensor | None = None  # of the open sentence, [M]

    def pack(self) -> tuple[Tensor | None, Tensor | None]:
        """The vectors, and the sum of the open sentence."""
        return self.vectors, self._open_sum

    def unpack(self, packed: tuple[Tensor | None, Tensor | None]) -> None:
        """Go on from what `pack` returned."""
        self.vectors, self._open_sum = packed

    def feed(
        self, hidden_states: Tensor, start: int, finished: Sequence[Sentence], open_begin: int
    ) -> int:
        """Process the next tokens.

        Args:
            hidden_states: After the final norm, ``[L, M]``.
            start: Position of the first of them.
            finished: Sentences that they complete, in order.
            open_begin: Position at which the next sentence begins.

        Returns:
            Number of new vectors.
        """
        states = hidden_states.float()
        added = []
        for sentence in finished:
            begin = max(sentence.begin - start, 0)
            total = states[begin : sentence.body_end - start].sum(dim=0)
            if sentence.begin < start and self._open_sum is not None:
                total = total + self._open_sum
            mean = total / (sentence.body_end - sentence.begin)
            added.append(mean / (mean.norm() + 1e-8))
        rest = states[max(open_begin - start, 0) :].sum(dim=0)
        if open_begin < start and self._open_sum is not None:
            rest = rest + self._open_sum
        self._open_sum = rest
        if added:
            new = torch.stack(added)
            self.vectors = new if self.vectors is None else torch.cat([self.vectors, new])
        return len(added)


def redundant(vectors: Tensor, num_new: int, tau: float, pair: Pair) -> dict[int, float]:
    """Sentences that a new one repeats, with their similarity.

    SkipKV, eqs. 1, 3 and 7: of two sentences whose cosine similarity is above ``tau``, the
    earlier is redundant. Only pairs with a new sentence are compared.

    Args:
        vectors: Unit vectors of all sentences, ``[n, M]``, the new ones last.
        num_new: Number of new ones.
        tau: Similarity above which an earlier sentence is redundant.
        pair: Which of several later sentences counts: the most similar one (``"max"``) or the
            latest (``"last"``, as in the authors' code).

    Returns:
        Similarity by number of the sentence.
    """
    if num_new == 0:
        return {}
    num_old = len(vectors) - num_new
    similarity = vectors[num_old:] @ vectors.T  # [new, all]
    later = torch.arange(num_old, len(vectors), device=vectors.device)[:, None]
    earlier = torch.arange(len(vectors), device=vectors.device)[None, :]
    above = (similarity > tau) & (earlier < later)
    if pair == "max":
        best = similarity.masked_fill(~above, -1).amax(dim=0)
    else:
        newest = (above * later).amax(dim=0) - num_old
        best = similarity.gather(0, newest.clamp(min=0)[None])[0]
    found = above.any(dim=0).nonzero().flatten().tolist()
    return dict(zip(found, best[found].tolist(), strict=True))
