"""Vision-language models that are given text only, in `generate` with a cache and in an engine."""

from functools import cache
from typing import Any

import pytest
import torch
from families import SIZES
from transformers import AutoConfig, AutoModelForImageTextToText

from kvpolicy import Engine, Plan, PolicyCache
from kvpolicy.compat import cache_argument
from kvpolicy.errors import ModelError

PLAN = Plan.uniform("full")
PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2]]
NEW = 6
SMALL_VISION = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
}


@cache
def tiny_vlm(kind: str) -> Any:
    """A tiny random model with a part for images; its own configuration names no end token."""
    config = AutoConfig.for_model(kind)
    text = config.get_text_config(decoder=True)
    vision = getattr(config, "vision_config", None)
    for part, sizes in ((text, SIZES), (vision, SMALL_VISION)):
        for name in set(sizes) & set(vars(part or object.__new__(type("Empty", (), {})))):
            setattr(part, name, sizes[name])
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    if getattr(model.config, "eos_token_id", None) is not None:  # of Fuyu in older releases
        model.config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.float().eval()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["gemma3", "llava", "fuyu"])
def test_text_gives_the_tokens_of_generate(kind: str) -> None:
    model = tiny_vlm(kind)

    def generated(prompt: list[int], **options: Any) -> list[int]:
        text = torch.tensor([prompt])
        found = model.generate(text, max_new_tokens=NEW, do_sample=False, **options)
        return found[0, len(prompt) :].tolist()

    expected = [generated(prompt) for prompt in PROMPTS]
    try:
        engine = Engine(model, plan=PLAN, slots=2)
    except ModelError:
        if kind != "fuyu":
            raise
        pytest.skip("transformers 5.2 has its decoder elsewhere")
    results = engine.generate(PROMPTS, max_new_tokens=NEW).results()
    assert [list(result.tokens) for result in results] == expected
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert generated(prompt, **cache_argument(PolicyCache(model, PLAN))) == answer
