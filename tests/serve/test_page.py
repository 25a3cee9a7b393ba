"""The page in Chromium: it talks, shows what is held, and runs no text of others."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chromium import Opened, browser_of_tests
from serving import Running, plans_of, serving
from tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow  # a browser

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202e{{ 7*7 }}"
KEY = "page-key"
Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_of_tests() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens the page of a server; when the test ends, nothing may have been complained of."""
    opened: list[Opened] = []

    def open_one(running: Running, **options: Any) -> Opened:
        opened.append(Opened(browser, f"{running.url}/", **options))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Running]:
    with serving(plans_of(full=0, streaming=12)) as running:
        yield running


def ask(page: Any, question: str, *, most: int = 30) -> None:
    page.fill("label:has-text('Most tokens') input", str(most))
    page.fill("label:has-text('Temperature') input", "0")
    page.fill("#question", question)
    page.click("#send")
    page.wait_for_selector("#send:not([disabled])")


def held_text(place: Any) -> str:
    """The tokens that a page, or a panel of it, shows; line ends without their marks."""
    return "".join(place.locator(".kept-text .kept-token").all_text_contents()).replace(
        "\u21b5", ""
    )


def test_two_plans_answer_side_by_side_and_show_what_they_hold(
    two: Running, open_page: Open
) -> None:
    page = open_page(two).page
    assert page.locator("#model").input_value() == "tiny:full"
    assert page.locator("#beside").input_value() == "tiny:streaming"
    ask(page, "who is there?", most=60)
    answers = [
        two.client()
        .chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "who is there?"}],
            max_tokens=60,
            temperature=0,
        )
        .choices[0]
        .message.content
        for model in ("tiny:full", "tiny:streaming")
    ]
    assert page.locator(".answers .said").all_text_contents() == answers
    costs = page.locator(".cost").all_text_contents()
    assert costs[0].startswith("60 tokens in ")
    assert costs[0].endswith("100 % of a full cache")
    assert not costs[1].endswith("100 % of a full cache")
    full, streaming = page.locator(".kept-panel").all()
    assert "77 of 78 tokens are held" in full.locator(".kept-facts").text_content()
    levels = streaming.locator(".kept-token").evaluate_all(
        "spans => spans.map(span => span.dataset.level)"
    )
    assert set(levels) == {"0", "8"}
    assert (levels[0], levels[-2], levels[-1]) == ("8", "8", "0"), "the last one is in no cache"
    rows = two.model.plans[1].engine.plan.layers[0]
    assert levels.count("8") <= rows.budget + rows.buffer + 1
    # The tokenizer calls "a" special, so texts of answers are without it.
    shown = f"u:who is there?\na:{answers[0]}".replace("a", "")
    assert held_text(full).replace("a", "") == shown


def test_a_conversation_goes_on_and_is_forgotten(two: Running, open_page: Open) -> None:
    page = open_page(two).page
    page.select_option("#beside", "")
    ask(page, "one")
    ask(page, "two")
    first = page.locator(".answers .said").first.text_content()
    assert page.locator(".user .said").all_text_contents() == ["one", "two"]
    shown = held_text(page).replace("\u21b5", "")
    assert shown.startswith(f"u:one\na:{first}\nu:two\na:")
    page.click("#clear")
    assert page.locator(".said").count() == page.locator(".kept-text .kept-token").count() == 0
    ask(page, "three")
    shown = held_text(page).replace("\u21b5", "")
    assert shown.startswith("u:three\na:")


def test_stop_cancels_and_the_conversation_goes_on(open_page: Open) -> None:
    with serving(plans_of(full=0)) as running:
        page = open_page(running).page
        running.gate.close()
        page.fill("#question", "a")
        page.click("#send")
        page.click("#stop")
        page.wait_for_selector("#send:not([disabled])")
        running.gate.open()
        assert page.locator(".cost").all_text_contents() == ["Stopped."]
        ask(page, "b")
        shown = held_text(page)
        assert shown.startswith("u:b"), "what was stopped is not part of it"


@pytest.mark.nightly
def test_who_scrolls_back_while_an_answer_comes_stays_there(open_page: Open) -> None:
    with serving(plans_of(full=0)) as running:
        page = open_page(running, viewport={"width": 390, "height": 500}).page
        for question in ("one", "two", "three"):
            ask(page, question)
        turns = page.locator("#turns")
        page.fill("#question", "four")
        running.gate.close()
        page.click("#send")
        page.wait_for_function(
            "() => { const turns = document.querySelector('#turns'); return turns.scrollTop > 0"
            " && turns.scrollTop + turns.clientHeight > turns.scrollHeight - 40 }"
        )
        turns.evaluate("turns => turns.scrollTop = 0")
        running.gate.open()
        page.wait_for_selector("#send:not([disabled])")
        assert turns.evaluate("turns => turns.scrollTop") == 0
        ask(page, "five", most=200)
        rest = turns.evaluate("turns => turns.scrollHeight - turns.scrollTop - turns.clientHeight")
        assert abs(rest) < 40, "who asks again follows the answer"
        stop = page.locator("#stop").bounding_box()
        assert stop["y"] + stop["height"] <= 2 * 500, "long conversations do not push it down"


def test_a_server_that_has_ended_is_told(browser: Any) -> None:
    with serving(plans_of(full=0)) as running:
        opened = Opened(browser, f"{running.url}/")
        ask(opened.page, "one")
    ask(opened.page, "two")
    assert "cannot be reached" in opened.page.locator("#problem").text_content()
    opened.page.context.close()


def test_texts_are_shown_and_never_run(open_page: Open) -> None:
    tokenizer = tiny_tokenizer(57)
    marks = ["<script>x()</script>", "<b>", "\u202e", "&amp;"]
    tokenizer.add_tokens(marks)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with serving(plans_of(full=0), tokenizer=tokenizer, model=tiny_model()) as running:
        page = open_page(running).page
        ask(page, HOSTILE, most=100)
        assert page.locator(".user .said").text_content() == HOSTILE
        assert page.locator("main script, main b, main img").count() == 0
        shown = held_text(page)
        assert "\u27e8U+202E\u27e9" in shown
        ask(page, "<script>x()</script>")
        assert "<script>x()</script>" in page.locator(".kept-prompt").text_content()


@pytest.mark.nightly
def test_a_server_with_keys_asks_for_one(open_page: Open) -> None:
    with serving(plans_of(full=0), api_keys=(KEY,)) as running:
        opened = open_page(running)
        page = opened.page
        assert "needs a key" in page.locator("#problem").text_content()
        page.fill("input[type=password]", KEY)
        page.press("input[type=password]", "Enter")
        page.wait_for_selector("#model")
        ask(page, "a")
        assert "tokens in" in page.locator(".cost").text_content()
        assert KEY not in page.url
        stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
        assert KEY not in stored
        # The browser itself notes the answer 401.
        opened.complaints[:] = [one for one in opened.complaints if "401" not in one]


def test_a_refusal_is_shown_as_its_sentence(open_page: Open) -> None:
    with serving(plans_of(full=0), max_prompt_tokens=20, max_new_tokens=9) as running:
        opened = open_page(running)
        ask(opened.page, "a" * 30, most=5)
        assert "takes prompts of up to 20" in opened.page.locator("#problem").text_content()
        assert opened.page.locator("#question").input_value() == "a" * 30
        opened.complaints[:] = [one for one in opened.complaints if "400" not in one]


@pytest.mark.nightly
def test_a_model_without_a_template_is_told(open_page: Open) -> None:
    with serving(plans_of(full=0), tokenizer=tiny_tokenizer()) as running:
        page = open_page(running).page
        assert "no chat template" in page.locator("#problem").text_content()


def test_everything_can_be_used_by_keyboard_on_a_narrow_screen(
    two: Running, open_page: Open
) -> None:
    page = open_page(two, viewport={"width": 360, "height": 700}).page
    page.fill("label:has-text('Most tokens') input", "5")
    page.focus("#question")
    page.keyboard.type("hello")
    page.keyboard.press("Control+Enter")
    page.locator(".cost:not(:empty)").nth(1).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea')]"
        ".filter(one => !one.labels.length).length"
    )
    assert unnamed == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(two: Running, open_page: Open, scheme: str) -> None:
    page = open_page(two, color_scheme=scheme).page
    ask(page, "a")
    for selector in (
        ".cost",
        ".kept-facts",
        ".kept-token[data-level='8']",
        "#send",
        ".hint, .said",
    ):
        assert contrast(page, selector) >= 4.5, selector


CONTRAST = """selector => {
  const element = document.querySelector(selector);
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  let back = element;
  while (back && /, 0\\)$/.test(getComputedStyle(back).backgroundColor)) back = back.parentElement;
  const [one, other] = [getComputedStyle(element).color, getComputedStyle(back).backgroundColor]
    .map(numbers).map(light).sort((a, b) => b - a);
  return (one + 0.05) / (other + 0.05);
}"""


def contrast(page: Any, selector: str) -> float:
    found: float = page.evaluate(CONTRAST, selector)
    return found


def test_the_page_may_load_and_run_nothing_but_its_own_files(two: Running) -> None:
    with two.http() as http:
        answer = http.get("/")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "http://" not in answer.text
        assert "https://" not in answer.text
        assert "style=" not in answer.text
        assert http.get("/assets/page.html").status_code == 404
        assert http.get("/assets/kept.js").status_code == 404
        assert http.get("/assets/chat.js").headers["content-type"].startswith("text/javascript")
