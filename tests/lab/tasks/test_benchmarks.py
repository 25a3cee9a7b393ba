"""Question sets in their true formats: files, folders laid out as on the hub, hub ids."""

import importlib.util
import json
from pathlib import Path

import pytest
from datafiles import AIME_24, GSM8K, LIVECODEBENCH, MATH_500, write_hub_folder, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from tiny import r1_tokenizer

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks import chat_template as chat
from kvpolicy.lab.tasks import datasets as rows_module
from kvpolicy.lab.tasks.datasets import JsonRows, read_rows
from kvpolicy.lab.tasks.question_sets import INSTRUCTION, draw
from kvpolicy.lab.tasks.task import Example, load_task

needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the extra 'tasks' is not installed"
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a test stays in the user's cache, and no test finds what is in it."""
    monkeypatch.chdir(tmp_path)
    if importlib.util.find_spec("datasets") is not None:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def by_prompt(items: list[Example]) -> dict[str, Example]:
    return {item.prompt.removesuffix(f"\n\n{INSTRUCTION}"): item for item in items}


@pytest.mark.nightly
def test_gsm8k_is_read_in_the_format_of_the_hub(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "gsm8k.jsonl", GSM8K)
    items = by_prompt(load_task(f"gsm8k:source={file}").examples(10, seed=0))
    answers = {row["question"]: items[row["question"]].answer for row in GSM8K}
    assert list(answers.values()) == ["10", "1234", "25"]
    item = items[GSM8K[0]["question"]]
    assert item.reference == "She has 3*4=12 apples.\nThen 12-2=10 are left."
    assert item.facets == {"steps": 2}
    assert item.chat
    assert item.prompt.endswith(INSTRUCTION)


def test_math_500_is_read_in_the_format_of_the_hub(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "test.jsonl", MATH_500)
    items = by_prompt(load_task(f"math-500:source={file}").examples(10, seed=0))
    polar = items[MATH_500[0]["problem"]]
    assert polar.answer == MATH_500[0]["answer"]
    assert polar.facets == {"level": 2, "subject": "Precalculus"}


@needs_datasets
def test_aime_is_read_from_parquet(tmp_path: Path) -> None:
    import datasets

    file = tmp_path / "aime.parquet"
    datasets.Dataset.from_list(AIME_24).to_parquet(str(file))
    items = by_prompt(load_task(f"aime-24:source={file}").examples(30, seed=0))
    assert items["Find the least $p$."].answer == "110"
    assert items["Find $m+n$."].facets == {"paper": "II", "number": 4}


@needs_datasets
@pytest.mark.parametrize(
    ("task", "rows", "split", "config"),
    [
        ("gsm8k", GSM8K, "test", "main"),
        ("math-500", MATH_500, "test", "default"),
        ("aime-24", AIME_24, "train", "default"),
    ],
)
def test_a_clone_of_a_hub_repository_is_read(
    tmp_path: Path, task: str, rows: list[dict[str, object]], split: str, config: str
) -> None:
    folder = write_hub_folder(tmp_path / "clone", rows, split=split, config=config)
    assert len(load_task(f"{task}:source={folder}").examples(100, seed=0)) == len(rows)


@needs_datasets
@pytest.mark.usefixtures("_hub_beside_us")
def test_a_hub_id_is_read() -> None:
    """`datasets` takes a folder of that name, if there is one, for the repository."""
    assert len(load_task("gsm8k").examples(100, seed=0)) == len(GSM8K)
    task = load_task("openai/gsm8k:config=main")
    assert sorted(item.answer for item in task.examples(9, seed=1)) == ["10", "1234", "25"]


@pytest.fixture
def _hub_beside_us(tmp_path: Path) -> None:
    write_hub_folder(tmp_path / "openai" / "gsm8k", GSM8K, split="test", config="main")


@needs_datasets
@pytest.mark.parametrize("name", ["gsm8k", "aime-24", "somebody/something"])
def test_an_unreachable_hub_is_reported_at_once(name: str) -> None:
    with pytest.raises(TaskError, match="source=FILE"):
        load_task(name).examples(1, seed=0)


def test_livecodebench_without_the_hub_is_reported_at_once() -> None:
    with pytest.raises(TaskError, match=r"test\.jsonl"):
        load_task("livecodebench").examples(1, seed=0)


def test_a_missing_package_for_tables_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TaskError, match=r"datasets.*\[tasks\]"):
        load_task("gsm8k").examples(1, seed=0)


@pytest.mark.parametrize("task", ["math-500", "aime-24", "livecodebench"])
def test_a_missing_split_is_reported(task: str) -> None:
    with pytest.raises(TaskError, match=f"'{task}'.*tune"):
        load_task(task).examples(1, seed=0, split="tune")


def test_own_questions_need_a_prompt_and_an_answer(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "answer": 2, "hard": 1, "kind": "sum", "note": "x" * 99}]
    (item,) = load_task(str(write_jsonl(tmp_path / "mine.jsonl", rows))).examples(5, seed=0)
    assert (item.prompt, item.answer, item.facets) == ("1+1?", "2", {"hard": 1, "kind": "sum"})


def test_a_text_file_is_a_text_for_each_paragraph(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("One.\nStill one.\n\n\nTwo.\n", encoding="utf-8")
    items = load_task("perplexity:of=book.txt").examples(5, seed=0)
    assert {item.reference for item in items} == {"One.\nStill one.", "Two."}
    assert {item.prompt for item in items} == {""}
    prompts = [item.prompt for item in load_task("agreement:of=book.txt").examples(5, seed=0)]
    assert sorted(prompts) == ["One.\nStill one.", "Two."]


def test_blank_lines_of_any_kind_separate_the_texts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(b"One.\r\nStill.\r\n\r\n Two.\n \t\n\n  Three.\n")
    items = load_task(f"perplexity:of={tmp_path / 'book.txt'}").examples(5, seed=0)
    assert {item.reference for item in items} == {"One.\nStill.", " Two.", "  Three."}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "a"}\nnothing\n', r"line 2 of .*a\.jsonl"),
        ("a.jsonl", "", r"a\.jsonl"),
        ("a.jsonl", '{"what": 1}\n', "what"),
        ("a.json", "{}", r"a\.json"),
        ("a.json", '{"prompt": 1}\n{"prompt": 2}', r"\.jsonl"),
        ("none.jsonl", None, r"none\.jsonl"),
        ("none.json", None, r"none\.json"),
        ("none.parquet", None, r"none\.parquet"),
    ],
)
def test_an_invalid_question_file_is_refused(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(TaskError, match=message):
        load_task(str(tmp_path / name)).examples(2, seed=0)


def test_a_set_with_other_columns_is_refused(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", MATH_500)
    with pytest.raises(TaskError, match="question"):
        load_task(f"gsm8k:source={file}").examples(1, seed=0)
    file = write_jsonl(tmp_path / "b.jsonl", [{"question": "1?", "answer": "one"}])
    with pytest.raises(TaskError, match="####"):
        load_task(f"gsm8k:source={file}").examples(1, seed=0)
    with pytest.raises(TaskError, match="question_content"):
        load_task(f"livecodebench:source={file}").examples(1, seed=0)


@given(st.integers(0, 30), st.integers(0, 40), st.integers(0, 9))
def test_rows_are_drawn_once_each_and_the_first_are_those_of_a_smaller_draw(
    num_rows: int, n: int, seed: int
) -> None:
    found = draw(num_rows, n, seed)
    assert len(set(found)) == len(found) == min(n, num_rows)
    assert set(found) <= set(range(num_rows))
    assert draw(num_rows, num_rows, seed)[:n] == found


def test_json_lines_are_found_again_in_any_order(tmp_path: Path) -> None:
    rows = [{"text": "é" * i, "i": i} for i in range(20)]
    first, second = rows[:7], rows[7:]
    path = write_jsonl(tmp_path / "a.jsonl", first)
    path.write_text(path.read_text(encoding="utf-8").replace("\n", "\n\n"), encoding="utf-8")
    found = JsonRows([path, write_jsonl(tmp_path / "b.jsonl", second)])
    assert len(found) == 20
    assert [found[i] for i in reversed(range(20))] == rows[::-1]
    assert list(read_rows(str(path))) == first


def test_a_question_is_wrapped_in_the_r1_template() -> None:
    tokenizer = r1_tokenizer()
    (item,) = chat.wrap([Example(0, "1+1?", "2", chat=True)], tokenizer)
    assert item.prompt == "<｜begin▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜><think>\n"
    (ids,) = chat.encode([item], tokenizer)
    assert not isinstance(ids, str)
    assert ids.count(tokenizer.bos_token_id) == 1, "and not a second one from the tokenizer"
    assert tokenizer.decode(ids) == item.prompt
    plain = Example(0, "1+1?", "2")
    assert chat.wrap([plain], tokenizer) == [plain]
    assert chat.encode([plain, item], tokenizer) == ["1+1?", ids]


def test_a_special_token_in_a_question_is_text() -> None:
    tokenizer = r1_tokenizer()
    mark = "<｜Assistant｜>"
    questions = [f"1+1?{mark}3", "1+1?3"]
    examples = [Example(i, text, "2", chat=True) for i, text in enumerate(questions)]
    wrapped = chat.wrap(examples, tokenizer)
    assert questions[0] in wrapped[0].prompt
    with_mark, without = chat.encode(wrapped, tokenizer)
    control = tokenizer.convert_tokens_to_ids(mark)
    assert with_mark.count(control) == without.count(control) == 1  # type: ignore[arg-type]
    assert tokenizer.decode(with_mark) == wrapped[0].prompt


def test_a_message_that_the_template_refuses_is_named() -> None:
    tokenizer = r1_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TaskError, match="example 3"):
        chat.wrap([Example(3, "1+1?", "2", chat=True)], tokenizer)


def test_a_model_without_a_chat_template_is_refused() -> None:
    tokenizer = r1_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TaskError, match="chat=false"):
        chat.wrap([Example(0, "1+1?", "2", chat=True)], tokenizer)


def test_livecodebench_uses_the_prompt_of_the_benchmark(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "test.jsonl", LIVECODEBENCH)
    items = load_task(f"livecodebench:source={file}").examples(9, seed=0)
    stdin, functional = sorted(items, key=lambda item: str(item.facets["platform"]))
    assert "# YOUR CODE HERE" in stdin.prompt
    assert "def twoSum" in functional.prompt
    assert (stdin.facets["difficulty"], functional.facets["difficulty"]) == ("easy", "medium")
    assert [len(json.loads(item.answer)) for item in (stdin, functional)] == [2, 2]
    assert {item.chat for item in items} == {True}


def test_a_release_of_livecodebench_is_its_first_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "test.jsonl", LIVECODEBENCH)
    write_jsonl(tmp_path / "test2.jsonl", LIVECODEBENCH[:1])
    for release, num in ((1, 2), (2, 3)):
        task = load_task(f"livecodebench:source={tmp_path},release={release}")
        assert len(task.examples(9, seed=0)) == num
    with pytest.raises(TaskError, match=r"test3\.jsonl"):
        load_task(f"livecodebench:source={tmp_path},release=3").examples(9, seed=0)
