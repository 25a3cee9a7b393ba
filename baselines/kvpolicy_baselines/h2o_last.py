"""The "H2O" of the R-KV code: attention of the last query only, nothing accumulated."""

from typing import ClassVar

import attrs
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.toolkit.attention_window import pin_window, window_importance


@attrs.define(eq=False, kw_only=True)
class H2OLast:
    """The "H2O" of R-KV's code: what the last query attends to stays. Not H2O as published.

    Zefan-Cai/R-KV d15c976, ``H2O.update_kv``, which is named after Zhang et al., 2023 (see
    ``h2o``) but accumulates nothing: logits of the last query, reduced by their maximum over
    the query heads of a group; softmax over all rows but the newest, which stays; every KV head
    keeps its best. It is ``snapkv`` with ``window_size = 1`` and ``kernel_size = 1``, and closer
    to a per-head TOVA than to H2O. It exists under a name of its own so that figures given for
    that code are not taken for H2O's.

    Deviations: the class as released raises whenever something has to leave, because a mean
    over heads drops a dimension; this is what it intends, without that line. Scores in fp32; a
    sequence is compacted when its own buffer is full (the code counts all tokens of the
    process).
    """

    protects: ClassVar[tuple[int, int]] = (0, 1)

    @hookimpl
    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Rate rows by the last query's attention; pin its own row."""
        importance = window_importance(queries[:, :, -1:], keys, kernel_size=1)
        return pin_window(importance, 1)
