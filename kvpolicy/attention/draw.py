"""Drawing: from logits to the next token of every slot, on the device.

Nothing here reads a value on the host, has a shape that depends on values, or sorts the vocabulary,
so a step with it can be compiled and captured.

A token is drawn by inverting the cumulative distribution in the order of the vocabulary. That takes
one random number per token; adding Gumbel noise to the logits would take one for every entry of the
vocabulary. Probabilities are integers, as the sum of integers does not depend on the order in which
a device adds them: a slot draws the same token alone and in any batch.
"""

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.devices import upload

# Instead of a token, where logits hold NaN or infinity and so name no likeliest one.
NO_TOKEN = -1

# Beyond these, quotients exceed fp32. One token is certain, or all are equally likely, long before.
_TEMPERATURES = (1e-30, 1e30)

# The weight of the likeliest token. A vocabulary of up to 2**21 tokens weighs less than 2**53, up
# to which fp64 is exact.
_MOST_WEIGHT = 2.0**32

# Digits of a 32-bit rank, each counted in one pass: the bits below it and the number of its values.
_DIGITS = ((22, 2**10), (11, 2**11), (0, 2**11))
_LEAST_RANK = -(2**31)

# Constants of splitmix64 as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


@attrs.frozen
class SamplingColumns:
    """How the tokens of each slot are chosen. A column that no slot needs may be left out.

    Attributes:
        temperature: Divides the logits, ``[W]``, fp32; 0: the likeliest token. ``None``: 0 for all.
        seed: Seeds, ``[W]``, int64.
        top_k: Draw among the k likeliest tokens only, ``[W]``, int64; 0: among all.
        top_p: Draw among the smallest set of tokens with at least this probability only, ``[W]``,
            fp64; 1: among all.
        min_p: Draw among tokens with at least this share of the likeliest one's probability only,
            ``[W]``, fp32; 0: among all.
    """

    temperature: Tensor | None = None
    seed: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None


class SamplingNumbers(Protocol):
    """How the tokens of one slot are chosen, see `SamplingColumns`."""

    @property
    def temperature(self) -> float: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def top_k(self) -> int: ...  # noqa: D102
    @property
    def top_p(self) -> float: ...  # noqa: D102
    @property
    def min_p(self) -> float: ...  # noqa: D102


def columns_of(samplings: Sequence[SamplingNumbers], device: torch.device | str) -> SamplingColumns:
    """The columns of several slots, without those that none of them needs."""
    temperature = np.array([min(one.temperature, _TEMPERATURES[1]) for one in samplings])
    if not temperature.any():
        return SamplingColumns()
    top_k = np.array([one.top_k for one in samplings], dtype=np.int64)
    top_p = np.array([one.top_p for one in samplings], dtype=np.float64)
    min_p = np.array([one.min_p for one in samplings], dtype=np.float32)
    return SamplingColumns(
        temperature=upload(temperature.astype(np.float32), device),
        seed=upload(np.array([one.seed for one in samplings], dtype=np.int64), device),
        top_k=upload(top_k, device) if top_k.any() else None,
        top_p=upload(top_p, device) if top_p.min() < 1 else None,
        min_p=upload(min_p, device) if min_p.any() else None,
    )


def draw(logits: Tensor, columns: SamplingColumns, position: Tensor) -> Tensor:
    """The next token of each slot.

    It depends on the slot's own logits, column entries and position only, so a text can be
    continued from any token, in any batch, as if it had never been interrupted.

    Args:
        logits: ``[W, V]``.
        columns: How each slot draws.
        position: Position of the next token in its sequence, ``[W]``, int64.

    Returns:
        Token ids ``[W]``, int64; `NO_TOKEN` where the logits name none.
    """
    tokens = likeliest = logits.argmax(dim=-1)
    if columns.temperature is not None:
        assert columns.seed is not None, "a slot that draws has a seed"
        drawn = _at_share(weights(logits, columns), uniform(columns.seed, position))
        tokens = torch.where(columns.temperature > 0, drawn, tokens)
    return _flag_missing(tokens, logits, likeliest)


def flag_missing(tokens: Tensor, logits: Tensor) -> Tensor:
    """Tokens ``[W]``, with `NO_TOKEN` where logits ``[W, V]`` hold NaN or infinity."""
    return _flag_missing(tokens, logits, logits.argmax(dim=-1))


def _flag_missing(tokens: Tensor, logits: Tensor, likeliest: Tensor) -> Tensor:
    # The maximum of numbers and NaN is NaN; -inf rules a token out.
    most = logits.gather(1, likeliest[:, None])[:, 0]
    return torch.where(most.isfinite(), tokens, NO_TOKEN)


def weights(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """The distribution to draw from: temperature, then top-k, then top-p, then min-p.

    This is the order of transformers' logits processors. Of tokens with equal logits, those with
    smaller ids count as likelier.

    Args:
        logits: ``[W, V]``.
        columns: How each slot draws, with a temperature. Rows of greedy slots have no meaning, nor
            have those whose logits name no likeliest token.

    Returns:
        Probabilities up to a factor for each slot, in the order of the vocabulary, ``[W, V]``,
        int64; 0 for tokens that cannot be drawn, those with less than 2**-32 of the likeliest
        token's probability among them.
    """
    assert columns.temperature is not None
    logits = logits.float()
    temperature = columns.temperature.clamp(*_TEMPERATURES)[:, None]
    # The maximum is subtracted first: its quotient by a tiny temperature may be infinite.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    share = scaled.exp()  # of the likeliest token's probability
    likely = (share * _MOST_WEIGHT).long()
    rank = _rank(logits)
    if columns.top_k is not None:
        k = columns.top_k[:, None]
        most = torch.where(k > 0, k, logits.shape[1])
        likely = likely * _top_by_weight(rank, likely.new_ones(1, 1).expand_as(likely), most)
    if columns.top_p is not None:
        total = likely.sum(dim=-1, keepdim=True)
        # At least the likeliest token belongs to the nucleus, whatever the product rounds to.
        most = (columns.top_p[:, None] * total).ceil().clamp(min=1).long()
        likely = likely * _top_by_weight(rank, likely, most)
    if columns.min_p is not None:
        likely = likely * (share >= columns.min_p[:, None])
    return likely


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Uniform numbers in [0, 1): entry ``position`` of the splitmix64 generator of ``seed``.

    The state of the generator starts at the hash of the seed, as seeds such as 0, 1, 2 would give
    sequences that differ by a shift.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".

    Args:
        seed: ``[W]``, int64.
        position: ``[W]``, int64.

    Returns:
        Multiples of 2**-53, ``[W]``, fp64.
    """
    bits = _mixed(_mixed(seed + _STEP) + (position + 1) * _STEP)
    return _shifted(bits, 11).double() * 2.0**-53


def _mixed(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64, in int64 that wraps around."""
    for shift, factor in _FACTORS:
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """An int64 shifted to the right as if it had no sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _at_share(likely: Tensor, share: Tensor) -> Tensor:
    """The tokens that hold these shares ``[W]`` of the cumulative weights ``[W, V]``."""
    cumulative = likely.cumsum(dim=-1)
    # Below the total even if rounded, as that is below 2**53 and a share is at most 1 - 2**-53.
    point = (share[:, None] * cumulative[:, -1:]).long()
    return torch.searchsorted(cumulative, point, right=True)[:, 0]


def _top_by_weight(rank: Tensor, weight: Tensor, most: Tensor) -> Tensor:
    """Which tokens come first: those before which less than ``most`` is counted.

    The order is that of falling ranks, of equal ones that of the vocabulary. The last rank is found
    digit by digit: each pass adds up the weights of all values of a digit, and goes on with the
    value at which ``most`` is reached.

    Args:
        rank: Of each token's logit, ``[W, V]``, int32.
        weight: What each token counts, ``[W, V]``, int64, none negative.
        most: ``[W, 1]``, int64, at least 1.

    Returns:
        ``[W, V]``, bool.
    """
    last = torch.full_like(most, _LEAST_RANK, dtype=torch.int32)
    for shift, num_values in _DIGITS:
        least = last >> shift
        # Lower ranks count as the least value, as only weights above a value are read, and all
        # higher ranks as one value more.
        digit = (rank >> shift).clamp(least, least + num_values) - least
        sums = weight.new_zeros(len(weight), num_values + 1).scatter_add_(1, digit.long(), weight)
        above = sums.sum(dim=-1, keepdim=True) - sums.cumsum(dim=-1)  # it falls to 0
        value = (above >= most).sum(dim=-1, keepdim=True)
        last = last + (value << shift).int()
    is_last = rank == last
    tied = weight * is_last
    before = above.gather(1, value) + tied.cumsum(dim=-1) - tied
    return (rank > last) | (is_last & (before < most))


def _rank(logits: Tensor) -> Tensor:
    """Integers in the order of fp32 numbers, int32; equal for 0 and -0."""
    bits = logits.view(torch.int32)
    # A float is a sign and a magnitude, an integer is a two's complement.
    sign = bits >> 31
    return (bits ^ (sign & 0x7FFFFFFF)) - sign
