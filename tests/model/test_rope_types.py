"""Every type of rotary embedding in transformers: tokens equal ``generate``, or it is refused."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import model_of
from tiny import greedy_tokens
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvpolicy import Engine, Plan, PolicyCache
from kvpolicy.compat import cache_argument
from kvpolicy.errors import CacheError, ModelError
from kvpolicy.hf import generate

ORIGINAL = 24
FULL = Plan.uniform("full")

#: Parameters of each type; those that transformers adds later are refused, or fail here.
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 3.0, 6.0, 9.0],
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}

PROMPTS = [[5, 9, 40, 2, 7], [3, 8, 11] * 10, [1, 2], [4, 9] * 14]
NEW = 12


def rope_model(rope_type: str, family: str = "llama", **changes: Any) -> PreTrainedModel:
    rope = {"rope_type": rope_type, "rope_theta": 10_000.0, **TYPES[rope_type]}
    most = ORIGINAL if rope_type in ("dynamic", "linear", "yarn") else 96
    return model_of(family, rope_parameters=rope, max_position_embeddings=most, **changes)


def phi3() -> PreTrainedModel:
    """Whose `generate` drops a cache where the frequencies change."""
    return rope_model("longrope", "phi3", original_max_position_embeddings=ORIGINAL)


def test_the_table_of_types_lists_those_tested() -> None:
    page = Path("docs/reference/models.md").read_text(encoding="utf-8")
    table = page.split("## Rotary embeddings")[1].split("## Refused")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.M)) == sorted(TYPES)


def generate_alone(model: PreTrainedModel, prompt: list[int], num_new: int = NEW) -> list[int]:
    """By a copy, as some rotary embeddings remember the longest sequence they have served."""
    return greedy_tokens(copy.deepcopy(model), prompt, num_new)


@pytest.mark.few(3)
@pytest.mark.parametrize("rope_type", sorted({"default", *ROPE_INIT_FUNCTIONS}))
@pytest.mark.parametrize("chunk", [7, 512])
def test_every_type_equals_generate_below_and_beyond_its_original_length(
    rope_type: str, chunk: int
) -> None:
    model = rope_model(rope_type)
    engine = Engine(model, plan=FULL, slots=3, chunk=chunk)
    results = engine.generate(PROMPTS, max_new_tokens=NEW).results()
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert list(result.tokens) == generate_alone(model, prompt)


@pytest.mark.few(1)
@pytest.mark.parametrize("rope_type", sorted(set(TYPES) & set(ROPE_INIT_FUNCTIONS) - {"longrope"}))
def test_a_sequence_that_crosses_the_original_length_equals_generate(rope_type: str) -> None:
    model, prompt = rope_model(rope_type), [5, 9, 40, 2, 7]
    (result,) = Engine(model, plan=FULL, chunk=2).generate([prompt], max_new_tokens=60).results()
    assert list(result.tokens) == generate_alone(model, prompt, 60)


@pytest.mark.few(1)
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@pytest.mark.parametrize("policy", ["h2o", "streaming", "rkv"])
def test_compacted_sequence_in_a_batch_equals_sequence_alone(rope_type: str, policy: str) -> None:
    model, plan = rope_model(rope_type).double(), Plan.uniform(policy, budget=16, buffer=4)
    run = Engine(model, plan=plan, slots=3, chunk=5).generate(PROMPTS, max_new_tokens=NEW)
    for prompt, result in zip(PROMPTS, run.results(), strict=True):
        (alone,) = Engine(model, plan=plan).generate([prompt], max_new_tokens=NEW).results()
        assert result.tokens == alone.tokens


@pytest.mark.few(1)
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_model_is_not_changed_and_its_past_has_no_effect(rope_type: str) -> None:
    model = rope_model(rope_type)
    expected = [generate_alone(model, prompt) for prompt in PROMPTS]
    greedy_tokens(model, PROMPTS[1], NEW)  # it remembers this length
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    run = Engine(model, plan=FULL, slots=2).generate(PROMPTS, max_new_tokens=NEW)
    assert [list(result.tokens) for result in run.results()] == expected
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [phi3, lambda: rope_model("longrope")])
def test_longrope_request_that_would_cross_is_refused_before_its_first_token(make: Any) -> None:
    model, prompt = make(), [5, 9, 40, 2, 7]
    engine, most = Engine(model, plan=FULL), ORIGINAL + 1 - len(prompt)
    short, long, crossing = (
        engine.generate([one], max_new_tokens=num_new).results()[0]
        for one, num_new in ((prompt, most), ([3, 8, 11] * 10, 30), (prompt, most + 1))
    )
    assert list(short.tokens) == generate_alone(model, prompt, most)
    assert list(long.tokens) == generate_alone(model, [3, 8, 11] * 10, 30)
    assert crossing.finish_reason == "error"
    assert not crossing.tokens
    assert crossing.error is not None
    assert f"grow to {ORIGINAL + 1}, and beyond {ORIGINAL} " in crossing.error


def cache_tokens(model: PreTrainedModel, cache: Any, prompt: list[int], num_new: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    options = cache_argument(cache) | {"max_new_tokens": num_new, "do_sample": False}
    answer = model.generate(ids, attention_mask=mask, **options)
    return answer[0, len(prompt) :].tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [lambda: rope_model("dynamic"), phi3])
def test_policy_cache_equals_generate(make: Any) -> None:
    model = make()
    for prompt in ([5, 9, 40, 2, 7], [3, 8, 11] * 10):
        assert cache_tokens(model, PolicyCache(model, FULL), prompt, 20) == (
            generate_alone(model, prompt, 20)
        )


def test_policy_cache_refuses_to_cross_the_length_of_longrope() -> None:
    model, prompt = phi3(), [5, 9, 40, 2, 7]
    message = f"cannot go on: .*beyond {ORIGINAL} the rotary embedding 'longrope'"
    with pytest.raises(CacheError, match=message):
        cache_tokens(model, PolicyCache(model, FULL), prompt, 21)
    announced = PolicyCache(model, FULL, max_length=40)
    with torch.no_grad(), pytest.raises(CacheError, match=message):
        model(torch.tensor([prompt]), **cache_argument(announced))
    assert announced.report.tokens == ()
    with pytest.raises(CacheError, match=message):
        model.generate(
            torch.tensor([prompt]), max_new_tokens=30, custom_generate=generate, plan=FULL
        )


def test_window_as_long_as_the_unscaled_length_hides_tokens_beyond_it() -> None:
    model = rope_model("yarn", "mistral", sliding_window=ORIGINAL)
    (result,) = Engine(model, plan=FULL).generate([[5, 9, 40]], max_new_tokens=60).results()
    assert list(result.tokens) == generate_alone(model, [5, 9, 40], 60)


def test_unknown_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TYPES, "spiral", {})
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "spiral", ROPE_INIT_FUNCTIONS["linear"])
    monkeypatch.setitem(TYPES, "spiral", {"factor": 2.0})
    model = rope_model("spiral")
    for build in (Engine, PolicyCache):
        with pytest.raises(ModelError, match="spiral"):
            build(model, plan=FULL)
