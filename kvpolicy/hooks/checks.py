"""Each hook's answer held against the contract.

A check returns what is wrong with an answer, in words, or ``None``. The stack turns that
into an error that names the policy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.engine.request import Waiting


def _is_tensor(
    answer: object, shape: Sequence[int], letters: str, device: torch.device | None = None
) -> str | None:
    wanted = f"{list(shape)} = {letters}"
    if not isinstance(answer, Tensor):
        return f"answered with {type(answer).__name__}; a tensor of shape {wanted} is wanted"
    if list(answer.shape) != list(shape):
        return f"answered with shape {list(answer.shape)}; wanted is {wanted}"
    return _place_problem(answer, device)


def _place_problem(answer: Tensor, device: torch.device | None) -> str | None:
    """Whether numbers can be read where they are wanted; a CPU's are wanted if none is named."""
    if answer.layout is not torch.strided:
        return f"answered with a tensor of layout {answer.layout}; a dense one is wanted"
    wanted = torch.device("cpu") if device is None else device
    if answer.device != wanted:
        return f"answered with a tensor on {answer.device}; it is wanted on {wanted}"
    return None


def scores_problem(
    answer: object, shape: Sequence[int], device: torch.device | None = None
) -> str | None:
    """What is wrong with an answer to `score`; ``shape`` is ``[B, H_kv, T]``."""
    problem = _is_tensor(answer, shape, "[B, H_kv, T]", device)
    if problem is not None:
        return problem
    assert isinstance(answer, Tensor)
    if not answer.is_floating_point():
        return f"answered with {answer.dtype}; scores are floating point"
    if answer.isnan().any():
        return f"answered with NaN in {int(answer.isnan().sum())} of {answer.numel()} scores"
    return None


def keep_problem(
    answer: object, shape: Sequence[int], budget: int, device: torch.device | None = None
) -> str | None:
    """What is wrong with an answer to `select`; ``shape`` is that of the scores."""
    num_sequences, num_kv_heads, num_rows = shape
    most = min(budget, num_rows)
    if not isinstance(answer, Tensor):
        return f"answered with {type(answer).__name__}; a tensor [B, H_kv, K] is wanted"
    if answer.dtype != torch.int64:
        return f"answered with {answer.dtype}; row indices are torch.int64"
    if answer.ndim != 3 or list(answer.shape[:2]) != [num_sequences, num_kv_heads]:
        wanted = f"[{num_sequences}, {num_kv_heads}, K]"
        return f"answered with shape {list(answer.shape)}; wanted is {wanted} = [B, H_kv, K]"
    placed = _place_problem(answer, device)
    if placed is not None:
        return placed
    if not 1 <= answer.shape[2] <= most:
        return f"keeps {answer.shape[2]} rows; between 1 and {most} may stay"
    if int(answer.min()) < 0 or int(answer.max()) >= num_rows:
        low, high = int(answer.min()), int(answer.max())
        return f"names rows {low} to {high}; there are rows 0 to {num_rows - 1}"
    if not (answer.diff(dim=2) > 0).all():
        return "answered with rows that do not strictly rise; sort them and name none twice"
    return None


def due_problem(answer: object, num_sequences: int) -> str | None:
    """What is wrong with an answer to `due`."""
    problem = _is_tensor(answer, [num_sequences], "[B]")
    if problem is not None:
        return problem
    assert isinstance(answer, Tensor)
    return None if answer.dtype == torch.bool else f"answered with {answer.dtype}; wanted is bool"


def steer_problem(answer: object, hidden_states: Tensor) -> str | None:
    """What is wrong with an answer to `steer`; looks at no values, so that graphs hold."""
    problem = _is_tensor(answer, hidden_states.shape, "[B, M]", hidden_states.device)
    if problem is not None:
        return problem
    assert isinstance(answer, Tensor)
    if answer.dtype != hidden_states.dtype:
        return f"answered with {answer.dtype}; the hidden states are {hidden_states.dtype}"
    return None


def observe_problem(answer: object) -> str | None:
    """What is wrong with the answers to `observe`: there should be none."""
    return f"answered with {answer!r}; nothing is wanted" if answer else None


def allocate_problem(answer: object, total: int, floors: Sequence[int]) -> str | None:
    """What is wrong with an answer to `allocate`."""
    wanted = f"{len(floors)} whole numbers, one for each layer, are wanted"
    if not isinstance(answer, (list, tuple)) or not all(type(rows) is int for rows in answer):
        return f"answered with {answer!r}; {wanted}"
    if len(answer) != len(floors):
        return f"answered with {len(answer)} budgets; {wanted}"
    for place, (rows, floor) in enumerate(zip(answer, floors, strict=True)):
        if rows < floor:
            return f"gives layer {place} of its group {rows} rows; at least {floor} are wanted"
    if sum(answer) != total:
        return f"shares {sum(answer)} rows among its layers; exactly {total} are wanted"
    return None


def schedule_problem(
    answer: object, waiting: Sequence[Waiting], num_free: int, num_active: int
) -> str | None:
    """What is wrong with an answer to `schedule`."""
    wanted = "a list of lists of request ids is wanted"
    if not isinstance(answer, list) or not all(isinstance(group, list) for group in answer):
        return f"answered with {answer!r}; {wanted}"
    ids = [request_id for group in answer for request_id in group]
    strange = [request_id for request_id in ids if type(request_id) is not int]
    if strange:
        return f"admits {strange[0]!r}, which is no waiting request; {wanted}"
    unknown = sorted(set(ids) - {request.id for request in waiting})
    if unknown:
        return f"admits {unknown[0]!r}, which is no waiting request; {wanted}"
    if len(set(ids)) < len(ids):
        return f"admits a request twice: {ids}"
    least = 0 if num_active else 1
    if not least <= len(ids) <= num_free or not all(answer):
        return (
            f"admits {len(ids)} requests in groups of {[len(group) for group in answer]}; "
            f"between {least} and {num_free} are wanted, and no empty group"
        )
    return None
