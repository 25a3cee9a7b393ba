"""Every model either gives the tokens of ``generate`` or raises a clear error."""

from typing import Any

import pytest
import torch
from families import FAMILIES, REFUSED, family_model, model_of
from tiny import greedy_tokens, tiny_model
from transformers import CONFIG_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpolicy import Engine, Plan, PolicyCache
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.compat import cache_argument
from kvpolicy.errors import ModelError
from kvpolicy.model.adapter import ATTENTION
from kvpolicy.model.attention import attention_function
from kvpolicy.model.forward_input import ForwardInput

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 6]

#: Supported models that are not in the list of families.
RUN: dict[str, dict[str, Any]] = {
    # Keys and values of different sizes, or latents, as the release stores them.
    "deepseek_v3": {
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "head_dim": 4,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
    "gemma": {},
    "granite": {},
    "gpt_neox": {},
    "smollm3": {},
    "starcoder2": {"sliding_window": 5},
    # It does not pass its window to attention, and no position is outside the window.
    "phimoe": {"sliding_window": 256},
}
if "gemma4_text" in CONFIG_MAPPING:
    # Its layers differ in the number and size of their heads.
    RUN["gemma4_text"] = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    }
if "laguna" in CONFIG_MAPPING:
    # Its layers differ in the number of their query heads.
    RUN["laguna"] = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "num_attention_heads_per_layer": [4, 2],
        "num_key_value_heads": 2,
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", RUN)
def test_supported_model_equals_generate(kind: str) -> None:
    model = model_of(kind, **RUN[kind])
    engine = Engine(model, plan=Plan.uniform("h2o", budget=64), slots=2, chunk=5)
    results = engine.generate(PROMPTS, max_new_tokens=10).results()
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert list(result.tokens) == greedy_tokens(model, prompt, 10)


@pytest.mark.skipif("laguna" not in RUN, reason="this transformers does not have it")
@pytest.mark.parametrize(
    ("policy", "knobs"), [("h2o", {"n_recent": 3}), ("snapkv", {"window_size": 3})]
)
def test_layers_may_have_other_numbers_of_query_heads(policy: str, knobs: dict[str, int]) -> None:
    model = model_of("laguna", **RUN["laguna"])
    plan = Plan.uniform(policy, budget=8, buffer=4, knobs={policy: knobs})
    shapes = Engine(model, plan=plan).adapter.layer_shapes()
    assert [(one.num_heads, one.num_kv_heads) for one in shapes] == [(4, 2), (2, 2)]
    together = Engine(model, plan=plan, slots=3, chunk=5).generate(PROMPTS, max_new_tokens=12)
    for prompt, result in zip(PROMPTS, together.results(), strict=True):
        (alone,) = Engine(model, plan=plan).generate([prompt], max_new_tokens=12).results()
        assert result.tokens == alone.tokens
        assert result.rows_evicted > 0 or len(prompt) + 12 <= 8


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_model_raises(kind: str) -> None:
    changes, message = REFUSED[kind]
    model = model_of(kind, **changes)
    with pytest.raises(ModelError, match=message):
        Engine(model, plan=Plan.uniform("h2o", budget=64))
    with pytest.raises(ModelError, match=message):
        PolicyCache(model, Plan.uniform("full"))


@pytest.mark.parametrize("is_newer", [False, True], ids=["older", "newer"])
def test_a_refusal_of_falcon_says_what_it_computes_itself(is_newer: bool) -> None:
    model = model_of("falcon", new_decoder_architecture=is_newer, num_kv_heads=2)
    with pytest.raises(ModelError, match="attention itself") as refused:
        Engine(model, plan=Plan.uniform("full"))
    assert "Error" not in str(refused.value)


OWN_POSITIONS = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "pegasus",
    "plbart",
)
DECODER = {
    "is_decoder": True,
    "is_encoder_decoder": False,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "init_std": 0.4,
}


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", OWN_POSITIONS)
def test_a_decoder_that_counts_positions_itself_is_refused(kind: str, dtype: torch.dtype) -> None:
    model = model_of(kind, **DECODER).to(dtype)
    for eager in (False, True):
        with pytest.raises(ModelError):
            Engine(model, plan=Plan.uniform("full"), eager=eager)


def test_a_model_that_attends_twice_in_a_layer_runs_in_eager_steps_only() -> None:
    model = model_of("diffllama", attention_dropout=0.0)
    with pytest.raises(ModelError) as refused:
        Engine(model, plan=Plan.uniform("full"))
    if "eager=True" not in str(refused.value):
        pytest.skip("transformers 5.2 attends in a way of its own, so that nothing runs this model")
    engine = Engine(model, plan=Plan.uniform("full"), slots=2, chunk=5, eager=True)
    results = engine.generate(PROMPTS, max_new_tokens=9).results()
    expected = [greedy_tokens(model, prompt, 9) for prompt in PROMPTS]
    assert [list(result.tokens) for result in results] == expected
    cache = PolicyCache(model, Plan.uniform("full"))
    found = model.generate(
        torch.tensor(PROMPTS[:1]), **cache_argument(cache), max_new_tokens=9, do_sample=False
    )
    assert found[0, len(PROMPTS[0]) :].tolist() == expected[0]


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_are_accepted_in_every_precision(
    family: str, dtype: torch.dtype
) -> None:
    for eager in (False, True):
        Engine(family_model(family, dtype=dtype), plan=Plan.uniform("full"), eager=eager)


@pytest.mark.few(2)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("window", [2, 3])
def test_a_window_of_a_few_tokens_runs(window: int, eager: bool) -> None:
    model = family_model("mistral", window=window)
    engine = Engine(model, plan=Plan.uniform("full"), eager=eager)
    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, max_new_tokens=9), strict=True):
        assert list(result.tokens) == greedy_tokens(model, prompt, 9)


def test_a_configuration_that_names_no_end_token_ends_nothing() -> None:
    """Composite configurations, and RoCBert's, have no such attribute."""
    model = tiny_model()
    model.generation_config.eos_token_id = None
    del model.config.eos_token_id
    (result,) = Engine(model, plan=Plan.uniform("full")).generate([[1, 2]], max_new_tokens=5)
    assert len(result.tokens) == 5


class Unreadable(type(tiny_model().config)):
    """A configuration with an attribute that cannot be read, as those with values per layer."""

    model_type = "unreadable"

    @property
    def kv_lora_rank(self) -> int:
        raise RuntimeError("it varies across layers")


def test_a_configuration_that_cannot_be_read_is_refused() -> None:
    model = tiny_model()
    model.config.__class__ = Unreadable
    with pytest.raises(ModelError, match="it varies across layers"):
        Engine(model, plan=Plan.uniform("full"))


def test_a_configuration_of_another_number_of_layers_is_refused() -> None:
    model = tiny_model()
    model.config.num_hidden_layers = 32
    with pytest.raises(ModelError, match="layers"):
        Engine(model, plan=Plan.uniform("full"))


def test_model_that_bypasses_the_attention_interface_raises() -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelError, match="0 of its 2 layers"):
        Engine(model, plan=Plan.uniform("full"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "later tokens"),
        ({"max_position_embeddings": None}, "positions"),
    ],
)
def test_unsupported_configuration_raises(changes: dict[str, Any], message: str) -> None:
    model = tiny_model()
    vars(model.config).update(changes)  # newer configurations validate assignments
    with pytest.raises(ModelError, match=message):
        Engine(model, plan=Plan.uniform("full"))


def test_a_library_may_wrap_every_attention_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kvpress does when it is imported; it passes on by place what those of torch take so."""
    model = tiny_model()
    engine = Engine(model, plan=Plan.uniform("full"))
    dropouts: list[float] = []

    def wrapped(
        module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, **more: Any
    ) -> Any:
        dropouts.append(dropout)
        return attention_function(module, query, key, value, mask, dropout, **more)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, ATTENTION, wrapped)
    (result,) = engine.generate(PROMPTS[:1], max_new_tokens=6).results()
    assert list(result.tokens) == greedy_tokens(model, PROMPTS[0], 6)
    assert set(dropouts) == {0.0}


def test_window_missing_in_the_configuration_raises() -> None:
    model = tiny_model()
    shape = LayerShape(4, 2, 8, model.dtype, model.device)
    step = EagerStep(KVCache([shape], [Slab(4)], 1), [0], [1])
    keys, attention = model.lm_head.weight.new_zeros(1, 2, 1, 8), model.model.layers[0].self_attn
    keys, values = step.store(0, keys, keys)
    queries = keys.repeat(1, 2, 1, 1)
    with pytest.raises(ModelError, match="window of 7"):
        attention_function(
            attention,
            queries,
            keys,
            values,
            None,
            kvpolicy_forward=ForwardInput(torch.zeros(1, 1), step),
            sliding_window=7,
        )


def test_window_only_in_the_configuration_raises() -> None:
    model = model_of("phimoe", sliding_window=6)
    with pytest.raises(ModelError, match=r"window of None.* 6"):
        Engine(model, plan=Plan.uniform("full"))
