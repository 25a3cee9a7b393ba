"""KV heads that share the budget of a layer: a sequence, its tokens, its bytes, and refusals."""

from typing import ClassVar

import attrs
import pytest
import torch
from allocations import peak_allocated
from hypothesis import given
from hypothesis import strategies as st
from list_reference import ListLayer, reference_tokens
from ragged_policies import FlatTop, LongKeysAlike, RatedFlatTop, flat_top_loop, rating
from strategies import costly
from tiny import tiny_model
from torch import Tensor

from kvpolicy import CacheView, Engine, Lookahead, Plan, Request, hookimpl, select_rows
from kvpolicy.engine.compose import core_of
from kvpolicy.engine.memory.footprint import footprint
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.engine.tracing import recording
from kvpolicy.errors import HookResultError, KVPolicyError, PlanError
from kvpolicy.plan.spec import LayerGroup, PolicySpec

MODEL = tiny_model(dtype=torch.float64, num_kv_heads=4, num_heads=8)
PROMPTS = [[5, 7, 9], [11, 3, 8, 2, 1] * 7, [10], [44, 45, 46, 47] * 3, [7, 3] * 10]


@attrs.define(eq=False)
class Received(FlatTop):
    """Shares rows by what they have received, so that attention fills tracks of segments."""

    @hookimpl
    def score(self, attn_sums: Tensor) -> Tensor:
        return attn_sums


@attrs.define(eq=False)
class Observed(FlatTop):
    """Shares rows by the attention of the last queries."""

    window_size: ClassVar[int] = 3

    @hookimpl
    def score(self, attn_weights: Tensor, keys: Tensor) -> Tensor:
        weights = attn_weights.sum(dim=2)
        return weights.unflatten(1, (keys.shape[1], -1)).sum(dim=2)


STACKS = {
    "long keys": lambda alpha: [LongKeysAlike(), FlatTop(alpha)],
    "received": lambda alpha: [Received(alpha)],
    "observed": lambda alpha: [Observed(alpha)],
    "rated": lambda alpha: [RatedFlatTop(alpha, rating(3))],
}


def requests_of(lengths: list[tuple[int, int]]) -> list[Request]:
    return [
        Request([(7 * n + 3 * i) % 60 for i in range(prompt)], new, stop_ids=())
        for n, (prompt, new) in enumerate(lengths)
    ]


def rows_of(engine: Engine, requests: list[Request]) -> list[tuple[object, ...]]:
    """The tokens of each request, and the positions that stayed at each of its compactions."""
    kept: dict[int, list[object]] = {number: [] for number in range(len(requests))}
    with recording(engine, hooks=["select"], kept=True) as trace:
        results = engine.generate(requests).results()
    for call in trace.calls:
        for one in call.left:
            at = (call.layer, call.tokens[call.requests.index(one.request)])
            kept[one.request].append((*at, one.heads, one.ranges))
    by_id = sorted(results, key=lambda one: one.id)
    return [(one.tokens, one.rows_evicted, sorted(kept[one.id])) for one in by_id]


@costly
@given(
    stack=st.sampled_from(sorted(STACKS)),
    alpha=st.sampled_from([0.0, 0.3, 1.0]),
    budget=st.integers(1, 9),
    buffer=st.integers(1, 4),
    slots=st.integers(2, 3),
    chunk=st.sampled_from([3, 512]),
    eager=st.booleans(),
    # Prompts of equal length are compacted together, with heads that hold different numbers.
    lengths=st.lists(
        st.tuples(st.sampled_from([1, 6, 25, 25]), st.integers(8, 16)), min_size=2, max_size=3
    ),
)
def test_rows_and_tokens_of_a_sequence_are_those_that_it_has_alone(
    stack, alpha, budget, buffer, slots, chunk, eager, lengths
) -> None:
    plan = Plan.uniform(*STACKS[stack](alpha), budget=budget, buffer=buffer, heads="shared")
    requests = requests_of(lengths)
    together = rows_of(Engine(MODEL, plan=plan, slots=slots, chunk=chunk, eager=eager), requests)
    engine = Engine(MODEL, plan=plan, slots=1)
    assert together == [rows_of(engine, [request])[0] for request in requests]


@costly
@given(
    alpha=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    budget=st.integers(1, 8),
    buffer=st.integers(1, 4),
    length=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_tokens_are_those_of_rows_in_lists(alpha, budget, buffer, length, seed) -> None:
    policy = RatedFlatTop(alpha, rating(seed))
    plan = Plan.uniform(policy, budget=budget, buffer=buffer, heads="shared")
    (request,) = requests_of([(length, 12)])
    (result,) = Engine(MODEL, plan=plan, slots=2).generate([request]).results()
    layers = [
        ListLayer(
            window=None,
            budget=budget,
            buffer=buffer,
            rate=rating(seed),
            due=lambda _: False,
            share=lambda scores, most: flat_top_loop(scores, most, alpha),
        )
        for _ in range(2)
    ]
    assert list(result.tokens) == reference_tokens(MODEL, layers, list(request.prompt), 12)
    assert len(result.tokens) == 12


@pytest.mark.few(1)
@pytest.mark.parametrize("eager", [True, False])
def test_heads_that_no_policy_lets_share_keep_what_they_keep_alone(eager: bool) -> None:
    requests = requests_of([(30, 15), (3, 30), (12, 8)])
    seen = [
        rows_of(
            Engine(
                MODEL,
                plan=Plan.uniform(LongKeysAlike(), budget=8, buffer=3, heads=heads),
                slots=2,
                eager=eager,
            ),
            requests,
        )
        for heads in ("own", "shared")
    ]
    assert seen[0] == seen[1]


def test_stored_padding_takes_budget_from_all_heads_together() -> None:
    plan = Plan.uniform(
        RatedFlatTop(0.2, rating(1)), budget=8, buffer=4, heads="shared", padding="stored"
    )
    run = Engine(MODEL, plan=plan, slots=2).generate(requests_of([(30, 12), (25, 12)]))
    results = run.results()
    assert [result.finish_reason for result in results] == ["length"] * 2
    assert [result.peak_rows for result in results] == [12, 12 - 5]


def test_layers_may_differ_in_how_their_heads_have_the_budget() -> None:
    stack = (PolicySpec.of(LongKeysAlike()), PolicySpec.of(FlatTop(0.1)))
    groups = (LayerGroup((0,), heads="shared"), LayerGroup((1,)))
    plan = Plan(stack, 6, 3, groups)
    resolved = plan.resolve(2)
    assert [layer.heads for layer in resolved.layers] == ["shared", "own"]
    run = Engine(MODEL, plan=plan, slots=2).generate(requests_of([(20, 9), (4, 12)]))
    for _ in range(8):
        run.step()
    first, second = run.cache.layers
    assert first.bounds is not None
    assert second.bounds is None


class Uneven(RatedFlatTop):
    """The first head has nearly all rows."""


def uneven() -> Uneven:
    return Uneven(0.1, lambda head, position: 1000.0 * (head == 0) + position % 17)


def test_a_shared_budget_takes_the_bytes_of_one_for_each_head() -> None:
    """As torch's allocator counts them; slabs for the fullest head take several times as much."""
    requests, budget, buffer = requests_of([(120, 20), (90, 30)]), 40, 8
    longest, peaks, plans, fullest = 140, {}, {}, 0
    for heads in ("own", "shared"):
        plans[heads] = Plan.uniform(uneven(), budget=budget, buffer=buffer, heads=heads)
        engine = Engine(MODEL, plan=plans[heads], slots=2)
        peaks[heads] = peak_allocated(lambda: core_of(engine, 2, longest).cache)  # noqa: B023
        run = engine.generate(requests)
        while not run.done:
            run.step()
            if heads == "shared" and not run.done:
                cache = run.cache
                fullest = max(fullest, *(int(cache.fullest(0, [slot])[0]) for slot in (0, 1)))
        shown = footprint(plans[heads], MODEL, slots=2, longest=longest)
        assert shown.num_bytes == core_of(engine, 2, longest).cache.num_bytes
    bounds = 2 * 2 * (4 + 1) * 8  # layers, slots, bounds
    assert 0 <= peaks["shared"] - peaks["own"] - bounds < 200
    assert fullest > 2 * (budget + buffer)
    for_the_fullest = Plan.uniform(uneven(), budget=fullest - buffer, buffer=buffer)
    wide = peak_allocated(lambda: core_of(Engine(MODEL, plan=for_the_fullest), 2, 999).cache)
    assert wide > 2 * peaks["shared"]


@attrs.define(eq=False)
class Answers:
    """Answers a mask made of the scores."""

    kind: str
    ragged: ClassVar[bool] = True

    @hookimpl
    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        mask = torch.zeros_like(scores, dtype=torch.bool)
        mask[:, :, -1] = True
        if self.kind == "too many":
            return torch.ones_like(mask)
        if self.kind == "a head without rows":
            mask[:, 1] = False
        elif self.kind == "absent rows":
            mask[:, 0, -budget:] = positions[:, 0, -budget:] >= 0
            mask[:, 2, 0] = True
        elif self.kind == "a wrong shape":
            return mask[:, :, 1:]
        elif self.kind == "absent indices":
            if (positions < 0).any():
                return torch.zeros_like(positions[:, :, :1])
            mask[:, 0, -budget:] = True
        return mask


WRONG = {
    "too many": "keeps 28 rows; at most 16 may stay, 4 for each of 4 KV heads",
    "a head without rows": "keeps no row of KV head 1; at least 1 row of each head stays",
    "absent rows": "keeps rows that a head does not have; their position is -1",
    "a wrong shape": "returned shape [1, 4, 6]; expected [1, 4, 7] = [B, H_kv, T]",
    "absent indices": "keeps rows that a head does not have; their position is -1",
}


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_mask_is_an_error_at_once_and_late(
    kind: str, defers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan.uniform(Answers(kind), budget=4, buffer=3, heads="shared")
    run = Engine(MODEL, plan=plan).generate(requests_of([(10, 12)]))
    monkeypatch.setattr(run.evictor, "defers", defers)
    with pytest.raises(HookResultError, match="policy 'answers'") as caught:
        run.results()
    assert WRONG[kind] in str(caught.value)


def test_a_mask_needs_heads_that_share() -> None:
    plan = Plan.uniform(Answers("mask"), budget=4, buffer=3)
    with pytest.raises(HookResultError, match='heads = "shared"'):
        Engine(MODEL, plan=plan).generate(requests_of([(10, 12)])).results()


@attrs.define(eq=False)
class Doubled(FlatTop):
    """Stores values times two, and counts in a track how often."""

    tracks: ClassVar[tuple[str, ...]] = ("times",)

    @hookimpl
    def evict(self, rows, keep: Tensor) -> bool:
        rows.keep(keep, values=rows.values * 2)
        return True

    @hookimpl
    def score(self, positions: Tensor, tracks) -> Tensor:
        tracks["times"] = tracks["times"] + 1
        return (positions * 7919 % 101).float()


def test_a_policy_that_evicts_gets_the_mask_and_tracks_move_with_their_rows() -> None:
    plan = Plan.uniform(Doubled(0.2), budget=6, buffer=3, heads="shared")
    run = Engine(MODEL, plan=plan, slots=2).generate(requests_of([(20, 30), (9, 30)]))
    for _ in range(20):
        run.step()
    cache = run.cache
    for slot in (0, 1):
        layer = cache.layers[0]
        times = layer.held(slot, layer.arena.tracks["times"])
        newest = int(cache.seq_len[slot] - cache.compacted_at[0, slot])
        for of_head in times:  # rows that have come since the last compaction are 0
            assert (of_head[len(of_head) - newest :] == 0).all()
            assert (of_head[: len(of_head) - newest] >= 1).all()
            assert (of_head.diff() <= 0).all()  # older rows have stayed more often


def test_policies_that_do_not_declare_it_are_refused() -> None:
    plan = Plan.uniform("rkv", FlatTop(), budget=64, heads="shared")
    with pytest.raises(PlanError) as caught:
        plan.resolve(2)
    assert str(caught.value) == (
        "the plan lets the KV heads of layer 0 share its rows, but policy 'rkv' does not "
        "declare "
        "ragged = True, which says that it works with heads that hold different numbers of rows; "
        'write heads = "own" for this layer'
    )
    # Nothing is evicted there, so nothing is shared.
    assert Plan.uniform("full", heads="shared").resolve(2).layers[0].heads == "own"


def test_layers_with_a_sliding_window_are_refused() -> None:
    from families import family_model

    model = family_model("mistral")
    plan = Plan.uniform(FlatTop(), budget=8, heads="shared")
    for make in (
        lambda: Engine(model, plan=plan),
        lambda: footprint(plan, model, slots=1),
    ):
        with pytest.raises(PlanError, match="sliding window"):
            make()


def test_models_in_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpolicy.model.tensor_parallel import SingleProcess

    monkeypatch.setattr(SingleProcess, "num_shards", 2)
    with pytest.raises(KVPolicyError, match="2 processes"):
        Engine(MODEL, plan=Plan.uniform(FlatTop(), budget=8, heads="shared"))


@attrs.define(eq=False)
class MoreBelow(FlatTop):
    """The first layer has more rows."""

    @hookimpl
    def allocate(self, budget: int, layer_indices: list[int]) -> list[int]:
        return [budget + 3, *[budget] * (len(layer_indices) - 2), budget - 3]


def test_allocate_divides_the_mean() -> None:
    plan = Plan.uniform(MoreBelow(), budget=8, buffer=2, heads="shared")
    engine = Engine(MODEL, plan=plan)
    assert [layer.budget for layer in engine.plan.layers] == [11, 5]
    cache = core_of(engine, 1, 100).cache
    assert [layer.slab.capacity for layer in cache.layers] == [13, 7]
    assert all(layer.bounds is not None for layer in cache.layers)


@pytest.mark.few(1)
@pytest.mark.parametrize("cut_at", [0, 3, 11])
def test_a_snapshot_of_uneven_heads_goes_on_as_if_it_had_not_been_cut(cut_at, tmp_path) -> None:
    plan = Plan.uniform(Received(0.1), budget=6, buffer=3, heads="shared")
    (request,) = requests_of([(20, 25)])
    (whole,) = Engine(MODEL, plan=plan).generate([request]).results()
    run = Engine(MODEL, plan=plan, slots=2).generate([*requests_of([(9, 4)]), request])
    while not (begun := [seq for seq in run.active if seq.id == 1 and seq.tokens]):
        run.step()
    while len(begun[0].tokens) < cut_at + 2:
        run.step()
    run.snapshot(1).save(tmp_path / "one.safetensors")
    snapshot = SequenceSnapshot.load(tmp_path / "one.safetensors")
    counts = (snapshot.contents.layers[0].positions >= 0).sum(dim=1)
    assert counts.min() < counts.max()
    num = len(snapshot.tokens)
    rest = attrs.evolve(request, prompt=(), max_new_tokens=25 - num, resume=snapshot)
    results = Engine(MODEL, plan=plan, slots=2).generate([*requests_of([(4, 9)]), rest]).results()
    assert snapshot.tokens + results[1].tokens == whole.tokens
    damaged = attrs.evolve(
        snapshot,
        contents=attrs.evolve(
            snapshot.contents,
            layers=tuple(attrs.evolve(one, rows=2) for one in snapshot.contents.layers),
        ),
    )
    damaged.save(tmp_path / "two.safetensors")
    with pytest.raises(KVPolicyError, match="2 rows"):
        SequenceSnapshot.load(tmp_path / "two.safetensors")


def test_select_rows_answers_a_mask() -> None:
    rng = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, 12, 8, generator=rng)
    positions = torch.arange(12).expand(2, 3, 12).clone()
    positions[:, 1, :5] = -1
    rows = CacheView(keys=keys.masked_fill((positions < 0)[..., None], 0), positions=positions)
    stack = [LongKeysAlike(), FlatTop(0.2)]
    mask = select_rows(stack, rows, budget=6, heads="shared").keep
    lengths = rows.keys.norm(dim=-1)
    for b in (0, 1):
        present = [positions[b, h] >= 0 for h in range(3)]
        rated = [lengths[b, h][present[h]].tolist() for h in range(3)]
        for h, kept in enumerate(flat_top_loop(rated, 6, 0.2)):
            assert mask[b, h][present[h]].nonzero()[:, 0].tolist() == kept
    with pytest.raises(KVPolicyError, match=r"'rkv' .*ragged"):
        select_rows("rkv", rows, budget=64, heads="shared")


@attrs.define(eq=False)
class Annotations(FlatTop):
    """Annotates rows by the position of their token, and keeps those with a high annotation."""

    tracks: ClassVar[tuple[str, ...]] = ("at",)

    @hookimpl
    def annotate(self, positions: Tensor, keys: Tensor) -> dict[str, Tensor]:
        return {"at": positions[:, None].float() + keys[:, :, 0].float() * 0}

    @hookimpl
    def score(self, positions: Tensor, tracks) -> Tensor:
        present = positions >= 0
        assert torch.equal(tracks["at"][present], positions[present].float())
        return (positions * 7919 % 101).float() - 50.0 * torch.arange(positions.shape[1])[:, None]


@attrs.define(eq=False)
class AnnotationsInStep(Annotations):
    annotates_in_step: ClassVar[bool] = True


@pytest.mark.few(2)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("policy", [Annotations, AnnotationsInStep])
def test_annotations_go_to_their_rows(policy, eager) -> None:
    plan = Plan.uniform(policy(0.1), budget=6, buffer=3, heads="shared")
    engine = Engine(MODEL, plan=plan, slots=2, eager=eager)
    results = engine.generate(requests_of([(20, 14), (5, 18), (9, 12)])).results()
    assert [len(result.tokens) for result in results] == [14, 18, 12]


@attrs.define(eq=False)
class Lookaheads(FlatTop):
    """Shares rows by the attention of tokens that might follow."""

    lookahead_size: ClassVar[int] = 3

    @hookimpl
    def lookahead(self) -> Lookahead:
        return Lookahead(num_greedy=3)

    @hookimpl
    def score(self, lookahead_queries: Tensor, keys: Tensor) -> Tensor:
        grouped = lookahead_queries.unflatten(1, (keys.shape[1], -1)).mean(dim=(2, 3))
        return (grouped[:, :, None] * keys).sum(dim=3).float()


def test_lookaheads_see_the_rows_of_uneven_heads() -> None:
    plan = Plan.uniform(Lookaheads(0.1), budget=6, buffer=3, heads="shared")
    requests = requests_of([(20, 9), (20, 6), (4, 12)])
    together = Engine(MODEL, plan=plan, slots=3).generate(requests).results()
    engine = Engine(MODEL, plan=plan)
    alone = [engine.generate([request]).results()[0] for request in requests]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
