"""Last used: rows stay that a query has used a short time ago."""

from typing import ClassVar

import attrs
from attrs.validators import ge, instance_of, lt
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False, kw_only=True)
class LastUsed:
    """Rows stay that a query has used a short time ago.

    A cache of disk pages evicts what was not used for the longest time; this is the same for rows.
    The engine accumulates the position of each row's last use, and nobody else pays for it. An
    example without a paper.

    Attributes:
        attn_threshold: Weight above which a query uses a row.
    """

    layers_alike: ClassVar[bool] = True

    attn_threshold: float = attrs.field(
        default=0.02, converter=float, validator=[instance_of(float), ge(0), lt(1)]
    )

    @hookimpl
    def score(self, attn_last: Tensor) -> Tensor:
        """Score rows by the position of the query that used them last."""
        return attn_last.double()
