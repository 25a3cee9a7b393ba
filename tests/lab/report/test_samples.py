"""The sample browser: filters, search, side by side, keys."""

import json
from pathlib import Path
from typing import Any

import pytest
from chromium import Opened
from report_pages import Open
from run_folders import write_run

PLANS = [("full cache", None), ("H2O", 64), ("H2O", 96)]
N = 40


def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
    place = PLANS.index((cell["series"], cell["budget"]))
    right = item % (3 + place) != 0
    text = f"Now, step {item}.\n\nWait, is it {'the same' if item == 4 else place}?\n\n</think>\n\n"
    changes: dict[str, Any] = {"correct": right, "text": text + f"\\boxed{{{item}}}"}
    if (place, item) in {(0, 9), (1, 11)}:
        changes |= {"finish_reason": "length"}
    if (place, item) == (1, 13):
        changes |= {"finish_reason": "error", "error": "the pool ran dry", "correct": False}
    if (place, item) == (0, 14):
        changes |= {"correct": None, "ungraded": "no box in sight"}
    return changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "one", plans=PLANS, n=N, outcome=outcome)


@pytest.fixture
def opened(open_report: Open, folder: Path) -> Opened:
    return open_report(folder)


def pairs(folder: Path, a: int = 0, b: int = 1) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The samples of two cells, item by item."""
    text = (folder / "samples.jsonl").read_text()
    samples = [json.loads(line) for line in text.splitlines()]
    cells = list(dict.fromkeys(sample["cell"] for sample in samples))
    sides = [[s for s in samples if s["cell"] == cells[side]] for side in (a, b)]
    return list(zip(*sides, strict=True))


def listed(opened: Opened) -> int:
    """How many samples the list says it has."""
    return int(opened.texts(".count")[0].split()[0].replace(",", ""))


def settled(opened: Opened, num: int) -> None:
    opened.page.wait_for_function(
        "n => document.querySelector('.count').textContent.startsWith(n + ' ')", arg=str(num)
    )


def shows(opened: Opened, item: int) -> None:
    """Wait until an item is shown."""
    opened.page.wait_for_function(
        "n => document.querySelector('.detail h3').textContent.split(' ')[1] === n", arg=str(item)
    )


FILTERS = {
    "all": lambda a, b: True,
    "correct": lambda a, b: a["correct"] is True,
    "wrong": lambda a, b: a["correct"] is not True,
    "differs": lambda a, b: (a["correct"], a["ungraded"]) != (b["correct"], b["ungraded"]),
    "better": lambda a, b: bool(a["correct"]) and not b["correct"],
    "worse": lambda a, b: bool(b["correct"]) and not a["correct"],
    "truncated": lambda a, b: "length" in (a["finish_reason"], b["finish_reason"]),
    "failed": lambda a, b: "error" in (a["finish_reason"], b["finish_reason"]),
    "ungraded": lambda a, b: bool(a["ungraded"] or b["ungraded"]),
}


def test_filters_select_samples(opened: Opened, folder: Path) -> None:
    for name, passes in FILTERS.items():
        expected = [a["item"] for a, b in pairs(folder) if passes(a, b)]
        chip = opened.page.locator(f"label.chip:has(input[value='{name}'])")
        assert chip.locator("small").text_content().strip() == str(len(expected))
        chip.click()
        settled(opened, len(expected))
        shows(opened, expected[0])
        shown = [int(text.split()[0][1:]) for text in opened.texts(".option strong")]
        assert shown == expected[: len(shown)]


def test_two_cells_are_shown_side_by_side_with_whole_texts(opened: Opened, folder: Path) -> None:
    a, b = pairs(folder, 1, 2)[0]
    opened.page.select_option("#cell-a", "1")
    opened.page.select_option("#cell-b", "2")
    opened.page.wait_for_selector(".trace-column[aria-label='Trace of H2O 96']")
    script = """all => all.map(one => {
      const copy = one.cloneNode(true);
      for (const mark of copy.querySelectorAll(".parting")) mark.remove();
      return copy.textContent;
    })"""
    texts = opened.page.locator(".trace-column .text").evaluate_all(script)
    assert texts == [a["text"], b["text"]]
    assert opened.count(".trace-column .parting") == 2
    kinds = opened.page.locator(".trace-column .text").first.locator("[data-kind]")
    actual = kinds.evaluate_all("all => all.map(one => one.dataset.kind)")
    # The thought in which the texts part is in two pieces.
    assert list(dict.fromkeys(actual)) == ["execution", "reflection", "tag", "answer"]
    opened.page.select_option("#cell-b", "none")
    opened.page.wait_for_selector(".traces.of-1")
    assert opened.count(".trace-column") == 1


def test_the_facts_of_a_sample_are_shown(opened: Opened, folder: Path) -> None:
    _, b = pairs(folder)[0]
    facts = opened.texts(".trace-column .facts-line")[1]
    speed = f"{(b['num_tokens'] - 1) / b['decode_s']:.0f} tokens/s"
    words = (f"{b['num_tokens']} new tokens", "2 compactions", "32 rows evicted", "10 prompt")
    for word in (*words, speed):
        assert word in facts
    assert "Correct answer: 0" in opened.texts(".expected")[0]
    assert "what is 0?" in opened.texts(".asked .text")[0]


def test_errors_and_missing_verdicts_are_shown(opened: Opened) -> None:
    opened.page.locator("label.chip:has(input[value='failed'])").click()
    settled(opened, 1)
    assert opened.texts(".problem") == ["the pool ran dry"]
    opened.page.locator("label.chip:has(input[value='ungraded'])").click()
    settled(opened, 1)
    assert opened.texts(".problem") == ["no box in sight"]


def test_search_covers_prompts_and_traces(opened: Opened) -> None:
    opened.page.fill("#search", "STEP 17.")
    settled(opened, 1)
    shows(opened, 17)
    assert opened.texts(".trace-column mark") == ["step 17.", "step 17."]
    opened.page.fill("#search", "what is 21?")
    settled(opened, 1)
    shows(opened, 21)
    opened.page.fill("#search", "(nowhere[")
    settled(opened, 0)
    assert "No sample passes" in opened.texts(".detail")[0]


def test_the_list_can_be_filtered_by_difficulty(opened: Opened) -> None:
    options = opened.page.locator("#only option")
    value = options.filter(has_text="kind sums").get_attribute("value")
    opened.page.select_option("#only", value)
    settled(opened, 4)


def test_keys_move_through_the_list(opened: Opened) -> None:
    opened.page.focus("#samples-list")
    for key, item in [
        ("ArrowDown", 1),
        ("ArrowDown", 2),
        ("ArrowUp", 1),
        ("End", N - 1),
        ("Home", 0),
    ]:
        opened.page.keyboard.press(key)
        shows(opened, item)
        active = opened.page.get_attribute("#samples-list", "aria-activedescendant")
        option = opened.page.locator(f"#{active}")
        assert option.get_attribute("aria-selected") == "true"
        assert option.get_attribute("aria-posinset") == str(item + 1)
        assert opened.count(".option[aria-selected=true]") == 1


def test_a_long_list_keeps_few_rows_in_the_page(opened: Opened) -> None:
    assert opened.count(".option") < N
    opened.page.focus("#samples-list")
    opened.page.keyboard.press("End")
    opened.page.wait_for_selector(f"#option-{N - 1}")
    assert opened.count("#option-0") == 0


def test_clicking_a_mark_or_count_opens_its_samples(opened: Opened) -> None:
    spot = opened.page.locator("#chart-accuracy .spot[data-cell='2']")
    spot.focus()
    opened.page.keyboard.press("Enter")
    assert opened.page.input_value("#cell-a") == "2"
    row = opened.page.locator("#failures tbody tr", has_text="full cache")
    count = row.locator("button").first
    assert count.text_content() == "1"
    count.click()
    settled(opened, 1)
    assert opened.page.input_value("#cell-a") == "0"
    assert opened.page.input_value("#cell-b") == "none", "whose samples would be listed as well"
    shows(opened, 9)


def test_arrow_keys_move_through_labelled_marks(opened: Opened) -> None:
    spots = opened.page.locator("#chart-accuracy .spot")
    spots.first.focus()
    actual = []
    for _ in range(spots.count()):
        actual.append(opened.page.evaluate("document.activeElement.getAttribute('aria-label')"))
        assert opened.page.locator("#chart-accuracy .tip").is_visible()
        opened.page.keyboard.press("ArrowRight")
    assert len(set(actual)) == len(PLANS)
    assert all("accuracy:" in one and "n = 40" in one for one in actual)
    opened.page.keyboard.press("Escape")
    assert not opened.page.locator("#chart-accuracy .tip").is_visible()


def test_attempts_are_separate_samples(open_report: Open, tmp_path: Path) -> None:
    def two(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        return {"text": f"item {item}, attempt {attempt}"}

    opened = open_report(write_run(tmp_path / "two", plans=PLANS, n=3, attempts=2, outcome=two))
    assert listed(opened) == 6
    opened.page.locator("[aria-label='Next sample']").click()
    opened.page.wait_for_function(
        "() => document.querySelector('.detail h3').textContent.includes('2 of 2')"
    )
    assert opened.texts(".trace-column .text")[0] == "item 0, attempt 1"


def test_a_group_can_be_chosen(open_report: Open, tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", plans=PLANS, n=4, seeds=(0, 1))
    other = write_run(tmp_path / "b", plans=PLANS[:1], n=5, tasks=("needle",), name="other")
    opened = open_report(one, other)
    names = opened.texts("#group option")
    assert [name.split(" · ")[1:] for name in names] == [
        ["reasoner", "seeds 0, 1"],
        ["reasoner", "seed 0"],
        ["reasoner", "seed 1"],
        ["needle", "seed 0"],
    ]
    assert opened.texts("#seed option") == ["0", "1"]
    assert listed(opened) == 4
    assert opened.texts("#table tbody td.right")[0] == "all"
    opened.page.select_option("#group", "3")
    opened.page.wait_for_selector(".option")
    assert listed(opened) == 5
    assert opened.count("#table tbody tr") == 1
    assert "needle 0: what is 0?" in opened.texts(".asked .text")[0]
    opened.page.select_option("#group", "2")
    opened.page.wait_for_function("() => document.querySelectorAll('#table tbody tr').length === 3")
    opened.page.wait_for_function(
        "() => document.querySelector('.asked .text')?.textContent.startsWith('reasoner 1')"
    )


def test_pooled_seeds_have_the_samples_of_each(open_report: Open, tmp_path: Path) -> None:
    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        return {"finish_reason": "length"} if cell["budget"] == 64 and item == 5 else {}

    run = write_run(tmp_path / "a", plans=PLANS, n=4, seeds=(0,))
    more = write_run(tmp_path / "b", plans=PLANS, n=6, seeds=(1,), outcome=outcome)
    opened = open_report(run, more)
    opened.page.wait_for_selector(".option")
    assert listed(opened) == 4
    opened.page.select_option("#seed", "1")
    settled(opened, 6)
    opened.page.select_option("#seed", "0")
    settled(opened, 4)
    # A click in the pooled table shows the seed that has what it counts.
    opened.page.locator("#failures tbody button").click()
    settled(opened, 1)
    assert opened.page.input_value("#seed") == "1"
    assert "#5" in opened.texts(".option")[0]
    opened.page.locator("#table tbody .link").nth(2).click()
    opened.page.wait_for_function("() => document.querySelector('#cell-a').value === '2'")


def tile(opened: Opened, name: str) -> list[str]:
    """What stands in one of the tiles on top."""
    found = opened.page.locator(".tile", has_text=name).first
    return found.locator("dd").all_text_contents()


def test_seeds_of_several_runs_are_shown(open_report: Open, tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", name="first", plans=PLANS, n=4)
    other = write_run(tmp_path / "b", name="second", plans=PLANS, n=6, seeds=(1,))
    opened = open_report(one, other)
    assert "seeds 0, 1" in opened.texts("#group option")[0]
    assert tile(opened, "samples") == ["30", "10 in each cell"]
    heads = "#manifest-body summary bdi"
    assert opened.texts(heads) == ["first", "second"]
    opened.page.select_option("#group", "2")
    opened.page.wait_for_function(f"() => document.querySelectorAll('{heads}').length === 1")
    assert opened.texts(heads) == ["second"]
    assert tile(opened, "samples") == ["18", "6 in each cell"]


def test_a_failed_search_shows_a_message(open_report: Open, tmp_path: Path) -> None:
    opened = open_report(write_run(tmp_path / "r", plans=PLANS, n=4, seeds=(0, 1)))
    opened.page.evaluate("document.getElementById('block-1').remove()")
    opened.page.select_option("#group", "2")
    opened.page.wait_for_selector(".detail [role=alert]")
    opened.page.fill("#search", "anything")
    opened.page.wait_for_function(
        "() => document.querySelector('.count').textContent === 'The search failed.'"
    )


def test_an_unfinished_run_shows_its_finished_samples(open_report: Open, tmp_path: Path) -> None:
    opened = open_report(write_run(tmp_path / "r", plans=PLANS, n=10, only_first=14))
    assert "14 of 30 samples are done" in opened.texts(".notice")[0]
    assert tile(opened, "samples") == ["14", "of 30: not complete"]
    opened.page.select_option("#cell-a", "1")
    opened.page.select_option("#cell-b", "0")
    opened.page.focus("#samples-list")
    opened.page.keyboard.press("End")
    opened.page.wait_for_selector(".trace-column .empty")
    assert opened.texts(".trace-column .empty") == ["This cell has no such sample."]
