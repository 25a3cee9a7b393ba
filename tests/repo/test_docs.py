"""Docs: examples run as printed, references are complete, and links resolve."""

import inspect
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs
import pytest
import tiny
from families import FAMILIES, REFUSED
from kvpolicy_reasoner.tasks import LEVELS
from pages import Block, Page, blocks_of

from kvpolicy import Engine, Plan, errors, hookspecs
from kvpolicy.cli.app import command_names, load_command
from kvpolicy.entry_points import default_name
from kvpolicy.hooks import discovery
from kvpolicy.hooks.discovery import describe_policy
from kvpolicy.lab.sweep.sweep_file import load_preset
from kvpolicy.lab.tasks.instructions import Following
from kvpolicy.lab.tasks.likelihood import Agreement, Perplexity
from kvpolicy.lab.tasks.repetition import Repetition
from kvpolicy.lab.tasks.retention import Retention
from kvpolicy.lab.tasks.task import Example, Graded, installed_tasks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOOKS = [
    name
    for name, value in vars(hookspecs).items()
    if inspect.isfunction(value) and hasattr(value, "kvpolicy_spec")
]
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*/*.md"))]
# Commands that take seconds each: a page that runs one of them is checked when it changes, and each
# night, README with every change. The others are checked with every change, above all the
# reference, whose help texts, signatures and messages must be current.
SLOW_COMMANDS = {
    *["ablate", "check", "epicache", "guard", "pytest", "serve", "steer", "torchrun", "trimkv"]
}
LINKING = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "tests").rglob("*.md")]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _section(page: Path, heading: str) -> str:
    """The text under a heading of the second level."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"{_name(page)} has no section '## {heading}'"
    return found[1]


# Examples


def _marks(page: Path) -> list[pytest.MarkDecorator]:
    """``nightly`` if it runs a command that takes seconds (with ``--help`` none does).

    The reference is quick; the others are slow.
    """
    lines = [
        line.removeprefix("kvpolicy ").split()
        for block in blocks_of(page)
        if block.language == "sh" and "slow" not in block.options
        for line in block.text.splitlines()
    ]
    if not any(words and words[0] in SLOW_COMMANDS and "--help" not in words for words in lines):
        return [] if page.parent.name == "reference" else [pytest.mark.slow]
    return [pytest.mark.slow if page.name == "README.md" else pytest.mark.nightly]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=_marks(page)) for page in PAGES], ids=_name
)
def test_page_runs_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Page(page, tmp_path, monkeypatch).follow()


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_page_runs_as_printed_with_slow_commands(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any(block.language == "sh" and "slow" in block.options for block in blocks_of(page)):
        pytest.skip("the page has no slow commands")
    Page(page, tmp_path, monkeypatch).follow(slow=True)


def _example_policies() -> list[Block]:
    blocks = blocks_of(DOCS / "reference" / "hooks.md")
    return [block for block in blocks if block.language == "python" and block.title]


@pytest.mark.few(3)
@pytest.mark.parametrize("block", _example_policies(), ids=lambda block: block.title)
def test_example_policy_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert block.title is not None
    file = tmp_path / block.title
    file.write_text(block.text)
    (name,) = discovery.load_policy_file(file)
    schedules = "schedule" in vars(discovery.load_policy_class(name))
    plan = {
        "budget": 12,
        "buffer": 4,
        "stack": ["h2o"] if schedules else ["h2o", name, "protect"],
        "schedule": [name] if schedules else [],
    }
    knobs = [] if schedules else ["protect.n_recent=2"]
    engine = Engine(tiny.shared_model(), None, Plan.from_dict(plan, knobs), slots=2)
    prompts = [[1, 2, 3] * 4, [4, 5] * 9, [6, 7, 8]]
    results = engine.generate(prompts, max_new_tokens=24).results()
    assert [len(result.tokens) for result in results] == [24, 24, 24]
    most = max(layer.capacity(longest=100) for layer in engine.plan.layers)
    assert sum(layer.budget or 0 for layer in engine.plan.layers) == 12 * len(engine.plan.layers)
    assert all(result.peak_rows <= most and result.compactions for result in results)


@pytest.mark.nightly
@pytest.mark.parametrize("script", sorted((DOCS / "examples").glob("*.py")), ids=_name)
def test_example_script_runs(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = {"skipkv_on_the_reasoner.py": "accuracy", "paged_cache.py": "blocks at most"}
    assert printed[script.name] in done.stdout
    assert not list(tmp_path.iterdir()), "the example left files behind"


# The reference of sweeps


def test_sweep_defaults_equal_the_default_preset() -> None:
    section = _section(DOCS / "reference" / "sweeps.md", "Defaults")
    stated = tomllib.loads("\n".join(re.findall(r"`(\w+ = [^`]+)`", section)))
    preset = load_preset(default_name("sweep") or "")
    assert (stated.pop("model"), stated.pop("task")) == (*preset.models, *preset.tasks)
    assert tuple(stated.pop("budgets")) == preset.budgets
    assert stated == {key: getattr(preset, key) for key in stated}
    assert stated.keys() == {"n", "slots", "max_new_tokens", "buffer"}


# The reference of hooks


def _problem_of_hook(hook: str) -> str | None:
    """What the page lacks about a hook."""
    section = _section(DOCS / "reference" / "hooks.md", hook)
    arguments = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    signature = re.search(r"```text signature\n(.*?)\n```", section)
    if signature is None or signature[1] != f"{hook}({', '.join(arguments)})":
        return "its signature"
    if re.findall(r"^\| `(\w+)` \|", section, re.M) != arguments:
        return "a row for each argument, in order"
    if "HookResultError" not in section:
        return "what becomes of an invalid result"
    return None if f"def {hook}(" in section else "an example"


def test_hooks_are_documented_with_their_signatures() -> None:
    problems = {hook: _problem_of_hook(hook) for hook in HOOKS}
    assert {hook: problem for hook, problem in problems.items() if problem} == {}


def test_documented_hooks_exist() -> None:
    text = (DOCS / "reference" / "hooks.md").read_text(encoding="utf-8")
    signatures = re.findall(r"```text signature\n(\w+)\(", text)
    assert signatures == HOOKS


def test_shape_letters_match_the_hookspecs() -> None:
    letters = set(re.findall(r"^ {4}(\w+) {2,}|  (\w+) {4,}", hookspecs.__doc__ or "", re.M))
    known = {letter for pair in letters for letter in pair if letter}
    documented = set(re.findall(r"\| `(\w+)` \|", _section(DOCS / "reference/hooks.md", "Shapes")))
    documented |= set(re.findall(r" `(\w+)` \| ", _section(DOCS / "reference/hooks.md", "Shapes")))
    assert documented <= known


# The reference of policies

OURS = [p for p in entry_points(group=discovery.GROUP) if p.dist and p.dist.name == "kvpolicy"]


def _format_type(hint: Any) -> str:
    """The type of a knob as the page writes it."""
    if get_origin(hint) is Literal:
        return ", ".join(f'`"{word}"`' for word in get_args(hint))
    if get_origin(hint) is dict:
        return "tables"
    if get_origin(hint) is tuple:
        return f"list of {_format_type(get_args(hint)[0])}"
    if get_origin(hint) in (Union, UnionType):
        kinds = [_format_type(kind) for kind in get_args(hint) if kind is not NoneType]
        return " or ".join([*kinds, "none"] if NoneType in get_args(hint) else kinds)
    return {int: "count", float: "number", str: "text", bool: "`true` or `false`"}[hint]


def _problem_of_policy(point: EntryPoint) -> str | None:
    """What the page says wrongly about a policy."""
    section = _section(DOCS / "reference" / "policies.md", point.name)
    if "**Source.** " not in section or "**Differs.** " not in section:
        return "no source, or not what differs from it"
    policy = point.load()
    hints = get_type_hints(policy)
    expected = [
        (
            knob.name,
            _format_type(hints[knob.name]),
            "none" if knob.default is None else f"`{json.dumps(knob.default)}`",
        )
        for knob in attrs.fields(policy)
        if knob.init
    ]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| .+ \|$", section, re.M)
    if rows != expected:
        return f"the knobs, types and defaults are {expected}"
    return None if expected or "No knobs." in section else "write 'No knobs.'"


def test_policies_are_documented_with_knobs_types_and_defaults() -> None:
    problems = {point.name: _problem_of_policy(point) for point in OURS}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_documented_policies_exist() -> None:
    text = (DOCS / "reference" / "policies.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^## (\w+)$", text, re.M)) == sorted(point.name for point in OURS)


# The reference of plans


def test_plan_keys_are_documented() -> None:
    section = _section(DOCS / "reference" / "plan.md", "Keys")
    plan_keys, _, group_keys = section.partition("### Groups of layers")
    for text, cls in ((plan_keys, Plan), (group_keys, Plan.__annotations__["layers"].__args__[0])):
        # The other fields are not written in files.
        fields = {field.name for field in attrs.fields(cls)} - {"name", "sources", "options"}
        fields |= {"extends"} if cls is Plan else set()
        assert set(re.findall(r"^\| `(\w+)` \|", text, re.M)) == fields


# The reference of errors


def error_classes() -> list[type]:
    classes = filter(inspect.isclass, vars(errors).values())
    return [one for one in classes if one.__module__ == errors.__name__]


def test_errors_are_documented_with_parent_and_docstring() -> None:
    page = DOCS / "reference" / "errors.md"
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*) \|$", page.read_text("utf-8"), re.M)
    assert rows == [
        (one.__name__, one.__bases__[0].__name__, (one.__doc__ or "").strip().partition("\n")[0])
        for one in error_classes()
    ]


def test_errors_have_an_example_message() -> None:
    # test_page_runs_as_printed checks the messages themselves.
    section = _section(DOCS / "reference" / "errors.md", "An example of each")
    shown = re.findall(r"^(\w+Error): \S+ .{20,}$", section, re.M)
    assert shown == [one.__name__ for one in error_classes()]


# The reference of commands


def test_help_of_every_command_is_documented() -> None:
    """The page shows ``--help`` output; test_page_runs_as_printed checks that it is current."""
    text = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    lines = [
        line
        for name in command_names()
        for line in [
            f"kvpolicy {name} {sub}" for sub in getattr(load_command(name), "commands", ())
        ]
        or [f"kvpolicy {name}"]
    ]
    missing = [
        line
        for line in lines
        if not re.search(rf"```sh\n{line} --help\n```\n\n```text\nUsage: {line} ", text)
    ]
    assert missing == []


# The reference of tasks

TASKS = DOCS / "reference" / "tasks.md"


def test_tasks_are_documented_with_their_options() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \| ", _section(TASKS, "Names"), re.M)
    documented = {name: re.findall(r"`(\w+=[^`]*)`", options) for name, options in rows}
    assert documented == {
        info.name: [f"{option}={default}" for option, default in info.options.items()]
        for info in installed_tasks()
        if info.distribution.startswith("kvpolicy ")
    }


def test_metric_columns_are_documented() -> None:
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| ", _section(TASKS, "Columns"), re.M)
    metrics = (
        Graded(lambda *_: True),
        Perplexity(),
        Agreement(),
        Repetition(),
        Retention(),
        Following(),
    )
    assert rows == [(one.name, column.name) for one in metrics for column in one.columns]


def test_levels_are_documented_with_their_ranges() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", _section(TASKS, "Levels"), re.M)
    documented = {name: (steps, facts) for name, steps, facts in rows}
    assert documented.keys() == LEVELS.keys()
    for name, level in LEVELS.items():
        if level is not None:
            steps = f"{level.min_depth} to {level.max_depth}"
            assert documented[name] == (steps, f"{level.min_facts} to {level.max_facts}")


def test_example_fields_are_documented() -> None:
    row = re.search(
        r"^\| `kvpolicy.lab.tasks.task.Example` \| .*?: (.*) \|$", TASKS.read_text(), re.M
    )
    assert row
    assert re.findall(r"`(\w+)`", row[1]) == [field.name for field in attrs.fields(Example)]


# The README


def test_readme_lists_every_policy() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", _section(ROOT / "README.md", "The policies"), re.M)
    assert sorted(rows) == sorted(point.name for point in OURS)


def test_docstrings_of_policies_have_a_summary() -> None:
    lacking = [point.name for point in OURS if not describe_policy(point).summary.endswith(".")]
    assert lacking == []


def test_readme_setup_commands_are_one_line() -> None:
    lines = [block.text for block in blocks_of(ROOT / "README.md") if "-m venv" in block.text]
    assert [line.count("\n") for line in lines] == [1, 1]
    assert lines[0].strip().endswith("kvpolicy ablate")
    assert lines[1].strip().endswith("pytest")


# Links


def _slug(heading: str) -> str:
    """The anchor a forge gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


_ABSOLUTE = re.compile(
    r"https://(?:github|raw\.githubusercontent)\.com/kvpolicy/kvpolicy/(?:blob/)?main/"
)


def _links() -> list[tuple[Path, str]]:
    found = []
    for page in LINKING:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        found += [(page, link) for link in re.findall(r"\]\(([^)\s]+)\)", prose)]
    # Absolute links are for the package index; the files are in this repository.
    found = [(page, _ABSOLUTE.sub(f"{ROOT}/", link)) for page, link in found]
    return [(page, link) for page, link in found if "://" not in link]


def _resolves(page: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    if not target.exists():
        return False
    if not anchor:
        return True
    headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
    return anchor in map(_slug, headings)


def test_links_resolve() -> None:
    broken = [f"{_name(page)}: {link}" for page, link in _links() if not _resolves(page, link)]
    assert broken == []


# Models


@pytest.mark.parametrize(("heading", "tested"), [("Run", FAMILIES), ("Refused", REFUSED)])
def test_models_table_equals_the_tested_models(heading: str, tested: dict) -> None:
    table = _section(DOCS / "reference" / "models.md", heading)
    rows = re.findall(r"^\| (?:[^|`]* \| )?`(\w+)` \|", table, re.M)
    assert rows == list(tested)
