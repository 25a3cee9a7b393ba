"""The "H2O" of R-KV's code: attention of the last query only, without accumulation."""

from typing import ClassVar

import attrs
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.toolkit import window_scores


@attrs.define(eq=False, kw_only=True)
class H2OLast:
    """The "H2O" of R-KV's code: keep what the last query attends to. Not H2O as published.

    Zefan-Cai/R-KV d15c976, ``H2O.update_kv``. It is named after Zhang et al., 2023 (see
    ``h2o``) but accumulates nothing: the maximum of the last query's logits over the query
    heads of a group; softmax over all rows except the newest, which stays; every KV head keeps
    its best rows. It equals ``snapkv`` with ``window_size = 1`` and ``kernel_size = 1``, and is
    closer to a per-head TOVA than to H2O. It has a separate name so that figures for that
    code are not mistaken for H2O's.

    Deviations: the released class raises whenever a row has to leave, because a mean over
    heads drops a dimension; this implementation leaves that line out. Scores are in fp32. A
    sequence is compacted when its own buffer is full (the code counts all tokens of the
    process).
    """

    gives_mass: ClassVar[bool] = True
    protects: ClassVar[tuple[int, int]] = (0, 1)

    @hookimpl
    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Score rows by the last query's attention."""
        return window_scores(queries[:, :, -1:], keys, kernel_size=1)
