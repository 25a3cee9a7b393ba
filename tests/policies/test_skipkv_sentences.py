"""Sentence splitting, sentence vectors and redundancy against oracles on the whole text."""

from itertools import pairwise

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds
from tiny import tiny_tokenizer, word_tokenizer

from kvpolicy.errors import KVPolicyError
from skipkv_plugin.policy import SkipKV
from skipkv_plugin.redundancy import SentenceVectors, redundant
from skipkv_plugin.sentences import Delimiters, Segmenter

# The delimiters of R1's tokenizers: each is a single token there as well.
WORDS = ["a", "b", "Wait", ".", ":", ")", "?", "\n", ".\n", ")\n", "\n\n", ".\n\n", ")\n\n"]
WORDS += ["?\n\n", ":\n", ":\n\n", ";\n"]
DELIMITERS = SkipKV().delimiters
R1_LIKE = {word: number for number, word in enumerate(WORDS)}
TOKENIZER = word_tokenizer(R1_LIKE, "a")


def spans_of(segmenter: Segmenter) -> list[tuple[int, int, int]]:
    return [(one.begin, one.end, one.body_end) for one in segmenter.sentences]


@st.composite
def chunks(draw: st.DrawFn, length: int) -> list[slice]:
    """A text split into chunks of any size."""
    places = sorted(draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=4)))
    edges = [0, *[place for place in places if place < length], length]
    return [slice(a, b) for a, b in pairwise(edges)]


@given(st.data(), st.lists(st.integers(0, 4), max_size=40), st.booleans())
def test_sentences_equal_the_oracle_for_any_chunks(
    data: st.DataObject, ids: list[int], merge: bool
) -> None:
    delimiters = Delimiters(frozenset({3, 4}))
    expected = reference.sentences([one >= 3 for one in ids], merge)
    segmenter = Segmenter(delimiters, merge)
    finished = []
    for piece in data.draw(chunks(len(ids))):
        finished += segmenter.feed(ids[piece])
    assert spans_of(segmenter) == expected
    assert [tokens for _, tokens in finished] == [ids[b:body] for b, _, body in expected]
    open_from = expected[-1][1] if expected else 0
    assert segmenter.begin == open_from
    assert segmenter.open_ids == ids[open_from:]


def test_published_delimiters_end_a_sentence() -> None:
    tokenizer = TOKENIZER
    delimiters = Delimiters.of(DELIMITERS, tokenizer)
    assert delimiters.ids == {R1_LIKE[word] for word in DELIMITERS}
    assert delimiters.texts == ()
    for word in WORDS:
        ends = delimiters.end_at([R1_LIKE["a"], R1_LIKE[word]])
        assert ends == (word in DELIMITERS), repr(word)


def test_colon_before_a_newline_does_not_end_a_sentence() -> None:
    delimiters = Delimiters.of(DELIMITERS, TOKENIZER)
    colon, a = R1_LIKE[":"], R1_LIKE["a"]
    for newline in ("\n", "\n\n"):
        assert not delimiters.end_at([a, colon, R1_LIKE[newline]])
        assert delimiters.end_at([colon, a, R1_LIKE[newline]])


def test_delimiter_of_several_tokens_is_found_by_text() -> None:
    # This tokenizer has no "\n\n" and no ".\n": one character a token.
    tokenizer = tiny_tokenizer()
    delimiters = Delimiters.of([".\n", "?\n\n"], tokenizer)
    assert delimiters.ids == frozenset()

    def ends(text: str) -> bool:
        return delimiters.end_at(tokenizer.encode(text, add_special_tokens=False))

    assert ends("so.\n")
    assert ends("so?\n\n")
    assert not ends("so\n")
    assert not ends("so.")
    assert not ends("so.\n\n")


def test_unknown_delimiter_does_not_match_the_unknown_token() -> None:
    words = {"a": 0, "b": 1, ".": 2, "\n\n": 3}
    delimiters = Delimiters.of(DELIMITERS, word_tokenizer(words, "a"))
    assert delimiters.ids == {3}
    assert not delimiters.end_at([1, 0])
    assert delimiters.end_at([1, 2, 3])


def test_text_delimiter_without_tokenizer_raises() -> None:
    with pytest.raises(KVPolicyError, match="tokenizer"):
        Delimiters.of(["\n"], None)
    assert Delimiters.of([7], None).end_at([7])


@given(
    st.data(),
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
    st.sampled_from([0.3, 0.8, 0.95]),
    st.sampled_from(["max", "last"]),
    st.booleans(),
    seeds,
)
def test_redundant_sentences_equal_the_oracle_for_any_chunks(
    data: st.DataObject, ids: list[int], tau: float, pair: str, merge: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    kinds = torch.randn(3, 5, generator=rng)
    states = kinds[torch.randint(3, (len(ids),), generator=rng)]
    states = states + 0.2 * torch.randn(len(ids), 5, generator=rng)
    spans = reference.sentences([one >= 3 for one in ids], merge)
    vectors = reference.sentence_vectors(states.tolist(), spans)
    expected = reference.redundant_sentences(vectors, tau, pair)
    near = [
        abs(reference.dot(a, b) - tau) < 1e-5 for i, a in enumerate(vectors) for b in vectors[:i]
    ]
    if any(near):
        return  # rounding decides whether such a pair is above tau

    segmenter, found, ours = Segmenter(Delimiters(frozenset({3, 4})), merge), {}, SentenceVectors()
    for piece in data.draw(chunks(len(ids))):
        finished = [sentence for sentence, _ in segmenter.feed(ids[piece])]
        num_new = ours.feed(states[piece], piece.start, finished, segmenter.begin)
        if ours.vectors is not None:
            for number, similarity in redundant(ours.vectors, num_new, tau, pair).items():
                known = found.get(number, -1.0) if pair == "max" else -1.0
                found[number] = max(known, similarity)
    assert found == pytest.approx(expected, abs=1e-5)
    if vectors:
        torch.testing.assert_close(ours.vectors, torch.tensor(vectors), atol=1e-5, rtol=0)


def test_published_example() -> None:
    """Similarities .37, .96 and .50 at tau .95: the first sentence is redundant."""
    gram = torch.tensor([[1, 0.37, 0.96], [0.37, 1, 0.50], [0.96, 0.50, 1]], dtype=torch.float64)
    vectors = torch.linalg.cholesky(gram).float()
    assert redundant(vectors, 3, 0.95, "max") == {0: pytest.approx(0.96)}


def test_similarity_equal_to_tau_is_not_redundant() -> None:
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert redundant(vectors, 2, 1.0, "max") == {}
    assert redundant(vectors, 1, 0.99, "max") == {0: 1.0}
