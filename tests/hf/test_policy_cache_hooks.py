"""A `PolicyCache` asks every hook, leaves its model as it was, and says what it cannot do."""

import copy
import gc
from typing import Any, ClassVar

import attrs
import pytest
import torch
from batches import PAD, written
from hypothesis import given
from hypothesis import strategies as st
from strategies import prompts
from tiny import greedy_tokens, shared_model, tiny_model, tiny_tokenizer
from torch import Tensor, nn

from kvpolicy import Engine, Plan, PolicyCache, hookimpl
from kvpolicy.errors import BudgetError, CacheError, HookError, KVPolicyError, ModelError
from kvpolicy.state import Memory, Registers

NUM_LAYERS = 2
DOUBLE = {"dtype": torch.float64}
FULL = Plan.uniform("full")


@attrs.define(eq=False)
class Watches:
    """Steers by what it was shown; notes both, for each sequence."""

    registers: ClassVar[tuple[str, ...]] = ("sum",)
    seen: dict[tuple[int, ...], list[Any]] = attrs.field(factory=dict)

    @hookimpl
    def observe(
        self,
        token_ids: Tensor,
        hidden_states: Tensor,
        start: int,
        prompt_len: int,
        tokenizer: Any,
        registers: Registers,
        memory: Memory,
    ) -> None:
        (mine,) = memory.of(self)
        tokens = mine.setdefault("tokens", [])
        assert start == len(tokens)
        assert len(hidden_states) == len(token_ids)
        tokens += token_ids.tolist()
        self.seen.setdefault(tuple(tokens[:prompt_len]), mine)
        mine["text"] = tokenizer.decode(tokens)
        mine.setdefault("states", []).append(hidden_states.double().norm(dim=-1))
        registers.of(self)["sum"][:] = float(sum(tokens) % 7) - 3

    @hookimpl
    def steer(self, hidden_states: Tensor, token_ids: Tensor, registers: Registers) -> Tensor:
        strength = registers.of(self)["sum"] + token_ids % 2
        return 0.3 * strength[:, None].to(hidden_states.dtype) * hidden_states.sin()


@given(prompts(count=3, max_len=30), st.integers(1, 7), st.sampled_from([3, 512]))
def test_observe_and_steer_equal_those_of_the_engine(
    prompts: list[list[int]], buffer: int, chunk: int
) -> None:
    model, tokenizer = shared_model(num_layers=NUM_LAYERS, **DOUBLE), tiny_tokenizer()
    seen = []
    answers = []
    for runner in ("engine", "cache"):
        watches = Watches()
        plan = Plan.uniform("streaming", watches, budget=12, buffer=buffer)
        if runner == "engine":
            run = Engine(model, tokenizer, plan, slots=2, chunk=chunk).generate(
                prompts, max_new_tokens=16
            )
            answers.append([list(result.tokens) for result in run.results()])
        else:
            cache = PolicyCache(model, plan, tokenizer, chunk=chunk)
            answers.append(written(model, prompts, 16, past_key_values=cache))
        seen.append(watches.seen)
    assert answers[0] == answers[1]
    assert answers[0] != [greedy_tokens(model, prompt, 16) for prompt in prompts]
    assert seen[0].keys() == seen[1].keys()
    for key in seen[0]:
        ours, theirs = seen[1][key], seen[0][key]
        shared = min(len(ours["tokens"]), len(theirs["tokens"]))
        assert ours["tokens"][:shared] == theirs["tokens"][:shared]
        states = [torch.cat(one["states"])[:shared] for one in (ours, theirs)]
        torch.testing.assert_close(*states)


def test_every_token_is_shown_once_over_several_turns() -> None:
    model, watches = shared_model(num_layers=NUM_LAYERS, **DOUBLE), Watches()
    plan = Plan.uniform("streaming", watches, budget=12, buffer=6)
    cache = PolicyCache(model, plan, tiny_tokenizer())
    text = [1, 2, 3, 4, 5]
    for more in ([7, 8, 9], [11] * 14, [3]):
        (answer,) = written(model, [text], 10, past_key_values=cache)
        text += [*answer, *more]
    mine = next(iter(watches.seen.values()))
    assert all(one is mine for one in watches.seen.values())
    assert mine["tokens"] == text[: len(mine["tokens"])]
    assert len(text) - len(mine["tokens"]) <= 6 + 2


# The model


def state_of(model: nn.Module) -> tuple[Any, ...]:
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
    ]
    return model.config._attn_implementation, hooks, sorted(vars(model))


def test_a_model_is_what_it_was_when_the_cache_is_gone() -> None:
    model = tiny_model()
    before = state_of(model)
    caches = [PolicyCache(model, FULL), PolicyCache(model, FULL)]
    written(model, [[1, 2, 3]], 4, past_key_values=caches[0])
    assert model.config._attn_implementation == before[0]
    del caches
    assert state_of(model) == before


def test_a_cache_is_not_kept_alive_by_its_model() -> None:
    """Without help from the garbage collector: slabs are large."""
    model = tiny_model()
    gc.disable()
    try:
        cache = PolicyCache(model, FULL)
        written(model, [[1, 2, 3]], 4, past_key_values=cache)
        slabs = cache.batch.cache.layers[0].keys
        del cache
        assert len(gc.get_referrers(slabs)) <= 1
    finally:
        gc.enable()
    assert not model._forward_hooks


def test_other_forwards_of_the_model_are_left_alone() -> None:
    model = shared_model(num_layers=NUM_LAYERS)
    alone = greedy_tokens(model, [5, 6, 7], 8)
    caches = [PolicyCache(model, Plan.uniform("streaming", budget=8, buffer=1)) for _ in range(2)]
    ours = [written(model, [[9, 8, 7] * 6], 6, past_key_values=cache) for cache in caches]
    assert ours[0] == ours[1]
    assert greedy_tokens(model, [5, 6, 7], 8) == alone
    assert {cache.report.tokens for cache in caches} == {(23,)}


@attrs.define(eq=False)
class Raises:
    """Raises what it is told to, at its second compaction."""

    error: BaseException
    count: int = 0

    @hookimpl
    def score(self) -> None:
        self.count += 1
        if self.count > NUM_LAYERS:
            raise self.error


def test_a_policy_that_raises_leaves_the_model_usable() -> None:
    model = shared_model(num_layers=NUM_LAYERS)
    plan = Plan.uniform(Raises(ValueError("no")), budget=8, buffer=2)
    cache = PolicyCache(model, plan)
    with pytest.raises(HookError, match="no"):
        written(model, [[1, 2, 3]], 20, past_key_values=cache)
    assert model.config._attn_implementation == "sdpa"
    assert len(greedy_tokens(model, [1, 2, 3], 4)) == 4
    with pytest.raises(CacheError, match=r"a forward did not end; call reset\(\)"):
        written(model, [[1, 2, 3] * 9], 3, past_key_values=cache)
    cache.reset()
    assert len(written(model, [[1, 2, 3]], 4, past_key_values=cache)[0]) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")])
def test_an_interrupted_forward_is_made_good_by_the_next(error: BaseException) -> None:
    """A hook of PyTorch hears of an exception, but not of an interrupt."""
    model = shared_model(num_layers=NUM_LAYERS)
    alone = greedy_tokens(model, [5, 6, 7], 8)
    cache = PolicyCache(model, FULL)

    def interrupt(*_: Any) -> None:
        raise error

    handle = model.get_decoder().layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(type(error)):
        written(model, [[1, 2, 3]], 4, past_key_values=cache)
    handle.remove()
    assert greedy_tokens(model, [5, 6, 7], 8) == alone
    assert model.config._attn_implementation == "sdpa"


def test_an_interrupted_forward_is_made_good_when_the_cache_goes() -> None:
    model = tiny_model()
    cache = PolicyCache(model, FULL)
    handle = (
        model.get_decoder()
        .layers[1]
        .register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    )
    with pytest.raises(KeyboardInterrupt):
        written(model, [[1, 2, 3]], 4, past_key_values=cache)
    handle.remove()
    cache.reset()
    assert model.config._attn_implementation == "sdpa"


# Refusals


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_beams": 2}, "does no beam search yet; leave out num_beams"),
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
def test_what_a_cache_cannot_do_is_said_in_a_sentence(
    options: dict[str, Any], sentence: str
) -> None:
    model = tiny_model(attn_implementation="eager")
    if "assistant_model" in options:
        options = {"assistant_model": tiny_model(seed=1)}
    cache = PolicyCache(model, FULL)
    with pytest.raises(CacheError, match=sentence) as raised:
        written(model, [[1, 2, 1, 2, 1, 2]], 8, past_key_values=cache, **options)
    assert "\n" not in str(raised.value)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("reorder_cache", [torch.tensor([0])]),
        ("crop", [-1]),
        ("activate_past_recording", []),
        ("batch_repeat_interleave", [2]),
        ("batch_select_indices", [torch.tensor([0])]),
        ("update", [torch.zeros(1), torch.zeros(1), 0]),
        ("get_mask_sizes", [1, 0]),
    ],
)
def test_methods_of_other_caches_are_refused(method: str, arguments: list[Any]) -> None:
    cache = PolicyCache(shared_model(), FULL)
    with pytest.raises(CacheError, match=r"^a PolicyCache .*; "):
        getattr(cache, method)(*arguments)


def test_gradients_are_refused() -> None:
    model = shared_model()
    cache = PolicyCache(model, FULL)
    with pytest.raises(CacheError, match="computes no gradients"):
        model(torch.tensor([[1, 2]]), past_key_values=cache)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), past_key_values=cache)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"inputs_embeds": torch.zeros(1, 2, 32)}, "token ids, not embeddings"),
        ({"input_ids": torch.ones(1, 2, dtype=int), "labels": torch.ones(1, 2)}, "given labels"),
        ({"input_ids": torch.ones(1, 2, dtype=int), "logits_to_keep": 2}, "newest token only"),
    ],
)
def test_forwards_of_another_kind_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    model = shared_model()
    cache = PolicyCache(model, FULL)
    with pytest.raises(CacheError, match=sentence), torch.no_grad():
        model(past_key_values=cache, **arguments)


def test_another_model_is_refused() -> None:
    cache = PolicyCache(tiny_model(), FULL)
    for model in (tiny_model(seed=1), copy.deepcopy(tiny_model())):
        with pytest.raises(CacheError, match="not made for; make one for each model"):
            written(model, [[1, 2, 3]], 3, past_key_values=cache)
    original = tiny_model()
    cache = PolicyCache(original, FULL)
    with pytest.raises(CacheError, match="another model; make one for each"):
        written(copy.deepcopy(original), [[1, 2, 3]], 3, past_key_values=cache)


def test_more_tokens_than_positions_are_refused() -> None:
    model = tiny_model(max_position_embeddings=16)
    cache = PolicyCache(model, Plan.uniform("streaming", budget=8, buffer=2))
    assert len(written(model, [[1] * 9], 8, past_key_values=cache)[0]) == 8
    cache.reset()
    with pytest.raises(CacheError, match="17 tokens; the model has positions for 16"):
        model.generate(
            torch.ones(1, 17, dtype=torch.int64),
            past_key_values=cache,
            max_new_tokens=1,
            pad_token_id=PAD,
        )


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
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
def test_a_cache_that_cannot_be_made_is_refused(
    arguments: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    model = tiny_model()
    with pytest.raises(error, match=sentence):
        PolicyCache(model, **arguments)
    assert not model._forward_hooks


def test_a_model_that_cannot_be_run_is_refused() -> None:
    model = tiny_model()
    model.config.is_encoder_decoder = True
    with pytest.raises(ModelError, match="encoder-decoder"):
        PolicyCache(model, FULL)


def test_an_empty_cache_has_an_empty_report() -> None:
    cache = PolicyCache(shared_model(), FULL)
    assert cache.report.to_dict()["tokens"] == ()
    assert (cache.get_seq_length(), len(cache), cache.is_compileable) == (0, 0, False)
