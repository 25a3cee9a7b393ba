"""The "H2O" of SkipKV's code: attention of the last query, the same rows for all heads."""

from typing import ClassVar

import attrs
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.toolkit import window_scores


@attrs.define(eq=False, kw_only=True)
class H2OShared:
    """The "H2O" of SkipKV's code: rows the last query attends to, the same for all heads.

    TTTTTTris/SkipKV 4492840, ``H2O.update_kv``: the baseline named H2O in the SkipKV paper
    (arXiv 2512.07993). Like ``h2o_last`` it is not H2O as published (see ``h2o``): nothing
    accumulates and no recent rows are protected but one. The maximum of the last query's logits
    over the query heads of a group; softmax over all rows except the newest, which stays; mean
    over the KV heads; the best rows stay, the same ones in every KV head.

    ``h2o_last`` is the class of R-KV's code that this one repairs: there the mean over heads
    made the code raise, and ``h2o_last`` leaves it out. It is a policy of its own because it is
    other code, and so that results of ``h2o_last`` keep their meaning.

    Deviations: scores are in fp32; pads are never stored (in the code a mask that no longer fits
    hides the rows with the highest scores when prompts are padded); a sequence is compacted when
    its own buffer is full (the code counts all tokens of the process).
    """

    gives_mass: ClassVar[bool] = True
    protects: ClassVar[tuple[int, int]] = (0, 1)

    @hookimpl
    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Score rows by the last query's attention, averaged over heads."""
        importance = window_scores(queries[:, :, -1:], keys, kernel_size=1)
        return importance.mean(dim=1, keepdim=True).repeat(1, keys.shape[1], 1)
