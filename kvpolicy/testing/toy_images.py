"""Images in the prompts of toy models: where they are, and what enters the layers for them."""

from collections import abc

import numpy as np
import torch

from kvpolicy.engine.compose import images_of
from kvpolicy.engine.core import Core
from kvpolicy.engine.extensions.base import CoreParts, Extension
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.model.adapter import ModelAdapter

#: Tokens of an image.
NUM_TOKENS = 2

_EVERY = 3  # so many prompts, the second of them has no image
_PLACES = 3


def place_of_image(length: int, number: int) -> slice:
    """Where a prompt of so many tokens has its image, which text follows; empty if it has none."""
    first = number % _PLACES
    has_one = number % _EVERY != 1 and first + NUM_TOKENS < length
    return slice(first, first + NUM_TOKENS * has_one)


class ShowImages(Extension):
    """Gives the engine what enters the layers for prompts with images, as a `PolicyCache` does.

    What an image looks like depends on the text around it, so that equal prompts have equal images.
    """

    def __init__(self, adapter: ModelAdapter, *, both_ways: bool) -> None:
        """Take the model.

        Args:
            adapter: The model.
            both_ways: Whether tokens of an image attend to each other in both directions.
        """
        self._adapter, self._both_ways = adapter, both_ways
        self._image_ids = torch.tensor([*adapter.image_ids])

    def attach(self, core: CoreParts) -> None:
        """Take what gives the decoder its embeddings."""
        super().attach(core)
        assert isinstance(core, Core)
        self._images = images_of(core)

    def admit(self, group: abc.Sequence[Sequence]) -> None:
        """Give each sequence that has an image what its prompt has for the layers."""
        embedder = self._adapter.embedder
        for seq in group:
            prompt = torch.tensor(seq.prompt)
            is_image = torch.isin(prompt, self._image_ids)
            if embedder is None or not is_image.any() or self.cache.seq_len[seq.slot]:
                continue
            rng = torch.Generator().manual_seed(sum(seq.prompt) + len(seq.prompt))
            looks = torch.randint(self._adapter.vocab_size, prompt.shape, generator=rng)
            # The number of tokens of the image that follow each of its tokens.
            ahead = is_image.flip(0).cumsum(0).flip(0).sub(1) * is_image * self._both_ways
            given = {"input_ids": prompt, "looks": looks, "ahead": ahead}
            (embedded,) = embedder(
                {name: one[None] for name, one in given.items()},
                np.ones((1, len(prompt)), dtype=bool),
            )
            self._images.hold(seq, embedded)
