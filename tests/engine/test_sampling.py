"""Sampling against a loop-based filter, against transformers, and for batch independence."""

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


def by_token(logits: Tensor, params: list[Sampling]) -> Tensor:
    """Our normalised distribution, in vocabulary order."""
    probs, tokens = probabilities(logits, params)
    return torch.zeros_like(logits).scatter_(1, tokens, probs / probs.sum(1, keepdim=True))


@given(seeds, st.lists(samplings, min_size=1, max_size=4))
def test_each_row_samples_from_its_own_filtered_distribution(
    seed: int, params: list[Sampling]
) -> None:
    logits = logits_of(seed, len(params))
    ours = by_token(logits, params)
    for row, sampling in enumerate(params):
        expected = sampling_probs(
            logits[row].tolist(),
            temperature=sampling.temperature,
            top_k=sampling.top_k or None,
            top_p=sampling.top_p,
        )
        torch.testing.assert_close(ours[row], torch.tensor(expected))


@given(seeds, samplings)
def test_filters_equal_transformers(seed: int, params: Sampling) -> None:
    logits = logits_of(seed, 3)
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    theirs = processors(torch.zeros(3, 1, dtype=torch.int64), logits.clone()).softmax(dim=-1)
    torch.testing.assert_close(by_token(logits, [params] * 3), theirs)


@pytest.mark.parametrize(("top_p", "num"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_nucleus_is_the_smallest_set_reaching_top_p(top_p: float, num: int) -> None:
    probs, _ = probabilities(torch.zeros(1, 4), [Sampling(temperature=1.0, top_p=top_p)])
    assert int((probs > 0).sum()) == num


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1e-300}, {"temperature": 1e-40}, {"temperature": 1.0, "top_p": 1e-300}],
)
def test_numbers_that_fp32_rounds_to_zero_leave_the_likeliest_token(params: dict) -> None:
    probs, tokens = probabilities(torch.tensor([[1.0, 30.0, -2.0]]), [Sampling(**params)])
    assert int((probs > 0).sum()) == 1
    assert int(tokens[0, 0]) == 1


def sample(
    logits: Tensor, samplings: list[Sampling], generators: list[torch.Generator]
) -> list[int]:
    sequences: list[Any] = [
        SimpleNamespace(request=SimpleNamespace(sampling=sampling), generator=generator)
        for sampling, generator in zip(samplings, generators, strict=True)
    ]
    return sample_next(sequences, logits)


@given(seeds, seeds)
def test_greedy_takes_the_most_likely_token_without_randomness(seed: int, draw_seed: int) -> None:
    logits = logits_of(seed, 3)
    generators = [torch.Generator().manual_seed(draw_seed) for _ in range(3)]
    before = generators[0].get_state()
    tokens = sample(logits, [Sampling()] * 3, generators)
    assert tokens == logits.argmax(dim=1).tolist()
    assert torch.equal(generators[0].get_state(), before)


@given(seeds, samplings, st.integers(1, 4), st.integers(0, 3))
def test_sampled_token_does_not_depend_on_other_rows(
    seed: int, params: Sampling, rows: int, row_idx: int
) -> None:
    row_idx %= rows
    logits = logits_of(seed, rows)
    others = [Sampling(), Sampling(temperature=2.0), Sampling(temperature=0.5, top_k=3)]
    mixed = [params if row == row_idx else others[row % 3] for row in range(rows)]
    generators = [
        torch.Generator().manual_seed(7 if r == row_idx else 100 + r) for r in range(rows)
    ]
    batched = sample(logits, mixed, generators)[row_idx]
    alone = sample(logits[row_idx : row_idx + 1], [params], [torch.Generator().manual_seed(7)])[0]
    assert batched == alone


def test_sample_frequencies_match_probabilities() -> None:
    logits = logits_of(3, 1, vocab=6)
    params = Sampling(temperature=0.9, top_k=5, top_p=0.95)
    generator = torch.Generator().manual_seed(0)
    num = 4000
    drawn = [sample(logits, [params], [generator])[0] for _ in range(num)]
    frequencies = torch.bincount(torch.tensor(drawn), minlength=6) / num
    expected = by_token(logits, [params])[0]
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
def test_invalid_sampling_raises(bad: dict) -> None:
    (knob,) = bad
    with pytest.raises(KVPolicyError, match=knob):
        Sampling(**bad)
