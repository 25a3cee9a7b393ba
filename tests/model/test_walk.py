"""The script that walks every class of transformers: what it reports, and what it writes."""

from typing import Any

import pytest
import walk_images
import walk_models
from any_model import tiny_config
from hybrids import HYBRIDS
from transformers import CONFIG_MAPPING
from walk_models import page_with, walk

from kvpolicy.compat import has_states


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("LlamaForCausalLM", "equal"),
        ("GPTNeoForCausalLM", "refused"),
        ("Blip2ForConditionalGeneration", "unbuilt"),
    ],
)
def test_a_class_has_its_verdict(name: str, verdict: str) -> None:
    assert walk(name)["verdict"] == verdict


@pytest.mark.slow
def test_another_token_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = walk_models._answers

    def shifted(*given: Any) -> list[Any]:
        return [([token + 1 for token in tokens], logprobs) for tokens, logprobs in answers(*given)]

    monkeypatch.setattr(walk_models, "_answers", shifted)
    assert walk("LlamaForCausalLM")["verdict"] == "WRONG"


@pytest.mark.slow
def test_another_probability_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = walk_models._answers

    def shifted(*given: Any) -> list[Any]:
        return [(tokens, [one - 0.1 for one in some]) for tokens, some in answers(*given)]

    monkeypatch.setattr(walk_models, "_answers", shifted)
    assert walk("LlamaForCausalLM")["verdict"] == "WRONG"


@pytest.mark.slow
def test_an_exception_of_ours_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(walk_models, "Engine", fails)
    row = walk("LlamaForCausalLM")
    assert row["verdict"] == "traceback"
    assert "a defect" in row["why"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("LlavaForConditionalGeneration", "equal"),
        ("PaliGemmaForConditionalGeneration", "refused"),
        ("Mistral4ForCausalLM", "blind"),
    ],
)
def test_a_class_has_its_verdict_with_an_image(name: str, verdict: str) -> None:
    assert walk_images.walk(name)["verdict"] == verdict


@pytest.mark.slow
def test_another_token_behind_an_image_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = walk_images.answers

    def shifted(model: Any, prompts: Any, images: Any, plan: Any = None) -> list[list[int]]:
        found = answers(model, prompts, images, plan)
        return [[token + (plan is not None) for token in tokens] for tokens in found]

    monkeypatch.setattr(walk_images, "answers", shifted)
    assert walk_images.walk("LlavaForConditionalGeneration")["verdict"] == "WRONG"


@pytest.mark.skipif(not has_states(), reason="transformers has no cache for states")
@pytest.mark.parametrize("kind", [kind for kind in HYBRIDS if kind in CONFIG_MAPPING])
def test_the_tiny_model_of_a_hybrid_has_states_and_rows(kind: str) -> None:
    kinds = {*tiny_config(CONFIG_MAPPING[kind]).layer_types}
    assert "hybrid" in kinds or (kinds & {"full_attention"} and kinds - {"full_attention"})


ROWS = [
    {"class": "A", "type": "a", "verdict": "equal", "path": "static"},
    {"class": "B", "type": "b", "verdict": "refused", "why": "model B cannot be run: it is odd"},
    {"class": "C", "type": "c", "verdict": "refused", "why": "model C cannot be run: it is odd"},
]


def test_tables_take_the_place_of_those_before() -> None:
    page = f"before\n{walk_models._BEGIN}\nold\n{walk_models._END}\nafter\n"
    once = page_with(page, ROWS)
    assert "| it is odd | `b`, `c` |" in once
    assert "| static | `a` |" in once
    assert "old" not in once
    assert (once.startswith("before\n"), once.endswith("\nafter\n")) == (True, True)
    assert page_with(once, ROWS) == once


def test_a_defect_is_no_part_of_a_page() -> None:
    with pytest.raises(KeyError):
        page_with("", [{"class": "A", "type": "a", "verdict": "WRONG", "why": "of a token"}])
