"""With a ``prefill_buffer`` a prompt enters in more rows than its slot has room for."""

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import pytest
import torch
from allocations import peak_allocated
from families import family_model
from forwards import shapes_of_forwards
from hypothesis import given
from hypothesis import strategies as st
from list_reference import ListLayer, reference_tokens
from reuse_cases import assert_same, llama
from strategies import costly, prompts
from tiny import shared_model, tiny_model
from torch import Tensor

from kvpolicy import (
    Engine,
    KVPolicyError,
    Lookahead,
    Plan,
    PolicyCache,
    PrefixStore,
    Request,
    hookimpl,
)
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows, Tracks
from kvpolicy.cache.shape import LayerShape, Slab, Staging
from kvpolicy.compat import cache_argument
from kvpolicy.engine.memory.footprint import footprint, slots_within
from kvpolicy.errors import CacheError, PlanError
from kvpolicy.plan.dump import to_plan_data
from kvpolicy.plan.spec import LayerGroup

NUM_LAYERS, NUM_NEW = 2, 8


def requests(prompts: Sequence[list[int]], num_new: int = NUM_NEW) -> list[Request]:
    return [Request(one, num_new, stop_ids=(), snapshot=True) for one in prompts]


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(61, (num,), generator=rng).tolist() for num in lengths]


# Kept rows and tokens equal those of loops over lists


@attrs.define(eq=False)
class Rated:
    """Scores that rank rows differently in every head."""

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        heads = torch.arange(positions.shape[1])[:, None]
        return ((positions * 37 + heads * 53) % 29).double()


@attrs.define(eq=False)
class EntersInList(ListLayer):
    """A layer of lists, one token at a time, whose buffer is another while the prompt enters."""

    prefill_buffer: int = 0

    def compact(self, seq_len: int, *, prefill_done: bool) -> None:
        later = self.buffer
        self.buffer = later if prefill_done else self.prefill_buffer
        super().compact(seq_len, prefill_done=prefill_done)
        self.buffer = later


@pytest.mark.slow
@costly
@given(
    prompts(count=3, max_len=24),
    st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 14)),
    st.sampled_from([512, 1, 3, 7]),
    st.sampled_from([8192, 20, 5]),
    st.integers(1, 3),
    st.booleans(),
)
def test_kept_rows_and_tokens_equal_loops_over_lists(
    prompts: list[list[int]],
    sizes: tuple[int, int, int],
    chunk: int,
    max_tokens_per_forward: int,
    slots: int,
    eager: bool,
) -> None:
    budget, buffer, more = sizes
    model = shared_model("llama", num_layers=NUM_LAYERS)
    plan = Plan.uniform(Rated(), budget=budget, buffer=buffer, prefill_buffer=buffer + more)
    limits = {"chunk": chunk, "max_tokens_per_forward": max_tokens_per_forward}
    engine = Engine(model, plan=plan, slots=slots, eager=eager, **limits)
    results = engine.generate(requests(prompts)).results()
    for prompt, result in zip(prompts, results, strict=True):
        layers = [
            EntersInList(
                None,
                budget,
                buffer,
                lambda head, position: float((position * 37 + head * 53) % 29),
                lambda _: False,
                prefill_buffer=buffer + more,
            )
            for _ in engine.plan.layers
        ]
        assert list(result.tokens) == reference_tokens(model, layers, prompt, NUM_NEW)
        assert result.snapshot is not None
        for ours, theirs in zip(result.snapshot.contents.layers, layers, strict=True):
            assert ours.positions.tolist() == [[row[0] for row in head] for head in theirs.heads]


# Policies see what they would see with a larger buffer


@attrs.define(eq=False)
class Sees:
    """Notes all that it is told of rows; scores by what attention has summed."""

    tracks: ClassVar[tuple[str, ...]] = ("age", "norm")
    window_size: ClassVar[int] = 3
    lookahead_size: ClassVar[int] = 2
    seen: list[list[Tensor]] = attrs.field(factory=list)

    @hookimpl
    def annotate(self, keys: Tensor) -> dict[str, Tensor]:
        return {"norm": keys.norm(dim=-1)}

    @hookimpl
    def lookahead(self) -> Lookahead:
        return Lookahead(num_greedy=2)

    @hookimpl
    def score(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        queries: Tensor,
        attn_weights: Tensor,
        attn_sums: Tensor,
        num_new: Tensor,
        tracks: Tracks,
        lookahead_queries: Tensor,
    ) -> Tensor:
        tracks["age"] = tracks["age"] + 1
        told = [keys, values, positions, queries, attn_weights, attn_sums, num_new]
        told += [tracks["age"], tracks["norm"], lookahead_queries]
        self.seen.append([one.clone() for one in told])
        return attn_sums + 0.1 * tracks["norm"]


@pytest.mark.parametrize("chunk", [512, 5])
def test_policies_are_told_of_all_rows_as_with_a_larger_buffer(chunk: int) -> None:
    (prompt,) = random_prompts(59)
    staged, larger = Sees(), Sees()
    plans = [
        Plan.uniform(staged, budget=10, buffer=4, prefill_buffer=20),
        Plan.uniform(larger, budget=10, buffer=20),
    ]
    for plan in plans:
        Engine(llama(), plan=plan, chunk=chunk).generate(requests([prompt], 2)).results()
    assert len(larger.seen) == 2  # after 30 and 50 tokens: 9 rows behind the budget are left
    assert len(staged.seen) == 3
    assert [len(one) for one in staged.seen] == [len(one) for one in larger.seen] + [10]
    for ours, theirs in zip(staged.seen, larger.seen, strict=False):
        for mine, yours in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, yours)
    assert staged.seen[-1][2].shape[2] == 19


# The default


@pytest.mark.parametrize(
    ("budget", "buffer", "expected"),
    [(12, 8, 8), (255, 32, 32), (256, 32, 256), (512, 64, 512), (4096, 128, 1024), (256, 300, 300)],
)
def test_a_plan_that_names_none_has_the_budget_unless_that_is_small(
    budget: int, buffer: int, expected: int
) -> None:
    left_open, named, like_the_buffer = (
        Plan.uniform("h2o", budget=budget, buffer=buffer, prefill_buffer=given).resolve(2)
        for given in (None, expected, buffer)
    )
    assert left_open == named
    assert left_open.digest() == named.digest()
    assert left_open.stages == (expected > buffer)
    assert (left_open.digest() != like_the_buffer.digest()) == left_open.stages


@pytest.mark.parametrize(
    "changes", [{"heads": "shared"}, {"prompt": "keep"}, {"padding": "stored"}], ids=str
)
def test_where_rows_cannot_lie_beside_slots_the_default_is_the_buffer(
    changes: dict[str, Any],
) -> None:
    resolved = Plan.uniform("h2o", budget=300, buffer=8, **changes).resolve(2)
    assert not resolved.stages
    assert resolved == Plan.uniform(
        "h2o", budget=300, buffer=8, prefill_buffer=8, **changes
    ).resolve(2)


def test_layers_with_a_sliding_window_have_chunks_of_the_buffer_by_default() -> None:
    model = family_model("gemma2")
    windows = [i for i, kind in enumerate(model.config.layer_types) if kind.startswith("sliding")]
    others = [i for i in range(model.config.num_hidden_layers) if i not in windows]
    plan = Plan.uniform("h2o", budget=256, buffer=2)
    groups = [LayerGroup(windows, plan.stack, prefill_buffer=2), LayerGroup(others, plan.stack)]
    asked = requests(random_prompts(300, 23))
    ours, theirs = (
        Engine(model, plan=one, slots=2).generate(asked)
        for one in (plan, attrs.evolve(plan, layers=groups))
    )
    assert ours.cache.num_bytes == theirs.cache.num_bytes
    for one, other in zip(ours.results(), theirs.results(), strict=True):
        assert one.tokens == other.tokens
    found = footprint(plan, model, slots=2, longest=400)
    shown = ["prefill_buffer" in one for one in found.to_dict()["layers"]]
    assert shown == [i in others for i in range(len(shown))]


def test_a_prompt_enters_in_forwards_of_a_thousand_tokens() -> None:
    model = tiny_model(num_layers=1, max_position_embeddings=4096)
    engine = Engine(model, plan=Plan.uniform("streaming", budget=600, buffer=8), slots=2)
    shapes = shapes_of_forwards(model)
    (result,) = engine.generate(requests(random_prompts(2500), 1)).results()
    assert [shape[1] for shape in shapes] == [1024, 176, 600, 600, 100]
    assert result.compactions == 3
    assert result.peak_rows == 608  # in its slot


def test_prompts_that_fit_into_their_slots_see_no_change_and_no_memory() -> None:
    model, asked = shared_model("llama"), requests(random_prompts(260, 7, 16), 30)
    named = Plan.uniform("rkv", budget=256, buffer=4, prefill_buffer=4)
    ours, theirs = (
        Engine(model, plan=plan, slots=2).generate(asked)
        for plan in (Plan.uniform("rkv", budget=256, buffer=4), named)
    )
    assert ours.cache.num_bytes == theirs.cache.num_bytes
    assert [one.tokens for one in ours.results()] == [one.tokens for one in theirs.results()]


def test_there_are_no_more_rows_beside_slots_than_the_longest_prompt_has() -> None:
    model, plan = shared_model("llama"), Plan.uniform("streaming", budget=256, buffer=4)
    beside = [
        Engine(model, plan=plan, slots=2).generate(requests(random_prompts(num, 9), 50)).cache
        for num in (260, 261, 400)
    ]
    row = NUM_LAYERS * 2 * (2 * 8 * 4 + 8)  # two heads of keys, values and a position
    sizes = [cache.num_bytes for cache in beside]
    assert [size - sizes[0] for size in sizes] == [0, 2 * row, 140 * row]


def test_a_policy_cache_has_chunks_of_the_buffer_by_default() -> None:
    model = shared_model("llama")
    (prompt,) = random_prompts(300)
    cache = PolicyCache(model, Plan.uniform("h2o", budget=256, buffer=4))
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            **cache_argument(cache),
        )
    plan = Plan.uniform("h2o", budget=256, buffer=4, prefill_buffer=4)
    (result,) = Engine(model, plan=plan).generate(requests([prompt])).results()
    assert tokens[0, 300:].tolist() == list(result.tokens)
    snapshot = cache.snapshot(0)
    assert snapshot.contents.layers[0].positions.shape[1] <= 260


def test_a_policy_cache_takes_a_snapshot_unless_it_has_rows_beside_its_slot() -> None:
    (request,), model = requests(random_prompts(430)), llama()
    plan = Plan.uniform("streaming", budget=256, buffer=4)
    engine = Engine(model, plan=plan, slots=1, chunk=100)
    (result,) = engine.generate([request]).results()
    cache = PolicyCache(model, plan)
    assert result.snapshot is not None
    cache.restore([result.snapshot])
    assert cache.report.rows_evicted == result.rows_evicted
    run = engine.open_run(max_len=500)
    number = run.submit(request)
    for _ in range(3):
        run.step()
    with pytest.raises(CacheError, match="prefill_buffer"):
        cache.restore([run.snapshot(number)])


def test_a_plan_that_is_written_leaves_open_what_was_and_names_what_was_named() -> None:
    def written(**options: Any) -> dict[str, Any]:
        plan = Plan.uniform("h2o", budget=300, buffer=8, **options).resolve(2)
        data = to_plan_data(plan)
        assert Plan.from_dict(data).resolve(2).digest() == plan.digest()
        return dict(data["layers"][0])

    allocated = Plan.uniform("pyramidkv", budget=134, knobs={"pyramidkv": {"beta": 29.0}}).resolve(
        2
    )
    again = Plan.from_dict(to_plan_data(allocated)).resolve(2)
    assert max(layer.budget or 0 for layer in again.layers) >= 256
    assert again.digest() == allocated.digest()
    assert "prefill_buffer" not in written()
    assert written(prefill_buffer=8)["prefill_buffer"] == 8
    assert written(prefill_buffer=400)["prefill_buffer"] == 400


# Batches, turns, snapshots, prefixes


PLANS = {
    "streaming": Plan.uniform("streaming", budget=12, buffer=4, prefill_buffer=18),
    "rkv": Plan.uniform("rkv", budget=12, buffer=4, prefill_buffer=13),
    "mixed": Plan(
        layers=[
            LayerGroup([0], ["h2o"], 14, 3, prefill_buffer=30),
            LayerGroup([1], ["tova"], 10, 6),
        ]
    ),
    "beside full": Plan(
        layers=[
            LayerGroup([0], ["full"]),
            LayerGroup([1], ["keydiff", "merge"], 10, 6, prefill_buffer=11),
        ]
    ),
}
LENGTHS = (3, 41, 70, 25, 17, 55, 16)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", list(PLANS))
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_batch_equals_each_prompt_alone_also_when_prompts_wait_for_a_lane(
    name: str, lanes: int
) -> None:
    asked, plan = requests(random_prompts(*LENGTHS)), PLANS[name]
    alone = Engine(llama(), plan=plan, slots=1)
    # A lane for a quarter of the memory of the slots, if a forward takes so many prompts.
    engine = Engine(llama(), plan=plan, slots=8, chunk=9, max_tokens_per_forward=30 * lanes)
    together = engine.generate(asked).results()
    run = engine.open_run(max_len=500)  # prompts and decode steps take turns
    numbers = [run.submit(one) for one in asked]
    results: dict[int, Any] = {}
    while len(results) < len(numbers):
        results |= {one.id: one for one in run.step().results}
    for number, request in zip(numbers, asked, strict=True):
        (theirs,) = alone.generate([request]).results()
        assert_same(together[number], theirs)
        assert_same(results[number], theirs)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", list(PLANS))
def test_a_prefix_store_changes_nothing(name: str) -> None:
    first, *others = random_prompts(60, 9, 20)
    asked = requests([first, [*first[:44], *others[0]], [*first[:29], *others[1]], first])
    plain = Engine(llama(), plan=PLANS[name], slots=2).generate(asked).results()
    store = PrefixStore(2**24, block_tokens=4)
    engine = Engine(llama(), plan=PLANS[name], slots=2, prefix_store=store)
    for _ in range(2):
        for ours, theirs in zip(engine.generate(asked).results(), plain, strict=True):
            assert_same(ours, theirs)
    assert store.stats.reused_tokens > 100


@pytest.mark.few(2)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_a_prompt_goes_on_from_a_snapshot_in_its_middle(num_steps: int) -> None:
    request, plan = requests(random_prompts(57))[0], PLANS["rkv"]
    engine = Engine(llama(), plan=plan, slots=2, chunk=10)
    (whole,) = engine.generate([request]).results()
    run = engine.open_run(max_len=500)
    number = run.submit(request)
    for _ in range(num_steps):
        run.step()
    snapshot = run.snapshot(number)
    assert snapshot.seq_len < len(request.prompt)
    beside = run.submit(attrs.evolve(request, prompt=(), resume=snapshot))
    results: dict[int, Any] = {}
    while len(results) < 2:
        results |= {one.id: one for one in run.step().results}
    assert_same(results[number], whole)
    resumed = attrs.asdict(results[beside], recurse=False)
    assert (resumed["tokens"], resumed["error"]) == (whole.tokens, None)
    contents = [results[beside].snapshot.contents.layers, whole.snapshot.contents.layers]
    for ours, theirs in zip(*contents, strict=True):
        assert torch.equal(ours.positions, theirs.positions)


@pytest.mark.parametrize("name", ["streaming", "mixed"])
def test_what_ends_in_the_middle_of_its_prompt_makes_room_for_others(name: str) -> None:
    """Nothing of what its rows have received is left in the lane."""
    first, second = requests(random_prompts(60, 61))
    engine = Engine(llama(), plan=PLANS[name], slots=2, chunk=9, max_tokens_per_forward=9)
    (whole,) = engine.generate([second]).results()
    run = engine.open_run(max_len=500)
    numbers = [run.submit(first), run.submit(second)]
    for _ in range(3):
        run.step()
    run.cancel(numbers[0])
    results: dict[int, Any] = {}
    while len(results) < 2:
        results |= {one.id: one for one in run.step().results}
    assert results[numbers[0]].finish_reason == "cancelled"
    assert_same(results[numbers[1]], whole)


@attrs.define(eq=False)
class Fails:
    """Fails once a prompt is longer than it likes."""

    @hookimpl
    def score(self, positions: Tensor, seq_len: Tensor) -> Tensor:
        if seq_len.max() > 60:
            msg = "too long"
            raise ValueError(msg)
        return positions.double()


def test_a_policy_that_fails_ends_its_own_sequence_only() -> None:
    asked = requests(random_prompts(70, 40, 71, 33))
    plan = Plan.uniform(Fails(), budget=12, buffer=4, prefill_buffer=18)
    engine = Engine(llama(), plan=plan, slots=2, on_hook_error="answer", max_tokens_per_forward=36)
    results = engine.generate(asked).results()
    assert [one.finish_reason for one in results] == ["error", "length", "error", "length"]


# Memory


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_the_allocator_counts_what_the_cache_reports(num_prompts: int) -> None:
    shape = LayerShape(8, 4, 32, torch.float32, torch.device("cpu"))
    slab = Slab(40, tracks=("attn_sums",), staging=Staging(300, num_prompts))
    caches: list[KVCache] = []
    peak = peak_allocated(lambda: caches.append(KVCache([shape] * 4, [slab] * 4, 8)))
    assert peak == pytest.approx(caches[0].num_bytes, rel=0.02)
    rows = 8 * 40 + num_prompts * 300
    assert caches[0].num_bytes == 4 * rows * 4 * (2 * 32 * 4 + 8 + 4)


@pytest.mark.parametrize(
    ("slots", "max_tokens", "num_staged"),
    [(24, 8192, 2), (36, 8192, 3), (36, 200, 2), (36, 64, 1), (4, 8192, 1), (36, 10, 1)],
)
def test_memory_is_slots_and_one_staging_area_known_beforehand(
    slots: int, max_tokens: int, num_staged: int
) -> None:
    model = shared_model("llama")
    plan = Plan.uniform("h2o", budget=24, buffer=8, prefill_buffer=100)
    plain = Plan.uniform("h2o", budget=24, buffer=8, prefill_buffer=8)
    limits = {"longest": 200, "max_tokens_per_forward": max_tokens}
    found = footprint(plan, model, slots=slots, **limits)
    without = footprint(plain, model, slots=slots, **limits)
    assert found.bytes_per_slot == without.bytes_per_slot
    per_row = found.layers[0].kv_bytes_per_row + found.layers[0].other_bytes_per_row
    assert found.staging_bytes == num_staged * 92 * per_row * len(found.layers)
    assert found.num_bytes == without.num_bytes + found.staging_bytes
    engine = Engine(model, plan=plan, slots=slots, max_tokens_per_forward=max_tokens)
    run = engine.open_run(max_len=200)
    for one in requests(random_prompts(150, 150, 150), 10):
        run.submit(one)
    run.close()
    run.results()
    assert run.cache.num_bytes == found.num_bytes
    assert run.report.peak_kv_bytes <= found.num_bytes + found.copied_bytes


@pytest.mark.parametrize(("num_layers", "chunk"), [(8, 512), (1, 40)])
def test_copies_are_bounded_by_lanes_however_many_prompts_and_layers_there_are(
    num_layers: int, chunk: int
) -> None:
    model = shared_model("llama", num_layers=num_layers)
    plan = Plan.uniform("streaming", budget=24, buffer=8, prefill_buffer=300)
    found = footprint(plan, model, slots=8, longest=160, max_tokens_per_forward=400)
    engine = Engine(model, plan=plan, slots=8, chunk=chunk, max_tokens_per_forward=400)
    run = engine.generate(requests(random_prompts(150, *[30] * 7), 2))
    run.results()
    assert found.num_staged == 1
    assert run.cache.transient_bytes <= found.copied_bytes


@pytest.mark.parametrize("num_slots", [1, 2, 3, 9])
def test_the_slots_of_a_memory_are_as_many_as_fit_beside_the_staging_area(num_slots: int) -> None:
    model = shared_model("llama")
    plan = Plan.uniform("h2o", budget=24, buffer=8, prefill_buffer=100)
    limits = {"longest": 200, "max_tokens_per_forward": 200}
    needed = footprint(plan, model, slots=num_slots, **limits).needed_bytes
    assert slots_within(needed, plan, model, **limits) == num_slots
    if num_slots > 1:
        assert slots_within(needed - 1, plan, model, **limits) == num_slots - 1


def test_forwards_and_compactions_of_staged_rows_report_their_copies() -> None:
    shape = LayerShape(8, 4, 32, torch.float32, torch.device("cpu"))
    cache = KVCache([shape], [Slab(40, staging=Staging(280, 2))], 4)
    cache.num_prompt[:2] = 400

    def forward() -> None:
        new = torch.zeros(2, 2, shape.num_kv_heads, 300, shape.head_dim)
        step = EagerStep(cache, [0, 1], [300, 300])
        step.store(0, *new)
        step.commit()

    peak = peak_allocated(forward)
    assert cache.transient_bytes == 2 * 300 * shape.row_bytes
    assert cache.transient_bytes <= peak <= 3 * cache.transient_bytes  # with the new rows
    cache.counts.transient_bytes = 0
    keep = torch.arange(200, 230).expand(2, shape.num_kv_heads, -1)
    peak = peak_allocated(lambda: LayerRows(cache, 0, [0, 1]).keep(keep))
    assert cache.transient_bytes <= peak <= 1.5 * cache.transient_bytes
    assert cache.layers[0].positions[0, 0, :31].tolist() == [*range(200, 230), -1]


# What it does not serve


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": "shared"},
        {"prompt": "keep"},
        {"padding": "stored"},
        {"prefill_buffer": 3},
    ],
    ids=str,
)
def test_what_it_does_not_serve_is_refused_by_name(changes: dict[str, Any]) -> None:
    options = {"budget": 16, "buffer": 4, "prefill_buffer": 32} | changes
    with pytest.raises(PlanError, match="prefill_buffer"):
        Plan.uniform("h2o", **options).resolve(2)


def test_a_layer_with_a_sliding_window_is_refused_and_may_be_left_out() -> None:
    model = family_model("gemma2")
    windows = [i for i, kind in enumerate(model.config.layer_types) if kind.startswith("sliding")]
    plan = Plan.uniform("streaming", budget=8, buffer=4, prefill_buffer=16)
    with pytest.raises(PlanError, match=f"layer {windows[0]} a prefill_buffer"):
        Engine(model, plan=plan)
    others = [i for i in range(model.config.num_hidden_layers) if i not in windows]
    stack = plan.stack
    groups = [LayerGroup(windows, stack, prefill_buffer=4), LayerGroup(others, stack)]
    split = attrs.evolve(plan, layers=groups)
    asked = requests(random_prompts(40, 23))
    together = Engine(model, plan=split, slots=2).generate(asked).results()
    for request, ours in zip(asked, together, strict=True):
        (theirs,) = Engine(model, plan=split, slots=1).generate([request]).results()
        assert ours.tokens == theirs.tokens


def test_a_policy_cache_refuses_it() -> None:
    plan = Plan.uniform("streaming", budget=8, buffer=4, prefill_buffer=16)
    with pytest.raises(KVPolicyError, match="prefill_buffer"):
        PolicyCache(shared_model("llama"), plan)
