"""What prompts and stops may be given as."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny import greedy_tokens, shared_model, tiny_tokenizer

from kvpolicy import Engine, Plan, Request

TOKENIZER = tiny_tokenizer()


def engine() -> Engine:
    return Engine(shared_model(), TOKENIZER, Plan.uniform("full"), slots=2)


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, iter], ids=lambda f: f.__name__)
def test_token_ids_accept_any_container(make: Any) -> None:
    (result,) = engine().generate([make([1, 2])], max_new_tokens=3).results()
    assert list(result.tokens) == greedy_tokens(shared_model(), [1, 2], 3)


def test_single_stop_string_is_not_split_into_characters() -> None:
    prompt = "what is 2+2?"
    (plain,) = engine().generate([prompt], max_new_tokens=12).results()
    stop = plain.text[4:7]
    for run in (
        engine().generate([prompt], max_new_tokens=12, stop=stop),
        engine().generate([Request(prompt, max_new_tokens=12, stop=stop)]),
        engine().generate([prompt], max_new_tokens=12, stop=[stop]),
    ):
        (result,) = run.results()
        assert result.text == plain.text[: plain.text.index(stop)]


def test_single_stop_id_needs_no_list() -> None:
    prompt = [4, 8, 15]
    plain = greedy_tokens(shared_model(), prompt, 8)
    (result,) = engine().generate([prompt], max_new_tokens=8, stop_ids=plain[2]).results()
    assert list(result.tokens) == plain[: plain.index(plain[2]) + 1]
