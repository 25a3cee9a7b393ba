"""Tasks by name, by file, by hub id; strangers' tasks; what every task promises of its items."""

import sys
from pathlib import Path

import pytest
from datafiles import GSM8K, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_reasoner.tasks import LEVELS, levels_of

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.task import QUESTIONS, Graded, installed_tasks, load_task

DRAWN = [
    "reasoner",
    "reasoner:level=easy",
    "reasoner-verbose",
    "reasoner-needle:length=120",
    "multikey",
    "conversation:length=200",
]

STRANGER = '''
import attrs

from kvpolicy.lab.tasks.task import Graded
from kvpolicy.lab.tasks.task import Example


@attrs.frozen
class Echo:
    """Say it again."""

    word: str = "hello"
    times: int = 1
    loud: bool = False

    @property
    def name(self):
        return "echo"

    @property
    def metric(self):
        return Graded(lambda text, item: text.strip() == item.answer)

    def examples(self, n, *, seed, split="test"):
        return [Example(i, self.word * self.times, self.word, {"loud": int(self.loud)})
                for i in range(n)]
'''


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of somebody else's that brings a task, and one that cannot be imported."""
    info = tmp_path / "echo_tasks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-tasks\nVersion: 1.0\n")
    points = "[kvpolicy.tasks]\necho = echo_tasks:Echo\nbroken = echo_tasks_that_are_not:Echo\n"
    (info / "entry_points.txt").write_text(points)
    (tmp_path / "echo_tasks.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "echo_tasks", raising=False)


@pytest.mark.usefixtures("stranger")
def test_a_package_can_register_a_task() -> None:
    task = load_task("echo:word=hi,times=2,loud=true")
    (item,) = task.examples(1, seed=0)
    assert (item.prompt, item.facets) == ("hihi", {"loud": 1})
    (info,) = (one for one in installed_tasks() if one.name == "echo")
    assert (info.summary, info.distribution) == ("Say it again.", "echo-tasks 1.0")
    assert info.options == {"word": "'hello'", "times": "1", "loud": "False"}


@pytest.mark.usefixtures("stranger")
def test_a_broken_task_is_named_and_hides_no_other() -> None:
    with pytest.raises(TaskError, match=r"'broken'.*echo-tasks 1\.0"):
        load_task("broken")
    problems = {info.name: info.problem for info in installed_tasks()}
    assert problems.pop("broken") is not None
    assert set(problems.values()) == {None}
    assert load_task("echo").name == "echo"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resoner", "reasoner"),
        ("reasoner:lvl=easy", "'lvl'.*level"),
        ("reasoner:level=simple", "easy"),
        ("reasoner:level=easy,hard", "'hard'"),
        ("reasoner-needle:length=long", "length='long'"),
        ("reasoner-needle:length=10", "length=10"),
        ("multikey:keys=20", "keys"),
        ("multikey:keys=0", "keys"),
        ("gsm8k:chat=maybe", "chat"),
        ("questions", "'questions'"),
        ("questions:source=a.jsonl,grader=kind", "grader"),
        ("livecodebench:release=7", "release"),
        ("livecodebench:time_s=0", "time_s"),
        ("", "''"),
    ],
)
def test_a_wrong_name_or_option_is_refused_with_the_known_ones(text: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_task(text)


def test_a_file_is_a_task_by_its_path_alone(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "my:odd=name.jsonl".replace("=", "-"), GSM8K)
    task = load_task(str(file))
    assert task.name == f"{QUESTIONS}:source={file}"
    assert len(task.examples(10, seed=0)) == len(GSM8K)
    assert load_task(f"{file}:chat=false,grader=exact").examples(1, seed=0)[0].chat is False


@pytest.mark.parametrize("name", DRAWN)
@given(st.integers(0, 5), st.integers(1, 6))
def test_a_smaller_draw_is_a_prefix_of_a_larger_one(name: str, seed: int, n: int) -> None:
    task = load_task(name)
    items = task.examples(6, seed=seed)
    assert task.examples(n, seed=seed) == items[:n]
    assert [item.index for item in items] == list(range(6))
    assert len({item.prompt for item in items}) == 6


@pytest.mark.parametrize("name", DRAWN)
def test_no_prompt_is_in_two_splits(name: str) -> None:
    task = load_task(name)
    drawn = {split: task.examples(20, seed=0, split=split) for split in ("train", "tune", "test")}
    prompts = [item.prompt for items in drawn.values() for item in items]
    assert len(set(prompts)) == 60


@pytest.mark.parametrize("name", DRAWN)
def test_only_the_expected_answer_in_a_box_is_correct(name: str) -> None:
    task = load_task(name)
    for item in task.examples(5, seed=1):
        wrong = str(int(item.answer) + 1)
        for text, verdict in (
            (f"\\boxed{{{item.answer}}}", True),
            (f"\\boxed{{{wrong}}} no: \\boxed{{ {item.answer} }}", True),
            (f"\\boxed{{{item.answer}}} no: \\boxed{{{wrong}}}", False),
            (f"\\boxed{{{item.answer}", False),
            (item.answer, False),
            ("", False),
        ):
            assert task.grade(text, item) is verdict


@pytest.mark.parametrize(("level", "depths"), [("easy", {1, 2}), ("medium", {3, 4})])
def test_a_level_has_its_documented_depths(level: str, depths: set[int]) -> None:
    for name in ("reasoner", "reasoner-verbose"):
        items = load_task(f"{name}:level={level}").examples(30, seed=0)
        assert {item.facets["depth"] for item in items} == depths


def test_the_standard_level_is_the_default() -> None:
    assert load_task("reasoner:level=standard").examples(5, seed=0) == load_task(
        "reasoner"
    ).examples(5, seed=0)
    assert load_task("reasoner:level=standard").name == "reasoner"
    assert set(LEVELS) == {"easy", "medium", "hard", "long", "standard"}
    assert levels_of("reasoner") == ["easy", "medium", "hard", "standard"]


@pytest.mark.parametrize("info", installed_tasks(), ids=lambda info: info.name)
def test_an_installed_task_has_a_summary_and_options(info) -> None:
    assert info.problem is None
    assert info.summary.endswith(".")


def test_the_metric_of_a_question_is_its_grader() -> None:
    assert isinstance(load_task("reasoner-needle").metric, Graded)
    assert not load_task("reasoner-needle").metric.runs_code
