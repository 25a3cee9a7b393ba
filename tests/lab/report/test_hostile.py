"""Texts of models, files and users are never interpreted."""

import json
from pathlib import Path
from typing import Any

import pytest
from chromium import Opened
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup
from report_pages import Open
from run_folders import ACCURACY, complete_edit, write_run

from kvpolicy.lab.report.page import as_json, printable

HOSTILE = [
    "</script><script>window.pwned = 1; alert(1)</script>",
    "<img src=x onerror=window.pwned=1>",
    "--><!--<script>window.pwned=1</script>",
    "\"><svg onload='window.pwned=1'>",
    "javascript:window.pwned=1",
    "</style><style>body{display:none}</style>",
    "</title></textarea></noscript><iframe srcdoc='<script>parent.pwned=1</script>'>",
    "{{7*7}} {% raw %} ${7*7} {{ ''.__class__ }}",
    "\u202eright to left\u202c and \u2066isolates\u2069 \u200fmarks \u061cof letters",
    "שלום עולם, مرحبا",
    "nul\x00 bell\x07 escape\x1b[31m",
    "lone \ud800 surrogates \udfff",
    "lines\u2028and\u2029paragraphs",
    "&lt;b&gt; &amp; &#60;script&#62;",
    "]]> <![CDATA[ x",
    "x" * 3000,
    "__proto__",
    "constructor",
]
ALL = " | ".join(HOSTILE)


def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
    word = HOSTILE[item % len(HOSTILE)]
    facets = {word[:40]: word[:40], "__proto__": 1, "depth": item % 2}
    changes: dict[str, Any] = {
        "text": f"{word}\n\nWait, {ALL}\n\n</think>\n\n{word}",
        "facets": facets,
    }
    if item % 3 == 0:
        changes |= {"finish_reason": "error", "error": word, "correct": False}
    if item % 3 == 1:
        changes |= {"correct": None, "ungraded": word}
    return changes


def rewritten(folder: Path, name: str, change: Any) -> None:
    """Change every line of a file; lone surrogates are written as JSON escapes."""
    path = folder / name
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(record)) + "\n" for record in records))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every text is hostile."""
    column = dict.fromkeys(("title", "heading"), ALL) | {"name": "accuracy", "is_share": True}
    folder = write_run(
        tmp_path_factory.mktemp("runs") / "hostile",
        n=len(HOSTILE),
        plans=[("full cache", None), ("H2O", 64)],
        columns=[ACCURACY, {**column, "name": "__proto__"}],
    )
    rewritten(
        folder, "items.jsonl", lambda item: item | {"prompt": ALL, "answer": ALL, "reference": ALL}
    )
    rewritten(folder, "samples.jsonl", lambda s: s | outcome(s, s["item"], 0))
    manifest = json.loads((folder / "manifest.json").read_text())
    run = manifest["run"]
    run["name"] = run["version"] = ALL
    for group in run["groups"]:
        group |= dict.fromkeys(("model", "device", "dtype", "sampling", "split", "measure"), ALL)
    for cell in run["cells"]:
        cell["series"] = f"{ALL} {cell['series']}"
        cell["knobs"] = {ALL: ALL}
        cell["resolved"] = {
            "layers": [
                {"layer": 0, "stack": [{"policy": ALL, ALL: ALL}], "budget": 3, "buffer": 1}
            ],
            "schedule": [{"policy": ALL}],
        }
    manifest["sessions"][0] |= {"command": ALL, ALL: {ALL: [ALL]}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    complete_edit(folder)
    return folder


def nothing_happened(opened: Opened) -> None:
    assert opened.page.evaluate("window.pwned === undefined && ({}).polluted === undefined")
    assert opened.count("img, iframe, object, embed, link, style + style, svg[onload]") == 0
    assert opened.page.locator("script:not([type])").count() == 0
    assert opened.page.locator("script[type=module]").count() == 1
    assert opened.page.evaluate("document.querySelectorAll('title').length") == 1
    handlers = """[...document.querySelectorAll('*')].flatMap(one => [...one.attributes])
        .filter(one => one.name.startsWith('on') || /^javascript:/i.test(one.value)).length"""
    assert opened.page.evaluate(handlers) == 0


def test_hostile_texts_are_shown_as_text(open_report: Open, folder: Path) -> None:
    opened = open_report(folder)
    nothing_happened(opened)
    for place in range(len(HOSTILE)):
        shown = opened.texts(".trace-column .text")[0]
        assert "</script><script>window.pwned = 1; alert(1)</script>" in shown
        assert "{{7*7}} {% raw %} ${7*7}" in shown
        assert "⟨U+202E⟩right to left" in shown
        assert "⟨U+061C⟩of letters" in shown
        assert "␀" in shown
        assert "lone \ufffd surrogates \ufffd" in shown
        assert "&lt;b&gt; &amp; &#60;script&#62;" in shown
        nothing_happened(opened)
        opened.page.locator("[aria-label='Next sample']").click()
        last = min(place + 1, len(HOSTILE) - 1)
        opened.page.wait_for_function(
            "n => document.querySelector('.detail h3').textContent.startsWith('Item ' + n)",
            arg=str(last),
        )
    opened.page.fill("#search", "<img src=x onerror")
    opened.page.wait_for_selector("mark")
    opened.unfold()
    for head in opened.page.locator("#table th button").all():
        head.click()
    opened.page.locator(".spot").first.focus()
    assert opened.page.locator(".tip").first.is_visible()
    nothing_happened(opened)


def test_hostile_texts_are_inert_on_a_phone_or_without_javascript(
    browser: Any, open_report: Open, folder: Path, tmp_path: Path
) -> None:
    opened = open_report(folder, viewport={"width": 360, "height": 740})
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    file = next(tmp_path.glob("*.html"))
    plain = Opened(browser, file, ready=False, java_script_enabled=False)
    assert plain.count("img, iframe") == 0
    plain.close()


def test_the_content_security_policy_blocks_an_injected_script(
    browser: Any, folder: Path, open_report: Open, tmp_path: Path
) -> None:
    """The second wall: were the first one broken, nothing would run or be asked for."""
    open_report(folder)
    page = next(tmp_path.glob("*.html")).read_text()
    broken = tmp_path / "broken.html"
    attack = (
        "<body><script>window.pwned = 1</script><img src='http://127.0.0.1:9/x' "
        "onerror='window.pwned = 2'><script src='http://127.0.0.1:9/y.js'></script>"
    )
    broken.write_text(page.replace("<body>", attack, 1))
    opened = Opened(browser, broken)
    assert opened.page.evaluate("window.pwned === undefined")
    refused = "document.createElement('div').innerHTML = '<b>x</b>'"
    assert opened.page.evaluate(
        f"(() => {{ try {{ {refused}; return false }} catch {{ return true }} }})()"
    )
    assert len([one for one in opened.complaints if "Content Security Policy" in one]) >= 3
    opened.complaints.clear()
    opened.requests[:] = opened.requests[:1]
    opened.close()


any_text = st.text(st.characters(), max_size=40) | st.sampled_from(HOSTILE)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    is_number = not isinstance(value, float) or abs(value) < float("inf")
    return value if is_number else None


@given(values)
def test_data_in_a_script_element_round_trips(value: Any) -> None:
    text = as_json(value)
    assert json.loads(text) == finite(value)
    assert text.isascii()
    assert not set(text) & set("<>&")


@given(any_text)
def test_printable_text_is_encodable_without_control_characters(text: str) -> None:
    made = printable(text)
    made.encode()
    assert not any(ord(letter) < 32 and letter not in "\t\n" for letter in made)
    assert not isinstance(made, Markup)
