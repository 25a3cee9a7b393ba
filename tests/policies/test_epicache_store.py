"""Episodes of a conversation: their windows, caches, router and files."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_plugins.epicache.embeddings import Embedding, encoded
from kvpolicy_plugins.epicache.episodes import Episode, group, nearest, normalised, windows_of
from kvpolicy_plugins.epicache.store import EpisodeStore, Framing, Settings, asked, prefilled
from strategies import seeds
from tiny import shared_model, tiny_tokenizer

from kvpolicy import Engine, KVPolicyError, Plan, SequenceSnapshot, load_model
from kvpolicy.lab.tasks.task import load_task


@attrs.frozen
class Said:
    utterances: tuple[str, ...]


BIRDS = [f" b{number}" for number in range(6)]
STONES = [f" s{number}" for number in range(6)]
# Two topics, left and returned to.
TALK = Said(
    tuple(
        words[turn % 6] + words[(turn + 1) % 6]
        for words, first in ((BIRDS, 0), (STONES, 4), (BIRDS, 8), (STONES, 12))
        for turn in range(first, first + 4)
    )
)
SMALL = Settings(num_episodes=2, window=2, n_medoid=2, instruction="what?")


def engine(budget: int = 10, buffer: int = 8, **options: Any) -> Engine:
    plan = Plan.uniform("epicache", budget=budget, buffer=buffer, **options)
    model = shared_model(num_layers=2, dtype=torch.float64)
    return Engine(model, tiny_tokenizer(), plan)


def hot(texts: Any) -> np.ndarray:
    """One direction for each topic."""
    return np.array([[text.count("b") + 0.1, text.count("s")] for text in texts], dtype=float)


@pytest.fixture(scope="module")
def store() -> EpisodeStore:
    return EpisodeStore.build(engine(), TALK, settings=SMALL, embed=hot)


# Windows, groups and routes


@given(st.lists(st.text(max_size=3), min_size=1, max_size=20), st.integers(1, 6))
def test_windows_are_the_utterances_in_order(utterances: list[str], size: int) -> None:
    windows = windows_of(utterances, size, "|")
    assert "".join(windows) == "".join(one + "|" for one in utterances)
    assert len(windows) == -(-len(utterances) // size)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 14), seeds)
def test_every_window_is_in_one_episode_and_medoids_are_the_nearest(
    num: int, n_medoid: int, num_windows: int, seed: int
) -> None:
    vectors = normalised(np.random.default_rng(seed).normal(size=(num_windows, 3)))
    found = group(vectors, num, n_medoid=n_medoid, seed=seed)
    assert sorted(w for one in found for w in one.windows) == list(range(num_windows))
    assert len(found) == min(num, num_windows)
    for one in found:
        inside = vectors[list(one.windows)]
        np.testing.assert_allclose(one.centroid, inside.mean(axis=0))
        near = {w: float(vectors[w] @ one.centroid) for w in one.windows}
        out = [near[w] for w in one.windows if w not in one.medoids]
        assert len(one.medoids) == min(n_medoid, len(one.windows))
        assert max(out, default=-np.inf) <= min(near[w] for w in one.medoids) + 1e-12


def test_groups_are_the_best_of_all_divisions_and_depend_on_the_seed_only() -> None:
    """Against every way to divide nine windows in two."""
    vectors = normalised(np.random.default_rng(3).normal(size=(9, 4)))

    def loss(labels: Any) -> float:
        parts = [vectors[np.array(labels) == one] for one in (0, 1)]
        return sum(float(((part - part.mean(axis=0)) ** 2).sum()) for part in parts if len(part))

    best = min(loss((0, *rest)) for rest in itertools.product((0, 1), repeat=8))
    found = group(vectors, 2, n_medoid=1, seed=5)
    labels = [0 if w in found[0].windows else 1 for w in range(9)]
    assert loss(labels) == pytest.approx(best)
    again = group(vectors, 2, n_medoid=1, seed=5)
    assert [one.windows for one in again] == [one.windows for one in found]


def test_equal_windows_make_one_episode() -> None:
    assert len(group(np.ones((5, 2)) / 2**0.5, 4, n_medoid=2)) == 1


def test_cosine_compares_directions_and_the_dot_product_lengths_too() -> None:
    """An episode whose windows are alike has a long centroid."""
    alike = Episode((0, 1), (0,), np.array([0.9, 0.0]))
    spread = Episode((2, 3), (2,), np.array([0.2, 0.2]))
    question = np.array([0.8, 0.6])
    assert nearest(question, [alike, spread]) == 1
    assert nearest(question, [alike, spread], by="dot") == 0


# Embeddings


@pytest.mark.parametrize("kind", ["states", "inputs"])
def test_embeddings_are_weighted_means_of_what_the_model_gives(kind: str) -> None:
    one = engine()
    windows = ["t7 t8 t9", "t8 t9", "t9 t1 t1"]
    found = Embedding.fitted(one, windows, kind)
    model = shared_model(num_layers=2, dtype=torch.float64)
    ids = [encoded(one, text) for text in windows]
    raw = []
    for tokens in ids:
        with torch.no_grad():
            if kind == "states":
                of_tokens = model.model(torch.tensor([tokens])).last_hidden_state[0].double()
            else:
                table = model.get_input_embeddings().weight.double()
                centred = table - table.mean(dim=0)
                values, axes = np.linalg.eigh((centred.T @ centred / len(table)).numpy())
                whiten = axes @ np.diag((values + 0.01 * values.mean()) ** -0.5) @ axes.T
                of_tokens = centred[tokens] @ torch.from_numpy(whiten)
        counts = [sum(token in other for other in ids) for token in tokens]
        weights = np.log(len(ids) / np.array(counts))
        raw.append((of_tokens.numpy() * weights[:, None]).sum(axis=0) / weights.sum())
    expected = np.stack(raw) - np.mean(raw, axis=0)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found.vectors(one, windows), expected, atol=1e-6)


def test_words_of_all_windows_and_of_none_do_not_count() -> None:
    one = engine()
    windows = ["t7 t8", "t7 t9", "t7 t3"]
    found = Embedding.fitted(one, windows, "inputs")
    (plain,) = found.vectors(one, ["t8"])
    (asked_for,) = found.vectors(one, ["t5t8t4"])
    np.testing.assert_allclose(asked_for, plain)


# Stores


def test_each_episode_is_one_topic_with_its_own_patched_prompt(store: EpisodeStore) -> None:
    assert [one.episode.windows for one in store.episodes] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    for one, letter, other in zip(store.episodes, "bs", "sb", strict=True):
        text = one.prompt.removeprefix("what?")
        assert one.prompt.startswith("what?")
        assert letter in text
        assert other not in text
        first, second = sorted(one.episode.medoids)
        windows = windows_of(TALK.utterances, 2, "\n")
        assert text == windows[first] + windows[second]
    positions = [one.snapshot.contents.layers[1].positions for one in store.episodes]
    assert not torch.equal(*positions), "the patched prompts chose other rows"


def test_questions_are_answered_from_the_cache_of_their_topic(store: EpisodeStore) -> None:
    answers = store.ask_all([" s1?", " b2?", " s3?"], max_new_tokens=4, stop_ids=())
    assert [one.episode for one in answers] == [1, 0, 1]
    assert [one.question for one in answers] == [" s1?", " b2?", " s3?"]
    alone = [store.ask(one.question, max_new_tokens=4, stop_ids=()) for one in answers]
    assert [one.result.tokens for one in alone] == [one.result.tokens for one in answers]


def test_questions_and_answers_are_dropped(store: EpisodeStore) -> None:
    before = [
        [tensor.clone() for tensor in one.snapshot.contents.tensors] for one in store.episodes
    ]
    first = store.ask(" b1?", max_new_tokens=12, stop_ids=()).result.tokens
    store.ask(" b4 b5?", max_new_tokens=30, stop_ids=())
    assert store.ask(" b1?", max_new_tokens=12, stop_ids=()).result.tokens == first
    for tensors, one in zip(before, store.episodes, strict=True):
        assert all(map(torch.equal, tensors, one.snapshot.contents.tensors))


@pytest.mark.few(2)
@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("heads", ["own", "shared"])
def test_budget_that_holds_all_gives_the_answers_of_a_full_cache(num: int, heads: str) -> None:
    """Whatever the number of episodes."""
    roomy = engine(budget=400, buffer=40, heads=heads)
    settings = attrs.evolve(SMALL, num_episodes=num)
    found = EpisodeStore.build(roomy, TALK, settings=settings, embed=hot)
    full = Engine(roomy.adapter, roomy.tokenizer, Plan.full_cache())
    framing = Framing()
    history = "".join(one + framing.joint for one in TALK.utterances)
    snapshot, *_ = prefilled(full, encoded(full, history, begins=True))
    for question in (" b1?", " s1?"):
        text = framing.before_question + question + framing.closing
        (expected,) = asked(full, snapshot, [encoded(full, text)], max_new_tokens=9, stop_ids=())
        answer = found.ask(question, max_new_tokens=9, stop_ids=())
        assert answer.result.tokens == expected.tokens


def test_one_episode_is_a_prefill_with_one_patched_prompt() -> None:
    one = engine()
    found = EpisodeStore.build(one, TALK, settings=attrs.evolve(SMALL, num_episodes=1), embed=hot)
    (episode,) = found.episodes
    knobs = {"epicache": {"prompt": episode.prompt, "lookahead_size": 500}}
    plain = Engine(
        one.adapter, one.tokenizer, Plan.uniform("epicache", budget=10, buffer=8, knobs=knobs)
    )
    history = "".join(said + "\n" for said in TALK.utterances)
    snapshot, *_ = prefilled(plain, encoded(plain, history, begins=True))
    for ours, theirs in zip(
        episode.snapshot.contents.layers, snapshot.contents.layers, strict=True
    ):
        assert torch.equal(ours.positions, theirs.positions)
        assert torch.equal(ours.keys, theirs.keys)


def test_device_holds_a_block_beside_the_budget_at_most(store: EpisodeStore) -> None:
    assert {one.peak_rows for one in store.episodes} == {18}
    row_bytes = 2 * 2 * 2 * 8 * 8
    assert store.peak_bytes <= 18 * row_bytes < store.episodes[0].full_bytes
    assert store.host_bytes == sum(one.snapshot.num_bytes for one in store.episodes)


@pytest.mark.slow
def test_a_saved_store_answers_as_before(tmp_path: Path) -> None:
    one = engine(heads="shared")
    built = EpisodeStore.build(one, TALK, settings=SMALL)
    built.save(tmp_path / "store")
    again = EpisodeStore.load(tmp_path / "store", engine(heads="shared"))
    for question in (" b1?", " s2?"):
        first = built.ask(question, max_new_tokens=8, stop_ids=())
        second = again.ask(question, max_new_tokens=8, stop_ids=())
        assert (first.episode, first.result.tokens) == (second.episode, second.result.tokens)
    assert (again.settings, again.host_bytes) == (built.settings, built.host_bytes)
    built.save(tmp_path / "store")  # over a store: nothing but a store is lost


def test_a_store_of_another_plan_is_refused_when_asked(tmp_path: Path) -> None:
    EpisodeStore.build(engine(), TALK, settings=SMALL).save(tmp_path)
    other = EpisodeStore.load(tmp_path, engine(budget=11))
    assert "budget" in str(other.ask(" b1?").result.error)


def test_stores_that_cannot_be_read_are_refused(tmp_path: Path, store: EpisodeStore) -> None:
    with pytest.raises(KVPolicyError, match="nothing"):
        EpisodeStore.load(tmp_path / "nothing", engine())
    store.save(tmp_path / "a")
    with pytest.raises(KVPolicyError, match="function"):
        EpisodeStore.load(tmp_path / "a", engine())
    index = tmp_path / "a" / "index.json"
    data = json.loads(index.read_text())
    index.write_text(json.dumps(data | {"version": 9}))
    with pytest.raises(KVPolicyError, match="version 9"):
        EpisodeStore.load(tmp_path / "a", engine(), embed=hot)
    index.write_text(json.dumps(data | {"settings": {"no": 1}}))
    with pytest.raises(KVPolicyError, match="damaged"):
        EpisodeStore.load(tmp_path / "a", engine(), embed=hot)
    data["episodes"][0]["centroid"][0] += 0.25
    index.write_text(json.dumps(data))
    with pytest.raises(KVPolicyError, match="damaged"):
        EpisodeStore.load(tmp_path / "a", engine(), embed=hot)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").write_text("mine")
    with pytest.raises(KVPolicyError, match="b'"):
        store.save(tmp_path / "b")


@pytest.mark.skipif(os.name == "nt", reason="needs modes")
def test_a_store_on_disk_is_for_this_user_only(tmp_path: Path, store: EpisodeStore) -> None:
    umask = os.umask(0)
    try:
        store.save(tmp_path / "a")
    finally:
        os.umask(umask)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()}
    assert ((tmp_path / "a").stat().st_mode & 0o777, modes) == (0o700, {0o600})


@pytest.mark.parametrize(
    ("problem", "build"),
    {
        "epicache": {
            "engine": Engine(
                shared_model(num_layers=2, dtype=torch.float64), tiny_tokenizer(), Plan.full_cache()
            )
        },
        "utterances": {"conversation": Said(())},
        "embedding": {"settings": Settings(embedding="words")},
        "finite": {"embed": lambda texts: [[float("nan")]] * len(texts)},
        "tokenizer": {
            "engine": Engine(
                shared_model(num_layers=2, dtype=torch.float64),
                plan=Plan.uniform("epicache", budget=10, buffer=8),
            )
        },
    }.items(),
)
def test_builds_that_make_no_sense_are_refused(problem: str, build: dict[str, Any]) -> None:
    given = {"engine": engine(), "conversation": TALK, "settings": SMALL} | build
    with pytest.raises(KVPolicyError, match=problem):
        EpisodeStore.build(given.pop("engine"), given.pop("conversation"), **given)


@pytest.mark.parametrize("knobs", [{"window": 0}, {"num_episodes": 1.5}, {"route": "far"}], ids=str)
def test_wrong_settings_are_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(KVPolicyError, match=next(iter(knobs))):
        Settings(**knobs)


@pytest.mark.nightly
@pytest.mark.needs_reasoner
def test_needles_survive_more_often_in_the_cache_of_their_topic() -> None:
    model, tokenizer = load_model("reasoner")
    task = load_task("conversation")
    plan = Plan.uniform("epicache", budget=48, buffer=64)
    settings = Settings(window=2, instruction="", num_episodes=4)
    own: list[float] = []
    others: list[float] = []
    for talk in task.conversations(3, seed=1):
        frame = task.frame(tokenizer)
        found = EpisodeStore.build(
            Engine(model, tokenizer, plan), talk, frame=frame, settings=settings
        )
        ends = [0]
        for number in range(len(talk.utterances)):
            text = frame.opening + "".join(talk.utterances[: number + 1])
            ends.append(len(encoded(found.engine, text)))
        for question in talk.questions:
            name = question.text.removesuffix("?").split()[-1]
            told = next(i for i, text in enumerate(talk.utterances) if f" {name} =" in text)
            for one in found.episodes:
                share = kept_share(one.snapshot, ends[told], ends[told + 1])
                (own if told // 2 in one.episode.windows else others).append(share)
    assert len(own) == 24
    assert np.mean(own) > 1.5 * np.mean(others)


def kept_share(snapshot: SequenceSnapshot, start: int, end: int) -> float:
    """The share of tokens in ``[start, end)`` that are held, over layers and heads."""
    inside = [
        (layer.positions >= start) & (layer.positions < end) for layer in snapshot.contents.layers
    ]
    held = sum(int(mask.sum()) for mask in inside)
    return held / (len(inside) * 2 * (end - start))
