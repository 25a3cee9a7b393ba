"""With ``prompt = "keep"`` the rows of prompts stay, and policies choose from those behind them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from families import family_model
from hypothesis import given
from hypothesis import strategies as st
from list_reference import reference_tokens
from rated import list_layers, ratings
from strategies import costly, plans, prompts
from tiny import greedy_tokens, shared_model, tiny_model
from torch import Tensor

from kvpolicy import (
    Engine,
    Lookahead,
    Memory,
    Plan,
    Request,
    SequenceSnapshot,
    hookimpl,
    observed_weights,
)
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import Tracks
from kvpolicy.engine.evictor import Evictor
from kvpolicy.engine.memory.footprint import footprint
from kvpolicy.engine.requests.results import Result
from kvpolicy.engine.tracing import recording
from kvpolicy.lab.sweep.recording import NEVER, record_kept_rows
from kvpolicy.plan.resolved import ResolvedPlan

NUM_LAYERS = 2
NEW_TOKENS = 24

chunks = st.sampled_from([1, 2, 5, 11, 512])
kept_plans = plans(num_layers=NUM_LAYERS, min_budget=12, max_budget=14).map(
    lambda plan: attrs.evolve(plan, prompt="keep")
)
models = st.builds(
    shared_model,
    st.sampled_from(["llama", "qwen3"]),
    seed=st.integers(0, 3),
    num_layers=st.just(NUM_LAYERS),
)


# What is kept


@attrs.define(eq=False)
class Checked:
    """Scores by `rating`; notes the positions that it is shown, and is due as told."""

    every: int = 0
    shown: list[Tensor] = attrs.field(factory=list)

    @hookimpl
    def score(self, positions: Tensor, prompt_len: Tensor) -> Tensor:
        self.shown.append(positions.clone())
        assert (positions >= prompt_len[:, None, None]).all()
        return ratings(positions)

    @hookimpl
    def due(self, num_rows: Tensor, seq_len: Tensor, prompt_len: Tensor, budget: int) -> Tensor:
        assert (num_rows <= (seq_len - prompt_len).clamp(min=0)).all()
        return seq_len % self.every == 0 if self.every else seq_len < 0


@contextmanager
def every_compaction_checked(monkeypatch: pytest.MonkeyPatch, plan: ResolvedPlan) -> Iterator[None]:
    """Checks after every forward that prompts are whole and the rows behind them within bounds."""
    evict = Evictor.evict
    keys_of: dict[int, Tensor] = {}

    def evict_and_check(self: Evictor, sequences: Any) -> None:
        evict(self, sequences)
        for seq in sequences:
            assert_prompt_is_held(self._cache, plan, seq, keys_of)

    with monkeypatch.context() as patched:
        patched.setattr(Evictor, "evict", evict_and_check)
        yield


def assert_prompt_is_held(cache: KVCache, plan: ResolvedPlan, seq: Any, keys_of: Any) -> None:
    num_in = min(int(cache.seq_len[seq.slot]), len(seq.prompt))
    for layer, layer_plan in zip(cache.layers, plan.layers, strict=True):
        positions = layer.positions[seq.slot, :, :num_in]
        assert torch.equal(positions, torch.arange(num_in).expand_as(positions))
        keys = layer.keys[seq.slot, :, :num_in]
        known = keys_of.setdefault((seq.id, layer_plan.layer_idx, num_in), keys.clone())
        assert torch.equal(keys, known)
        num_rows = int(cache.rows[layer_plan.layer_idx, seq.slot])
        behind = num_rows - num_in
        assert (layer.positions[seq.slot, :, num_in:num_rows] >= num_in).all()
        if layer_plan.bounded:
            most = layer_plan.budget + layer_plan.buffer
            assert behind < most or (behind == most and seq.finish_reason is not None)
        assert seq.compactions == 0 or len(seq.prompt) == num_in, "a compaction in the prefill"


@costly
@given(st.data(), models, kept_plans, prompts(count=4, max_len=40), chunks, st.booleans())
def test_prompts_are_whole_at_every_moment_under_every_policy(
    data: st.DataObject,
    model: torch.nn.Module,
    plan: Plan,
    prompts: list[list[int]],
    chunk: int,
    eager: bool,
) -> None:
    engine = Engine(model, plan=plan, slots=3, chunk=chunk, eager=eager)
    with pytest.MonkeyPatch.context() as patch, every_compaction_checked(patch, engine.plan):
        results = engine.generate(prompts, max_new_tokens=NEW_TOKENS).results()
    assert [result.error for result in results] == [None] * len(prompts)
    for result in results:
        most = [
            result.prompt_len + layer.budget + layer.buffer
            for layer in engine.plan.layers
            if layer.bounded
        ]
        if len(most) == NUM_LAYERS:
            assert result.peak_rows <= max(most)


@pytest.mark.slow
@costly
@given(
    st.sampled_from(["llama", "gemma2", "mistral"]),
    prompts(count=3, max_len=12),
    st.tuples(st.integers(2, 7), st.integers(1, 7), st.sampled_from([0, 0, 3, 5])),
    chunks,
    st.booleans(),
)
def test_tokens_equal_an_oracle_that_chooses_from_generated_rows_only(
    family: str,
    prompts: list[list[int]],
    rules: tuple[int, int, int],
    chunk: int,
    eager: bool,
) -> None:
    budget, buffer, every = rules
    model = family_model(family)
    plan = Plan.uniform(Checked(every), budget=budget, buffer=buffer, prompt="keep")
    engine = Engine(model, plan=plan, slots=2, chunk=chunk, eager=eager)
    results = engine.generate(prompts, max_new_tokens=12).results()
    for prompt, result in zip(prompts, results, strict=True):
        layers = list_layers(engine, budget, buffer, every, len(prompt))
        assert list(result.tokens) == reference_tokens(model, layers, prompt, 12)
        assert sum(layer.num_compactions for layer in layers) or not result.rows_evicted


# The same decision by other means: all rows are shown, and a policy pins those of the prompt


@attrs.define(eq=False)
class Attention:
    """Scores by all that attention has told: weights, sums, queries and a track."""

    tracks: ClassVar[tuple[str, ...]] = ("age",)
    window_size: int = 3
    num_behind: int | None = None  # rows at the end that it chooses from; None: all
    kept: list[tuple[int, Tensor]] = attrs.field(factory=list)

    @hookimpl
    def score(
        self,
        layer_idx: int,
        keys: Tensor,
        positions: Tensor,
        queries: Tensor,
        attn_weights: Tensor,
        attn_sums: Tensor,
        prompt_len: Tensor,
        tracks: Tracks,
    ) -> Tensor:
        tracks["age"] = tracks["age"] + 1
        by_head = attn_weights.unflatten(1, (keys.shape[1], -1)).sum(dim=(2, 3))
        grouped = queries.unflatten(1, (keys.shape[1], -1)).mean(dim=(2, 3))
        products = (keys * grouped[:, :, None]).sum(dim=-1)
        scores = by_head + 0.3 * attn_sums + 0.01 * products + 0.02 * tracks["age"]
        in_prompt = positions < prompt_len[:, None, None]
        return scores.masked_fill(in_prompt, torch.inf)

    @hookimpl
    def select(self, layer_idx: int, positions: Tensor, scores: Tensor, budget: int) -> Tensor:
        keep = scores.topk(budget, dim=2).indices.sort(dim=2).values
        self.kept.append((layer_idx, positions.gather(2, keep)))
        return keep


@costly
@given(prompts(count=1, max_len=20), st.integers(1, 6), st.integers(1, 5), st.integers(0, 3))
def test_a_plan_that_keeps_prompts_equals_a_policy_that_pins_them(
    prompts: list[list[int]], budget: int, buffer: int, seed: int
) -> None:
    """For one prompt, the other plan needs as many rows more as it has tokens."""
    model = shared_model("llama", seed=seed, dtype=torch.float64)
    (prompt,) = prompts
    given_policies = Attention(), Attention()
    plans = (
        Plan.uniform(given_policies[0], budget=budget, buffer=buffer, prompt="keep"),
        Plan.uniform(given_policies[1], budget=len(prompt) + budget, buffer=buffer),
    )
    runs = [Engine(model, plan=plan).generate(prompts, max_new_tokens=20) for plan in plans]
    kept, pinned = (run.results()[0] for run in runs)
    assert kept.tokens == pinned.tokens
    assert (kept.compactions, kept.rows_evicted) == (pinned.compactions, pinned.rows_evicted)
    assert kept.peak_rows == pinned.peak_rows
    behind, all_rows = (policy.kept for policy in given_policies)
    assert len(behind) == len(all_rows)
    for (layer, one), (other_layer, other) in zip(behind, all_rows, strict=True):
        assert layer == other_layer
        assert torch.equal(one, other[:, :, len(prompt) :])


def test_tracks_and_attention_of_a_call_belong_to_their_sequences() -> None:
    """Three prompts of different lengths in one call, and each of them alone."""
    model = tiny_model("llama", dtype=torch.float64)
    prompts = [[3, 5] * 2, [4, 8, 1] * 6, [5]]

    def run(some: list[list[int]]) -> tuple[list[tuple[int, ...]], list[tuple[int, Tensor]]]:
        policy = Attention()
        plan = Plan.uniform(policy, budget=4, buffer=3, prompt="keep")
        results = Engine(model, plan=plan, slots=3).generate(some, max_new_tokens=25).results()
        return [result.tokens for result in results], policy.kept

    tokens, kept = run(prompts)
    for index, prompt in enumerate(prompts):
        (alone,), kept_alone = run([prompt])
        assert tokens[index] == alone
        for (layer, rows), (layer_alone, rows_alone) in zip(kept, kept_alone, strict=True):
            assert layer == layer_alone
            assert torch.equal(rows[index], rows_alone[0])


def test_prompts_of_different_lengths_are_asked_about_together() -> None:
    policy = Checked()
    plan = Plan.uniform(policy, budget=4, buffer=4, prompt="keep")
    engine = Engine(shared_model("llama"), plan=plan, slots=3)
    engine.generate([[3] * 2, [4] * 9, [5] * 30], max_new_tokens=10).results()
    (shown,) = policy.shown
    assert shown.shape == (3 * NUM_LAYERS, 2, 8)
    starts = torch.tensor([2, 9, 30] * NUM_LAYERS)[:, None, None]
    assert torch.equal(shown, (starts + torch.arange(8)).expand(-1, 2, -1))


@costly
@given(models, prompts(max_len=40), st.integers(1, 4), chunks)
def test_tokens_equal_generate_if_no_answer_exceeds_its_budget(
    model: torch.nn.Module, prompts: list[list[int]], slots: int, chunk: int
) -> None:
    plan = Plan.uniform("h2o", "protect", budget=16, buffer=8, prompt="keep")
    engine = Engine(model, plan=plan, slots=slots, chunk=chunk)
    for prompt, result in zip(
        prompts, engine.generate(prompts, max_new_tokens=24).results(), strict=True
    ):
        assert list(result.tokens) == greedy_tokens(model, prompt, 24)
        assert result.compactions == 0


@attrs.define(eq=False)
class LooksAhead:
    """Scores by the attention of two tokens that the model would write next."""

    lookahead_size: ClassVar[int] = 2

    @hookimpl
    def lookahead(self) -> Lookahead:
        return Lookahead(num_greedy=2)

    @hookimpl
    def score(
        self, keys: Tensor, positions: Tensor, seq_len: Tensor, lookahead_queries: Tensor
    ) -> Tensor:
        after = seq_len + lookahead_queries.shape[2]
        weights = observed_weights(lookahead_queries, keys, positions, after)
        return weights.unflatten(1, (keys.shape[1], -1)).sum(dim=(2, 3))


def test_a_lookahead_leaves_prompts_that_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    plan = Plan.uniform(LooksAhead(), budget=5, buffer=3, prompt="keep")
    prompts = [[3, 5] * 2, [4, 8, 1] * 6, [5]]
    engine = Engine(model, plan=plan, slots=3)
    with every_compaction_checked(monkeypatch, engine.plan):
        results = engine.generate(prompts, max_new_tokens=25).results()
    for prompt, result in zip(prompts, results, strict=True):
        (alone,) = engine.generate([prompt], max_new_tokens=25).results()
        assert (result.tokens, result.rows_evicted) == (alone.tokens, alone.rows_evicted)
        assert result.rows_evicted > 0


@pytest.mark.few(2)
@pytest.mark.parametrize(("num_prompt", "longest"), [(9, 9), (9, 60), (14, 14), (30, 30)])
def test_rows_of_a_prompt_that_left_the_window_are_dropped_at_a_compaction(
    num_prompt: int, longest: int
) -> None:
    """Also where the slab holds a whole window, which slides on between compactions."""
    window, prompt = 16, [3, 9, 4, 1, 6, 2] * 5
    prompt = prompt[:num_prompt]
    held: list[tuple[int, int]] = []

    @attrs.define(eq=False)
    class Notes:
        @hookimpl
        def score(
            self, layer_idx: int, positions: Tensor, seq_len: Tensor, memory: Memory
        ) -> Tensor:
            for own, num in zip(memory.of(self), seq_len.tolist(), strict=True):
                slot = own.setdefault("slot", run.active[0].slot)
                if layer_idx == 0 and len(seq_len) == 1:
                    held.append((num, int(run.cache.prompt_rows[0, slot])))
            return positions.double()

    model = family_model("mistral", window=window)
    plan = Plan.uniform(Notes(), budget=3, buffer=2, prompt="keep")
    requests = [Request(prompt, 30), Request([5] * longest, 1)]
    run = Engine(model, plan=plan, slots=2).generate(requests, stop_ids=())
    run.results()
    assert len(held) > 5
    for seq_len, num in held:
        assert num == max(len(prompt) - max(seq_len - window + 1, 0), 0)


# Memory


@pytest.mark.few(1)
@pytest.mark.parametrize("eager", [True, False])
def test_slabs_have_room_for_the_longest_prompt_of_the_run(eager: bool) -> None:
    model = shared_model("llama")
    plan = Plan.uniform("h2o", "protect", budget=12, buffer=4, prompt="keep")
    run = Engine(model, plan=plan, slots=2, eager=eager).generate(
        [[3] * 10, [4] * 5, [5] * 33], max_new_tokens=60
    )
    results = run.results()
    assert run.cache.capacity.tolist() == [33 + 12 + 4] * NUM_LAYERS
    assert [result.peak_rows for result in results] == [26, 21, 49]
    counted = footprint(plan, model, slots=2, longest=33 + 60, longest_prompt=33)
    assert counted.num_bytes == run.cache.num_bytes
    assert run.report.peak_kv_bytes == run.cache.num_bytes + run.cache.transient_bytes


@pytest.mark.nightly
def test_memory_does_not_depend_on_the_length_of_answers() -> None:
    plan = Plan.uniform("streaming", budget=12, buffer=4, prompt="keep")
    peaks = []
    for length in (60, 200):
        engine = Engine(shared_model("llama"), plan=plan, slots=2)
        run = engine.generate([[3] * 40] * 3, max_new_tokens=length)
        assert {result.peak_rows for result in run.results()} == {56}
        peaks.append(run.report.peak_kv_bytes)
    assert peaks[0] == peaks[1]


def test_an_unknown_prompt_may_be_as_long_as_the_sequence() -> None:
    plan = Plan.uniform("h2o", "protect", budget=12, buffer=4, prompt="keep")
    found = footprint(plan, shared_model("llama"), slots=2, longest=100)
    assert {layer.rows_per_slot for layer in found.layers} == {100}


def test_layers_without_a_budget_are_as_they_were() -> None:
    full = Plan.uniform("full", prompt="keep").resolve(2)
    assert [layer.capacity(100, 20) for layer in full.layers] == [100, 100]
    pairs = zip(full.layers, full.stacks(), strict=True)
    assert [layer.slab(stack, 100, 20).room for layer, stack in pairs] == [None, None]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["snapkv", "pyramidkv"])
def test_a_policy_that_compacts_prompts_only_evicts_nothing(name: str) -> None:
    model = shared_model("llama")
    knobs = {name: {"phase": "prefill", "window_size": 4}}
    plan = Plan.uniform(name, budget=12, knobs=knobs, prompt="keep")
    (result,) = Engine(model, plan=plan).generate([[3, 4] * 20], max_new_tokens=30).results()
    assert result.rows_evicted == 0
    assert list(result.tokens) == greedy_tokens(model, [3, 4] * 20, 30)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_resumed_sequence_has_the_rows_of_its_first_prompt(family: str, tmp_path: Path) -> None:
    model = family_model(family, window=9, dtype=torch.float64)
    plan = Plan.uniform("h2o", budget=6, buffer=3, prompt="keep")
    prompt, turn = [3, 9, 4] * 4, [5, 5, 8] * 3

    def serve(*requests: Request) -> tuple[list[Result], list[int]]:
        run = Engine(model, plan=plan, slots=2).generate(requests, stop_ids=())
        return run.results(), run.cache.capacity.tolist()

    ((uncut,), capacity) = serve(Request(prompt, 40))
    ((first,), _) = serve(Request(prompt, 17, snapshot=True))
    assert first.snapshot is not None
    first.snapshot.save(tmp_path / "one.safetensors")
    loaded = SequenceSnapshot.load(tmp_path / "one.safetensors")
    for snapshot in (first.snapshot, loaded):
        requests = Request([], 23, resume=snapshot), Request(turn, 23, resume=snapshot)
        (going_on, other), capacity_again = serve(*requests)
        assert uncut.tokens[17:] == going_on.tokens[-23:]
        assert other.error is None
        assert capacity_again == capacity


# What is told of it


def test_num_new_counts_the_tokens_behind_a_prompt() -> None:
    seen: list[list[int]] = []

    @attrs.define(eq=False)
    class Counts:
        @hookimpl
        def score(self, positions: Tensor, num_new: Tensor) -> Tensor:
            seen.append(num_new.tolist())
            return positions.double()

    plan = Plan.uniform(Counts(), budget=4, buffer=3, prompt="keep")
    engine = Engine(shared_model("llama", num_layers=1), plan=plan)
    engine.generate([[3] * 20], max_new_tokens=15).results()
    assert seen == [[7], [3], [3]]


def test_recordings_have_the_positions_of_generated_rows() -> None:
    plan = Plan.uniform("streaming", budget=6, buffer=4, prompt="keep")
    engine = Engine(shared_model("llama"), plan=plan, slots=2)
    prompts = [[3] * 5, [4] * 17]
    with recording(engine, kept=True) as trace:
        engine.generate(prompts, max_new_tokens=40).results()
    left = [one for call in trace.calls for one in call.left]
    assert {one.request for one in left} == {0, 1}
    for one in left:
        assert min(first for first, _ in one.ranges) >= len(prompts[one.request])


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_kept_rows_of_a_prompt_are_recorded_as_kept(family: str) -> None:
    model = family_model(family, window=8)
    plan = Plan.uniform("streaming", budget=6, buffer=4, prompt="keep")
    run = Engine(model, plan=plan, slots=2).generate([[3] * 5, [4] * 17], max_new_tokens=40)
    with record_kept_rows(run, [0, 1]) as recorder:
        kept = [recorder.pop(result) for result in run]
    for one in kept:
        for layer in one.layers:
            left_at = torch.tensor(layer.left_at)[:, : one.num_prompt]
            if layer.window is None:
                assert layer.at
                assert (left_at == NEVER).all()
            assert (torch.tensor(layer.left_at)[:, one.num_prompt :] != NEVER).any() == bool(
                layer.at
            )


def test_note_says_that_prompts_stay_where_nothing_was_evicted() -> None:
    plan = Plan.uniform("h2o", "protect", budget=64, prompt="keep")
    run = Engine(shared_model("llama"), plan=plan).generate([[3] * 80], max_new_tokens=10)
    run.results()
    assert run.report.note == (
        "nothing was evicted: the longest sequence had 89 rows, and budget and buffer are "
        "64 + 32 behind the rows of its prompt, which stay"
    )


# Wrong answers


@pytest.mark.parametrize("folds", [False, True])
def test_wrong_answers_name_the_policy_although_they_are_checked_late(folds: bool) -> None:
    from kvpolicy.errors import HookResultError

    @attrs.define(eq=False)
    class Outside:
        @hookimpl
        def select(self, positions: Tensor, budget: int) -> Tensor:
            keep = torch.arange(budget) + positions.shape[2] - budget + 1
            return keep.expand(*positions.shape[:2], -1).contiguous()

    engine = Engine(
        shared_model("llama"),
        plan=Plan.uniform("streaming", Outside(), budget=6, buffer=2, prompt="keep"),
        slots=2,
    )
    run = engine.generate([[3] * 5, [4] * 9], max_new_tokens=20)
    run.evictor.defers = True
    for stack in engine.stacks:
        stack.layers_alike = folds
    with pytest.raises(HookResultError, match="outside"):
        run.results()
