"""Requests with images: what `generate` gives, alone, in batches, and while rows leave."""

from functools import cache
from typing import Any

import attrs
import pytest
import torch
from batches import padded
from tiny import tiny_tokenizer
from tiny_images import IMAGE, Image, image_of, of_images, tiny_seeing_model

from kvpolicy import Engine, KVPolicyError, Plan, PolicyCache, PrefixStore, Request, Result
from kvpolicy.compat import cache_argument, has_states

NEW = 8
FULL = Plan.uniform("full")
KNOBS: dict[str, dict[str, Any]] = {
    "h2o": {"n_recent": 3},
    "snapkv": {"window_size": 3},
    "streaming": {"n_sink": 1},
    "skipkv": {"delimiters": (3, 7), "tau": 0.5, "window_size": 4},
}
PLAIN = "LlavaForConditionalGeneration"
ROPE_IN_PLANES = "Qwen2_5_VLForConditionalGeneration"
BOTH_WAYS = "Gemma3ForConditionalGeneration"
TO_LAYERS = "Granite4VisionForConditionalGeneration"
WITH_STATES = pytest.param(
    "Lfm2VlForConditionalGeneration",
    marks=pytest.mark.skipif(not has_states(), reason="transformers has no cache for states"),
)
CLASSES = [PLAIN, ROPE_IN_PLANES, BOTH_WAYS, WITH_STATES, TO_LAYERS]


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
    # A text in which the model has generated the token of an image cannot be given to it again.
    model.generation_config.suppress_tokens = [IMAGE]
    return model, images


def batch(name: str) -> list[tuple[list[int], Image | None]]:
    """Prompts of several lengths, with an image in the middle, without one, and with one early."""
    first, second = seeing(name)[1]
    return [
        (first.prompt([5, 9, 40, 3], [7, 11]), first),
        ([4, 6, 8], None),
        (second.prompt([3], [8, 9, 21, 7]), second),
    ]


def request(prompt: list[int], image: Image | None, **options: Any) -> Request:
    images = None if image is None else of_images([image], torch.tensor([prompt]))
    return Request(prompt, max_new_tokens=NEW, stop_ids=(), images=images, **options)


def generated(name: str, prompt: list[int], image: Image | None, plan: Plan | None = None) -> Any:
    """Greedy tokens of the model's own `generate`, with a `PolicyCache` if there is a plan."""
    model, _ = seeing(name)
    inputs = padded([prompt])
    images = of_images([] if image is None else [image], inputs["input_ids"])
    options = {} if plan is None else cache_argument(PolicyCache(model, plan, tiny_tokenizer()))
    settings = {"max_new_tokens": NEW, "do_sample": False}
    with torch.no_grad():
        found = model.generate(**inputs, **images, **settings, **options)
    return found[0, len(prompt) :].tolist()


def tokens(results: list[Result]) -> list[list[int]]:
    assert [one.error for one in results] == [None] * len(results)
    return [list(one.tokens) for one in results]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CLASSES)
def test_an_engine_gives_the_tokens_of_generate(name: str) -> None:
    model, _ = seeing(name)
    expected = [generated(name, prompt, image) for prompt, image in batch(name)]
    assert generated(name, *batch(name)[0]) != generated(
        name, batch(name)[0][0], seeing(name)[1][1]
    ), "the image has no effect"
    engine = Engine(model, plan=FULL, slots=2, chunk=5 if name != BOTH_WAYS else None)
    assert tokens(engine.generate([request(*one) for one in batch(name)]).results()) == expected


@pytest.mark.parametrize("name", [PLAIN, ROPE_IN_PLANES])
def test_a_model_whose_first_forward_is_that_of_an_engine_is_left_as_it_was(name: str) -> None:
    fresh = seeing(name)[0].__class__(seeing(name)[0].config).eval()
    fresh.load_state_dict(seeing(name)[0].state_dict())
    prompt, image = batch(name)[0]
    assert image is not None
    expected = generated(name, prompt, image)
    for _ in range(2):
        (result,) = Engine(fresh, plan=FULL).generate([request(prompt, image)]).results()
        assert tokens([result]) == [expected]
        images = of_images([image], torch.tensor([prompt]))
        settings = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [IMAGE]}
        with torch.no_grad():
            found = fresh.generate(**padded([prompt]), **images, **settings)
        assert found[0, len(prompt) :].tolist() == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", KNOBS)
@pytest.mark.parametrize("name", CLASSES)
def test_while_rows_leave_a_request_equals_itself_alone_and_in_generate(
    name: str, policy: str
) -> None:
    model, _ = seeing(name)
    sizes = {"budget": 8, "buffer": 4, "knobs": {policy: KNOBS[policy]}}
    plan = Plan.uniform(policy, **sizes, prefill_buffer=4)
    expected = [
        generated(name, prompt, image, Plan.uniform(policy, **sizes))
        for prompt, image in batch(name)
    ]
    for slots in (1, 2):
        engine = Engine(model, tiny_tokenizer(), plan, slots=slots)
        results = engine.generate([request(*one) for one in batch(name)]).results()
        assert tokens(results) == expected
        assert sum(one.rows_evicted for one in results) > 0


@pytest.mark.parametrize("name", [PLAIN, ROPE_IN_PLANES])
def test_equal_tokens_with_other_images_share_no_rows(name: str) -> None:
    model, images = seeing(name)
    prompt = images[0].prompt([5, 9, 40, 3], [7, 11, 30])
    engine = Engine(model, plan=FULL, slots=1, prefix_store=PrefixStore(1 << 20, block_tokens=2))
    asked = [images[0], images[1], None, images[0]]
    results = [engine.generate([request(prompt, one)]).results()[0] for one in asked]
    expected = [generated(name, prompt, one) for one in (images[0], images[1])]
    found = tokens(results)
    assert (found[0], found[1], found[3]) == (expected[0], expected[1], expected[0])
    assert expected[0] != expected[1]
    assert [one.reused_tokens for one in results] == [0] * 4


@pytest.mark.parametrize("name", [PLAIN, ROPE_IN_PLANES])
def test_a_snapshot_behind_an_image_goes_on(name: str) -> None:
    model, (image, _) = seeing(name)
    prompt = image.prompt([5, 9, 40, 3], [7, 11])
    expected = generated(name, prompt, image)
    engine = Engine(model, plan=FULL, slots=1)
    images = of_images([image], torch.tensor([prompt]))
    first = Request(prompt, max_new_tokens=4, stop_ids=(), images=images, snapshot=True)
    (begun,) = engine.generate([first]).results()
    going_on = Request(resume=begun.snapshot, max_new_tokens=NEW - 4, stop_ids=())
    (ended,) = engine.generate([going_on]).results()
    assert tokens([begun, ended]) == [expected[:4], expected[4:]]


def test_images_that_do_not_fit_the_prompt_end_their_request_alone() -> None:
    model, (image, _) = seeing(PLAIN)
    prompt = image.prompt([5, 9, 40, 3], [7, 11])
    engine = Engine(model, plan=FULL, slots=2)
    bad = Request([5, IMAGE, 9], images=request(prompt, image).images, stop_ids=())
    failed, good = engine.generate([bad, request(prompt, image)]).results()
    assert failed.error is not None
    assert "images" in failed.error
    assert tokens([good]) == [generated(PLAIN, prompt, image)]


def test_an_image_without_room_ends_its_request_alone() -> None:
    model, (image, _) = seeing(BOTH_WAYS)
    prompt = image.prompt([5, 9], [7, 11])
    engine = Engine(model, plan=FULL, slots=2, chunk=image.num_tokens - 1)
    failed, good = engine.generate([request(prompt, image), request([4, 6, 8], None)]).results()
    assert failed.error is not None
    assert "buffer" in failed.error
    assert tokens([good]) == [generated(BOTH_WAYS, [4, 6, 8], None)]


def test_what_cannot_be_served_is_refused() -> None:
    model, (image, _) = seeing(PLAIN)
    images = request([5], image).images
    engine = Engine(model, tiny_tokenizer(), FULL, slots=1)
    for wrong, named in [
        (Request("a text", images=images), "input_ids"),
        (Request([5, 9], images={"pixels": torch.zeros(1)}), "pixel_values"),
    ]:
        (result,) = engine.generate([wrong]).results()
        assert result.error is not None
        assert named in result.error
    for value in ({}, {"pixel_values": 3}, torch.zeros(3)):
        with pytest.raises(KVPolicyError, match="processor"):
            Request([5, 9], images=value)  # type: ignore[arg-type]


def test_a_model_without_images_refuses_them() -> None:
    from tiny import tiny_model

    (result,) = (
        Engine(tiny_model(), plan=FULL)
        .generate([Request([5, 9], images={"pixel_values": torch.zeros(1)})])
        .results()
    )
    assert result.error is not None
    assert "takes none" in result.error


def test_requests_are_equal_if_their_images_are() -> None:
    _, (first, second) = seeing(PLAIN)
    prompt = first.prompt([5], [7])
    one, same, other = (request(prompt, image) for image in (first, first, second))
    assert one == same
    hashable = [attrs.evolve(each, prompt=tuple(prompt)) for each in (one, same, other)]
    assert len(set(hashable)) == 2
    assert one != other
    assert one != request(prompt, None)
    copied = {name: tensor.clone() for name, tensor in first.arguments.items()}
    assert one == attrs.evolve(one, images=copied)
    assert one != attrs.evolve(one, images={name: one.double() for name, one in copied.items()})


@pytest.mark.parametrize("name", [PLAIN, ROPE_IN_PLANES])
def test_tokens_of_images_without_images_are_text_as_in_generate(name: str) -> None:
    model, (image, _) = seeing(name)
    prompt = image.prompt([5, 9], [7])
    (result,) = Engine(model, plan=FULL).generate([request(prompt, None)]).results()
    assert tokens([result]) == [generated(name, prompt, None)]
    assert tokens([result]) != [generated(name, prompt, image)]
