"""Protect: keep the first and the newest tokens under any policy."""

import attrs
from attrs.validators import ge, instance_of


@attrs.define(eq=False, kw_only=True)
class Protect:
    """Keep attention sinks and recent rows under any policy: ``["h2o", "protect"]``.

    Attention sinks are those of Xiao et al., 2024 (arXiv 2309.17453); H2O, SnapKV and R-KV
    protect recent rows. It implements no hook: the engine keeps what a policy ``protects``.

    Attributes:
        n_sink: First tokens of the sequence that always stay.
        n_recent: Newest rows that always stay.
    """

    n_sink: int = attrs.field(default=4, validator=[instance_of(int), ge(0)])
    n_recent: int = attrs.field(default=8, validator=[instance_of(int), ge(0)])

    @property
    def protects(self) -> tuple[int, int]:
        """The sinks and the recent rows."""
        return self.n_sink, self.n_recent

    @property
    def no_effect(self) -> str | None:
        """Nothing is protected if both numbers are 0."""
        return None if any(self.protects) else "n_sink and n_recent are 0"
