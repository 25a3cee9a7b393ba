"""Policies that read the weights of their layers see those that the model computes with."""

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch
from families import FAMILIES, family_model, model_of
from tiny import shared_model, tiny_model
from torch import Tensor, nn

from kvpolicy import Engine, Plan, PolicyCache, hookimpl, packed_model
from kvpolicy.compat import cache_argument
from kvpolicy.errors import HookError, HookResultError, ModelError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.decoder import attention_module
from kvpolicy.state import Bound, LayerWeights
from kvpolicy.testing import check_policy, keep_rows

PROMPTS = [[5, 9, 40, 2, 2, 7, 11, 30, 1], [8, 1], [3] * 13, [17, 4, 4, 59, 21]]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@attrs.define(eq=False)
class OutputNorm:
    """Scores a row by what it can add to the layer's output, ``|W_o v|``, the mean of its group."""

    @hookimpl
    def bind(self, weights: LayerWeights) -> Tensor:
        return weights.o.unflatten(0, (len(weights.v), -1))  # [H_kv, G, M, D]

    @hookimpl
    def score(self, values: Tensor, bound: Bound) -> Tensor:
        outputs = torch.einsum("bhtd,hgmd->bhtgm", values, bound.of(self))
        return outputs.float().norm(dim=-1).mean(dim=-1)


def by_modules(model: nn.Module, layer_idx: int, values: Tensor) -> Tensor:
    """The same from the model's own output projection, head by head."""
    project = attention_module(model, layer_idx)
    project = getattr(project, "o_proj", None) or project.dense
    num_kv_heads, dim = values.shape[1], values.shape[3]
    num_heads = project.in_features // dim
    found = torch.zeros(values.shape[:3])
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        heads = values.new_zeros(*values.shape[::2], num_heads, dim)  # [B, T, H_q, D]
        heads[:, :, head] = values[:, kv_head]
        with torch.no_grad():
            zero = project(torch.zeros_like(heads.flatten(2)))
            output = project(heads.flatten(2)) - zero
        found[:, kv_head] += output.float().norm(dim=2) / (num_heads // num_kv_heads)
    return found


@attrs.define(eq=False)
class Compares:
    """Compares the scores under it with the model's own modules."""

    model: Any
    num: int = 0

    @hookimpl(wrapper=True)
    def score(self, layer_idx: int, values: Tensor) -> Any:
        scores = yield
        assert torch.allclose(scores, by_modules(self.model, layer_idx, values), **CLOSE)
        self.num += 1
        return scores


@pytest.mark.few(2)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_output_projection_is_the_models_own(family: str) -> None:
    model = family_model(family, window=100)
    compares = Compares(model)
    plan = Plan.uniform(OutputNorm(), compares, budget=9, buffer=4)
    Engine(model, plan=plan, slots=3).generate(PROMPTS, max_new_tokens=12).results()
    assert compares.num >= 4


@attrs.define(eq=False)
class Recomputes:
    """Computes queries, keys and values from what enters the attention, and compares."""

    tracks: ClassVar[tuple[str, ...]] = ("error",)
    window_size: ClassVar[int] = 5

    seen: dict[tuple[int, int], Tensor] = attrs.field(factory=dict)
    num: int = 0

    @hookimpl
    def bind(self, weights: LayerWeights) -> LayerWeights:
        return weights

    @hookimpl
    def annotate(
        self,
        layer_idx: int,
        states: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        bound: Bound,
    ) -> dict[str, Tensor]:
        weights: LayerWeights = bound.of(self)
        assert torch.allclose(weights.values(states), values, **CLOSE)
        moved = self._rotated(weights, weights.keys(states), positions)
        assert torch.allclose(moved.transpose(0, 1), keys, rtol=1e-3, atol=1e-3)
        for position, state in zip(positions.tolist(), states, strict=True):
            self.seen[layer_idx, position] = state.clone()
        return {"error": (weights.values(states) - values).norm(dim=2)}

    @hookimpl
    def score(
        self, layer_idx: int, positions: Tensor, queries: Tensor, seq_len: Tensor, bound: Bound
    ) -> Tensor:
        weights: LayerWeights = bound.of(self)
        newest = torch.arange(int(seq_len[0]) - queries.shape[2], int(seq_len[0]))
        states = torch.stack([self.seen[layer_idx, at] for at in newest.tolist()])
        moved = self._rotated(weights, weights.queries(states), newest)
        factor = weights.scaling * queries.shape[3] ** 0.5
        assert torch.allclose(moved * factor, queries[0], rtol=1e-3, atol=1e-3)
        self.num += 1
        return positions.double()

    def _rotated(self, weights: LayerWeights, heads: Tensor, positions: Tensor) -> Tensor:
        """``[N, H, D]`` at positions ``[N]``, ``[H, N, D]``."""
        by_head = heads.transpose(0, 1)[None]
        return weights.rotate(by_head, positions.expand(by_head.shape[:3]))[0]


@pytest.mark.few(6)
@pytest.mark.parametrize("family", [*sorted(FAMILIES), "gpt_neox"])
def test_queries_keys_and_values_are_the_models_own(family: str) -> None:
    changes = {"hidden_act": "gelu", "rotary_pct": 0.5} if family == "gpt_neox" else None
    model = model_of(family, **changes) if changes else family_model(family, window=100)
    recomputes = Recomputes()
    plan = Plan.uniform(recomputes, budget=9, buffer=4)
    Engine(model, plan=plan).generate([PROMPTS[0]], max_new_tokens=12).results()
    assert recomputes.num >= 2


@pytest.mark.parametrize("release", [True, False])
def test_packed_weights_are_dense(release: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.model.packed.MIN_BYTES", 0)
    plain = next(ModelAdapter(tiny_model()).layer_weights([1]))
    packed = next(ModelAdapter(packed_model(tiny_model(), release=release)).layer_weights([1]))
    assert len(plain.tensors) == 4
    for one, other in zip(plain.tensors, packed.tensors, strict=True):
        assert torch.equal(one, other)


def test_weights_are_views() -> None:
    model = tiny_model()
    weights = next(ModelAdapter(model).layer_weights([0]))
    assert weights.v.data_ptr() == model.model.layers[0].self_attn.v_proj.weight.data_ptr()
    assert not any(one.requires_grad for one in weights.tensors)


# What is refused


def test_a_projection_that_is_no_linear_layer_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, states: Tensor) -> Tensor:
            return 2 * super().forward(states)

    def model(name: str, make: type[nn.Module]) -> nn.Module:
        found = tiny_model()
        setattr(found.model.layers[1].self_attn, name, make())
        return found

    plan = Plan.uniform(OutputNorm(), budget=12)
    wrapped = model("o_proj", lambda: nn.Sequential(nn.Linear(32, 32)))
    with pytest.raises(ModelError, match=r"layer 1 .*o_proj"):
        Engine(wrapped, plan=plan)
    with pytest.raises(ModelError):
        Engine(model("v_proj", lambda: Doubled(32, 16)), plan=plan)
    half = model("k_proj", lambda: nn.Linear(32, 16))
    half.model.layers[1].self_attn.k_proj.weight = nn.Parameter(
        torch.zeros(16, 32).to(torch.float8_e4m3fn), requires_grad=False
    )
    with pytest.raises((ModelError, RuntimeError)):
        Engine(half, plan=plan)


@attrs.define(eq=False)
class Wrong:
    """Fails in `bind`."""

    change: bool = False

    @hookimpl
    def bind(self, weights: LayerWeights) -> None:
        if self.change:
            weights.v.mul_(1.0)
        else:
            msg = "no weights"
            raise ValueError(msg)


def test_errors_name_policy_hook_and_layer() -> None:
    for policy, kind, message in (
        (Wrong(), HookError, r"'wrong' .*bind\(\) at layer 0"),
        (Wrong(True), HookResultError, "'wrong'"),
    ):
        with pytest.raises(kind, match=message):
            Engine(tiny_model(), plan=Plan.uniform("streaming", policy, budget=12))


WRITES = {
    "in place": lambda weight: weight.mul_(2.0),
    "through .data": lambda weight: weight.data.mul_(2.0),
    "through numpy": lambda weight: np.multiply(weight.numpy(), 2, out=weight.numpy()),
    "through DLPack": lambda weight: torch.from_dlpack(weight).mul_(2.0),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_weights_that_a_policy_writes_are_put_back(
    write: Callable[[Tensor], object], fails: bool
) -> None:
    class Writes:
        @hookimpl
        def bind(self, weights: LayerWeights) -> None:
            write(weights.o)
            if fails:
                raise ValueError

    model = tiny_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(HookError, match=r"'writes'.*bind\(\) at layer 0") as caught:
        Engine(model, plan=Plan.uniform("streaming", Writes(), budget=12))
    assert isinstance(caught.value, HookResultError) != fails
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


# Who receives what


def test_every_policy_receives_its_own() -> None:
    seen: list[tuple[str, Any]] = []

    def policy(name: str, binds: bool) -> object:
        class Mine:
            tracks = ("a",)

            @hookimpl
            def annotate(self, bound: Bound) -> None:
                seen.append((name, bound.of(self)))

            @hookimpl
            def score(self, layer_idx: int, bound: Bound, positions: Tensor) -> Tensor:
                seen.append((name, bound.of(self)))
                assert bound.of(self) in (None, (name, layer_idx))
                return positions.double()

        class Binds(Mine):
            @hookimpl
            def bind(self, layer_idx: int) -> Any:
                return name, layer_idx

        return Binds() if binds else Mine()

    @attrs.define(eq=False)
    class Both:
        parts: tuple = attrs.field(
            factory=lambda: (("b", policy("b", True)), ("c", policy("c", False)))
        )

        @hookimpl
        def score(self, parts: Any, bound: Bound) -> Tensor:
            assert bound.of(self) is None
            first, second = parts.of(self)
            return first + second

    plan = Plan.uniform(Both(), budget=9, buffer=4)
    engine = Engine(shared_model(), plan=plan)
    assert not engine.stacks[0].layers_alike
    engine.generate(PROMPTS, max_new_tokens=9).results()
    assert set(seen) == {("b", ("b", 0)), ("b", ("b", 1)), ("c", None)}
    cache = PolicyCache(shared_model(), plan)
    ids = torch.tensor(PROMPTS[:1])
    shared_model().generate(ids, **cache_argument(cache), max_new_tokens=9, do_sample=False)
    assert cache.report.rows_evicted


def test_one_compaction_of_given_tensors_is_given_weights() -> None:
    weights = next(ModelAdapter(tiny_model()).layer_weights([0]))
    keys = torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(0))
    queries = keys.repeat(1, 2, 1, 1)
    kept = keep_rows(OutputNorm(), keys, keys, queries, budget=5, layer_weights=weights)
    scores = by_modules(tiny_model(), 0, keys)
    assert torch.equal(kept, scores.topk(5, dim=2).indices.sort(dim=2).values)


@pytest.mark.nightly
def test_a_policy_that_binds_keeps_the_contract() -> None:
    assert check_policy(OutputNorm, max_examples=20).checked["budget"] > 20
