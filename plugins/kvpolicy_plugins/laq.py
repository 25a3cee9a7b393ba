"""Lookahead Q-Cache: attention of the queries of tokens that would come next."""

from typing import ClassVar, Literal

import attrs
import torch
from attrs.validators import ge, in_, instance_of
from torch import Tensor

from kvpolicy import Lookahead, hookimpl, observed_weights
from kvpolicy.toolkit import GroupReduce, Pooling, odd, pooled_window_attention


@attrs.define(eq=False, kw_only=True)
class LookaheadQCache:
    """LAQ and LAQ++: keep the rows that the next tokens would attend to, by decoding a few.

    Wang et al., "Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query",
    EMNLP 2025 (arXiv 2505.20334); code at noforit/Lookahead_Q-Cache 74612bd,
    ``SnapKVCluster.update_kv_LAQ``.

    SnapKV's score with another window. Before a compaction, ``n_lookahead`` tokens are decoded
    greedily and forgotten. With their queries and the last ``n_local`` true ones,
    ``Q = [Q_local; Q_lookahead]``:

        P = softmax(Q K^T / sqrt(D))       over the rows of the cache
        s_j = pool(reduce_g(sum_i P_ij))   g: query heads of the KV head

    The rows of the last ``n_local`` tokens stay. LAQ has ``n_local = 0``, LAQ++ 8. Without
    look-ahead it is SnapKV as published.

    ``phase="decode"`` (default) looks ahead at every compaction, so that the slab has a fixed size:
    what a long thought needs, most of whose rows come after the prompt.
    ``phase="prefill"`` is the published version: once, when the prompt has been prefilled, so that
    the slab grows with the generation.

    Deviations:

    * The authors decode the pseudo tokens over a temporary cache that SnapKV has compressed
      (``w1 = 32``, as many rows as stay). Here they are decoded over the rows as they are: these
      are in memory in any case, and at the end of a prompt the pseudo tokens become those that the
      full cache would generate. The cost is that of ``n_lookahead`` steps over more rows.
    * Within a prompt, which the authors compress as a whole, the pseudo tokens are its own next
      ones: they are known, and one forward computes them.
    * Every look-ahead query sees all rows, and a local one those up to its own. The code hides rows
      at the end of the prompt (``compat_mask``): it applies the triangle of a causal mask to the
      last ``n_local + n_lookahead`` of them, as if all queries were of the newest tokens.
    * Rows are chosen per KV head, where the code stores one copy per query head; ``group_reduce``
      is an addition. Scores are in fp32, and of equal ones, which pooling makes frequent, the newer
      row stays.
    * A pseudo token that ends the text has no query. If there is no query at all, the newest true
      one takes its place.

    Attributes:
        n_lookahead: Pseudo tokens, at most; 0: none.
        n_local: Most recent queries beside those; their rows always stay.
        phase: ``"decode"`` or ``"prefill"``, see above.
        kernel_size: Rows that are pooled together, odd.
        pooling: ``"maxpool"`` or ``"avgpool"``, which pads with zeros.
        group_reduce: ``"mean"``, ``"max"`` or ``"sum"`` over the query heads of a KV head.
        compat_mask: Whether rows are hidden as in the authors' code.
    """

    gives_mass: ClassVar[bool] = True
    ragged: ClassVar[bool] = True

    n_lookahead: int = attrs.field(default=8, validator=[instance_of(int), ge(0)])
    n_local: int = attrs.field(default=8, validator=[instance_of(int), ge(0)])
    phase: Literal["decode", "prefill"] = attrs.field(
        default="decode", validator=in_(["decode", "prefill"])
    )
    kernel_size: int = attrs.field(default=7, validator=[instance_of(int), ge(1), odd])
    pooling: Pooling = attrs.field(default="maxpool", validator=in_(["maxpool", "avgpool"]))
    group_reduce: GroupReduce = attrs.field(default="mean", validator=in_(["mean", "max", "sum"]))
    compat_mask: bool = attrs.field(default=False, validator=instance_of(bool))

    def __attrs_post_init__(self) -> None:
        if self.n_lookahead + self.n_local == 0:
            msg = "'n_lookahead' and 'n_local' are both 0, which leaves no query; raise one of them"
            raise ValueError(msg)

    @property
    def lookahead_size(self) -> int:
        """The pseudo tokens."""
        return self.n_lookahead

    @property
    def window_size(self) -> int:
        """The local queries; without any, the newest one in case that nothing is decoded."""
        return max(self.n_local, 1)

    @property
    def protects(self) -> tuple[int, int]:
        """The rows of the local queries."""
        return 0, self.n_local

    @property
    def bounded(self) -> bool:
        """Whether the slab has a fixed size: not if only the prompt is compacted."""
        return self.phase == "decode"

    @hookimpl(when=lambda self: self.phase == "prefill")
    def due(self, seq_len: Tensor, prompt_len: Tensor) -> Tensor:
        """Compact once, when the prompt has been prefilled."""
        return seq_len == prompt_len

    @hookimpl(when="n_lookahead")
    def lookahead(self) -> Lookahead:
        """Decode the pseudo tokens."""
        return Lookahead(num_greedy=self.n_lookahead)

    @hookimpl
    def score(
        self,
        queries: Tensor,
        lookahead_queries: Tensor | None,
        keys: Tensor,
        positions: Tensor,
        seq_len: Tensor,
    ) -> Tensor:
        """Score rows by the attention of both kinds of queries."""
        ahead = queries[:, :, :0] if lookahead_queries is None else lookahead_queries
        num_local = self.n_local or int(ahead.shape[2] == 0)
        local = queries[:, :, max(queries.shape[2] - num_local, 0) :]
        # Queries, and how many tokens there are up to the last of them.
        asked = [(local, seq_len), (ahead, seq_len + ahead.shape[2])]
        if self.compat_mask:
            asked = [(torch.cat([local, ahead], dim=2), seq_len)]
        present = positions >= 0  # heads that share a budget may have fewer rows
        weights = [
            observed_weights(some, keys, positions, num_tokens, present=present)
            for some, num_tokens in asked
            if some.shape[2]
        ]
        return pooled_window_attention(
            torch.cat(weights, dim=2),
            keys.shape[1],
            window=self.n_local,
            kernel_size=self.kernel_size,
            pooling=self.pooling,
            group_reduce=self.group_reduce,
        )
