"""The kept-token view in Chromium, checked against plain loops."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import browser_of_tests
from families import family_model
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_pages import Shown, empty_page, held_by, times_of
from tiny import shared_model, tiny_tokenizer

from kvpolicy import Engine, Plan
from kvpolicy.lab.report.kept_rows import compact
from kvpolicy.lab.sweep.recording import KeptLayer, KeptRecord, KeptRows, record_kept_rows

CONTRAST = 4.5  # WCAG 2, level AA, for text


def recorded(plan: Plan, model: Any = None, max_new_tokens: int = 40) -> KeptRecord:
    engine = Engine(model or shared_model(num_layers=2), tiny_tokenizer(), plan)
    run = engine.generate(["one two.\nthree\n\n+ 4"], max_new_tokens=max_new_tokens)
    with record_kept_rows(run, [0]) as recorder:
        (result,) = run.results()
        rows = recorder.pop(result)
    return KeptRecord.of(rows, key="key", cell="cell", item=0, attempt=0)


def handmade(tokens: list[str], left_at: list[list[int]], at: list[int], **more: Any) -> KeptRecord:
    layers = [KeptLayer(0, more.get("window"), at, left_at)]
    return KeptRecord.of(
        KeptRows(more.get("num_prompt", 1), tokens, layers), key="", cell="", item=0, attempt=0
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_of_tests() as browser:
        yield browser


@pytest.fixture
def shown(browser: Any, tmp_path: Path) -> Iterator[Shown]:
    shown = Shown(browser, tmp_path, viewport={"width": 1200, "height": 900})
    yield shown
    shown.close()  # fails if anything was said on the console


@pytest.fixture(scope="module")
def records() -> list[KeptRecord]:
    """Heads that disagree, layers of different budgets, layers that are never compacted."""
    whole = Plan.uniform("full")
    h2o = Plan.uniform("h2o", budget=14, buffer=4)
    windowed = family_model("gemma2", window=11)
    random = Plan.uniform("random", budget=9, buffer=5)
    return [recorded(h2o), recorded(whole), recorded(random), recorded(random, windowed)]


# --- the shades -------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("pair", [(0, 1), (2, 3), (3,), (1,)])
def test_shades_count_the_heads_that_hold_a_token(
    shown: Shown, records: list[KeptRecord], pair: tuple[int, ...]
) -> None:
    """At every step, for every layer and head, of the plain record and of the compact one."""
    chosen = [records[i].to_dict() for i in pair]
    shown.show([chosen[0], *(compact(records[i]) for i in pair[1:])])
    for layer, head in [(None, None), (0, None), (1, None), (1, 0), (None, 1)]:
        times = times_of(chosen, layer)
        for step, time in enumerate(times):
            assert shown.choose(layer=layer, head=head, step=step)["time"] == time
            for panel, record in enumerate(chosen):
                check_panel(shown.tokens(panel), record, layer, head, time)


def check_panel(
    tokens: list[tuple[str, str, str]],
    record: dict[str, Any],
    layer: int | None,
    head: int | None,
    time: int,
) -> None:
    total = sum(
        len(one["left_at"]) if head is None else 1
        for one in record["layers"]
        if layer in (None, one["layer"])
    )
    counts = held_by(record, layer, head, time)
    assert [int(heads) for _, _, heads in tokens] == counts
    for p, ((_, level, _), count) in enumerate(zip(tokens, counts, strict=True)):
        if p >= min(time, len(tokens) - 1):
            assert level == "later"
        else:  # no shade but for the first, none but the last for all
            assert int(level) == (8 if count == total else min(-(-8 * count // total), 7))


@given(st.data())
@settings(max_examples=20)
def test_the_map_has_the_counts_of_all_steps(browser: Any, data: st.DataObject) -> None:
    kept = data.draw(any_record())
    page = _page(browser)
    script = """record => {
        const kept_ = kept.readKept(record), choice = { layer: null, head: null };
        const times = kept.timesOf(kept_, choice);
        return [times, [...kept.survival(kept_, kept.chosen(kept_, choice), times)]];
    }"""
    times, counts = page.evaluate(script, compact(kept))
    record = kept.to_dict()
    assert times == times_of([record], None)
    for time in times:
        row, counts = counts[: len(kept.tokens)], counts[len(kept.tokens) :]
        joined = min(time, max(len(kept.tokens) - 1, 0))
        assert row[joined:] == [-1] * (len(kept.tokens) - joined)
        assert row[:joined] == held_by(record, None, None, time)[:joined]
    assert counts == []


_pages: dict[int, Any] = {}


def _page(browser: Any) -> Any:
    """One page for all examples of a property."""
    if id(browser) not in _pages:
        page = browser.new_page()
        page.set_content(empty_page())
        _pages[id(browser)] = page
    return _pages[id(browser)]


@st.composite
def any_record(draw: st.DrawFn) -> KeptRecord:
    """A record as the engine could have made it, windows included."""
    num_tokens = draw(st.integers(0, 12))
    layers = []
    for number in range(draw(st.integers(1, 3))):
        at = sorted(draw(st.sets(st.integers(1, max(num_tokens - 1, 1)), max_size=4)))
        at = at if num_tokens > 1 else []
        heads = []
        for _ in range(draw(st.integers(1, 3))):
            choices = [[-1, *(s for s, t in enumerate(at) if t > p)] for p in range(num_tokens)]
            heads.append([draw(st.sampled_from(one)) for one in choices])
        window = draw(st.sampled_from([None, 2, 5]))
        layers.append(KeptLayer(number, window, at, heads))
    rows = KeptRows(min(1, num_tokens), ["a"] * num_tokens, layers)
    return KeptRecord.of(rows, key="", cell="", item=0, attempt=0)


@given(st.lists(st.lists(st.integers(-1, 61_000), min_size=3, max_size=3), min_size=1, max_size=4))
@settings(max_examples=30)
def test_the_compact_form_is_equivalent(browser: Any, left_at: list[list[int]]) -> None:
    # Also numbers whose letters would be halves of others.
    left_at[0][0] = 0xD800 - 0x23 - 1
    kept = handmade(["a", "b", "c"], left_at, [1])
    small = compact(kept)["layers"][0]
    assert isinstance(small["left_at"], str)
    script = "([layer, n]) => [...kept.unpack(layer, n)]"
    for form in (small, kept.to_dict()["layers"][0]):
        found = _page(browser).evaluate(script, [form, 3])
        assert found == np.array(left_at).T.ravel().tolist()


def test_a_record_of_more_compactions_than_letters_keeps_its_numbers() -> None:
    kept = handmade(["a"], [[-1]], list(range(63_500)))
    assert compact(kept)["layers"][0]["left_at"] == [[-1]]


def test_the_map_has_the_shades_of_the_text(shown: Shown) -> None:
    # Four positions, in 0 to 2 heads of two: after the one compaction, and at the end.
    kept = handmade(["a", "b", "c", "d", "e"], [[0, 0, -1, -1, -1], [0, -1, -1, -1, -1]], [3])
    shown.show([kept.to_dict()])
    script = """() => {
        const canvas = document.querySelector('.kept-map canvas');
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        const two = one => one.toString(16).padStart(2, 0);
        const hex = i => '#' + [0, 1, 2].map(j => two(data[4 * i + j])).join('');
        const pixels = [...Array(10).keys()].map(i => data[4 * i + 3] ? hex(i) : null);
        return [canvas.width, canvas.height, pixels];
    }"""
    shade = "name => getComputedStyle(document.querySelector('#view')).getPropertyValue(name)"
    names = ("--kept-0", "--kept-4", "--kept-8")
    none, half, full = (shown.page.evaluate(shade, name).strip() for name in names)
    expected = [none, half, full, None, None, none, half, full, full, None]
    assert shown.page.evaluate(script) == [5, 2, expected]


def test_maps_side_by_side_share_a_scale(shown: Shown) -> None:
    long, short = (handmade(["a"] * n, [[-1] * n], [n // 2]).to_dict() for n in (40, 10))
    shown.show([long, short])
    boxes = [shown.page.locator(".kept-map canvas").nth(i).bounding_box() for i in range(2)]
    assert boxes[1]["width"] == pytest.approx(boxes[0]["width"] / 4, abs=1)
    script = """n => {
        const canvas = document.querySelectorAll('.kept-map canvas')[n];
        const data = canvas.getContext('2d').getImageData(0, 0, 1, canvas.height).data;
        return [...Array(canvas.height).keys()].map(row => data[4 * row + 3] > 0);
    }"""
    # Steps at 5, 9 (the end of the short one), 20 and 39 tokens.
    assert [shown.page.evaluate(script, n) for n in range(2)] == [
        [True] * 4,
        [True, True, False, False],
    ]


# --- the text ---------------------------------------------------------------------------------


def test_prompt_and_line_ends_are_marked(shown: Shown) -> None:
    kept = handmade(["a\n", "\n", "", "b\n\n", "c\x1b"], [[-1] * 5], [], num_prompt=2)
    shown.show([kept.to_dict()])
    parts = shown.page.locator(".kept-text .kept-part p")
    assert parts.nth(0).text_content() == "a↵↵\n"
    assert parts.nth(1).text_content() == "·b↵↵\nc␛"


HOSTILE = [
    "<img src=x onerror=document.title='owned'>",
    "</script><script>document.title='owned'</script>",
    "<!--",
    "‮abc",
    "javascript:alert(1)",
    "\ud800",
]


def test_hostile_text_stays_text(shown: Shown) -> None:
    kept = handmade(HOSTILE, [[-1] * len(HOSTILE)], [2])
    shown.show([compact(kept)] * 2, labels=HOSTILE[:2])
    shown.page.locator(".kept-text .kept-token").first.hover()
    assert HOSTILE[0] in shown.page.locator(".kept-tip").text_content()
    assert shown.page.locator(".kept-panel h5").all_text_contents() == HOSTILE[:2]
    assert shown.tokens(0)[0][0] == HOSTILE[0]
    assert shown.page.locator("#view img, #view script, #view a").count() == 0
    assert shown.page.title() == "kept"


@pytest.mark.parametrize("kept", [handmade([], [[]], []), handmade(["a"], [[-1]], [])])
def test_empty_records_are_shown(shown: Shown, kept: KeptRecord) -> None:
    shown.show([kept.to_dict()])
    assert shown.state()["steps"] == 1
    assert len(shown.tokens(0)) == len(kept.tokens)


def test_a_refused_request_does_not_change_the_legend(shown: Shown) -> None:
    refused = KeptRecord.of(KeptRows(0, [], []), key="", cell="", item=0, attempt=0).to_dict()
    kept = handmade(["a", "b", "c"], [[-1] * 3, [0, -1, -1]], [2]).to_dict()
    legend = shown.page.locator(".kept-legend")
    for records in ([refused, kept], [kept, refused]):
        shown.show(records)
        shades = legend.locator(".kept-shade").all_text_contents()
        assert shades == ["0", "1", "2", "abcnot generated yet"]
        assert "1 layer \N{MULTIPLICATION SIGN} 2 KV heads" in legend.text_content()
    shown.show([refused])
    assert legend.text_content() == ""


def test_a_missing_head_holds_no_token(shown: Shown) -> None:
    layers = [KeptLayer(0, None, [2], [[-1] * 4] * 2), KeptLayer(1, None, [2], [[-1] * 4])]
    kept = KeptRecord.of(KeptRows(1, list("abcd"), layers), key="", cell="", item=0, attempt=0)
    shown.show([kept.to_dict()])
    shown.choose(layer=1, head=1, step=0)
    levels = [level for _, level, _ in shown.tokens(0)]
    assert levels[-1] == "later"
    assert "8" not in levels
    assert "0" in levels


# --- doing things -----------------------------------------------------------------------------


def test_slider_buttons_and_keys_change_the_step(shown: Shown, records: list[KeptRecord]) -> None:
    shown.show([records[0].to_dict(), records[2].to_dict()])
    steps = shown.state()["steps"]
    assert shown.state()["step"] == steps - 2  # the last compaction
    shown.page.locator("#view input[type=range]").focus()
    shown.page.keyboard.press("ArrowLeft")
    assert shown.state()["step"] == steps - 3
    shown.page.keyboard.press("Home")
    assert shown.state()["step"] == 0
    shown.page.get_by_role("button", name="Next step").click()
    assert shown.state()["step"] == 1
    shown.page.locator(".kept-map").last.focus()
    shown.page.keyboard.press("ArrowDown")
    assert shown.state()["step"] == 2
    shown.page.keyboard.press("ArrowUp")
    assert shown.state()["step"] == 1
    assert "compaction" in shown.page.locator(".kept-where").first.text_content()


def test_choosing_a_layer_keeps_the_step(shown: Shown, records: list[KeptRecord]) -> None:
    shown.show([records[2].to_dict()])
    time = shown.choose(step=3)["time"]
    shown.page.get_by_label("Layer").select_option("1")
    shown.page.get_by_label("KV head").select_option("0")
    state = shown.state()
    assert (state["layer"], state["head"]) == (1, 0)
    assert state["time"] <= time
    assert "KV head 0" in shown.page.locator(".kept-legend").text_content()


def test_a_token_shows_its_history_by_pointer_and_key(shown: Shown) -> None:
    kept = handmade(["a", "b", "c", "d"], [[1, -1, -1, -1], [0, -1, 1, -1]], [2, 3])
    shown.show([kept.to_dict()], step=0)
    tip = shown.page.locator(".kept-tip")
    assert not tip.is_visible()
    shown.page.locator(".kept-text .kept-token").first.hover()
    lines = tip.locator("div").all_text_contents()
    assert lines == [
        "“a” · position 0 (prompt)",
        "held by 1 of 2 KV heads",
        "head 0: left at 3 tokens (compaction 2)",
        "head 1: left at 2 tokens (compaction 1)",
    ]
    shown.page.locator(".kept-text").focus()
    for _ in range(2):
        shown.page.keyboard.press("ArrowRight")
    assert "position 2 (answer, token 2)" in tip.text_content()
    assert "not in the sequence yet" in tip.text_content()
    shown.page.keyboard.press("ArrowRight")
    assert "never in the cache" in tip.text_content()
    shown.page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_a_row_that_left_its_window_is_labelled(shown: Shown) -> None:
    kept = handmade(["a", "b", "c", "d", "e"], [[-1, 0, -1, -1, -1]], [2], window=3)
    shown.show([kept.to_dict()], step=1)
    shown.page.locator(".kept-text .kept-token").first.hover()
    assert "slid out of the window" in shown.page.locator(".kept-tip").text_content()
    shown.page.locator(".kept-text .kept-token").nth(1).hover()
    assert "compaction 1" in shown.page.locator(".kept-tip").text_content()


def test_clicking_the_map_moves_to_that_step(shown: Shown, records: list[KeptRecord]) -> None:
    shown.show([records[0].to_dict()])
    canvas = shown.page.locator(".kept-map canvas").bounding_box()
    shown.page.mouse.click(canvas["x"] + 2, canvas["y"] + 1)
    assert shown.state()["step"] == 0
    assert "position 0" in shown.page.locator(".kept-tip").text_content()


def test_playback_shows_all_steps_unless_motion_is_reduced(
    browser: Any, tmp_path: Path, records: list[KeptRecord]
) -> None:
    for motion, seen in [("no-preference", True), ("reduce", False)]:
        shown = Shown(browser, tmp_path, reduced_motion=motion)
        shown.show([records[0].to_dict()], step=0)
        play = shown.page.get_by_text("Play", exact=True)
        assert play.is_visible() == seen
        if seen:
            play.click()
            shown.page.wait_for_function("view.state().step >= 1")
            shown.page.get_by_text("Pause", exact=True).click()
        shown.close()


# --- looks ------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_shades_are_readable_and_rise_in_lightness(
    browser: Any, tmp_path: Path, scheme: str, records: list[KeptRecord]
) -> None:
    for options, theme in [({"color_scheme": scheme}, None), ({}, scheme)]:
        shown = Shown(browser, tmp_path, **options)
        if theme:
            shown.page.evaluate("name => document.documentElement.dataset.theme = name", theme)
        shown.show([records[0].to_dict()])
        script = """() => [...Array(9).keys(), 'later'].map(level => {
            const one = document.querySelector('.kept-text .kept-token');
            one.dataset.level = level;
            const { color, backgroundColor } = getComputedStyle(one);
            return [color, backgroundColor].map(c => c.match(/[0-9.]+/g).slice(0, 3).map(Number));
        })"""
        pairs = shown.page.evaluate(script)
        light = [luminance(shade) for _, shade in pairs[:-1]]
        assert light == sorted(light, reverse=scheme == "light")
        for ink, shade in pairs:
            bright, dim = sorted([luminance(ink), luminance(shade)], reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= CONTRAST
        shown.close()


def luminance(rgb: list[float]) -> float:
    """Relative luminance of WCAG 2."""
    linear = [
        one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4
        for one in (value / 255 for value in rgb)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_map_follows_the_theme(shown: Shown, records: list[KeptRecord]) -> None:
    shown.show([records[0].to_dict()])
    picture = "() => document.querySelector('.kept-map canvas').toDataURL()"
    before = shown.page.evaluate(picture)
    shown.page.evaluate("() => { document.documentElement.dataset.theme = 'dark' }")
    shown.page.wait_for_function(f"before => ({picture})() !== before", arg=before)


def test_the_view_fits_a_phone(browser: Any, tmp_path: Path, records: list[KeptRecord]) -> None:
    shown = Shown(browser, tmp_path, viewport={"width": 360, "height": 700})
    shown.show([records[0].to_dict(), records[3].to_dict()])
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 360
    shown.close()
