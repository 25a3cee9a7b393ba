"""Lookahead Q-Cache in plain loops."""

from collections.abc import Sequence

from reference import Matrix, attention, pool, reduce_group


def laq(
    keys: Matrix,
    local: Sequence[Matrix],
    ahead: Sequence[Matrix],
    *,
    kernel_size: int = 7,
    pooling: str = "maxpool",
    group_reduce: str = "mean",
    compat_mask: bool = False,
) -> list[float]:
    """Scores of the rows of one KV head; those of the local queries' tokens come last, not pooled.

    ``local`` and ``ahead`` hold for each query head of the group the queries of the newest tokens
    and of the pseudo tokens.
    """
    per_head = []
    for true_queries, pseudo_queries in zip(local, ahead, strict=True):
        queries = [*true_queries, *pseudo_queries]
        totals = [0.0] * len(keys)
        for i, query in enumerate(queries):
            if compat_mask:  # as if all queries were of the newest tokens
                num_visible = len(keys) - len(queries) + i + 1
            else:
                num_visible = min(len(keys) - len(true_queries) + i + 1, len(keys))
            if num_visible > 0:
                for t, weight in enumerate(attention(query, keys[:num_visible])):
                    totals[t] += weight
        per_head.append(totals)
    scores = [reduce_group(column, group_reduce) for column in zip(*per_head, strict=True)]
    num_before = len(keys) - len(local[0])
    return pool(scores[:num_before], kernel_size, pooling) + scores[num_before:]
