"""Which rows belong to images: those of the tokens in whose place a model puts their embeddings."""

from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvpolicy.engine.requests.sequence import Sequence as EngineSequence


class ImageRows:
    """Finds the rows of images by the tokens of prompts."""

    def __init__(self, image_ids: Collection[int]) -> None:
        """Take the token ids of images, of which there may be none."""
        self._ids = torch.tensor(sorted(image_ids), dtype=torch.int64)
        # Of each sequence, its prompt and which of its tokens are of images.
        self._known: WeakKeyDictionary[EngineSequence, tuple[tuple[int, ...], Tensor]]
        self._known = WeakKeyDictionary()

    def __call__(self, sequences: Sequence[EngineSequence], positions: Tensor) -> Tensor:
        """Which rows belong to images, bool ``[B, H_kv, T]``.

        Args:
            sequences: The sequence of each entry, ``B``.
            positions: Position of each row's token, ``[B, H_kv, T]``; -1 where there is no row.
        """
        found = torch.zeros_like(positions, dtype=torch.bool)
        if not len(self._ids):
            return found
        for entry, seq in enumerate(sequences):
            of_prompt = self._of_prompt(seq)
            at = positions[entry]
            is_prompt = (at >= 0) & (at < len(of_prompt))
            found[entry] = of_prompt.to(at.device)[at.clamp(0, len(of_prompt) - 1)] & is_prompt
        return found

    def _of_prompt(self, seq: EngineSequence) -> Tensor:
        prompt, is_image = self._known.get(seq, (None, None))
        if prompt is not seq.prompt or is_image is None:
            is_image = torch.isin(torch.tensor(seq.prompt), self._ids)
            self._known[seq] = seq.prompt, is_image
        return is_image
