"""Tokens that attend to some of those behind them, as in an image: equality with plain loops."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvpolicy.attention import blocks
from kvpolicy.attention.eager import attend
from kvpolicy.attention.softmax import PLAIN
from kvpolicy.attention.visible import Visible

LENGTHS, NUM_ROWS, WIDTH = [5, 7], [9, 7], 7
# Of each column, its token's last one: two images in the first sequence, one in the second.
AHEAD = [[0, 0, 1, 0, 2, 1, 0], [0, 3, 2, 1, 0, 0, 0]]


def in_loops(
    queries: Tensor, keys: Tensor, values: Tensor, reach: int | None
) -> tuple[Tensor, Tensor]:
    output, sums = torch.zeros_like(queries), torch.zeros(keys.shape[:3])
    for b, (length, num_rows) in enumerate(zip(LENGTHS, NUM_ROWS, strict=True)):
        for head in range(queries.shape[1]):
            for column in range(WIDTH - length, WIDTH):
                own = num_rows - WIDTH + column
                first = 0 if reach is None else max(own - reach + 1, 0)
                rows = range(first, own + AHEAD[b][column] + 1)
                logits = [float(queries[b, head, column] @ keys[b, head // 2, r]) for r in rows]
                powers = [math.exp(one) for one in logits]
                for row, power in zip(rows, powers, strict=True):
                    weight = power / sum(powers)
                    output[b, head, column] += weight * values[b, head // 2, row]
                    sums[b, head // 2, row] += weight
    return output, sums


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
@pytest.mark.parametrize("reach", [None, 3])
@pytest.mark.parametrize("sums", [False, True])
def test_attention_ahead_equals_plain_loops(
    sums: bool, reach: int | None, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    rng = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 4, WIDTH, 8, generator=rng)
    keys, values = (torch.randn(2, 2, max(NUM_ROWS), 8, generator=rng) for _ in range(2))
    device = torch.device("cpu")
    sizes = np.array(LENGTHS), np.array(NUM_ROWS), WIDTH, device, reach
    visible = Visible(*sizes, ahead=np.array(AHEAD))
    accumulated = {"attn_sums": torch.zeros(keys.shape[:3])} if sums else {}
    given = queries, keys, values, visible
    output = attend(*given, scaling=1.0, softmax=PLAIN, accumulated=accumulated)
    expected, received = in_loops(queries, keys, values, reach)
    for b, length in enumerate(LENGTHS):
        of_tokens = slice(WIDTH - length, None)
        torch.testing.assert_close(output[b, :, of_tokens], expected[b, :, of_tokens])
    for found in accumulated.values():
        torch.testing.assert_close(found, received)
