"""Invalid requests: each mistake gives a one-sentence error."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny import greedy_tokens, shared_model, tiny_tokenizer

from kvpolicy import Engine, Plan, Request
from kvpolicy.errors import KVPolicyError

TOKENIZER = tiny_tokenizer()


def engine() -> Engine:
    return Engine(shared_model(), TOKENIZER, Plan.uniform("full"), slots=2)


def test_single_text_instead_of_a_list_raises() -> None:
    # Otherwise each character would become a prompt.
    with pytest.raises(KVPolicyError, match="list"):
        engine().generate("hello", max_new_tokens=2)


def test_single_request_instead_of_a_list_raises() -> None:
    with pytest.raises(KVPolicyError, match="list"):
        engine().generate(Request([1, 2]), max_new_tokens=2)


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "one id from a flat list": (7, "7"),
    "nothing": (None, "None"),
    "a fraction in a tensor": (torch.tensor([1.5]), "1.5"),
    "a batch": ([[1, 2]], "[1, 2]"),
    "texts in a list": (["hello"], "hello"),
    "bytes": (b"hello", "hello"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_invalid_prompt_becomes_an_error_result(case: str) -> None:
    prompt, message = BAD_PROMPTS[case]
    bad, good = engine().generate([prompt, [1, 2]], max_new_tokens=2).results()
    assert bad.finish_reason == "error"
    assert message in bad.error
    assert list(good.tokens) == greedy_tokens(shared_model(), [1, 2], 2)


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


@pytest.mark.parametrize("stop", ["", [""], [3], [None]], ids=repr)
def test_invalid_stop_string_raises(stop: Any) -> None:
    with pytest.raises(KVPolicyError, match="stop"):
        engine().generate(["hello"], stop=stop)


@pytest.mark.parametrize("stop_ids", [["a"], [1.5], [None]], ids=repr)
def test_invalid_stop_id_raises(stop_ids: Any) -> None:
    with pytest.raises(KVPolicyError, match="stop_ids"):
        engine().generate(["hello"], stop_ids=stop_ids)
