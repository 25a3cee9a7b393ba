"""A forward that is to be run: who lays it out need not be who runs it."""

from collections.abc import Generator

import attrs
from torch import Tensor

from kvpolicy.cache.layout import StepLayout


@attrs.frozen(eq=False)
class Feed:
    """A forward that is to be run.

    Attributes:
        token_ids: New tokens of the slots that the step serves, ``[B, L]``, padded on the left.
        step: Where their rows go.
    """

    token_ids: Tensor
    step: StepLayout


# Yields the forwards that are to be run, and is sent what came of each: logits ``[B, V]`` and,
# if the observer wants them, hidden states ``[B, L, M]``.
Feeds = Generator[Feed, tuple[Tensor, Tensor | None], None]
