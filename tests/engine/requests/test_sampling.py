"""Sampling of requests: each as if it were alone, from any of its tokens on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Plan, Sampling
from kvpolicy.attention.draw import NO_TOKEN
from kvpolicy.engine.sampler import columns_of, sample_next, teacher_forced
from kvpolicy.errors import KVPolicyError

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    top_p=st.sampled_from([0.05, 0.9, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


def logits_of(seed: int, rows: int, vocab: int = 12) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def sample(logits: Tensor, samplings: list[Sampling], positions: list[int]) -> list[int]:
    sequences: list[Any] = [
        SimpleNamespace(sampling=sampling, processors=None, num_tokens=position)
        for sampling, position in zip(samplings, positions, strict=True)
    ]
    return sample_next(sequences, logits).tolist()


@given(seeds, st.lists(st.tuples(samplings, st.integers(1, 99)), min_size=1, max_size=4))
def test_every_sequence_samples_as_if_it_were_alone(
    seed: int, sequences: list[tuple[Sampling, int]]
) -> None:
    logits = logits_of(seed, len(sequences))
    hows, positions = zip(*sequences, strict=True)
    batched = sample(logits, [*hows], [*positions])
    for row, (how, position) in enumerate(sequences):
        assert sample(logits[row : row + 1], [how], [position]) == batched[row : row + 1]
        if how.greedy:
            assert batched[row] == int(logits[row].argmax())


def test_columns_hold_the_samplings_and_only_what_some_of_them_need() -> None:
    greedy, plain = Sampling(seed=5, top_k=9, top_p=0.5), Sampling(temperature=0.6, seed=2**63 - 1)
    assert columns_of([greedy], "cpu").temperature is None
    columns = columns_of([plain, plain], "cpu")
    assert (columns.top_k, columns.top_p) == (None, None)
    columns = columns_of([plain, Sampling(temperature=2.0, top_k=3, top_p=0.9, seed=1)], "cpu")
    assert columns.min_p is None
    found = (columns.temperature, columns.seed, columns.top_k, columns.top_p)
    assert [column.tolist() for column in found if column is not None] == [
        [pytest.approx(0.6), 2.0],
        [2**63 - 1, 1],
        [0, 3],
        [1.0, 0.9],
    ]


@given(seeds, st.integers(1, 11), st.sampled_from([0.7, 1.5]))
def test_a_text_is_continued_from_any_of_its_tokens(
    seed: int, num: int, temperature: float
) -> None:
    # In double precision no draw is so near to a limit between two tokens that rounding matters.
    model = shared_model(dtype=torch.float64)
    engine = Engine(model, plan=Plan.uniform("full"), slots=2)
    options: dict[str, Any] = {
        "sampling": Sampling(temperature=temperature, top_p=0.95, seed=seed),
        "stop_ids": (),
    }
    prompt = [1 + seed % 50, 2, 3]
    (whole,) = engine.generate([prompt], max_new_tokens=12, **options).results()
    begun = [*prompt, *whole.tokens[:num]]
    _, rest = engine.generate([[4, 5], begun], max_new_tokens=12 - num, **options).results()
    assert whole.tokens[num:] == rest.tokens


def test_equal_prompts_with_other_seeds_are_sampled_apart() -> None:
    engine = Engine(shared_model(), plan=Plan.uniform("full"), slots=8)
    hows = [Sampling(temperature=1.5, seed=seed) for seed in range(8)]
    run = engine.generate([[1, 2, 3]] * 8, max_new_tokens=12, sampling=hows)
    assert len({result.tokens for result in run.results()}) == 8


def test_forced_tokens_are_those_given_where_the_logits_are_numbers() -> None:
    logits = logits_of(0, 3)
    logits[1, 4] = torch.nan
    assert teacher_forced([5, 6, 7], logits).tolist() == [5, NO_TOKEN, 7]


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
