"""What callers get wrong when they ask: each slip has its sentence, none its own traceback."""

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


def test_one_text_instead_of_a_list_is_refused() -> None:
    # A list of its characters would be as many prompts.
    with pytest.raises(KVPolicyError, match="list"):
        engine().generate("hello", max_new_tokens=2)


def test_one_request_instead_of_a_list_is_refused() -> None:
    with pytest.raises(KVPolicyError, match="list"):
        engine().generate(Request([1, 2]), max_new_tokens=2)


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "one id, as in a flat list": (7, "7"),
    "nothing": (None, "None"),
    "a fraction in a tensor": (torch.tensor([1.5]), "1.5"),
    "a batch": ([[1, 2]], "[1, 2]"),
    "words": (["hello"], "hello"),
    "bytes": (b"hello", "hello"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_what_is_no_prompt_becomes_an_error_of_that_request(case: str) -> None:
    prompt, says = BAD_PROMPTS[case]
    bad, good = engine().generate([prompt, [1, 2]], max_new_tokens=2).results()
    assert bad.finish_reason == "error"
    assert says in bad.error
    assert list(good.tokens) == greedy_tokens(shared_model(), [1, 2], 2)


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, iter], ids=lambda f: f.__name__)
def test_token_ids_may_come_in_any_container(make: Any) -> None:
    (result,) = engine().generate([make([1, 2])], max_new_tokens=3).results()
    assert list(result.tokens) == greedy_tokens(shared_model(), [1, 2], 3)


def test_one_stop_string_is_a_string_and_not_its_characters() -> None:
    prompt = "what is 2+2?"
    (plain,) = engine().generate([prompt], max_new_tokens=12).results()
    stop = plain.text[4:7]
    for asked in (
        engine().generate([prompt], max_new_tokens=12, stop=stop),
        engine().generate([Request(prompt, max_new_tokens=12, stop=stop)]),
        engine().generate([prompt], max_new_tokens=12, stop=[stop]),
    ):
        (result,) = asked.results()
        assert result.text == plain.text[: plain.text.index(stop)]


def test_one_stop_id_may_be_given_bare() -> None:
    prompt = [4, 8, 15]
    plain = greedy_tokens(shared_model(), prompt, 8)
    (result,) = engine().generate([prompt], max_new_tokens=8, stop_ids=plain[2]).results()
    assert list(result.tokens) == plain[: plain.index(plain[2]) + 1]


@pytest.mark.parametrize("stop", ["", [""], [3], [None]], ids=repr)
def test_a_stop_that_is_no_text_is_refused(stop: Any) -> None:
    with pytest.raises(KVPolicyError, match="stop"):
        engine().generate(["hello"], stop=stop)


@pytest.mark.parametrize("stop_ids", [["a"], [1.5], [None]], ids=repr)
def test_a_stop_id_that_is_no_token_is_refused(stop_ids: Any) -> None:
    with pytest.raises(KVPolicyError, match="stop_ids"):
        engine().generate(["hello"], stop_ids=stop_ids)
