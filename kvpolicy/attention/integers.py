"""Rows in integers of 8 or 4 bits: the bytes of a key or a value, and what they stand for.

A row of a KV head is cut into groups of channels. Each group has a *step* and a *least* number, in
bf16, and each channel a *code*, a whole number from 0 on: ``channel = least + step * code``. With 8
bits the head is one group, with 4 bits a group has 32 channels. Nothing is shared between rows, so
that a row is evicted, moved and copied like any other.

The bytes of a row are its codes, then step and least of each group. With 4 bits, a byte of a group
has the code of a channel of its first half in its lower bits, and that of the channel as far behind
the middle in its upper bits.
"""

from math import gcd

import torch
from torch import Tensor

#: What the channels of a head are a multiple of, so that a step has an even address.
MULTIPLE = 4

_GROUP = 32  # channels that share a step with 4 bits
_OF_GROUP = 4  # bytes: step and least
# bf16 has 8 bits: rounding changes a number by less than this share of it.
_ROUNDING = 2**-8


def group_size(head_dim: int, bits: int) -> int:
    """Channels that share a step; with 0 bits, as numbers are, all channels are one group."""
    return gcd(head_dim, _GROUP) if bits == 4 else head_dim


def bytes_of_row(head_dim: int, bits: int) -> int:
    """Bytes of a row of a head of so many channels, which are a multiple of `MULTIPLE`."""
    return head_dim * bits // 8 + head_dim // group_size(head_dim, bits) * _OF_GROUP


def quantize(rows: Tensor, bits: int) -> Tensor:
    """The bytes of rows.

    Channels change by half a step at most; steps and least numbers are rounded such that the codes
    reach all channels of a group. A group with a number that is not finite has none that is.

    Args:
        rows: ``[..., D]``, ``D`` being a multiple of `MULTIPLE`.
        bits: 8 or 4.

    Returns:
        ``[..., bytes_of_row(D, bits)]``, uint8.
    """
    size, levels = group_size(rows.shape[-1], bits), 2**bits - 1
    groups = rows.float().unflatten(-1, (-1, size))
    least, most = groups.aminmax(dim=-1, keepdim=True)
    low = least.to(torch.bfloat16)
    low = torch.where(low > least, (least - least.abs() * _ROUNDING).to(torch.bfloat16), low)
    step = ((most - low) * ((1 + _ROUNDING) / levels)).to(torch.bfloat16)
    # A group of equal numbers may have step 0.
    steps = step.float().clamp(min=torch.finfo(torch.float32).tiny)
    codes = ((groups - low) / steps).round_().clamp_(0, levels).nan_to_num_(0).to(torch.uint8)
    if bits == 4:
        codes = codes[..., : size // 2] | (codes[..., size // 2 :] << 4)
    scales = torch.cat([step, low], dim=-1).flatten(-2)
    return torch.cat([codes.flatten(-2), scales.view(torch.uint8)], dim=-1)


def dequantize(stored: Tensor, head_dim: int, bits: int, dtype: torch.dtype) -> Tensor:
    """What the bytes of rows stand for.

    Args:
        stored: ``[..., bytes_of_row(D, bits)]``, uint8; bytes that are all 0 stand for zeros.
        head_dim: ``D``.
        bits: 8 or 4.
        dtype: Precision that is wanted.

    Returns:
        ``[..., D]``.
    """
    size = group_size(head_dim, bits)
    num_codes = head_dim * bits // 8
    codes = stored[..., :num_codes].unflatten(-1, (head_dim // size, -1))
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    scales = stored[..., num_codes:].contiguous().view(torch.bfloat16).float()
    step, least = scales.unflatten(-1, (-1, 2))[..., None].unbind(-2)
    return torch.addcmul(least, codes.float(), step).flatten(-2).to(dtype)
