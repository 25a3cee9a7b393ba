"""Steps are recorded, and groups of their operators become one, without other results."""

import gc
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from families import FAMILIES, FUSED, FUSED_IN_HALF, family_model
from static_steps import begin_decode
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from kvpolicy import Engine, Plan, Request
from kvpolicy.model.fused.join_weights import joined
from kvpolicy.model.fused.record import NotRecordableError, record
from kvpolicy.model.fused.rewrite import fuse
from kvpolicy.model.static_forward import static_forward

NOTHING = {"norms": 0, "rotations": 0, "gates": 0, "joint products": 0}


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() & FUSED))
def test_families_are_fused_by_what_they_compute(family: str, dtype: torch.dtype) -> None:
    engine = Engine(deepcopy(family_model(family)).to(dtype), plan=Plan.uniform("full"), slots=2)
    run = engine.generate([Request([3, 4, 5], 40), Request([9], 40)])
    for _ in range(3):
        run.step()
    given = begin_decode(run)
    given.step.in_graph = True
    found: list[Any] = []

    def compare(call: Any, given: Any) -> Any:
        recording = record(lambda: static_forward(call, given))
        found.append(tuple(fuse(recording).values()))
        (logits, _), step = recording.output, given.step
        step.token_ids.add_(2).remainder_(engine.adapter.vocab_size)
        step.seq_len += 1
        found.append((recording.program()()[0], static_forward(call, given)[0], logits))
        return recording.output

    given.run = compare
    with given.step.idle(1):
        engine.adapter.forward(given)
    counts, (fused, expected, before) = found
    in_half = FUSED_IN_HALF if dtype == torch.bfloat16 else {}
    assert counts == in_half.get(family, FUSED[family])
    torch.testing.assert_close(fused, expected)
    assert not torch.equal(fused, before)


def test_what_is_changed_in_place_is_read_in_order() -> None:
    state, step = torch.zeros(3), torch.ones(3)

    def run() -> Tensor:
        before = state * 2
        state.add_(step)
        state[:2] *= 3
        return torch.cat([before, state])

    with torch.inference_mode():
        recording = record(run)
        assert fuse(recording) == NOTHING
        program = recording.program()
        state.zero_()
        program()
        assert program().tolist() == [6, 6, 2, 12, 12, 2]


def test_a_program_frees_its_tensors_when_it_goes() -> None:
    """Slabs of a run whose end nobody collects garbage at."""

    def recorded() -> tuple[Any, Any]:
        state = torch.ones(3)
        return record(lambda: (state * 2).relu()).program(), ref(state)

    gc.disable()
    try:
        program, seen = recorded()
        assert program().tolist() == [2, 2, 2]
        del program
        assert seen() is None
    finally:
        gc.enable()


def written_past_torch() -> Tensor:
    out = torch.empty(3)
    np.from_dlpack(out)[:] = 1
    return out + 1


@torch.inference_mode()
def test_memory_that_is_written_later_is_no_result() -> None:
    def run() -> Tensor:
        out, nothing = torch.empty(2, 3), torch.empty(0)
        out[0].copy_(STATES[0, 0, 0, :3])
        torch.add(ROW[:3], 1, out=out[1])
        return torch.cat([nothing, out.flatten()])

    recording = record(run)
    assert torch.equal(recording.program()(), recording.output)


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.ones(2) * torch.ones(1).item(),
        lambda: torch.ones(2) if torch.ones(1) else torch.zeros(2),
        lambda: torch.ones(3).nonzero(),
        lambda: torch.ones(3)[torch.ones(3) > 0],
        lambda: torch.ones(3) if torch.equal(torch.ones(1), torch.zeros(1)) else None,
        written_past_torch,
    ],
)
@torch.inference_mode()
def test_what_a_recording_would_leave_out_is_refused(run: Callable[[], Any]) -> None:
    with pytest.raises(NotRecordableError):
        record(run)


def norm_like(states: Tensor, weight: Tensor, axis: int = -1, eps: float = 1e-6) -> Tensor:
    wide = states.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(axis, keepdim=True) + eps)).to(
        states.dtype
    )


def turned(states: Tensor, cos: Tensor, sin: Tensor, *, cut: int = 2, sign: int = -1) -> Tensor:
    first, second = states[..., :cut], states[..., cut:]
    return states * cos + torch.cat([sign * second if sign > 0 else -second, first], -1) * sin


STATES = torch.randn(4, 2, 1, 4, generator=torch.Generator().manual_seed(0))
ROW = torch.tensor([1.0, 2.0, 3.0, 4.0])
TURN = STATES[:, :1] * 2


@pytest.mark.parametrize(
    ("run", "kinds"),
    [
        (lambda: norm_like(STATES, ROW), ["norms"]),
        (lambda: norm_like(STATES + STATES, ROW), ["norms"]),
        (lambda: norm_like(STATES.double(), ROW), []),
        (lambda: norm_like(STATES, ROW, axis=0), []),
        (lambda: norm_like(STATES, ROW[:, None, None, None]), []),
        (lambda: norm_like(STATES, ROW + 1), []),
        (lambda: turned(STATES, TURN, ROW) + turned(STATES, TURN, ROW), []),
        (lambda: turned(STATES, TURN, TURN) + turned(STATES + 1, TURN, TURN), ["rotations"]),
        (lambda: turned(STATES, TURN, TURN), []),
        (lambda: turned(STATES, TURN, TURN, cut=1) + turned(STATES, TURN, TURN, cut=1), []),
        (lambda: turned(STATES, TURN, TURN, sign=1) + turned(STATES, TURN, TURN, sign=1), []),
        (lambda: turned(turned(STATES, TURN, TURN), TURN, TURN), []),
        (lambda: silu(STATES) * STATES, ["gates"]),
        (lambda: silu(STATES) * ROW, []),
        (lambda: silu(STATES.double()) * STATES, []),
        (lambda: linear(STATES, TURN[0, 0]) + linear(STATES, TURN[1, 0]), []),
    ],
)
@torch.inference_mode()
def test_only_what_computes_the_same_becomes_one(run: Callable[[], Tensor], kinds: list) -> None:
    recording = record(run)
    counts = fuse(recording)
    assert [kind for kind, num in counts.items() if num] == kinds
    torch.testing.assert_close(recording.program()(), recording.output)


@torch.inference_mode()
def test_a_sum_that_is_changed_after_its_norm_stays() -> None:
    def run() -> Tensor:
        total = STATES + STATES
        normed = norm_like(total, ROW)
        total += 1
        return torch.cat([total, normed])

    recording = record(run)
    assert fuse(recording) == NOTHING
    torch.testing.assert_close(recording.program()(), recording.output)


def layers(*sizes: int, bias: bool = False) -> list[nn.Linear]:
    return [nn.Linear(4, size, bias=bias) for size in sizes]


def weights_of(parts: list[nn.Linear]) -> list[Any]:
    return [part.weight for part in parts]


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_one_input_are_one(bias: bool) -> None:
    parts = layers(3, 1, 5, bias=bias)
    before = [part.weight.tolist() for part in parts]
    with torch.inference_mode():
        recording = record(lambda: torch.cat([part(STATES) for part in parts], -1))
        assert fuse(recording) == {**NOTHING, "joint products": 1}
        torch.testing.assert_close(recording.program()(), recording.output)
    assert [part.weight.tolist() for part in parts] == before
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
    with torch.no_grad():
        parts[1].weight += 1
    found = recording.program()()
    torch.testing.assert_close(found[..., 3], parts[1](STATES)[..., 0])
    parts[0](STATES).sum().backward()
    assert parts[0].weight.grad is not None


def test_products_with_a_bias_and_without_stay_apart() -> None:
    parts = [*layers(3), *layers(3, bias=True)]
    with torch.inference_mode():
        recording = record(lambda: parts[0](STATES) + parts[1](STATES))
        assert fuse(recording) == NOTHING


def test_weights_are_moved_once() -> None:
    weights = weights_of(layers(3, 1, 5))
    whole = joined(weights)
    assert whole is not None
    again = joined(weights)
    assert again is not None
    assert again.data_ptr() == whole.data_ptr() == weights[0].data_ptr()
    assert torch.equal(again, torch.cat(weights))


def test_weights_whose_memory_others_have_are_not_moved() -> None:
    """What is written to the others later would be missed."""
    parts = layers(3, 5)
    held = parts[1].state_dict()
    assert joined(weights_of(parts)) is None
    del held
    assert joined(weights_of(parts)) is not None
    one = parts[0].weight
    assert joined([one, one]) is None
    assert joined([torch.ones(2, 4), torch.ones(2, 4)]) is None
    assert joined([nn.Parameter(torch.ones(4, 8)[:, ::2]) for _ in range(2)]) is None
