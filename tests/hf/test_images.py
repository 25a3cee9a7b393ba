"""Prompts with images in `generate` with a `PolicyCache`: embeddings, positions, rows."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from batches import padded
from tiny import tiny_tokenizer
from tiny_images import IMAGE, Image, image_of, of_images, tiny_seeing_model
from torch import Tensor

from kvpolicy import Engine, Plan, PolicyCache, Request, Sampling, hookimpl
from kvpolicy.compat import cache_argument, has_states
from kvpolicy.errors import CacheError, HookError, ModelError

NEW = 8
FULL = Plan.uniform("full")
KNOBS: dict[str, dict[str, Any]] = {
    "h2o": {"n_recent": 3},
    "snapkv": {"window_size": 3},
    "streaming": {"n_sink": 1},
    "skipkv": {"delimiters": (3, 7), "tau": 0.5, "window_size": 4},
}
PLANS = {
    name: Plan.uniform(name, budget=8, buffer=4, knobs={name: knobs})
    for name, knobs in KNOBS.items()
}
WITH_STATES = pytest.param(
    "Lfm2VlForConditionalGeneration",
    marks=pytest.mark.skipif(not has_states(), reason="transformers has no cache for states"),
)
# Tokens of an image that attend to each other, positions in planes, images in tiles, plain ones,
# and layers with states of fixed size.
CLASSES = [
    "Gemma3ForConditionalGeneration",
    "HunYuanVLForConditionalGeneration",
    WITH_STATES,
    "Gemma4ForConditionalGeneration",
    "Granite4VisionForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
]
ROPE_IN_PLANES = "Qwen2_5_VLForConditionalGeneration"
PLAIN = "LlavaForConditionalGeneration"
BOTH_WAYS = "Gemma3ForConditionalGeneration"


@cache
def seeing(name: str) -> Any:
    """A model and two images; skipped where this release of transformers builds none."""
    try:
        model = tiny_seeing_model(name)
    except Exception as error:
        pytest.skip(f"no tiny model of this release of transformers: {error}")
    images = image_of(model), image_of(model, seed=1)
    if None in images:
        pytest.skip("no tiny image for this release of transformers")
    return model, images


def answers(
    model: Any,
    prompts: Sequence[list[int]],
    images: Sequence[Image | None],
    policy_cache: PolicyCache | None = None,
    **options: Any,
) -> list[list[int]]:
    """Greedy tokens of `generate` for prompts in one batch, which have these images, in order."""
    inputs = padded([*prompts])
    own = [image for image in images if image is not None]
    options |= cache_argument(policy_cache) if policy_cache is not None else {}
    # A text in which the model has generated the token of an image cannot be given to it again.
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    settings |= {"suppress_tokens": [IMAGE]}
    with torch.no_grad():
        found = model.generate(
            **inputs, **of_images(own, inputs["input_ids"]), **(settings | options)
        )
    return found[:, inputs["input_ids"].shape[1] :].tolist()


def batch(images: tuple[Image, Image]) -> tuple[list[list[int]], list[Image | None]]:
    """Prompts of several lengths, with an image in the middle, without one, and with one early."""
    first, second = images
    prompts = [first.prompt([5, 9, 40, 3], [7, 11]), [4, 6, 8], second.prompt([3], [8, 9, 21, 7])]
    return prompts, [first, None, second]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CLASSES)
def test_a_full_cache_gives_the_tokens_of_generate(name: str) -> None:
    model, images = seeing(name)
    prompts, given = batch(images)
    alone = [answers(model, [one], [image])[0] for one, image in zip(prompts, given, strict=True)]
    assert answers(model, prompts[:1], [images[1]])[0] != alone[0], "the image has no effect"
    assert answers(model, prompts, given, PolicyCache(model, FULL)) == alone


@pytest.mark.few(4)
@pytest.mark.parametrize("policy", PLANS)
@pytest.mark.parametrize("name", CLASSES)
def test_a_row_of_a_batch_equals_the_row_alone_while_rows_leave(name: str, policy: str) -> None:
    model, images = seeing(name)
    prompts, given = batch(images)
    plan = PLANS[policy]
    alone = [
        answers(model, [one], [image], PolicyCache(model, plan, tiny_tokenizer()))[0]
        for one, image in zip(prompts, given, strict=True)
    ]
    together = PolicyCache(model, plan, tiny_tokenizer())
    assert answers(model, prompts, given, together) == alone
    assert together.report.rows_evicted > 0


def visible(num_tokens: int, budget: int, buffer: int, n_sink: int, num_prompt: int) -> Tensor:
    """Which tokens each token sees under `streaming`, in plain lists, bool ``[N, N]``."""
    seen = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    held: list[int] = []
    done = 0
    while done < num_tokens:
        if len(held) == budget + buffer:
            held = held[:n_sink] + held[len(held) - (budget - n_sink) :]
        most = budget + buffer - len(held)
        chunk = min(most, num_prompt - done) if done < num_prompt else 1
        for token in range(done, done + chunk):
            held.append(token)
            seen[token, held] = True
        done += chunk
    return seen


@pytest.mark.parametrize("name", [PLAIN, ROPE_IN_PLANES])
def test_evicted_rows_are_as_masked_and_positions_go_on_behind_an_image(name: str) -> None:
    """One forward of the model itself over the whole text, under a mask, gives each next token."""
    model, (image, _) = seeing(name)
    prompt = image.prompt([5, 9, 40, 3, 3, 8], [7, 11, 30])
    found = answers(model, [prompt], [image], PolicyCache(model, PLANS["streaming"]))[0]
    text = torch.tensor([prompt + found])
    seen = visible(text.shape[1], budget=8, buffer=4, n_sink=1, num_prompt=len(prompt))
    assert not seen.equal(torch.ones_like(seen).tril())
    given = {**of_images([image], text), "input_ids": text}
    if name == ROPE_IN_PLANES:
        # The grid has two rows and columns in the place of four tokens.
        start, after = 6, len(prompt) + NEW - 10
        before, behind = (torch.arange(num).expand(3, -1) for num in (start, after))
        grid = start + torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
        given["position_ids"] = torch.cat([before, grid, start + 2 + behind], dim=1)[:, None]
    hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(**given, attention_mask=hidden[None, None]).logits[0]
    logits[:, IMAGE] = -torch.inf
    assert logits[len(prompt) - 1 : -1].argmax(dim=1).tolist() == found


@pytest.mark.parametrize("name", [PLAIN, ROPE_IN_PLANES])
def test_a_conversation_goes_on_behind_an_image_and_takes_another(name: str) -> None:
    model, (first, second) = seeing(name)
    held, text = PolicyCache(model, FULL), list[int]()
    turns = [(first.prompt([5, 9], [7, 11]), first), ([4, 21], None)]
    turns += [(second.prompt([8], [30, 6]), second)]
    for number, (turn, image) in enumerate(turns):
        text = [*text, *turn]
        expected = answers(model, [text], [first, second] if number == 2 else [first])
        if number == 2 and name == ROPE_IN_PLANES:
            # Its generate wants the images of all turns, and its forward those of the new columns.
            with pytest.raises(ModelError, match="embed"):
                answers(model, [text], [first, second], held)
            return
        found = answers(model, [text], [image], held)
        assert found == expected
        text = [*text, *found[0]]


@pytest.mark.parametrize("of_all_columns", [False, True])
@pytest.mark.parametrize("name", [PLAIN, ROPE_IN_PLANES])
def test_a_forward_of_the_model_itself_takes_an_image_of_a_later_turn(
    name: str, of_all_columns: bool
) -> None:
    model, (first, second) = seeing(name)
    texts = [first.prompt([5, 9], [7, 11]), second.prompt([8, 4], [30, 6])]
    held = PolicyCache(model, FULL)
    ids = torch.tensor([[*texts[0], *texts[1]]])
    with torch.no_grad():
        expected = model(ids, **of_images([first, second], ids)).logits[0, -1]
        for text, image in zip(texts, (first, second), strict=True):
            new = torch.tensor([text])
            given = of_images([image], new)
            if of_all_columns:  # as older releases of transformers do in generate
                seen = ids[:, : held.get_seq_length() + len(text)]
                kinds = {key: (seen == IMAGE).long() for key in given if "token_type_ids" in key}
                given |= {**kinds, "attention_mask": torch.ones_like(seen)}
            output = model(new, **given, **cache_argument(held))
    assert torch.allclose(output.logits[0, -1], expected, atol=1e-4)


def test_beams_and_copies_go_on_behind_an_image() -> None:
    model, (image, _) = seeing(ROPE_IN_PLANES)
    prompt = image.prompt([5, 9, 40], [7, 11])
    beams = {"num_beams": 3}
    try:
        expected = answers(model, [prompt], [image], **beams)
    except RuntimeError:
        pytest.skip("this transformers searches no beams behind an image itself")
    assert answers(model, [prompt], [image], PolicyCache(model, FULL), **beams) == expected
    held = PolicyCache(model, FULL)
    text = [*prompt, *answers(model, [prompt], [image], held)[0]]
    turn = [*text, 4, 21]
    expected = answers(model, [turn], [image])
    assert answers(model, [turn], [None], copy.deepcopy(held)) == expected
    restored = PolicyCache(model, FULL)
    restored.restore([held.snapshot(0)])
    assert answers(model, [turn], [None], restored) == expected


def test_a_snapshot_behind_an_image_goes_on_in_an_engine(tmp_path: Any) -> None:
    model, (image, _) = seeing(ROPE_IN_PLANES)
    held = PolicyCache(model, FULL)
    answers(model, [image.prompt([5, 9, 40], [7, 11])], [image], held)
    snapshot = held.snapshot(0)
    snapshot.save(tmp_path / "one.safetensors")
    loaded = type(snapshot).load(tmp_path / "one.safetensors")
    assert loaded.contents.rope_offset == snapshot.contents.rope_offset < 0
    going_on = Request([4], max_new_tokens=NEW, resume=loaded, stop_ids=())
    model.generation_config.suppress_tokens = [IMAGE]
    try:
        (result,) = Engine(model, plan=FULL).generate([going_on]).results()
    finally:
        model.generation_config.suppress_tokens = None
    assert result.error is None
    whole = [*snapshot.token_ids, 4]
    assert list(result.tokens) == answers(model, [whole], [image])[0]


def test_what_belongs_to_no_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (image, _) = seeing("Granite4VisionForConditionalGeneration")
    mask = type(model.model).get_placeholder_mask

    def of_every_number(*given: Any, inputs_embeds: Tensor, **more: Any) -> Tensor:
        return mask(*given, inputs_embeds=inputs_embeds, **more).expand_as(inputs_embeds)

    monkeypatch.setattr(type(model.model), "get_placeholder_mask", of_every_number)
    with pytest.raises(ModelError, match="deepstack_features"):
        answers(model, [image.prompt([5, 9], [7])], [image], PolicyCache(model, FULL))


def test_keys_are_not_moved_behind_an_image() -> None:
    model, (image, _) = seeing(ROPE_IN_PLANES)
    plan = Plan.uniform("streaming", "rerotate", budget=8, buffer=4)
    with pytest.raises((ModelError, HookError), match="image"):
        answers(model, [image.prompt([5, 9, 40] * 3, [7, 11])], [image], PolicyCache(model, plan))


class SeesImages:
    """Keeps what it is told of."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    @hookimpl
    def score(self, positions: Tensor, is_image: Tensor) -> Tensor:
        self.seen.append((positions.clone(), is_image.clone()))
        return positions.float()


def test_policies_are_told_which_rows_are_of_images() -> None:
    model, images = seeing(PLAIN)
    prompts, given = batch(images)
    policy = SeesImages()
    answers(model, prompts, given, PolicyCache(model, Plan.uniform(policy, budget=6, buffer=4)))
    assert any(is_image.any() for _, is_image in policy.seen)
    for positions, is_image in policy.seen:
        for row, marks in zip(positions.flatten(0, 1), is_image.flatten(0, 1), strict=True):
            fits = [
                all(
                    (at < len(prompt) and prompt[at] == IMAGE) == mark
                    for at, mark in zip(row.tolist(), marks.tolist(), strict=True)
                )
                for prompt in prompts
            ]
            assert any(fits)


@pytest.mark.parametrize("scorer", ["h2o", "streaming"])
def test_images_stay_if_the_plan_says_so(scorer: str) -> None:
    model, (image, _) = seeing(PLAIN)
    prompt = image.prompt([5, 9], [7, 11, 21, 30, 4, 8] * 3)
    held = []
    for stack in ([scorer], [scorer, "protect_images"]):
        plan = Plan.uniform(*stack, budget=8, buffer=4, knobs={scorer: KNOBS[scorer]})
        cache = PolicyCache(model, plan)
        answers(model, [prompt], [image], cache)
        contents = cache.snapshot(0).contents.layers
        held.append([set(head.tolist()) for layer in contents for head in layer.positions])
    ours = set(range(2, 2 + image.num_tokens))
    assert all(ours <= positions for positions in held[1])
    assert not all(ours <= positions for positions in held[0])


def test_an_image_whose_tokens_attend_both_ways_enters_at_once_or_is_refused() -> None:
    model, (image, _) = seeing(BOTH_WAYS)
    # Free rows end within the image: room is made for all of it.
    prompt = image.prompt([5, 9, 40, 3, 3, 8, 11, 30, 7, 4], [7, 11])
    held = PolicyCache(model, PLANS["streaming"])
    answers(model, [prompt], [image], held)
    assert held.report.compactions > 0
    small = Plan.uniform("streaming", budget=8, buffer=image.num_tokens - 1)
    with pytest.raises(ModelError, match=f"{image.num_tokens} tokens"):
        answers(model, [prompt], [image], PolicyCache(model, small))
    with pytest.raises(ModelError, match=f"{image.num_tokens} tokens"):
        answers(model, [prompt], [image], PolicyCache(model, FULL, chunk=image.num_tokens - 1))


def test_what_is_no_image_of_the_model_is_refused() -> None:
    model, (image, _) = seeing(PLAIN)
    prompt = [5, *[IMAGE] * (image.num_tokens + 1), 7]
    with pytest.raises((CacheError, ModelError), match="embed"):
        answers(model, [prompt], [image], PolicyCache(model, FULL))
    ids = torch.tensor([[5, 9]])
    with pytest.raises(CacheError, match="labels"), torch.no_grad():
        model(ids, labels=ids, **cache_argument(PolicyCache(model, FULL)))


@pytest.mark.parametrize("with_ids", [False, True])
def test_embeddings_in_the_place_of_tokens_are_refused(with_ids: bool) -> None:
    """Policies read tokens, and `generate` gives a forward either these or embeddings."""
    model, _ = seeing(PLAIN)
    ids = torch.tensor([[5, 9, 40]])
    given = {"inputs_embeds": model.get_input_embeddings()(ids)}
    given |= {"input_ids": ids} if with_ids else {}
    held = PolicyCache(model, FULL)
    with pytest.raises(CacheError, match="input_ids"), torch.no_grad():
        model.generate(**given, max_new_tokens=2, **cache_argument(held))
    assert answers(model, [[5, 9, 40]], [None], held) == answers(model, [[5, 9, 40]], [None])


def test_an_image_id_in_a_text_of_an_engine_is_a_token_as_any_other() -> None:
    model, _ = seeing(PLAIN)
    prompt = [5, IMAGE, 7]
    expected = answers(model, [prompt], [None])
    request = Request(prompt, NEW, sampling=Sampling(logit_bias={IMAGE: -1e9}))
    (result,) = Engine(model, plan=FULL).generate([request]).results()
    assert [list(result.tokens)] == expected
