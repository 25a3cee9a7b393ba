"""Which rows belong to images: those of the tokens in whose place a model puts their embeddings."""

from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvpolicy.devices import upload
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
        if not len(self._ids):
            return torch.zeros_like(positions, dtype=torch.bool)
        places = {seq: place for place, seq in enumerate(dict.fromkeys(sequences))}
        # One table for all entries: each layer of a sequence is one.
        table = pad_sequence([*map(self._of_prompt, places)], batch_first=True)
        device, most = positions.device, table.shape[1]
        which = upload(np.array([places[seq] for seq in sequences]), device)
        found = upload(table, device)[which[:, None, None], positions.clamp(0, most - 1)]
        return found & (positions >= 0) & (positions < most)

    def _of_prompt(self, seq: EngineSequence) -> Tensor:
        prompt, is_image = self._known.get(seq, (None, None))
        if prompt is not seq.prompt or is_image is None:
            is_image = torch.isin(torch.tensor(seq.prompt), self._ids)
            self._known[seq] = seq.prompt, is_image
        return is_image
