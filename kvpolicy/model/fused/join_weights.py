"""Joining: weights that are multiplied with the same input lie one behind another in memory.

Then one product computes all of them. The parameters stay what they are, objects and numbers; their
memory is a part of one that has them all, so that nothing is held twice.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor ``[N, ...]`` of parameters ``[N_i, ...]``, which become views of it.

    Args:
        parts: Parameters of equal shapes but for the first axis; they are moved, unless they lie
            one behind another already.

    Returns:
        The tensor; ``None`` if they cannot be moved, because they are no plain parameters, or other
        tensors share their memory, which would miss what is written to it later.
    """
    first = parts[0]
    length = sum(len(part) for part in parts)
    if _follow_each_other(parts):
        return first.detach().as_strided((length, *first.shape[1:]), first.stride())
    if not all(_can_be_moved(part) for part in parts) or len(set(map(id, parts))) < len(parts):
        return None
    with torch.inference_mode(first.is_inference()), torch.no_grad():
        whole = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, whole.split([len(one) for one in parts]), strict=True):
            part.data = view
    return whole


def _follow_each_other(parts: Sequence[Tensor]) -> bool:
    storage, end = parts[0].untyped_storage().data_ptr(), parts[0].data_ptr()
    for part in parts:
        is_next = part.data_ptr() == end and part.untyped_storage().data_ptr() == storage
        if not is_next or not part.is_contiguous():
            return False
        end += part.nbytes
    return True


def _can_be_moved(part: Tensor) -> bool:
    """Whether a tensor is a plain parameter that has its memory for itself."""
    return (
        type(part) is nn.Parameter
        and part.is_contiguous()
        and part.untyped_storage().nbytes() == part.nbytes
        and _num_users(part) == _num_users(nn.Parameter(torch.empty(1)))
    )


def _num_users(tensor: Tensor) -> int:
    """How many tensors have this one's memory."""
    number: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return number
