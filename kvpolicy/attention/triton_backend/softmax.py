"""Parts of the softmax that kernels of decode steps and of prompts share."""

import triton
import triton.language as tl


@triton.jit
def capped(x, SOFTCAP: tl.constexpr):
    """Logits after a soft cap, ``softcap * tanh(x / softcap)``; 0: there is none."""
    if SOFTCAP > 0:
        x = SOFTCAP * (2 * tl.sigmoid(2 * x / SOFTCAP) - 1)
    return x


@triton.jit
def shift_for(top):
    """What is taken from logits before their exponentials: -inf - -inf would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def divisor_for(total):
    """What outputs are divided by: a query that sees no row gets zeros."""
    return tl.where(total > 0, total, 1.0)


@triton.jit
def add_to_track(track, received, is_row):
    """Add what rows receive to a track."""
    tl.store(track, tl.load(track, mask=is_row) + received, mask=is_row)
