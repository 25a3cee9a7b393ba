"""`prompt_len` and `num_new` say what they promise; a page shows a use of them."""

import random
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from batches import generated_tokens
from families import family_model
from hypothesis import given
from hypothesis import strategies as st
from pages import blocks_of
from strategies import prompts
from tiny import shared_model, tiny_model
from torch import Tensor

from kvpolicy import Engine, Plan, PolicyCache, Request, hookimpl
from kvpolicy.cache.rows import LayerRows, Tracks
from kvpolicy.engine.tracing import recording
from kvpolicy.hooks import discovery
from kvpolicy.state import Memory
from kvpolicy.testing import keep_rows, replay

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "decay-attention.md"
NUM_LAYERS, GROUP = 2, 2


@attrs.frozen(order=True)
class Compaction:
    layer_idx: int
    seq_len: int
    prompt_len: int
    num_new: int
    budget: int


@attrs.define(eq=False)
class Notes:
    """Records the arguments of each sequence, and checks the attention that rows received."""

    tracks: ClassVar[tuple[str, ...]] = ("sums",)

    of_sequences: list[list[Compaction]] = attrs.field(factory=list)

    @hookimpl(wrapper=True)
    def score(
        self,
        layer_idx: int,
        attn_sums: Tensor,
        seq_len: Tensor,
        prompt_len: Tensor,
        num_new: Tensor,
        budget: int,
        tracks: Tracks,
        memory: Memory,
    ) -> Generator[None, Tensor, Tensor]:
        assert prompt_len.dtype == num_new.dtype == torch.int64
        # The weights of one query sum to 1 in each query head.
        received = (attn_sums - tracks["sums"]).sum(dim=2)  # [B, H_kv]
        expected = GROUP * num_new[:, None].expand(received.shape)
        torch.testing.assert_close(received, expected.to(received), rtol=1e-4, atol=1e-3)
        tracks["sums"] = attn_sums
        for b, notes in enumerate(memory.of(self)):
            if "seen" not in notes:
                notes["seen"] = []
                self.of_sequences.append(notes["seen"])
            numbers = [int(one[b]) for one in (seq_len, prompt_len, num_new)]
            notes["seen"].append(Compaction(layer_idx, *numbers, budget))
        scores = yield
        return scores

    @hookimpl(wrapper=True)
    def select(
        self, layer_idx: int, prompt_len: Tensor, memory: Memory
    ) -> Generator[None, Tensor, Tensor]:
        for b, notes in enumerate(memory.of(self)):
            newest = notes["seen"][-1]
            assert (newest.layer_idx, newest.prompt_len) == (layer_idx, int(prompt_len[b]))
        keep = yield
        return keep


def check_counts(compactions: list[Compaction]) -> None:
    """`num_new` counts tokens since the compaction before, in each layer."""
    for layer_idx in range(NUM_LAYERS):
        before = 0
        for one in compactions:
            if one.layer_idx == layer_idx:
                assert one.num_new == one.seq_len - before > 0
                before = one.seq_len


@pytest.mark.nightly
@given(
    prompts(count=4, max_len=40),
    st.integers(1, 7),
    st.sampled_from([2, 5, 512]),
    st.sampled_from([("knorm", {}), ("h2o", {"n_recent": 2, "every": 3})]),
)
def test_arguments_equal_those_of_a_policy_cache(
    prompts: list[list[int]], buffer: int, chunk: int, policy: tuple[str, dict[str, Any]]
) -> None:
    model = shared_model(num_layers=NUM_LAYERS)
    found = []
    for runner in ("engine", "cache"):
        notes = Notes()
        plan = Plan.uniform({"policy": policy[0], **policy[1]}, notes, budget=9, buffer=buffer)
        if runner == "engine":  # sequences end at different times, so that others change slots
            requests = [Request(one, max_new_tokens=18 + 5 * i) for i, one in enumerate(prompts)]
            Engine(model, plan=plan, slots=3, chunk=chunk).generate(requests).results()
        else:
            cache = PolicyCache(model, plan, chunk=chunk)
            generated_tokens(model, prompts, 18, past_key_values=cache)
        assert {one[0].prompt_len for one in notes.of_sequences} == {len(one) for one in prompts}
        for one in notes.of_sequences:
            check_counts(one)
            assert {made.budget for made in one} == {9}
        # Compared up to the last token, after which an engine compacts no more.
        ends = 18 - 1
        found.append(
            sorted(
                [made for made in one if made.seq_len < made.prompt_len + ends]
                for one in notes.of_sequences
            )
        )
    assert found[0] == found[1]


def test_prompt_of_a_later_turn_is_all_before_its_answer() -> None:
    notes = Notes()
    plan = Plan.uniform({"policy": "knorm", "n_recent": 1}, notes, budget=6, buffer=3)
    model = shared_model(num_layers=NUM_LAYERS)
    cache = PolicyCache(model, plan)
    text, turns = [1, 2, 3, 4, 5], []
    for more in ([7, 8, 9], [11] * 14, []):
        turns.append(len(text))
        (answer,) = generated_tokens(model, [text], 10, past_key_values=cache)
        text += [*answer, *more]
    (compactions,) = notes.of_sequences
    check_counts(compactions)
    for one in compactions:
        started = [turn for turn in turns if one.prompt_len == turn]
        assert started, f"{one} belongs to no turn that began with {turns} tokens"
    assert {one.prompt_len for one in compactions} == set(turns)


@pytest.mark.parametrize("chunk", [3, 512])
def test_windows_that_slide_do_not_reset_the_count(chunk: int) -> None:
    @attrs.define(eq=False)
    class Counts:
        seen: list[tuple[int, int, int]] = attrs.field(factory=list)

        @hookimpl
        def due(self, num_rows: Tensor, budget: int) -> Tensor:
            return num_rows > budget

        @hookimpl
        def score(self, layer_idx: int, seq_len: Tensor, num_new: Tensor) -> None:
            self.seen.append((layer_idx, int(seq_len), int(num_new)))

    counts = Counts()
    plan = Plan.uniform(counts, budget=4, buffer=3)
    engine = Engine(family_model("gemma3_text", window=6), plan=plan, chunk=chunk)
    engine.generate([[1, 2, 3] * 5], max_new_tokens=12).results()
    assert len(counts.seen) > 4
    for layer_idx in {layer for layer, _, _ in counts.seen}:
        of_layer = [one[1:] for one in counts.seen if one[0] == layer_idx]
        ends = [0, *(seq_len for seq_len, _ in of_layer)]
        assert [num for _, num in of_layer] == [b - a for a, b in pairwise(ends)]


def test_what_no_policy_names_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: LayerRows) -> None:
        msg = "computed, and no policy names it"
        raise AssertionError(msg)

    monkeypatch.setattr(LayerRows, "num_new", property(fail))
    plan = Plan.uniform({"policy": "knorm", "n_recent": 1}, budget=4, buffer=2)
    engine = Engine(tiny_model(), plan=plan)
    with recording(engine, hooks=["score", "select"]) as trace:
        engine.generate([[1, 2, 3]], max_new_tokens=9).results()
    assert trace.calls
    assert all("prompt_len" not in call.arguments for call in trace.calls)
    with pytest.raises(AssertionError, match="no policy names it"):
        Engine(tiny_model(), plan=Plan.uniform(Notes(), budget=4, buffer=2)).generate(
            [[1, 2, 3]], max_new_tokens=9
        ).results()


def test_traces_list_the_arguments() -> None:
    plan = Plan.uniform({"policy": "knorm", "n_recent": 1}, Notes(), budget=4, buffer=2)
    engine = Engine(tiny_model(), plan=plan)
    with recording(engine, hooks=["score", "select"]) as trace:
        engine.generate([[1, 2, 3]], max_new_tokens=6).results()
    by_hook = {call.hook: call.arguments for call in trace.calls}
    assert str(by_hook["score"]["prompt_len"]) == str(by_hook["select"]["prompt_len"]) == "int64[1]"
    assert str(by_hook["score"]["num_new"]) == "int64[1]"
    assert by_hook["score"]["budget"] == 4


def test_single_calls_pass_them() -> None:
    seen = []

    class Looks:
        @hookimpl
        def score(self, prompt_len: Tensor, num_new: Tensor, seq_len: Tensor) -> None:
            seen.append((prompt_len.tolist(), num_new.tolist(), seq_len.tolist()))

    rows = torch.randn(2, 1, 9, 4)
    keep_rows(Looks(), rows, rows, rows, budget=5)
    keep_rows(Looks(), rows, rows, rows, budget=5, prompt=7)
    replay(Looks(), rows, rows, rows, budget=3, prompt=4, compact_at=[4, 6, 9])
    assert seen == [
        ([9, 9], [9, 9], [9, 9]),
        ([7, 7], [9, 9], [9, 9]),
        ([4, 4], [4, 4], [4, 4]),
        ([4, 4], [2, 2], [6, 6]),
        ([4, 4], [3, 3], [9, 9]),
    ]


# The page


def page_policy(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **knobs: Any
) -> object:
    discovery.forget_files()
    (block,) = [block for block in blocks_of(PAGE) if block.title == title]
    (tmp_path / title).write_text(block.text)
    (name,) = discovery.load_policy_file(tmp_path / title)
    return discovery.load_policy(name, **knobs)


def softmax_weights(query: list[float], keys: list[list[float]]) -> list[float]:
    logits = [sum(a * b for a, b in zip(query, key, strict=True)) / 2.0 for key in keys]
    shares = [2.718281828459045**logit for logit in logits]
    return [share / sum(shares) for share in shares]


def loop_reference(
    keys: list[list[float]],
    queries: list[list[list[float]]],
    prompt: int,
    compact_at: list[int],
    budget: int,
    decay: float,
    *,
    by_query: bool,
) -> list[list[int]]:
    """Positions that stay, token by token; keys ``[T][D = 4]``, queries ``[G][T][D]``.

    Args:
        by_query: Whether the sums decay with every query, or with every compaction by the
            number of queries since the one before.
    """
    held: list[int] = []
    faded, received = {}, {}
    kept, num_queries = [], 0
    for token in range(len(keys)):
        held.append(token)
        faded[token] = received[token] = 0.0
        num_queries += 1
        if by_query:
            faded = {row: decay * faded[row] for row in held}
        for head in queries:
            weights = softmax_weights(head[token], [keys[row] for row in held])
            for row, weight in zip(held, weights, strict=True):
                (faded if by_query else received)[row] += weight
        if token + 1 >= prompt and token + 1 in compact_at:
            if not by_query:
                for row in held:
                    faded[row] = decay**num_queries * faded[row] + received[row]
                    received[row] = 0.0
            num_queries = 0
            held = sorted(sorted(held, key=lambda row: faded[row])[-budget:])
            kept.append(list(held))
    return kept


@pytest.mark.parametrize("decay", [0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    ("title", "by_query"), [("fading.py", False), ("fading_each.py", True)], ids=["sums", "each"]
)
def test_page_equals_a_loop(
    title: str,
    by_query: bool,
    decay: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(f"{title} {decay}")
    num_tokens, prompt, budget, compact_at = 40, 12, 6, [12, 15, 16, 24, 31, 40]
    keys = [[rng.gauss(0, 2) for _ in range(4)] for _ in range(num_tokens)]
    queries = [[[rng.gauss(0, 2) for _ in range(4)] for _ in keys] for _ in range(GROUP)]
    expected = loop_reference(keys, queries, prompt, compact_at, budget, decay, by_query=by_query)
    policy = page_policy(title, tmp_path, monkeypatch, decay=decay)
    tensor = torch.tensor([[keys]], dtype=torch.float64)
    rows = torch.tensor([queries], dtype=torch.float64)
    kept = replay(policy, tensor, tensor, rows, budget=budget, prompt=prompt, compact_at=compact_at)
    assert [one[0, 0].tolist() for one in kept] == expected
