"""Processors of models: what is loaded, and what is refused."""

from pathlib import Path

import pytest
import transformers
from tiny import tiny_model
from tiny_processor import TEMPLATE, tiny_processor, tiny_seeing

from kvpolicy.errors import ModelError
from kvpolicy.model.image_prompts import chat_template_of, processor_for
from kvpolicy.model.loading import load_processor


def test_the_processor_of_a_folder_is_loaded_with_its_template(tmp_path: Path) -> None:
    model, processor = tiny_seeing()
    processor.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    found, problem = processor_for(model, str(tmp_path))
    assert problem == ""
    assert chat_template_of(found) == TEMPLATE


def test_of_several_templates_the_default_is_taken() -> None:
    processor = tiny_processor()
    processor.chat_template = {"tools": "b", "default": "a"}
    assert chat_template_of(processor) == "a"
    assert chat_template_of(None) is None


def test_a_model_of_text_alone_has_none(tmp_path: Path) -> None:
    assert processor_for(tiny_model(), str(tmp_path)) == (None, "")


def test_a_folder_without_a_processor_says_what_it_lacks(tmp_path: Path) -> None:
    model, processor = tiny_seeing()
    processor.tokenizer.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    found, problem = processor_for(model, str(tmp_path))
    assert found is None
    assert str(tmp_path) in problem


def test_a_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = tiny_seeing()
    processor.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)

    def fail(*_: object, **__: object) -> None:
        msg = "\nQwen2VLVideoProcessor requires the Torchvision library but it was not found."
        raise ImportError(msg)

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", fail)
    with pytest.raises(ModelError, match=r"\[images\]"):
        load_processor(str(tmp_path))
