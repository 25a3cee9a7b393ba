"""Chats with images through the `openai` package: what `generate` gives, and what is refused."""

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
import torch
from PIL import Image
from serving import Running, error_of, serving
from tiny_processor import MARK, NUM_TOKENS, TEMPLATE, picture, tiny_seeing, url_of

from kvpolicy import Plan, PolicyCache, PrefixStore
from kvpolicy.compat import cache_argument

NEW = 8
PATH = "/v1/chat/completions"
PLANS = {"full": Plan.uniform("full"), "h2o": Plan.uniform("h2o", budget=12, buffer=4)}
MAX_PIXELS = 10_000
Part = dict[str, Any]


@pytest.fixture(scope="module")
def seeing() -> Iterator[Running]:
    model, processor = tiny_seeing()
    store = PrefixStore(1 << 20, block_tokens=2)
    with serving(
        PLANS,
        model=model,
        tokenizer=processor.tokenizer,
        processor=processor,
        prefix_store=store,
        max_pixels=MAX_PIXELS,
        max_body=100_000,
        slots=3,
    ) as running:
        yield running


def image(given: Image.Image, **options: Any) -> Part:
    return {"type": "image_url", "image_url": {"url": url_of(given), **options}}


def sent(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def text(given: str) -> Part:
    return {"type": "text", "text": given}


def user(*parts: Part) -> Any:
    return [{"role": "user", "content": [*parts]}]


TALKS: list[tuple[Any, list[Image.Image]]] = [
    (user(text("what is "), image(picture(0)), text(" here?")), [picture(0)]),
    ([{"role": "user", "content": "who is there?"}], []),
    (
        user(image(picture(1)), text("or"), image(picture(2, 5, 30))),
        [picture(1), picture(2, 5, 30)],
    ),
    (
        [
            {"role": "system", "content": "be kind"},
            *user(image(picture(0)), text("a?")),
            {"role": "assistant", "content": "it is b"},
            *user(text("and this? "), image(picture(3))),
        ],
        [picture(0), picture(3)],
    ),
    (user(image(picture(3)), text("and this?")), [picture(3)]),
]


def inputs_of(seeing: Running, talk: Any, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    """What the model's own processor makes of the same chat."""
    pictures = iter(images)

    def parts_of(content: Any) -> Any:
        given = [text(content)] if isinstance(content, str) else content
        return [
            one if one["type"] == "text" else {"type": "image", "image": next(pictures)}
            for one in given
        ]

    chat = [{**one, "content": parts_of(one["content"])} for one in talk]
    processor = seeing.model.processor
    return dict(
        processor.apply_chat_template(
            chat, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
    )


def generated(
    seeing: Running, talk: Any, images: list[Image.Image], plan: str
) -> tuple[int, list[int]]:
    """Tokens of the prompt, and greedy tokens of `generate` in a `PolicyCache`."""
    model = seeing.plan.engine.adapter.model
    inputs = inputs_of(seeing, talk, images)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].double()
    options = cache_argument(PolicyCache(model, PLANS[plan], seeing.model.tokenizer))
    settings = {"max_new_tokens": NEW, "do_sample": False}
    with torch.no_grad():
        found = model.generate(**inputs, **options, **settings)
    num_prompt = inputs["input_ids"].shape[1]
    return num_prompt, found[0, num_prompt:].tolist()


def body_of(talk: Any, plan: str = "full", **more: Any) -> dict[str, Any]:
    ids = {"token_ids": True}
    return {
        "model": f"tiny:{plan}",
        "messages": talk,
        "max_tokens": NEW,
        "temperature": 0,
        "kvpolicy": ids,
        **more,
    }


def asked(seeing: Running, talk: Any, plan: str = "full") -> Any:
    with seeing.http() as http:
        answer = http.post(PATH, json=body_of(talk, plan))
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("number", range(len(TALKS)))
def test_a_chat_with_images_is_answered_as_generate_does(
    seeing: Running, plan: str, number: int
) -> None:
    talk, images = TALKS[number]
    num_prompt, expected = generated(seeing, talk, images, plan)
    found = asked(seeing, talk, plan)
    assert found["choices"][0]["token_ids"] == expected
    assert found["usage"]["prompt_tokens"] == num_prompt
    assert num_prompt >= NUM_TOKENS * len(images)


def test_another_image_gets_another_answer(seeing: Running) -> None:
    answers = [asked(seeing, user(image(picture(seed)), text("?"))) for seed in range(4)]
    assert len({tuple(one["choices"][0]["token_ids"]) for one in answers}) > 1


def test_texts_and_images_that_are_asked_together_are_answered_as_alone(seeing: Running) -> None:
    drawn = [(talk, plan) for talk, _ in TALKS for plan in PLANS] * 2
    alone = [asked(seeing, *one) for one in drawn]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda one: asked(seeing, *one), drawn))
    assert [one["choices"][0]["token_ids"] for one in together] == [
        one["choices"][0]["token_ids"] for one in alone
    ]


def test_a_prefix_store_neither_keeps_nor_finds_rows_behind_images(seeing: Running) -> None:
    talk, _ = TALKS[0]
    for _ in range(2):
        usage = asked(seeing, talk)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    words: Any = [{"role": "user", "content": "who is there, and who is here?"}]
    counts = [asked(seeing, words)["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert counts[1]["cached_tokens"] > 0


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_of_a_chat_with_an_image_has_the_whole_answer(seeing: Running, n: int) -> None:
    talk, _ = TALKS[2]
    options: Any = {"model": "tiny:h2o", "messages": talk, "max_tokens": NEW, "seed": 3, "n": n}
    client = seeing.client()
    whole = client.chat.completions.create(**options)
    texts = [""] * n
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [one.message.content for one in whole.choices]


def test_rows_of_images_are_told_to_a_stream_that_is_watched(seeing: Running) -> None:
    talk, images = TALKS[0]
    body = body_of(talk, stream=True, kvpolicy={"kept": True})
    with seeing.http() as http:
        events = http.post(PATH, json=body).text
    num_prompt, _ = generated(seeing, talk, images, "full")
    assert f'"num_prompt":{num_prompt}' in events


def test_formats_of_openai_are_read_and_turned_as_they_are_to_be_seen(seeing: Running) -> None:
    given = picture(4)
    upright = Image.Exif()
    upright[0x0112] = 6  # turn by 90 degrees to the right
    turned = given.rotate(90, expand=True)
    urls = {
        "png": url_of(given),
        "webp": url_of(given, "webp", lossless=True),
        "turned": url_of(turned, "png", exif=upright),
    }
    answers = {
        kind: asked(seeing, user(sent(url)))["choices"][0]["token_ids"]
        for kind, url in urls.items()
    }
    assert answers["webp"] == answers["turned"] == answers["png"]
    for kind in ("jpeg", "gif"):
        assert asked(seeing, user(sent(url_of(given, kind))))["choices"]


def test_detail_that_is_left_to_the_server_changes_nothing(seeing: Running) -> None:
    expected = asked(seeing, user(image(picture(1))))["choices"][0]["token_ids"]
    for detail in ("auto", None):
        found = asked(seeing, user(image(picture(1), detail=detail)))
        assert found["choices"][0]["token_ids"] == expected


# What is refused


def promising(width: int, height: int) -> str:
    """A PNG of a few bytes whose header says that it is large."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(one)) + kind + one + struct.pack(">I", zlib.crc32(kind + one))
        for kind, one in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def frames() -> str:
    file = io.BytesIO()
    picture(0).save(file, "gif", save_all=True, append_images=[picture(1)])
    return f"data:image/gif;base64,{base64.b64encode(file.getvalue()).decode()}"


WRONG: dict[str, tuple[Part, str, str]] = {
    "an address": (sent("https://example.com/a.png"), "image_url.url", "fetch"),
    "a file": (sent("file:///etc/passwd"), "image_url.url", "fetch"),
    "a path": (sent("/etc/passwd"), "image_url.url", "fetch"),
    "no base64": (sent("data:image/png,abc"), "image_url.url", "base64"),
    "half of base64": (sent(url_of(picture(0))[:-3]), "image_url.url", "base64"),
    "letters beyond ASCII": (sent("data:image/png;base64,ÄÖ=="), "image_url.url", "base64"),
    "no data": (sent("data:image/png;base64,"), "image_url.url", "PNG"),
    "a text": (sent("data:image/png;base64,aGVsbG8="), "image_url.url", "PNG"),
    "PostScript": (
        sent(f"data:image/png;base64,{base64.b64encode(b'%!PS-Adobe-3.0 EPSF-3.0').decode()}"),
        "image_url.url",
        "PNG",
    ),
    "a part of an image": (sent(url_of(picture(0))[:-200]), "image_url.url", "decoded"),
    "several frames": (sent(frames()), "image_url.url", "frames"),
    "too many pixels": (image(picture(0, 101, 100)), "image_url.url", f"{MAX_PIXELS:,}"),
    "a promise": (sent(promising(9_000, 9_000)), "image_url.url", f"{MAX_PIXELS:,}"),
    "a promise of more": (sent(promising(60_000, 60_000)), "image_url.url", f"{MAX_PIXELS:,}"),
    "detail": (image(picture(0), detail="high"), "image_url.detail", "processor"),
    "another field": (image(picture(0), size=3), "image_url.size", "size"),
    "no object": ({"type": "image_url", "image_url": "data:"}, "image_url", "data:image/png"),
    "no URL": ({"type": "image_url"}, "image_url", "data:image/png"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_is_no_image_is_refused_and_named(seeing: Running, kind: str) -> None:
    part, where, word = WRONG[kind]
    with seeing.http() as http:
        answer = http.post(PATH, json=body_of(user(text("a"), part)))
        error = error_of(answer)
    assert answer.status_code == 400
    assert error["param"] == f"messages[0].content[1].{where}"
    assert word in error["message"]
    assert asked(seeing, TALKS[1][0])["choices"], "the server goes on"


def refusal(running: Running, talk: Any, **more: Any) -> tuple[httpx2.Response, dict[str, str]]:
    with running.http() as http:
        answer = http.post(PATH, json=body_of(talk, **more))
    return answer, error_of(answer)


def test_images_that_have_too_many_pixels_together_are_refused(seeing: Running) -> None:
    fits = image(picture(0, 60, 100))
    assert asked(seeing, user(fits))["choices"]
    answer, error = refusal(seeing, user(fits, fits))
    assert (answer.status_code, error["code"]) == (400, "invalid_image")
    assert "content[1]" in error["param"]


def test_a_body_has_some_images_at_most(seeing: Running) -> None:
    tiny = image(picture(0, 2, 2))
    talk = [*user(*[tiny] * 10), *user(*[tiny] * 7)]
    answer, error = refusal(seeing, talk)
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "17" in error["message"]


def test_a_larger_body_is_refused_with_what_to_do(seeing: Running) -> None:
    answer, error = refusal(seeing, user(sent("data:image/png;base64," + "A" * 100_000)))
    assert answer.status_code == 413
    assert "images" in error["message"]


def test_the_mark_of_an_image_in_a_text_is_refused_beside_images(seeing: Running) -> None:
    answer, error = refusal(seeing, user(text(f"b {MARK} c"), image(picture(0))))
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert MARK in error["message"]


def test_reasoning_has_no_images(seeing: Running) -> None:
    talk = [{"role": "assistant", "content": "a", "reasoning_content": [image(picture(0))]}]
    answer, error = refusal(seeing, talk)
    assert (answer.status_code, error["param"]) == (400, "messages[0].reasoning_content")


def test_a_prompt_with_images_that_is_too_long_is_refused(seeing: Running) -> None:
    words = text("a" * (250 - NUM_TOKENS))
    answer, error = refusal(seeing, user(words, image(picture(0))))
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")


def test_a_model_without_images_says_so(server: Running) -> None:
    talk = user(text("who?"), image(picture(0)))
    with pytest.raises(openai.BadRequestError, match="text") as refused:
        server.client().chat.completions.create(model="tiny", messages=talk, max_tokens=1)
    assert (refused.value.code, refused.value.param) == ("images_not_supported", "messages")


def test_a_processor_that_is_not_there_is_named() -> None:
    model, processor = tiny_seeing()
    tokenizer = processor.tokenizer
    tokenizer.chat_template = TEMPLATE
    with serving(PLANS, model=model, tokenizer=tokenizer, lacks_processor=True) as running:
        answer, error = refusal(running, user(image(picture(0))))
        assert (answer.status_code, error["code"]) == (400, "images_not_supported")
        assert "processor" in error["message"]
        assert asked(running, TALKS[1][0])["choices"], "texts are answered"
