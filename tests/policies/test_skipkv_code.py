"""The plans and knobs of SkipKV that follow its released code, against loops over whole texts."""

import re
from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds
from tiny import tiny_tokenizer, word_tokenizer

from kvpolicy import Engine, Plan
from kvpolicy.entry_points import installed
from kvpolicy.model.loading import load_model
from kvpolicy.plan.toml import parse_value
from kvpolicy.toolkit import Paragraphs
from skipkv_plugin.policy import SkipKV
from skipkv_plugin.sentences import Delimiters, Segmenter
from skipkv_plugin.state import SequenceState
from skipkv_plugin.steering import thinking_after_prompt

README = files("skipkv_plugin").joinpath("README.md").read_text(encoding="utf-8")
SETTINGS = [name for name in installed("kvpolicy.plans") if re.match(r"skipkv-(llama|qwen)-", name)]

WORDS = [" a", "Wait", " again", "\n", ".\n", ":", "<think>", "</think>"]
IDS = {word: number for number, word in enumerate(WORDS)}
TOKENIZER = word_tokenizer(IDS, " a")
LINE_BREAK, THINK, CLOSED = IDS["\n"], IDS["<think>"], IDS["</think>"]

# Half of the tokens end a sentence or are keywords.
texts = st.lists(
    st.integers(0, len(WORDS) - 1) | st.sampled_from([LINE_BREAK, IDS["Wait"]]),
    min_size=1,
    max_size=40,
)


def knobs_of(plan: str) -> dict[str, Any]:
    (knobs,) = Plan.load(plan).resolve(28).to_dict()["layers"][0]["stack"]
    return knobs


def chunks(data: st.DataObject, length: int) -> list[slice]:
    places = sorted(data.draw(st.sets(st.integers(0, length), max_size=5)) | {0, length})
    return [slice(a, b) for a, b in pairwise(places)]


# Plans


def test_the_plan_of_the_code_sets_every_knob_of_the_table() -> None:
    table = README.partition("## Differences from the authors' code")[2].partition("From the paper")
    rows = re.findall(r"^\| .* \|$", table[0], re.M)[1:]
    restored = [cell for row in rows for cell in re.findall(r"`(\w+) = ([^`]+)` \|$", row)]
    found = knobs_of("skipkv-code")
    assert {name: found[name] for name, _ in restored} == {
        name: parse_value(value) for name, value in restored
    }
    defaults = knobs_of("skipkv")
    differing = {name for name in found if found[name] != defaults[name]}
    assert differing == {name for name, _ in restored}
    assert all(re.search(r"\| (none\b.*|`\w+ = [^`]+`) \|$", row) for row in rows)


def test_the_plan_of_the_paper_differs_from_the_defaults_in_three_knobs() -> None:
    paper, defaults = knobs_of("skipkv-paper"), knobs_of("skipkv")
    differing = {name: paper[name] for name in paper if paper[name] != defaults[name]}
    assert differing == {
        "delimiters": [text for text in SkipKV().delimiters if "?" not in text],
        "delimiter": "\n",
        "alpha_max": 0,
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_authors_use_the_code(name: str) -> None:
    """All but what they chose for each model, benchmark and budget."""
    code, found = knobs_of("skipkv-code"), knobs_of(name)
    chosen = {"tau", "alpha_0", "layer"}
    assert {name for name in found if found[name] != code[name]} <= chosen
    assert found["layer"] is not None
    assert Plan.load(name).schedule == Plan.load("skipkv-code").schedule
    assert Plan.load(name).buffer == 128


def test_the_authors_settings_exist_for_three_models() -> None:
    assert len(SETTINGS) == 10


# Delimiters by id


def test_a_line_break_after_a_colon_ends_a_sentence_by_id() -> None:
    ids = Delimiters.of(SkipKV().delimiters, TOKENIZER, "ids")
    text = Delimiters.of(SkipKV().delimiters, TOKENIZER, "text")
    after_colon = [IDS[" a"], IDS[":"], LINE_BREAK]
    assert ids.end_at(after_colon)
    assert not text.end_at(after_colon)


def test_a_delimiter_of_several_tokens_is_its_last_token_by_id() -> None:
    tokenizer = tiny_tokenizer()  # one character a token
    delimiters = Delimiters.of([".\n"], tokenizer, "ids")
    (line_break,) = tokenizer.encode("\n", add_special_tokens=False)
    assert delimiters.ids == {line_break}
    assert delimiters.end_at([line_break])


@pytest.mark.few(1)
@pytest.mark.needs_reasoner
@pytest.mark.parametrize("model", ["reasoner", "reasoner-verbose"])
def test_texts_that_a_tokenizer_does_not_know_are_no_delimiters_and_keywords(model: str) -> None:
    """The bundled tokenizers encode ``)\\n`` as nothing, or with older libraries as unknown."""
    _, tokenizer = load_model(model)
    assert set(tokenizer.encode(")\n", add_special_tokens=False)) <= {tokenizer.unk_token_id}
    knobs = knobs_of("skipkv-code")
    delimiters = Delimiters.of(knobs["delimiters"], tokenizer, "ids")
    assert {tokenizer.decode([one]) for one in delimiters.ids} == {".", "\n\n"}
    plan = Plan.load("skipkv-code", [f"skipkv.vector={model}", "skipkv.layer=3", "budget=40"])
    prompts = [" tea is 4. What is tea?<|assistant|><think>\n\n"]
    (result,) = Engine(load_model(model)[0], tokenizer, plan).generate(prompts, max_new_tokens=30)
    assert result.error is None


# Similarities that are one token older


@given(st.data(), texts, st.sampled_from([0.3, 0.8]), st.sampled_from(["max", "last"]), seeds)
def test_late_similarities_leave_out_the_sentence_of_the_newest_token(
    data: st.DataObject, ids: list[int], tau: float, pair: Any, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    kinds = torch.randn(2, 5, generator=rng)
    states = kinds[torch.randint(2, (len(ids),), generator=rng)]
    states = states + 0.2 * torch.randn(len(ids), 5, generator=rng)
    state = new_state(tau=tau, pair=pair, late_similarities=True)
    for piece in chunks(data, len(ids)):
        state.feed(ids[piece], states[piece], piece.start)
        older = [one == LINE_BREAK for one in ids[: piece.stop]][:-1]
        spans = reference.sentences(older, merge=False)
        vectors = reference.sentence_vectors(states.tolist(), spans)
        if any(abs(reference.dot(a, b) - tau) < 1e-5 for a in vectors for b in vectors):
            return  # rounding decides whether such a pair is above tau
        expected = reference.redundant_sentences(vectors, tau, pair)
        assert state.similarities == pytest.approx(expected, abs=1e-5)


def test_a_repetition_that_ends_with_the_newest_token_is_late() -> None:
    token_ids = [IDS[" a"], LINE_BREAK] * 2
    late, at_once = new_state(late_similarities=True), new_state()
    for state in (late, at_once):
        state.feed(token_ids, torch.ones(4, 3), 0)
    assert at_once.similarities == {0: pytest.approx(1)}
    assert late.similarities == {}
    late.feed([IDS[" a"]], torch.ones(1, 3), 4)
    assert late.similarities == at_once.similarities


def new_state(**values: Any) -> SequenceState:
    defaults: dict[str, Any] = {
        "segmenter": Segmenter(Delimiters(frozenset({LINE_BREAK})), merge=False),
        "prompt_len": 0,
        "tokenizer": TOKENIZER,
        "tau": 0.95,
        "pair": "last",
        "keywords": ("Wait", " again"),
        "keyword_match": "ids",
    }
    return SequenceState(**{**defaults, **values})


# Non-execution sentences of the prompt


@given(st.data(), texts, st.booleans())
def test_the_first_keyword_of_the_prompt_counts_as_in_the_code(
    data: st.DataObject, ids: list[int], count_prompt: bool
) -> None:
    prompt_len = data.draw(st.integers(0, len(ids)))
    state = new_state(prompt_len=prompt_len, count_prompt=count_prompt)
    for piece in chunks(data, len(ids)):
        state.feed(ids[piece], torch.zeros(len(ids[piece]), 2), piece.start)
    spans = reference.sentences([one == LINE_BREAK for one in ids], merge=False)
    keywords = [t for t, one in enumerate(ids) if one in (IDS["Wait"], IDS[" again"])]
    labels = {t for t in keywords if t >= prompt_len}
    if count_prompt:
        labels |= set([t for t in keywords if t < prompt_len][:1])
    else:
        spans = [span for span in spans if span[0] >= prompt_len]
    assert state.num_non_execution == sum(
        any(begin <= t < end for t in labels) for begin, end, _ in spans
    )


def test_one_keyword_of_the_prompt_counts() -> None:
    token_ids = [IDS["Wait"], LINE_BREAK, IDS["Wait"], LINE_BREAK, IDS["Wait"], LINE_BREAK]
    counted, generated = new_state(prompt_len=4, count_prompt=True), new_state(prompt_len=4)
    for state in (counted, generated):
        state.feed(token_ids, torch.ones(6, 3), 0)
    assert (counted.num_non_execution, generated.num_non_execution) == (2, 1)


# Thinking after the prompt


@given(st.data(), texts)
def test_any_opening_tag_of_the_prompt_opens_thinking(data: st.DataObject, ids: list[int]) -> None:
    paragraphs = Paragraphs.of(TOKENIZER, delimiter="\n")
    inside = False
    for piece in chunks(data, len(ids)):
        if ids[piece]:
            inside = thinking_after_prompt(
                paragraphs,
                torch.tensor(ids[piece]),
                inside,
                which="any",
                is_end=piece.stop == len(ids),
            )
    assert inside == (THINK in ids and ids[-1] != CLOSED)


def test_a_closed_thought_in_the_prompt_is_open_as_in_the_code() -> None:
    prompt = torch.tensor([THINK, CLOSED, IDS[" a"]])
    paragraphs = Paragraphs.of(TOKENIZER, delimiter="\n")
    found = {
        which: thinking_after_prompt(paragraphs, prompt, False, which=which, is_end=True)
        for which in ("last", "any")
    }
    assert found == {"last": False, "any": True}
