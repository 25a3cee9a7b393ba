"""Recency: rows with large values stay, and lose score with age."""

import attrs
from attrs.validators import ge, gt, instance_of
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False, kw_only=True)
class Recency:
    """Recency: rows with large values stay, and lose score with age.

    The score of a row is the norm of its value, halved every ``half_life`` tokens:
    ``|v| * 2 ** (-age / half_life)``, where age is the number of tokens after it. Small values
    contribute little to any attention output, and old rows get less attention. An example of a
    policy in a package of its own, without a paper.

    Attributes:
        half_life: Number of tokens after which a row has lost half of its score.
        n_recent: Newest rows that always stay.
    """

    half_life: float = attrs.field(
        default=64.0, converter=float, validator=[instance_of(float), gt(0)]
    )
    n_recent: int = attrs.field(default=8, validator=[instance_of(int), ge(0)])

    @property
    def protects(self) -> tuple[int, int]:
        """The newest rows."""
        return 0, self.n_recent

    @hookimpl
    def score(self, values: Tensor, positions: Tensor, seq_len: Tensor) -> Tensor:
        """Score rows by the norm of their values and by their age."""
        age = seq_len.to(positions.device)[:, None, None] - 1 - positions
        scores = values.float().norm(dim=-1) * 2.0 ** (-age / self.half_life)
        if self.n_recent:
            scores[:, :, -self.n_recent :] = float("inf")
        return scores
