"""A static step neither waits for the device, nor leaves it, nor allocates much."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import attrs
import pytest
import torch
from families import family_model
from graph_guard import GraphError, OnlyWhatAGraphHolds
from static_steps import begin_decode, begun_decode
from tiny import tiny_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kvpolicy import Engine, Plan, Request, hookimpl
from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.base import DecodeLayer
from kvpolicy.attention.integers import quantize
from kvpolicy.attention.torch_backend.backend import FixedShapesBackend
from kvpolicy.cache import static_step
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import Slab
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.engine.requests.request import Sampling
from kvpolicy.model import static_forward
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.annotating import annotate_static_rows
from kvpolicy.model.forward_input import ForwardInput

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 6]
SAMPLINGS = [Sampling(), Sampling(0.8, seed=3), Sampling(0.7, top_k=5, top_p=0.9, seed=4)]
# Of a tiny model, without the tables of drawing. The slabs of a layer are larger.
MOST_BYTES = 16 << 10
MOST_BYTES_OF_DRAWING = 64 << 10

# Without CUDA, fake tensors take another device of which the host knows no values.
GPU = "cuda" if torch.cuda.is_available() else "meta"


def requests(*, drawn: bool = False) -> list[Request]:
    samplings = SAMPLINGS if drawn else SAMPLINGS[:1] * 3
    return [Request(*one) for one in zip(PROMPTS, [200] * 3, samplings, strict=True)]


@contextmanager
def guarded(most_bytes: int = MOST_BYTES) -> Iterator[OnlyWhatAGraphHolds]:
    with torch.inference_mode(), OnlyWhatAGraphHolds(most_bytes) as mode:
        yield mode


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "policy", "drawn"),
    [("qwen3", "snapkv", False), ("qwen3", "h2o", True), ("gemma2", "h2o", False)],
)
def test_a_static_step_holds_only_what_a_graph_can(
    family: str, policy: str, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_forward, "BACKEND", "aot_eager")
    model = family_model(family, window=100)
    plan = Plan.uniform(policy, "protect", budget=150, buffer=30)
    given = begun_decode(model, plan, requests(drawn=drawn), compile=True)
    step = given.step
    assert min(layer.keys.nbytes for layer in step.cache.layers) > MOST_BYTES
    before = step.rows.clone()
    with guarded(MOST_BYTES_OF_DRAWING if drawn else MOST_BYTES) as mode:
        static_forward.static_forward(_twin(model), given)
    assert mode.num_calls > 50
    assert (step.rows - before == 1).all()


@attrs.define(eq=False)
class Annotations:
    """Annotates rows from everything that it is given."""

    tracks: ClassVar[tuple[str, ...]] = ("a",)
    annotates_in_step: ClassVar[bool] = True

    @hookimpl
    def annotate(
        self, states: Tensor, keys: Tensor, values: Tensor, positions: Tensor
    ) -> dict[str, Tensor]:
        numbers = (keys * values).sum(dim=2) + states.mean(dim=1, keepdim=True)
        return {"a": numbers + positions[:, None]}


@pytest.mark.nightly
@pytest.mark.parametrize("in_step", [True, False])
def test_annotating_holds_only_what_a_graph_can(
    in_step: bool, monkeypatch: pytest.MonkeyPatch, no_compiler: None
) -> None:
    """What the operator does inside, too: it is captured with the step."""
    monkeypatch.setattr(Annotations, "annotates_in_step", in_step)
    plan = Plan.uniform("streaming", Annotations(), budget=150, buffer=30)
    model = tiny_model()
    engine = Engine(model, plan=plan, slots=3, compile=True)
    run = engine.generate(requests())
    for _ in range(2):
        run.step()
    given = begin_decode(run)
    step, annotating, layer = given.step, given.annotating, given.step.cache.layers[0]
    assert min(layer.keys.nbytes for layer in step.cache.layers) > MOST_BYTES
    states = torch.ones(3, model.config.hidden_size)
    key = torch.ones(3, 2, 1, 8)
    before = layer.tracks["a"].clone()
    num_kept = sum(int(ring.tensors[0][0].any(dim=1).sum()) for ring in step.rings)
    step.live[1] = False
    monkeypatch.setattr(step, "in_graph", False)  # so that it is not an operator
    given.attention_input = states[:, None]
    with guarded() as mode:
        annotate_static_rows(given, 0, key, key)
    assert mode.num_calls > 5
    assert annotating is not None
    assert given.attention_input is None
    if in_step:
        changed = (layer.tracks["a"] != before).nonzero().tolist()
        rows = step.cache.rows[0].tolist()
        assert changed == [[slot, head, rows[slot]] for slot in (0, 2) for head in (0, 1)]
    else:
        (ring,) = step.rings
        assert ring.tensors[0][:, num_kept, 0].tolist() == [1, 0, 1]
        assert not ring.tensors[0][:, num_kept + 1 :].any()


def _twin(model: Any) -> Any:
    return ModelAdapter(model)._twin.current()


def _copies_to_meta() -> None:
    torch.ones(2).to("meta").add(1)
    torch.ones(2).copy_(torch.ones(2, device="meta"))


OFFENDERS: dict[str, tuple[Callable[[], object], str]] = {
    "item": (lambda: torch.ones(1).item(), "reads a value"),
    "branch": (lambda: bool(torch.ones(1) > 0), "reads a value"),
    "mask": (lambda: torch.ones(3)[torch.ones(3) > 0], "reads a value"),
    "index": (lambda: torch.ones(3).nonzero(), "reads a value"),
    "host tensor": (lambda: torch.tensor([1, 2]), "from values of the host"),
    "copy": (_copies_to_meta, "copies from one device"),
    "allocation": (lambda: torch.zeros(MOST_BYTES), "allocates"),
    "product": (lambda: torch.zeros(4, 256).T @ torch.zeros(4, 256), "allocates"),
}


@pytest.mark.parametrize("name", OFFENDERS)
def test_the_guard_catches(name: str) -> None:
    offend, message = OFFENDERS[name]
    with pytest.raises(GraphError, match=message), guarded():
        offend()


def test_the_guard_catches_a_step_that_reads_its_rows() -> None:
    given = begun_decode(tiny_model(), Plan.uniform("full"), requests())
    with pytest.raises(GraphError, match=r"a value|values of the host"), guarded():
        static_forward.static_forward(_twin(tiny_model()), given)


def test_the_guard_lets_views_of_large_tensors_pass() -> None:
    large = torch.zeros(MOST_BYTES)
    with guarded():
        large[1:].add_(1)
        large.view(2, -1)[0].mul_(2)
    assert large.sum() == MOST_BYTES - 1 + MOST_BYTES // 2 - 1


IN_INTEGERS = {"key_bits": 8, "value_bits": 4, "exact": 5}


@pytest.mark.parametrize(
    ("policy_reads", "form"),
    [((), {}), (("attn_sums",), {}), (ACCUMULATORS, {}), (ACCUMULATORS, IN_INTEGERS)],
)
def test_a_step_on_a_gpu_meets_no_tensor_of_the_host(
    policy_reads: tuple[str, ...], form: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors refuse to meet those of another device, and to be read."""
    model = tiny_model()
    if GPU == "meta":  # which older transformers ask whether it has an autocast
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(static_step, "upload", lambda values, to: torch.tensor(values).to(to))
    with FakeTensorMode(allow_non_fake_inputs=False), torch.no_grad():
        with torch.device(GPU):
            model = type(model)(model.config).eval()
        adapter = ModelAdapter(model)
        shapes = adapter.layer_shapes()
        assert {shape.device.type for shape in shapes} == {GPU}
        cache = KVCache(shapes, [Slab(16, 4, policy_reads, **form)] * len(shapes), 4)
        step = StaticStep(cache)
        assert step.in_graph
        step.num_served = 3
        step._serve(4)
        step._columns = step._all_columns
        given = ForwardInput(step.token_ids[:, None], step, draws=True)
        logits, _ = static_forward.static_forward(adapter._twin.current(), given)
    assert logits.device.type == GPU
    assert logits.shape == (4, model.config.vocab_size)


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("in_segments", [False, True])
def test_attention_without_triton_meets_no_tensor_of_the_host(bits: int, in_segments: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=False):
        rows = torch.zeros(2, 2, 8, device=GPU)
        keys = torch.zeros(2, 2, 8, 4, device=GPU)
        new, slab, ring = keys[:, :, 0], keys, None
        if bits:
            slab, ring = quantize(keys, bits), keys[:, :, :3].clone()
        layer = DecodeLayer(
            slab,
            slab.clone(),
            rows.long(),
            rows[:, :, 0].long(),
            rows[:, 0, 0].long(),
            rows[:, 0, 0].bool(),
            accumulated=[rows.clone() for _ in ACCUMULATORS],
            accumulators=list(ACCUMULATORS),
            window=torch.zeros(2, 4, 3, 4, device=GPU),
            bounds=torch.zeros(2, 3, dtype=torch.int64, device=GPU) if in_segments else None,
            sliding_window=0 if in_segments else 8,
            key_bits=bits,
            value_bits=bits,
            exact_keys=ring,
            exact_values=ring,
        )
        query = torch.zeros(2, 4, 4, device=GPU)
        output = FixedShapesBackend().bind(layer)(query, new, new, scaling=0.5)
    assert output.device.type == GPU


def test_the_fake_gpu_catches_a_tensor_of_the_host() -> None:
    with FakeTensorMode(allow_non_fake_inputs=False), pytest.raises(RuntimeError, match="device"):
        torch.zeros(2, device=GPU) + torch.arange(2)
