"""A `PolicyCache` calls all hooks, restores its model and refuses unsupported options."""

import copy
import gc
from typing import Any

import attrs
import pytest
import torch
from batches import PAD, generated_tokens
from hypothesis import given
from hypothesis import strategies as st
from recorder import RecordsAndSteers
from strategies import costly, prompts
from tiny import greedy_tokens, shared_model, tiny_model, tiny_tokenizer
from torch import nn

from kvpolicy import Engine, Plan, PolicyCache, hookimpl
from kvpolicy.compat import cache_argument
from kvpolicy.errors import BudgetError, CacheError, HookError, KVPolicyError, ModelError

NUM_LAYERS = 2
DOUBLE = {"dtype": torch.float64}
FULL = Plan.uniform("full")


@pytest.mark.nightly
@given(prompts(count=3, max_len=30), st.integers(1, 7), st.sampled_from([3, 512]))
def test_observe_and_steer_equal_the_engine(
    prompts: list[list[int]], buffer: int, chunk: int
) -> None:
    model, tokenizer = shared_model(num_layers=NUM_LAYERS, **DOUBLE), tiny_tokenizer()
    seen = []
    answers = []
    for runner in ("engine", "cache"):
        recorder = RecordsAndSteers()
        plan = Plan.uniform("streaming", recorder, budget=12, buffer=buffer)
        if runner == "engine":
            run = Engine(model, tokenizer, plan, slots=2, chunk=chunk).generate(
                prompts, max_new_tokens=16
            )
            answers.append([list(result.tokens) for result in run.results()])
        else:
            cache = PolicyCache(model, plan, tokenizer, chunk=chunk)
            answers.append(generated_tokens(model, prompts, 16, past_key_values=cache))
        seen.append(recorder.seen)
    assert answers[0] == answers[1]
    assert answers[0] != [greedy_tokens(model, prompt, 16) for prompt in prompts]
    assert seen[0].keys() == seen[1].keys()
    for key in seen[0]:
        ours, theirs = seen[1][key], seen[0][key]
        shared = min(len(ours["tokens"]), len(theirs["tokens"]))
        assert ours["tokens"][:shared] == theirs["tokens"][:shared]
        states = [torch.cat(one["states"])[:shared] for one in (ours, theirs)]
        torch.testing.assert_close(*states)


def test_every_token_is_observed_once_over_several_turns() -> None:
    model, recorder = shared_model(num_layers=NUM_LAYERS, **DOUBLE), RecordsAndSteers()
    plan = Plan.uniform("streaming", recorder, budget=12, buffer=6)
    cache = PolicyCache(model, plan, tiny_tokenizer())
    text = [1, 2, 3, 4, 5]
    for more in ([7, 8, 9], [11] * 14, [3]):
        (answer,) = generated_tokens(model, [text], 10, past_key_values=cache)
        text += [*answer, *more]
    notes = next(iter(recorder.seen.values()))
    assert all(one is notes for one in recorder.seen.values())
    assert notes["tokens"] == text[: len(notes["tokens"])]
    assert len(text) - len(notes["tokens"]) <= 6 + 2


@attrs.define(eq=False, kw_only=True)
class KeepsWhatStandsOut:
    """Scores rows by what enters the attention, and checks that every row is annotated."""

    tracks: tuple[str, ...] = ("size",)
    annotates_in_step: bool = False

    @hookimpl
    def annotate(self, states: torch.Tensor, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        size = states.sin().sum(dim=1, keepdim=True) + 100
        return {"size": size.expand(keys.shape[:2])}

    @hookimpl
    def score(self, tracks: Any) -> torch.Tensor:
        assert (tracks["size"] > 0).all()
        return tracks["size"]


@costly
@given(prompts(count=3, max_len=30), st.integers(1, 7), st.sampled_from([3, 512]), st.booleans())
def test_annotations_equal_those_of_the_engine(
    prompts: list[list[int]], buffer: int, chunk: int, in_step: bool
) -> None:
    model = shared_model(num_layers=NUM_LAYERS, **DOUBLE)
    plan = Plan.uniform(KeepsWhatStandsOut(annotates_in_step=in_step), budget=9, buffer=buffer)
    run = Engine(model, plan=plan, slots=2, chunk=chunk).generate(prompts, max_new_tokens=10)
    answers = [list(result.tokens) for result in run.results()]
    cache = PolicyCache(model, plan, chunk=chunk)
    assert generated_tokens(model, prompts, 10, past_key_values=cache) == answers


@pytest.mark.few(1)
@pytest.mark.parametrize("in_step", [True, False])
def test_annotations_go_with_a_row_through_copies_and_turns(in_step: bool) -> None:
    model = shared_model(num_layers=NUM_LAYERS, **DOUBLE)
    plan = Plan.uniform(KeepsWhatStandsOut(annotates_in_step=in_step), budget=9, buffer=6)
    cache, text = PolicyCache(model, plan), [1, 2, 3, 4, 5]
    for more in ([7, 8, 9], [11] * 14, [3]):
        copied = copy.deepcopy(cache)
        (answer,) = generated_tokens(model, [text], 10, past_key_values=cache)
        (other,) = generated_tokens(model, [text], 10, past_key_values=copied)
        assert answer == other
        text += [*answer, *more]
    beams = PolicyCache(model, plan)
    options = {"num_beams": 3, "do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    ids = torch.tensor([text[:12]])
    model.generate(ids, attention_mask=torch.ones_like(ids), **cache_argument(beams), **options)
    assert beams.report.rows_evicted > 0


# The model


def state_of(model: nn.Module) -> tuple[Any, ...]:
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
    ]
    return model.config._attn_implementation, hooks, sorted(vars(model))


def test_model_is_restored_when_the_cache_is_deleted() -> None:
    model = tiny_model()
    before = state_of(model)
    caches = [PolicyCache(model, FULL), PolicyCache(model, FULL)]
    generated_tokens(model, [[1, 2, 3]], 4, past_key_values=caches[0])
    assert model.config._attn_implementation == before[0]
    del caches
    assert state_of(model) == before


def test_model_does_not_keep_the_cache_alive() -> None:
    """Without the garbage collector, because slabs are large."""
    model = tiny_model()
    gc.disable()
    try:
        cache = PolicyCache(model, FULL)
        generated_tokens(model, [[1, 2, 3]], 4, past_key_values=cache)
        slabs = cache.core.cache.layers[0].keys
        del cache
        assert len(gc.get_referrers(slabs)) <= 1
    finally:
        gc.enable()
    assert not model._forward_hooks


def test_other_forwards_of_the_model_are_unchanged() -> None:
    model = shared_model(num_layers=NUM_LAYERS)
    alone = greedy_tokens(model, [5, 6, 7], 8)
    caches = [PolicyCache(model, Plan.uniform("streaming", budget=8, buffer=1)) for _ in range(2)]
    ours = [generated_tokens(model, [[9, 8, 7] * 6], 6, past_key_values=cache) for cache in caches]
    assert ours[0] == ours[1]
    assert greedy_tokens(model, [5, 6, 7], 8) == alone
    assert {cache.report.tokens for cache in caches} == {(23,)}


@attrs.define(eq=False)
class Raises:
    """Raises ``error`` at its second compaction."""

    error: BaseException
    count: int = 0

    @hookimpl
    def score(self, layer_idx: int) -> None:
        self.count += 1
        if self.count > NUM_LAYERS:
            raise self.error


def test_model_is_usable_after_a_policy_raised() -> None:
    model = shared_model(num_layers=NUM_LAYERS)
    plan = Plan.uniform(Raises(ValueError("no")), budget=8, buffer=2)
    cache = PolicyCache(model, plan)
    with pytest.raises(HookError, match="no"):
        generated_tokens(model, [[1, 2, 3]], 20, past_key_values=cache)
    assert model.config._attn_implementation == "sdpa"
    assert len(greedy_tokens(model, [1, 2, 3], 4)) == 4
    with pytest.raises(CacheError, match=r"reset\(\)"):
        generated_tokens(model, [[1, 2, 3] * 9], 3, past_key_values=cache)
    cache.reset()
    assert len(generated_tokens(model, [[1, 2, 3]], 4, past_key_values=cache)[0]) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")])
def test_interrupted_forward_is_repaired_by_the_next(error: BaseException) -> None:
    """PyTorch forward hooks run after an exception, but not after an interrupt."""
    model = shared_model(num_layers=NUM_LAYERS)
    alone = greedy_tokens(model, [5, 6, 7], 8)
    cache = PolicyCache(model, FULL)

    def interrupt(*_: Any) -> None:
        raise error

    handle = model.get_decoder().layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(type(error)):
        generated_tokens(model, [[1, 2, 3]], 4, past_key_values=cache)
    handle.remove()
    assert greedy_tokens(model, [5, 6, 7], 8) == alone
    assert model.config._attn_implementation == "sdpa"


@attrs.define(eq=False)
class ReadsKeys:
    @hookimpl
    def score(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.sum(dim=-1)


@pytest.mark.parametrize("num_prompt", [20, 14])
def test_a_model_that_computes_nan_is_named_when_rows_are_evicted(num_prompt: int) -> None:
    """A budget that is exceeded by the prompt, and one that is by what is generated."""
    model = tiny_model()
    model.model.layers[0].mlp.down_proj.weight.data.fill_(torch.nan)
    cache = PolicyCache(model, Plan.uniform(ReadsKeys(), budget=12, buffer=4))
    with pytest.raises(ModelError, match="NaN"):
        generated_tokens(model, [[5] * num_prompt], 20, past_key_values=cache)


def test_interrupted_forward_is_repaired_by_reset() -> None:
    model = tiny_model()
    cache = PolicyCache(model, FULL)
    handle = (
        model.get_decoder()
        .layers[1]
        .register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    )
    with pytest.raises(KeyboardInterrupt):
        generated_tokens(model, [[1, 2, 3]], 4, past_key_values=cache)
    handle.remove()
    cache.reset()
    assert model.config._attn_implementation == "sdpa"


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt_lookup_num_tokens": 2, "eos_token_id": 60},
            "cannot take back tokens|gives the logits of the newest",
        ),
        ({"assistant_model": "itself"}, "cannot take back tokens|gives the logits of the newest"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "given output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"use_cache": False}, "use_cache=False"),
    ],
)
def test_unsupported_generate_options_raise(options: dict[str, Any], message: str) -> None:
    model = tiny_model(attn_implementation="eager")
    if "assistant_model" in options:
        options = {"assistant_model": tiny_model(seed=1)}
    cache = PolicyCache(model, FULL)
    with pytest.raises(CacheError, match=message) as raised:
        generated_tokens(model, [[1, 2, 1, 2, 1, 2]], 8, past_key_values=cache, **options)
    assert "\n" not in str(raised.value)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("crop", [-1]),
        ("activate_past_recording", []),
        ("offload", [0]),
        ("prefetch", [0]),
        ("__iter__", []),
        ("__getitem__", [0]),
        ("__copy__", []),
        ("__reduce_ex__", [2]),
        ("update", [torch.zeros(1), torch.zeros(1), 0]),
        ("get_mask_sizes", [1, 0]),
        ("has_previous_state", []),
        ("update_conv_state", [torch.zeros(1), 0]),
        ("update_recurrent_state", [torch.zeros(1), 0]),
    ],
)
def test_unsupported_cache_methods_raise(method: str, arguments: list[Any]) -> None:
    cache = PolicyCache(shared_model(), FULL)
    with pytest.raises(CacheError, match=r"^a PolicyCache .*; "):
        getattr(cache, method)(*arguments)


def test_gradients_raise() -> None:
    model = shared_model()
    cache = PolicyCache(model, FULL)
    with pytest.raises(CacheError, match="gradients"):
        model(torch.tensor([[1, 2]]), past_key_values=cache)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), past_key_values=cache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 2, 32)}, "token ids, not embeddings"),
        ({"input_ids": torch.ones(1, 2, dtype=int), "labels": torch.ones(1, 2)}, "given labels"),
        ({"input_ids": torch.ones(1, 2, dtype=int), "logits_to_keep": 2}, "newest token only"),
    ],
)
def test_unsupported_forward_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    model = shared_model()
    cache = PolicyCache(model, FULL)
    with pytest.raises(CacheError, match=message), torch.no_grad():
        model(past_key_values=cache, **arguments)


def test_another_model_raises() -> None:
    cache = PolicyCache(tiny_model(), FULL)
    for model in (tiny_model(seed=1), copy.deepcopy(tiny_model())):
        with pytest.raises(CacheError, match="model"):
            generated_tokens(model, [[1, 2, 3]], 3, past_key_values=cache)
    original = tiny_model()
    cache = PolicyCache(original, FULL)
    with pytest.raises(CacheError, match="model"):
        generated_tokens(copy.deepcopy(original), [[1, 2, 3]], 3, past_key_values=cache)


def test_more_tokens_than_positions_raise() -> None:
    model = tiny_model(max_position_embeddings=16)
    cache = PolicyCache(model, Plan.uniform("streaming", budget=8, buffer=2))
    assert len(generated_tokens(model, [[1] * 9], 8, past_key_values=cache)[0]) == 8
    cache.reset()
    with pytest.raises(CacheError, match=r"17.*16"):
        model.generate(
            torch.ones(1, 17, dtype=torch.int64),
            **cache_argument(cache),
            max_new_tokens=1,
            pad_token_id=PAD,
        )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"plan": None}, KVPolicyError, "no plan"),
        ({"plan": Plan.uniform("streaming", budget=2)}, BudgetError, "protect"),
        ({"plan": FULL, "max_length": 0}, CacheError, "max_length=0"),
        ({"plan": FULL, "chunk": 0}, KVPolicyError, "chunk=0"),
        (
            {"plan": Plan.uniform("streaming", budget=9, padding="stored")},
            CacheError,
            "stores no pads",
        ),
    ],
)
def test_invalid_cache_options_raise(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = tiny_model()
    with pytest.raises(error, match=message):
        PolicyCache(model, **arguments)
    assert not model._forward_hooks


def test_unsupported_model_raises() -> None:
    model = tiny_model()
    model.config.is_encoder_decoder = True
    with pytest.raises(ModelError, match="encoder-decoder"):
        PolicyCache(model, FULL)


def test_empty_cache_has_an_empty_report() -> None:
    cache = PolicyCache(shared_model(), FULL)
    assert cache.report.to_dict()["tokens"] == ()
    assert cache.get_seq_length() == 0
