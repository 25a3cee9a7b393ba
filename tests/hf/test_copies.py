"""Copies of a `PolicyCache`, and rows that are repeated, selected or reordered, as fresh caches."""

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from batches import PAD, generated_tokens, padded
from hypothesis import given
from hypothesis import strategies as st
from recorder import RecordsAndSteers
from strategies import costly, plans, prompts
from tiny import shared_model, tiny_model, tiny_tokenizer
from torch import nn
from transformers import Cache, DynamicCache

from kvpolicy import Engine, Plan, PolicyCache, hookimpl
from kvpolicy.compat import cache_argument, cache_in
from kvpolicy.errors import CacheError, SnapshotError
from kvpolicy.state import Memory

NUM_LAYERS = 2
FULL = Plan.uniform("full")
TIGHT = Plan.uniform("rkv", budget=12, buffer=4, knobs={"rkv": {"window_size": 4}})

# In double precision the order of additions does not matter.
models = st.builds(
    shared_model,
    seed=st.integers(0, 3),
    num_layers=st.just(NUM_LAYERS),
    dtype=st.just(torch.float64),
)
MORE = ([7, 8, 9], [11, 3] * 8)  # two ways to go on
Turn = Callable[[PolicyCache, list[list[int]]], list[list[int]]]


def conversation(
    model: nn.Module, start: list[list[int]], plan: Plan, **options: Any
) -> tuple[PolicyCache, list[list[int]]]:
    """A cache after a first turn, and all of the text so far."""
    cache = PolicyCache(model, plan, tiny_tokenizer(), **options)
    answers = generated_tokens(model, start, 9, past_key_values=cache)
    return cache, [row + answer for row, answer in zip(start, answers, strict=True)]


def go_on(
    model: nn.Module, cache: PolicyCache, text: list[list[int]], more: list[int]
) -> tuple[list[list[int]], Any]:
    """The answers of a second turn, and what it did to the cache."""
    answers = generated_tokens(model, [row + more for row in text], 12, past_key_values=cache)
    return answers, contents(cache)


def contents(cache: PolicyCache) -> Any:
    """The report without seconds, and without the bytes that copying takes."""
    return attrs.evolve(cache.report, policy_s=0.0, peak_kv_bytes=0)


@pytest.mark.nightly
@given(models, prompts(max_len=30), plans(num_layers=NUM_LAYERS), st.sampled_from([3, 512]))
def test_continuations_of_copies_equal_those_of_fresh_caches(
    model: nn.Module, start: list[list[int]], plan: Plan, chunk: int
) -> None:
    cache, text = conversation(model, start, plan, chunk=chunk)
    before = contents(cache)
    copies = [copy.deepcopy(cache) for _ in MORE]
    assert [contents(one) for one in copies] == [before] * len(MORE)
    ours = [go_on(model, one, text, more) for one, more in zip(copies, MORE, strict=True)]
    assert contents(cache) == before
    fresh = [
        go_on(model, conversation(model, start, plan, chunk=chunk)[0], text, more) for more in MORE
    ]
    assert ours == fresh
    assert go_on(model, cache, text, MORE[0]) == fresh[0]


def test_copies_have_notes_and_registers_of_their_own() -> None:
    """A policy that steers by what it has read, and a plan with `memory` in every hook."""
    model = shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)

    def begin() -> tuple[PolicyCache, list[list[int]]]:
        plan = Plan.uniform("streaming", RecordsAndSteers(), budget=12, buffer=5)
        return conversation(model, [[1, 2, 3, 4, 5], [9, 8]], plan)

    cache, text = begin()
    copies = [copy.deepcopy(cache) for _ in MORE]
    ours = [go_on(model, one, text, more) for one, more in zip(copies, MORE, strict=True)]
    fresh = [go_on(model, begin()[0], text, more) for more in MORE]
    assert ours == fresh
    assert ours[0] != ours[1]


def test_prefix_is_computed_once_and_shared() -> None:
    """As transformers' documentation reuses a prompt: one forward, then a copy for each text."""
    model = shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)
    prefix = [3, 1, 4, 1, 5, 9, 2, 6] * 3
    with torch.no_grad():
        shared = cache_in(
            model(torch.tensor([prefix]), **cache_argument(PolicyCache(model, TIGHT)))
        )
    answers = []
    for more in MORE:
        cache = copy.deepcopy(shared)
        answers += generated_tokens(model, [prefix + more], 10, past_key_values=cache)
        assert cache.report.tokens == (len(prefix) + len(more) + 9,)
    fresh = PolicyCache(model, TIGHT)
    with torch.no_grad():
        model(torch.tensor([prefix]), **cache_argument(fresh))
    assert answers[0] == generated_tokens(model, [prefix + MORE[0]], 10, past_key_values=fresh)[0]
    assert shared.report.tokens == (len(prefix),)


@pytest.mark.nightly
@given(models, prompts(count=3, max_len=30), plans(num_layers=NUM_LAYERS), st.data())
def test_selected_rows_go_on_as_alone(
    model: nn.Module, start: list[list[int]], plan: Plan, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    cache, text = conversation(model, start, plan)
    cache.batch_select_indices(torch.tensor(rows))
    width = max(map(len, text))
    chosen = [[PAD] * (width - len(text[row])) + text[row] for row in rows]
    mask = [[0] * (width - len(text[row])) + [1] * len(text[row]) for row in rows]
    more = [[7, row, 2] for row in range(len(rows))]
    ids = torch.tensor([one + new for one, new in zip(chosen, more, strict=True)])
    answer = model.generate(
        ids,
        attention_mask=torch.tensor([one + [1] * 3 for one in mask]),
        **cache_argument(cache),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=PAD,
    )
    expected = []
    for row, new in zip(rows, more, strict=True):
        alone, own_text = conversation(model, [start[row]], plan)
        expected += generated_tokens(model, [own_text[0] + new], 8, past_key_values=alone)
    assert answer[:, ids.shape[1] :].tolist() == expected


def test_repeated_rows_are_selected_by_index_or_mask() -> None:
    model = shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)
    cache, text = conversation(model, [[1, 2, 3], [5, 6]], TIGHT)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    assert cache.report.tokens == (11, 11, 10, 10)
    cache.batch_select_indices(torch.tensor([False, True, False, True]))
    assert cache.report.tokens == (11, 10)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.report.tokens == (10, 11)
    with pytest.raises(CacheError, match="2 rows"):
        cache.reorder_cache(torch.tensor([0, 2]))
    empty = PolicyCache(model, TIGHT)
    empty.batch_repeat_interleave(3)
    assert (empty.batch_size, len(text)) == (-1, 2)


BEAMS = {
    "num_beams": 3,
    "num_return_sequences": 3,
    "return_dict_in_generate": True,
    "output_scores": True,
    "pad_token_id": PAD,
    "max_new_tokens": 14,
    "do_sample": False,
}


@costly
@given(models, prompts(count=2, max_len=20))
def test_beam_search_equals_generate_if_nothing_is_evicted(
    model: nn.Module, start: list[list[int]]
) -> None:
    inputs = padded(start)
    ours = model.generate(**inputs, **BEAMS, **cache_argument(PolicyCache(model, FULL)))
    plain = model.generate(**inputs, **BEAMS)
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(ours.sequences_scores, plain.sequences_scores)


@pytest.mark.nightly
@given(models, prompts(count=2, min_len=3, max_len=20), plans(num_layers=NUM_LAYERS))
def test_beams_are_scored_as_if_each_had_a_cache_of_its_own(
    model: nn.Module, start: list[list[int]], plan: Plan
) -> None:
    """Every beam that is returned is forced, token by token, through a fresh cache."""
    inputs = padded(start)
    cache = PolicyCache(model, plan, tiny_tokenizer())
    found = model.generate(**inputs, **BEAMS, **cache_argument(cache))
    width = inputs["input_ids"].shape[1]
    for row, (sequence, score) in enumerate(
        zip(found.sequences, found.sequences_scores, strict=True)
    ):
        fresh = PolicyCache(model, plan, tiny_tokenizer())
        new, total = sequence[width:], 0.0
        given_ids = torch.tensor([start[row // 3]])
        with torch.no_grad():
            for token in new:
                logits = model(given_ids, past_key_values=fresh).logits[0, -1]
                total += float(logits.log_softmax(-1)[token])
                given_ids = token[None, None]
        assert total / len(new) == pytest.approx(float(score), abs=1e-6)


def test_model_is_restored_when_all_copies_are_deleted() -> None:
    model = tiny_model()
    before = sorted(vars(model))
    cache, text = conversation(model, [[1, 2, 3]], FULL)
    copied = copy.deepcopy(cache)
    del cache
    go_on(model, copy.deepcopy(copied), text, [4])
    del copied
    assert sorted(vars(model)) == before


def test_empty_caches_can_be_copied() -> None:
    model = shared_model(num_layers=NUM_LAYERS)
    copied = copy.deepcopy(PolicyCache(model, TIGHT))
    assert copied.report.tokens == ()
    assert generated_tokens(model, [[1, 2]], 4, past_key_values=copied) == [
        list(Engine(model, plan=TIGHT).generate([[1, 2]], max_new_tokens=4).results()[0].tokens)
    ]


@attrs.define(eq=False)
class RemembersALock:
    """Stores what cannot be copied."""

    @hookimpl
    def observe(self, token_ids: Any, memory: Memory) -> None:
        memory.of(self)[0]["lock"] = threading.Lock()


def test_memory_that_cannot_be_copied_is_named() -> None:
    model = shared_model(num_layers=NUM_LAYERS)
    plan = Plan.uniform("streaming", RemembersALock(), budget=12, buffer=4)
    cache, text = conversation(model, [[1, 2, 3]], plan)
    for attempt in (lambda: copy.deepcopy(cache), lambda: cache.batch_repeat_interleave(2)):
        with pytest.raises(CacheError, match="RemembersALock"):
            attempt()
    assert len(generated_tokens(model, [text[0] + [4]], 3, past_key_values=cache)[0]) == 3


@attrs.define(eq=False)
class CannotUnpack:
    """Remembers something that cannot be made again."""

    @hookimpl
    def observe(self, memory: Memory) -> None:
        memory.of(self)[0]["known"] = True

    def pack_memory(self, memory: dict[str, Any]) -> dict[str, Any]:
        return dict(memory)

    def unpack_memory(self, packed: object, tokenizer: object) -> dict[str, Any]:
        msg = "it cannot be made again"
        raise ValueError(msg)


def test_a_cache_that_cannot_be_restored_says_so_and_is_empty() -> None:
    model = shared_model(num_layers=NUM_LAYERS)
    plan = Plan.uniform("streaming", CannotUnpack(), budget=12, buffer=4)
    cache, _ = conversation(model, [[1, 2, 3]], plan)
    snapshot, other = cache.snapshot(0), PolicyCache(model, plan)
    with pytest.raises(SnapshotError, match="CannotUnpack"):
        other.restore([snapshot])
    assert other.report == PolicyCache(model, plan).report
    with pytest.raises(SnapshotError, match="CannotUnpack"):
        copy.deepcopy(cache)
    answers = [
        generated_tokens(model, [[4, 5]], 3, past_key_values=one)
        for one in (other, PolicyCache(model, plan))
    ]
    assert answers[0] == answers[1]


# What else caches of transformers offer


@pytest.mark.parametrize("name", sorted({*dir(Cache), *dir(DynamicCache)} - {*dir(object)}))
def test_every_public_method_of_other_caches_is_answered_for(name: str) -> None:
    """Nothing inherited acts on the empty list of layers as if it held the rows."""
    if name.startswith("__") and name not in ("__len__", "__iter__", "__repr__"):
        return
    ours, theirs = getattr(PolicyCache, name), getattr(Cache, name, None)
    assert ours is not theirs


@pytest.mark.parametrize(
    "attempt",
    [
        pickle.dumps,
        lambda cache: torch.save(cache, io.BytesIO()),
        copy.copy,
        list,
        lambda cache: cache[0],
        lambda cache: cache.layers[0].keys,
        lambda cache: cache.offload(0),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(attempt: Callable[[Any], Any]) -> None:
    cache = PolicyCache(shared_model(num_layers=NUM_LAYERS), TIGHT)
    with pytest.raises(CacheError, match=r"^a PolicyCache [^\n.]*[;,] [^\n]*$"):
        attempt(cache)


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("batch_repeat_interleave", 0),
        ("batch_repeat_interleave", 2.5),
        ("batch_select_indices", None),
        ("batch_select_indices", "a"),
        ("batch_select_indices", [7]),
    ],
)
def test_rows_that_there_cannot_be_are_refused(method: str, argument: Any) -> None:
    cache, _ = conversation(shared_model(num_layers=NUM_LAYERS), [[1, 2, 3]], TIGHT)
    with pytest.raises(CacheError, match="was asked for"):
        getattr(cache, method)(argument)


@pytest.mark.parametrize("is_empty", [False, True])
def test_caches_tell_what_they_are(is_empty: bool) -> None:
    model = shared_model(num_layers=NUM_LAYERS)
    cache = PolicyCache(model, TIGHT) if is_empty else conversation(model, [[1, 2, 3]], TIGHT)[0]
    assert len(cache) == NUM_LAYERS
    assert cache.is_sliding == cache.is_linear == cache.is_dummy == [False] * NUM_LAYERS
    assert (cache.is_initialized, cache.batch_size) == ((False, -1) if is_empty else (True, 1))
    assert cache.max_batch_size == cache.batch_size
    assert cache.get_max_length() == cache.get_max_cache_shape() == -1
    assert not any([cache.is_compileable, cache.is_croppable, cache.is_recording_past(0)])
    assert repr(cache) == (
        "PolicyCache(tokens=(), rows=())" if is_empty else "PolicyCache(tokens=(11,), rows=(11,))"
    )
    assert list(cache.layers) == []
