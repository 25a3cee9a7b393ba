"""Sampling against a loop-written filter, against transformers' own, and against itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import sampling_probs
from strategies import seeds
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvpolicy import Sampling
from kvpolicy.engine.sampler import probabilities, sample_next
from kvpolicy.errors import KVPolicyError

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
)


def logits_of(seed: int, rows: int, vocab: int = 12) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def by_token(logits: Tensor, how: list[Sampling]) -> Tensor:
    """Our distribution, normalised, in the order of the vocabulary."""
    likely, tokens = probabilities(logits, how)
    return torch.zeros_like(logits).scatter_(1, tokens, likely / likely.sum(1, keepdim=True))


@given(seeds, st.lists(samplings, min_size=1, max_size=4))
def test_every_row_draws_from_its_own_filtered_distribution(seed: int, how: list[Sampling]) -> None:
    logits = logits_of(seed, len(how))
    ours = by_token(logits, how)
    for row, sampling in enumerate(how):
        expected = sampling_probs(
            logits[row].tolist(),
            temperature=sampling.temperature,
            top_k=sampling.top_k or None,
            top_p=sampling.top_p,
        )
        torch.testing.assert_close(ours[row], torch.tensor(expected))


@given(seeds, samplings)
def test_the_filters_are_those_of_transformers(seed: int, how: Sampling) -> None:
    logits = logits_of(seed, 3)
    processors = LogitsProcessorList([TemperatureLogitsWarper(how.temperature)])
    if how.top_k:
        processors.append(TopKLogitsWarper(how.top_k))
    if how.top_p < 1:
        processors.append(TopPLogitsWarper(how.top_p))
    theirs = processors(torch.zeros(3, 1, dtype=torch.int64), logits.clone()).softmax(dim=-1)
    torch.testing.assert_close(by_token(logits, [how] * 3), theirs)


@pytest.mark.parametrize(("top_p", "num"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, num: int) -> None:
    likely, _ = probabilities(torch.zeros(1, 4), [Sampling(temperature=1.0, top_p=top_p)])
    assert int((likely > 0).sum()) == num


def sample(
    logits: Tensor, samplings: list[Sampling], generators: list[torch.Generator]
) -> list[int]:
    sequences: list[Any] = [
        SimpleNamespace(request=SimpleNamespace(sampling=sampling), generator=generator)
        for sampling, generator in zip(samplings, generators, strict=True)
    ]
    return sample_next(sequences, logits)


@given(seeds, seeds)
def test_greedy_takes_the_likeliest_token_and_no_randomness(seed: int, draw_seed: int) -> None:
    logits = logits_of(seed, 3)
    generators = [torch.Generator().manual_seed(draw_seed) for _ in range(3)]
    before = generators[0].get_state()
    tokens = sample(logits, [Sampling()] * 3, generators)
    assert tokens == logits.argmax(dim=1).tolist()
    assert torch.equal(generators[0].get_state(), before)


@given(seeds, samplings, st.integers(1, 4), st.integers(0, 3))
def test_what_is_drawn_does_not_depend_on_the_other_rows(
    seed: int, how: Sampling, rows: int, place: int
) -> None:
    place %= rows
    logits = logits_of(seed, rows)
    others = [Sampling(), Sampling(temperature=2.0), Sampling(temperature=0.5, top_k=3)]
    mixed = [how if row == place else others[row % 3] for row in range(rows)]
    generators = [torch.Generator().manual_seed(7 if r == place else 100 + r) for r in range(rows)]
    together = sample(logits, mixed, generators)[place]
    alone = sample(logits[place : place + 1], [how], [torch.Generator().manual_seed(7)])[0]
    assert together == alone


def test_frequencies_are_the_probabilities() -> None:
    logits = logits_of(3, 1, vocab=6)
    how = Sampling(temperature=0.9, top_k=5, top_p=0.95)
    generator = torch.Generator().manual_seed(0)
    num = 4000
    drawn = [sample(logits, [how], [generator])[0] for _ in range(num)]
    frequencies = torch.bincount(torch.tensor(drawn), minlength=6) / num
    expected = by_token(logits, [how])[0]
    assert ((frequencies - expected).abs() <= 4 * (expected * (1 - expected) / num).sqrt()).all()
    assert (frequencies[expected == 0] == 0).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": -1},
        {"seed": 0.5},
    ],
    ids=str,
)
def test_bad_sampling_is_refused(bad: dict) -> None:
    (knob,) = bad
    with pytest.raises(KVPolicyError, match=knob):
        Sampling(**bad)
