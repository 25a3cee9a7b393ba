"""Attention of prompts by weights in Triton, against loops."""

from copy import deepcopy

import attrs
import pytest
import torch
from families import family_model
from hypothesis import given
from hypothesis import strategies as st
from prompt_forwards import Forward, expected, forwards
from torch import Tensor
from triton_device import DEVICE

from kvpolicy import Engine, Plan, Request
from kvpolicy.attention import by_weights, eager
from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.by_weights import attend_by_weights
from kvpolicy.attention.softmax import PLAIN, Softmax
from kvpolicy.attention.triton_backend import prompts
from kvpolicy.attention.visible import Visible

# fp32 sums of up to some hundred terms in another order; 16-bit weights and outputs have 8 bits.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
SCALING = 0.4


@pytest.fixture(autouse=True)
def _in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator runs where kernels run here."""
    monkeypatch.setattr(by_weights, "ATTEND_BY_WEIGHTS", by_weights.in_triton)


def check(
    forward: Forward,
    accumulators: list[str],
    softmax: Softmax = PLAIN,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compare output and accumulators with loops; rows that are not held are not read."""
    tensors = forward.tensors(dtype, empty=float("nan"))
    rng = torch.Generator().manual_seed(forward.seed)
    before = {name: torch.rand(tensors[1].shape[:3], generator=rng) for name in accumulators}
    tracks = {name: track.clone().to(DEVICE) for name, track in before.items()}
    sinks = None if softmax.sinks is None else softmax.sinks.to(DEVICE)
    output = attend_by_weights(
        *(one.to(DEVICE) for one in tensors),
        attrs.evolve(forward.visible, device=DEVICE),
        scaling=SCALING,
        softmax=Softmax(softmax.softcap, sinks),
        accumulated=tracks,
    )
    wanted = expected(forward, tensors, SCALING, softmax)
    assert (output.dtype, output.shape) == (dtype, wanted.output.shape)
    torch.testing.assert_close(
        output.double().cpu(), wanted.output, rtol=0, atol=TOLERANCE[dtype]
    )  # zeros for pads
    for name, track in tracks.items():
        received = (track.cpu() - before[name]).double()
        scale = max(1.0, float(wanted.accumulated[name].abs().max()))
        torch.testing.assert_close(received, wanted.accumulated[name], rtol=0, atol=3e-5 * scale)
    return output


@given(
    forwards,
    st.lists(st.sampled_from(ACCUMULATORS), unique=True),
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.sampled_from(list(TOLERANCE)),
)
def test_prompts_attend_and_add_up_as_loops_do(
    forward: Forward,
    accumulators: list[str],
    softcap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    heads = forward.num_kv_heads * forward.group
    softmax = Softmax(softcap, torch.arange(heads) - 1.0 if has_sinks else None)
    check(forward, accumulators, softmax, dtype)


@pytest.mark.parametrize(
    "forward",
    [
        Forward([40], [50], 1, 2, None, 0),
        Forward([0, 37, 21], [39, 18, 2], 2, 2, None, 1),
        Forward([30, 3], [33, 40], 1, 2, 20, 2),
        Forward([30], [33], 1, 2, 2, 3),
    ],
    ids=["one", "unequal", "window", "short window"],
)
def test_many_tiles_are_one_softmax(forward: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "rows_at_once", lambda *_: 16)
    sinks = torch.linspace(-1, 1, forward.num_kv_heads * forward.group)
    check(forward, list(ACCUMULATORS), Softmax(30.0, sinks))


def test_a_sequence_among_others_equals_the_sequence_alone() -> None:
    together = Forward([5, 9], [17, 6], 1, 2, None, 4)
    queries, keys, values = (one.to(DEVICE) for one in together.tensors())

    def attended(entries: slice, columns: slice, rows: slice, visible: object) -> list[Tensor]:
        track = torch.zeros(keys[entries, :, rows].shape[:3], device=DEVICE)
        output = attend_by_weights(
            queries[entries, :, columns],
            keys[entries, :, rows],
            values[entries, :, rows],
            visible,
            scaling=SCALING,
            softmax=PLAIN,
            accumulated={"attn_sums": track},
        )
        return [output, track]

    every = slice(None)
    output, track = attended(every, every, every, attrs.evolve(together.visible, device=DEVICE))
    alone = attrs.evolve(Forward([9], [6], 1, 2, None, 4).visible, device=DEVICE)
    own_output, own_track = attended(slice(1, 2), slice(11, 17), slice(15), alone)
    # NumPy's products, in the interpreter, round by the place of a row among others.
    torch.testing.assert_close(output[1:, :, 11:], own_output, rtol=0, atol=1e-6)
    torch.testing.assert_close(track[1:, :, :15], own_track, rtol=0, atol=1e-6)


def test_output_lies_in_memory_as_models_go_on() -> None:
    assert check(Forward([3], [5], 2, 2, None, 0), []).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("accumulators", "softmax", "reach"),
    [
        (["attn_sums"], PLAIN, None),
        ([], Softmax(30.0), None),
        ([], PLAIN, None),
        ([], PLAIN, 6),
    ],
    ids=["sums", "cap", "plain", "window"],
)
def test_a_gpu_attends_by_weights_and_in_windows_in_kernels(
    accumulators: list[str],
    softmax: Softmax,
    reach: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the engine does, which says why not if weights are not; a plain softmax needs none."""
    forward, calls = Forward([3], [20], 2, 2, reach, 0), []
    given = [one.to(DEVICE) for one in forward.tensors()]

    def attended(visible: Visible) -> tuple[Tensor, set[str]]:
        tracks = {name: torch.zeros(given[1].shape[:3], device=DEVICE) for name in accumulators}
        problems: set[str] = set()
        output = eager.attend(
            *given,
            visible,
            scaling=SCALING,
            softmax=softmax,
            accumulated=tracks,
            problems=problems,
        )
        return output, problems

    def run(*args: object) -> Tensor:
        calls.append(args)
        return by_weights.in_triton(*args)

    monkeypatch.setattr(eager, "on_gpu", lambda device: device.type == DEVICE.type)
    monkeypatch.setattr(by_weights, "ATTEND_BY_WEIGHTS", run)
    seen = attrs.evolve(forward.visible, device=DEVICE)
    output, problems = attended(seen)
    wanted = expected(forward, forward.tensors(), SCALING, softmax)
    torch.testing.assert_close(output.double().cpu(), wanted.output, rtol=0, atol=3e-5)
    needs_weights = bool(accumulators) or not softmax.is_plain
    num_calls = needs_weights or reach is not None
    assert (len(calls), problems) == (num_calls, set())
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE)
    masked = attrs.evolve(seen, also=lambda now, rows: everything)
    output, problems = attended(masked)
    torch.testing.assert_close(output.double().cpu(), wanted.output, rtol=0, atol=3e-5)
    assert (len(calls), len(problems)) == (num_calls, needs_weights)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="texts of a CPU are compared")
@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("qwen3", Plan.uniform("h2o", budget=20, buffer=5, prefill_buffer=18)),
        ("gemma2", Plan.uniform("full")),
    ],
    ids=["sums", "caps and windows"],
)
def test_an_engine_writes_the_same_texts(
    family: str, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several sequences, in chunks, with pads, of which rows are evicted."""
    tokens = torch.randint(1, 60, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    model, calls = deepcopy(family_model(family)), []

    def texts() -> list[object]:
        engine = Engine(model, plan=plan, slots=3, chunk=24)
        run = engine.generate([Request(tokens[:size], 1) for size in (40, 31, 17)])
        return [(one.tokens, one.rows_evicted) for one in run.results()]

    def attended(*args: object) -> Tensor:
        calls.append(args)
        return by_weights.in_triton(*args)

    wanted = texts()
    monkeypatch.setattr(eager, "on_gpu", lambda _: True)
    monkeypatch.setattr(by_weights, "ATTEND_BY_WEIGHTS", attended)
    assert texts() == wanted
    assert calls
