"""Checks of hook answers against the contract in `kvpolicy.hookspecs`.

Each check returns what is wrong with an answer, or ``None``. `HookManager` puts the name of the
policy before it and raises `HookResultError`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.cache.rows import LayerRows
from kvpolicy.errors import shown
from kvpolicy.state import LayerWeights, Lookahead, WaitingRequest


@attrs.frozen(eq=False)
class ValueCheck:
    """A check in two parts: of what the host knows of an answer, and of its values.

    Attributes:
        structure: What is wrong with type, shape, dtype or device, or ``None``.
        values: What is wrong with the values of an answer of valid structure, or of some entries
            of its batch axis, or ``None``; reads them, which is a wait on a GPU.
        fault: Whether anything is wrong with the values, a bool on the device; ``None``: nothing
            is, as the host knows.
        part: Makes the check of some entries of the batch axis where it depends on them; ``None``:
            it does not.
    """

    structure: Callable[[object], str | None]
    values: Callable[[Any], str | None]
    fault: Callable[[Any], Tensor | None]
    part: "Callable[[slice], ValueCheck] | None" = None

    def of(self, entries: slice) -> "ValueCheck":
        """The check of some entries of the batch axis."""
        return self if self.part is None else self.part(entries)

    def __call__(self, answer: object) -> str | None:
        """What is wrong with an answer, or ``None``."""
        return self.structure(answer) or self.values(answer)


def _tensor_problem(
    answer: object, shape: Sequence[int], letters: str, device: torch.device | None = None
) -> str | None:
    expected = f"{list(shape)} = {letters}"
    if not isinstance(answer, Tensor):
        return f"returned {type(answer).__name__}; expected a tensor of shape {expected}"
    if list(answer.shape) != list(shape):
        return f"returned shape {list(answer.shape)}; expected {expected}"
    return _placement_problem(answer, device)


def _flags_problem(
    answer: object, shape: Sequence[int], letters: str, device: torch.device | None = None
) -> str | None:
    problem = _tensor_problem(answer, shape, letters, device)
    if problem is not None:
        return problem
    assert isinstance(answer, Tensor)
    return None if answer.dtype == torch.bool else f"returned {answer.dtype}; expected bool"


def _placement_problem(answer: Tensor, device: torch.device | None) -> str | None:
    """Check layout and device; without a device the CPU is expected."""
    if answer.layout is not torch.strided:
        return f"returned a tensor of layout {answer.layout}; expected a dense one"
    expected = torch.device("cpu") if device is None else device
    if answer.device != expected:
        return f"returned a tensor on {answer.device}; expected one on {expected}"
    return None


def scores_check(shape: Sequence[int], device: torch.device | None = None) -> ValueCheck:
    """The check of the answer to `score`; ``shape`` is ``[B, H_kv, T]``."""

    def structure(answer: object) -> str | None:
        problem = _tensor_problem(answer, shape, "[B, H_kv, T]", device)
        if problem is not None:
            return problem
        assert isinstance(answer, Tensor)
        if not answer.is_floating_point():
            return f"returned {answer.dtype}; expected floating point"
        return None

    def values(answer: Tensor) -> str | None:
        if answer.isnan().any():
            return f"returned NaN in {int(answer.isnan().sum())} of {answer.numel()} scores"
        return None

    return ValueCheck(structure, values, lambda answer: answer.isnan().any())


def keep_check(
    shape: Sequence[int],
    budget: int,
    device: torch.device | None = None,
    present: Tensor | None = None,
) -> ValueCheck:
    """The check of the answer to `select`.

    Args:
        shape: Shape of the scores, ``[B, H_kv, T]``.
        budget: The most rows that may stay of a head, or in the mean over heads that share them.
        device: Where the answer has to be; ``None``: on the CPU.
        present: Columns that a head has a row for, ``[B, H_kv, T]``, if heads share their rows:
            then the answer may be a mask. ``None``: they do not.
    """
    num_sequences, num_kv_heads, num_rows = shape
    most = min(budget, num_rows)

    def structure(answer: object) -> str | None:
        if not isinstance(answer, Tensor):
            return f"returned {type(answer).__name__}; expected a tensor [B, H_kv, K]"
        if answer.dtype == torch.bool and present is not None:
            return _tensor_problem(answer, shape, "[B, H_kv, T]", device)
        if answer.dtype != torch.int64:
            only = '; a mask needs heads = "shared" in the plan' * (answer.dtype == torch.bool)
            return f"returned {answer.dtype}; row indices are torch.int64{only}"
        if answer.ndim != 3 or list(answer.shape[:2]) != [num_sequences, num_kv_heads]:
            expected = f"[{num_sequences}, {num_kv_heads}, K]"
            return f"returned shape {list(answer.shape)}; expected {expected} = [B, H_kv, K]"
        problem = _placement_problem(answer, device)
        if problem is not None:
            return problem
        if not 1 <= answer.shape[2] <= most:
            return f"keeps {answer.shape[2]} rows; between 1 and {most} may stay"
        return None

    def values(answer: Tensor) -> str | None:
        if answer.dtype == torch.bool:
            return _mask_problem(answer, budget, present)
        low, high = int(answer.min()), int(answer.max())
        if low < 0 or high >= num_rows:
            return f"returned row indices from {low} to {high}; rows are 0 to {num_rows - 1}"
        if not (answer.diff(dim=2) > 0).all():
            return (
                "returned row indices that are not strictly increasing; sort them, without "
                "duplicates"
            )
        if present is not None and not present.gather(2, answer).all():
            return _ABSENT
        return None

    def fault(answer: Tensor) -> Tensor:
        if answer.dtype == torch.bool:
            assert present is not None
            counts = answer.sum(dim=2)
            wrong = (counts.sum(dim=1) > budget * num_kv_heads) | (counts == 0).any(dim=1)
            return wrong.any() | (answer & ~present).any()
        # If they rise, the first and the last are the least and the largest.
        outside = (answer[:, :, 0] < 0) | (answer[:, :, -1] >= num_rows)
        wrong = outside.any() | (answer.diff(dim=2) <= 0).any()
        if present is None:
            return wrong
        return wrong | ~present.gather(2, answer.clamp(0, num_rows - 1)).all()

    def part(entries: slice) -> ValueCheck:
        if present is None:
            return ValueCheck(structure, values, fault)
        own = present[entries]
        return keep_check(own.shape, budget, device, own)

    return ValueCheck(structure, values, fault, part)


def mask_of(keep: Tensor, like: Tensor) -> Tensor:
    """An answer to `select` as a mask, bool ``[B, H_kv, T]``, in the shape of ``like``."""
    if keep.dtype == torch.bool:
        return keep
    return torch.zeros_like(like, dtype=torch.bool).scatter_(2, keep, True)


_ABSENT = "keeps rows that a head does not have; their position is -1"


def _mask_problem(answer: Tensor, budget: int, present: Tensor | None) -> str | None:
    """Check the values of a mask, ``[B, H_kv, T]``."""
    counts, most = answer.sum(dim=2), budget * answer.shape[1]
    if present is not None and bool((answer & ~present).any()):
        return _ABSENT
    if bool((counts == 0).any()):
        head = int((counts == 0).nonzero()[0, 1])
        return f"keeps no row of KV head {head}; at least 1 row of each head stays"
    if bool((counts.sum(dim=1) > most).any()):
        return (
            f"keeps {int(counts.sum(dim=1).max())} rows; at most {most} may stay, {budget} for "
            f"each of {answer.shape[1]} KV heads"
        )
    return None


def protect_problem(answer: object, positions: Tensor) -> str | None:
    """Check an answer to `protect`."""
    return _flags_problem(answer, positions.shape, "[B, H_kv, T]", positions.device)


def due_problem(answer: object, num_sequences: int) -> str | None:
    """Check the answer to `due`."""
    return _flags_problem(answer, [num_sequences], "[B]")


def lookahead_problem(answer: object, lookahead_size: int, vocab_size: int) -> str | None:
    """Check the answer to `lookahead`."""
    if not isinstance(answer, Lookahead):
        return f"returned {type(answer).__name__}; expected a Lookahead, or None"
    token_ids, num_greedy = answer.token_ids, answer.num_greedy
    if type(num_greedy) is not int or (token_ids is None) != (num_greedy > 0):
        return f"returned {shown(answer)}; give either token_ids or num_greedy"
    if not 1 <= answer.num_tokens <= lookahead_size:
        return (
            f"asks for {answer.num_tokens} tokens; its lookahead_size allows 1 to {lookahead_size}"
        )
    for token in token_ids or ():
        if type(token) is not int or not 0 <= token < vocab_size:
            return f"names token {shown(token)}; expected integers from 0 to {vocab_size - 1}"
    return None


def steer_problem(answer: object, hidden_states: Tensor) -> str | None:
    """Check the answer to `steer` without reading values, so the step can be captured."""
    problem = _tensor_problem(answer, hidden_states.shape, "[B, M]", hidden_states.device)
    if problem is not None:
        return problem
    assert isinstance(answer, Tensor)
    if answer.dtype != hidden_states.dtype:
        return f"returned {answer.dtype}; the hidden states are {hidden_states.dtype}"
    return None


class BindCheck:
    """The check of an answer to `bind`, which may be anything, but leaves the weights alone."""

    def __init__(self, weights: LayerWeights) -> None:
        """Copy the weights of the layer, for as long as policies see them."""
        self._before = [(tensor, tensor._version, tensor.clone()) for tensor in weights.tensors]

    def __call__(self, _: object) -> str | None:
        """What is wrong, or ``None``; the weights are put back."""
        changed = False
        for tensor, version, copy in self._before:
            if tensor._version != version or not _same_bits(tensor, copy):
                changed = True
                with torch.no_grad():
                    tensor.copy_(copy)
        if changed:
            return "changed the weights of the model in place; expected a copy to be changed"
        return None


def _same_bits(weight: Tensor, copy: Tensor) -> bool:
    """Whether a weight, which may be NaN, is as it was.

    torch counts no writes through ``.data``, numpy, DLPack or the storage.
    """
    if weight.is_meta:
        return True
    found, expected = (one.contiguous().view(torch.uint8) for one in (weight, copy))
    return torch.equal(found, expected)


def annotation_problem(
    answer: object, tracks: Sequence[str], shape: Sequence[int], device: torch.device
) -> str | None:
    """Check an answer to `annotate` without reading values, so the step can be captured.

    Args:
        answer: The answer of one policy.
        tracks: Names of its tracks.
        shape: ``[N, H_kv]``.
        device: Device of the rows.
    """
    if answer is None:
        return None
    if not isinstance(answer, Mapping):
        return f"returned {type(answer).__name__}; expected numbers by the name of a track"
    for name, numbers in answer.items():
        if name not in tracks:
            return f"annotates track {name!r:.60}; it declares {', '.join(tracks) or 'none'}"
        problem = _tensor_problem(numbers, shape, "[N, H_kv]", device)
        if problem is None and not numbers.is_floating_point():
            problem = f"returned {numbers.dtype}; expected floating point"
        if problem is not None:
            return f"{problem}, for track '{name}'"
    return None


def observe_problem(answer: object) -> str | None:
    """Check the answers to `observe`: there should be none."""
    return f"returned {answer!r}; expected nothing" if answer else None


def allocate_problem(answer: object, total: int, floors: Sequence[int]) -> str | None:
    """Check the answer to `allocate`."""
    expected = f"expected {len(floors)} integers, one for each layer"
    if not isinstance(answer, (list, tuple)) or not all(type(rows) is int for rows in answer):
        return f"returned {answer!r}; {expected}"
    if len(answer) != len(floors):
        return f"returned {len(answer)} budgets; {expected}"
    for index, (rows, floor) in enumerate(zip(answer, floors, strict=True)):
        if rows < floor:
            return f"gives layer {index} of its group {rows} rows; expected at least {floor}"
    if sum(answer) != total:
        return f"gives {sum(answer)} rows to its layers; expected exactly {total}"
    return None


def schedule_problem(
    answer: object, waiting: Sequence[WaitingRequest], num_free: int, num_active: int
) -> str | None:
    """Check the answer to `schedule`."""
    expected = "expected a list of lists of request ids"
    if not isinstance(answer, list) or not all(isinstance(group, list) for group in answer):
        return f"returned {answer!r}; {expected}"
    ids = [request_id for group in answer for request_id in group]
    waiting_ids = {request.id for request in waiting}
    for request_id in ids:
        if type(request_id) is not int or request_id not in waiting_ids:
            return f"admits {request_id!r}, which is not a waiting request; {expected}"
    if len(set(ids)) < len(ids):
        return f"admits a request twice: {ids}"
    least = 0 if num_active else 1
    if not least <= len(ids) <= num_free or not all(answer):
        return (
            f"admits {len(ids)} requests in groups of {[len(group) for group in answer]}; "
            f"expected between {least} and {num_free}, and no empty group"
        )
    return None


def evict_check(
    rows: LayerRows, keep: Tensor, entries: slice | Sequence[int] = slice(None)
) -> ValueCheck:
    """The check of the answer to `evict`.

    Args:
        rows: The rows, which know what `LayerRows.keep` was called with in the end.
        keep: The rows that stay.
        entries: The part of the batch axis that is checked.
    """
    other = "returned True without calling rows.keep() with the rows that stay"

    def structure(answer: object) -> str | None:
        if answer is not True:
            return f"returned {answer!r}; expected True or None"
        own = rows.kept
        return other if own is None or own.shape != keep.shape else None

    def moved() -> Tensor | None:
        own = rows.kept
        return None if own is None or own is keep else own.ne(keep)[entries].any()

    def poisoned() -> Tensor | None:
        return None if rows.is_finite is None else ~rows.is_finite[entries].all()

    def fault(_: object) -> Tensor | None:
        flags = [flag for flag in (moved(), poisoned()) if flag is not None]
        return torch.stack(flags).any() if flags else None

    def values(_: object) -> str | None:
        if bool(moved()):
            return other
        if bool(poisoned()):
            return "stores NaN or infinity in place of keys or values"
        return None

    return ValueCheck(structure, values, fault, partial(evict_check, rows, keep))
