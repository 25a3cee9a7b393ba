"""Plugins that misbehave while they load are named in one sentence and harm nobody else."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_process import run_in_child
from installed_package import Install
from shell import Shell, refusal

from kvpolicy.entry_points import DEFAULTS, default_name
from kvpolicy.errors import KVPolicyError, PolicyLoadError, error_summary, shown
from kvpolicy.hooks import discovery
from kvpolicy.hooks.discovery import load_policy, load_policy_file, policy_names
from kvpolicy.hooks.stack import Stack
from kvpolicy.lab.tasks.task import installed_tasks, load_task
from kvpolicy.model.loading import load_model
from kvpolicy.plugin_code import plugin_code

POLICY = """
from kvpolicy import hookimpl

class Mine:
    @hookimpl
    def score(self, keys):
        return keys.norm(dim=-1)
"""

EVIL = """
class Evil(Exception):
    def __str__(self):
        raise ValueError("no text")
    __repr__ = __str__
"""

#: What a module does when it is imported, and what the message says.
IMPORTS = {
    "SystemExit": ("raise SystemExit", "SystemExit"),
    "sys.exit": ("import sys; sys.exit('bye')", "SystemExit: bye"),
    "exit of 0": ("import sys; sys.exit(0)", "SystemExit: 0"),
    "GeneratorExit": ("raise GeneratorExit", "GeneratorExit"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "a kind of interrupt": ("class Stop(KeyboardInterrupt): pass\nraise Stop('a')", "Stop: a"),
    "a BaseException": ("class Odd(BaseException): pass\nraise Odd('odd')", "Odd: odd"),
    "StopIteration": ("raise StopIteration(3)", "StopIteration: 3"),
    "a message that raises": (f"{EVIL}\nraise Evil", "Evil: (its message cannot be read)"),
    "a message that exits": (
        "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
        "E: (its message cannot be read)",
    ),
    "a message that is no text": (
        "class E(Exception):\n    def __str__(self): return 3\nraise E",
        "E: (its message cannot be read)",
    ),
    "many lines": ("raise ValueError('a\\nb\\r\\n\\tc\\u2028d')", "ValueError: a b c d"),
    "a long message": ("raise ValueError('x' * 10**6)", "x…"),
    "a name that lies": (
        "class M(type):\n    __name__ = property(lambda self: 1 / 0)\n"
        "class E(Exception, metaclass=M): pass\nraise E('text')",
        "E: text",
    ),
    "a group of errors": ("raise ExceptionGroup('two', [OSError(), KeyError()])", "two"),
    "recursion": ("def f(): return f()\nf()", "RecursionError"),
    "a syntax error": ("def (", "SyntaxError"),
    "an error of kvpolicy": ("import kvpolicy\nkvpolicy.load_policy('nosuch')", "nosuch"),
    "a missing module": ("import no_such_module", "no_such_module"),
    "an absent name": ("from json import nosuch", "nosuch"),
    "a replaced module": ("import sys; sys.modules['json'] = None", "replaces the module json"),
    "a removed module": ("import sys; del sys.modules['json']", "replaces the module json"),
    "other modules": ("import sys; sys.modules = {}; raise KeyError('x')", "KeyError: 'x'"),
    "hookimpl on a number": ("from kvpolicy import hookimpl\nhookimpl(3)", "AttributeError"),
    "its own module replaced": ("import sys; sys.modules[__name__] = 3", "replaces the module"),
}


def is_one_line(text: str) -> bool:
    return len(text.splitlines()) == 1 and len(text) < 900


# Imports


@pytest.mark.few(8)
@pytest.mark.parametrize(("text", "expected"), IMPORTS.values(), ids=IMPORTS)
def test_file_that_misbehaves_on_import_is_named(
    text: str, expected: str, tmp_path: Path, kvpolicy: Shell
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{text}\n{POLICY}")
    sys.modules.pop("kvpolicy_file_mine", None)  # of an earlier test
    before = dict(sys.modules)
    sentence = refusal(kvpolicy("list", "--plugin", path))
    assert "plugin file" in sentence
    assert "mine.py" in sentence
    assert expected in sentence
    assert is_one_line(sentence)
    assert json.loads("3") == 3
    assert all(sys.modules[name] is module for name, module in before.items())
    assert "kvpolicy_file_mine" not in sys.modules
    assert "mine" not in policy_names()


def test_file_that_removes_all_modules_is_named(tmp_path: Path) -> None:
    """In a process of its own, because Python then makes second copies of its built-in modules."""
    path = tmp_path / "mine.py"
    path.write_text(f"import sys; sys.modules.clear()\n{POLICY}")
    ended = run_in_child(tmp_path, "list", "--plugin", path)
    assert ended.status == 2
    assert ended.err.startswith("kvpolicy: plugin file")
    assert is_one_line(ended.err)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("text", "expected"),
    [pair for name, pair in IMPORTS.items() if name != "its own module replaced"],
    ids=[name for name in IMPORTS if name != "its own module replaced"],
)
def test_package_that_misbehaves_on_import_is_named(
    text: str, expected: str, install: Install
) -> None:
    install(
        "evil", {discovery.GROUP: {"evil": "evil_policy:Mine"}}, evil_policy=f"{text}\n{POLICY}"
    )
    with pytest.raises(PolicyLoadError) as found:
        load_policy("evil")
    message = str(found.value)
    assert message.startswith("policy 'evil' (evil_policy:Mine, evil 1.0) cannot be imported: ")
    assert expected in message
    assert is_one_line(message)
    load_policy("streaming")


@pytest.mark.slow
@pytest.mark.needs_reasoner
def test_list_names_the_broken_and_shows_the_others(install: Install, kvpolicy: Shell) -> None:
    fine = ("mine", "Mine", POLICY)
    kinds = {
        "circular": ("circular", "Mine", "from circular import Mine"),
        "absent": ("absent", "Nobody", POLICY),
        "syntax": ("syntax", "Mine", "def ("),
        "binary": ("binary", "Mine", "\0\0"),
        "deep": ("deep", "Mine", f"x = {'(' * 5000}{')' * 5000}"),
        "exits": ("exits", "Mine", f"import sys\nsys.exit(1)\n{POLICY}"),
        "builds": ("builds", "Mine", f"{POLICY}    def __init__(self): raise SystemExit(7)\n"),
        "tracks": ("tracks", "Mine", f"{POLICY}    tracks = 'abc'\n"),
        "number": ("number", "Mine", "Mine = 3"),
        "lies": ("lies", "Mine", "Mine = __import__('kvpolicy').Plan"),
    }
    names = {name: f"{module}:{cls}" for name, (module, cls, _) in {**kinds, "fine": fine}.items()}
    names |= {"malformed": "a b c", "nameless": "json", "nowhere": "no_such_module:X"}
    modules = {module: text for module, _, text in [*kinds.values(), fine]}
    install("evil", {discovery.GROUP: names}, **modules)

    seen = {one["name"]: one["problem"] for one in kvpolicy("list", "--json").json}
    in_source = {"circular", "absent", "syntax", "binary", "deep", "malformed", "nameless"}
    in_source |= {"nowhere", "number", "lies"}
    assert {name for name, problem in seen.items() if problem} == in_source
    answer = kvpolicy("list", "--load", "--json")
    assert answer.status == 0
    loaded = {one["name"]: one["problem"] for one in answer.json}
    when_loaded = {"exits": "SystemExit: 1", "builds": "SystemExit: 7", "tracks": "'abc'"}
    assert {name for name, problem in loaded.items() if problem} == in_source | {*when_loaded}
    assert all(text in loaded[name] for name, text in when_loaded.items())
    assert all(is_one_line(problem) for problem in loaded.values() if problem)
    assert "exits" in kvpolicy("list", "--load").out
    for name in names.keys() - {"fine"}:
        with pytest.raises(KVPolicyError, match=f"'{name}'"):
            Stack([(name, load_policy(name))])
    Stack([("fine", load_policy("fine"))])


def test_what_a_plugin_prints_is_not_in_the_output(install: Install, kvpolicy: Shell) -> None:
    text = f"print('hello')\n{POLICY}    def __init__(self): print('built')\n"
    install("loud", {discovery.GROUP: {"loud": "loud:Mine"}}, loud=text)
    answer = kvpolicy("list", "--load", "--json")
    assert {one["name"] for one in answer.json} >= {"loud", "streaming"}
    assert "hello\nbuilt" in answer.err


@pytest.mark.slow
def test_check_of_all_policies_names_the_broken_and_checks_the_others(
    install: Install, kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("evil", {discovery.GROUP: {"evil": "evil:Mine"}}, evil="raise SystemExit")
    monkeypatch.setattr("kvpolicy.cli.check.policy_names", lambda: ["evil", "streaming"])
    answer = kvpolicy("check", "--cases", "4", "--json")
    assert answer.status == 1, answer.err
    broken, checked = answer.json_lines
    assert broken["policy"] == "evil"
    assert "SystemExit" in broken["problem"]
    assert checked["policy"] == "streaming"
    assert "policy 'evil'" in refusal(kvpolicy("check", "evil", "--cases", "4"))


def test_ctrl_c_during_an_import_interrupts(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    started = tmp_path / "started"
    path.write_text(
        f"import time\nopen({str(started)!r}, 'w').close()\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    raise\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "kvpolicy", "list", "--plugin", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, ""), err
    assert err.strip() == "kvpolicy: interrupted."


# Names


def test_two_files_with_one_policy_are_refused(tmp_path: Path, kvpolicy: Shell) -> None:
    paths = [tmp_path / name / "mine.py" for name in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(POLICY)
    sentence = refusal(kvpolicy("list", "--plugin", paths[0], "--plugin", paths[1]))
    assert "'mine'" in sentence
    assert all(str(path) in sentence for path in paths)
    discovery.forget_files()
    twice = kvpolicy("list", "--plugin", paths[0], "--plugin", paths[0])
    assert twice.status == 0, twice.err


def test_file_that_shadows_an_installed_policy_is_refused(tmp_path: Path, kvpolicy: Shell) -> None:
    path = tmp_path / "mine.py"
    path.write_text(POLICY.replace("Mine", "Streaming"))
    sentence = refusal(kvpolicy("list", "--plugin", path))
    assert "'streaming'" in sentence
    assert str(path) in sentence
    assert "kvpolicy_baselines.streaming:Streaming" in sentence
    assert "kvpolicy_baselines" in type(load_policy("streaming")).__module__


def test_two_classes_of_a_file_with_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(POLICY.replace("Mine", "KeyNorm") + POLICY.replace("Mine", "Key_Norm"))
    with pytest.raises(PolicyLoadError, match=r"Key_Norm.*KeyNorm"):
        load_policy_file(path)
    assert discovery.registered_files() == []


@pytest.mark.nightly
@pytest.mark.needs_reasoner
def test_two_packages_with_one_name_are_refused(install: Install, kvpolicy: Shell) -> None:
    for package in ("one", "two"):
        points = {
            discovery.GROUP: {"same": f"{package}_mod:Mine", package: f"{package}_mod:Mine"},
            "kvpolicy.tasks": {"same_task": f"{package}_mod:Mine"},
            "kvpolicy.models": {"same_model": f"{package}_mod:Mine"},
            "kvpolicy.commands": {"same_command": f"{package}_mod:Mine"},
            "kvpolicy.plans": {"same_plan": f"{package}_mod"},
        }
        install(package, points, **{f"{package}_mod": POLICY})
    both = r"is registered by one 1\.0 \(one_mod(:Mine)?\) and two 1\.0 \(two_mod(:Mine)?\)"
    for load in (
        lambda: load_policy("same"),
        lambda: load_task("same_task"),
        lambda: load_model("same_model"),
    ):
        with pytest.raises(KVPolicyError, match=both):
            load()
    assert "one 1.0" in refusal(kvpolicy("same_command"))
    assert "two 1.0" in refusal(kvpolicy("plan", "show", "same_plan"))
    answer = kvpolicy("--help")
    assert answer.status == 0
    assert "same_command" in answer.out
    problems = {one["name"]: one["problem"] for one in kvpolicy("list", "--json").json}
    assert "uninstall one of them" in problems.pop("same")
    assert set(problems.values()) == {None}
    load_policy("one")


# Other entry points


BROKEN = "class Task:\n    def __init__(self, size: int = 3):\n        raise SystemExit(5)\n"


@pytest.mark.needs_reasoner
def test_misbehaving_tasks_models_and_commands_are_named(install: Install, kvpolicy: Shell) -> None:
    points = {
        "kvpolicy.tasks": {"exits": "t_exit:Task", "builds": "t_build:Task", "odd": "t_odd:task"},
        "kvpolicy.models": {"m_exits": "t_exit:x", "m_builds": "t_build:Task", "m_odd": "t_odd:x"},
        "kvpolicy.commands": {"c_exits": "t_exit:app", "c_odd": "t_odd:x", "c_app": "t_app:app"},
        "kvpolicy.plans": {"p_exits": "t_exit"},
    }
    app = "import typer\napp = typer.Typer()\n"  # without a command
    odd = "x = 3\ndef task(size=type('R', (), {'__repr__': lambda s: 1 / 0})()): return 3\n"
    install("evil", points, t_exit="raise SystemExit(5)", t_build=BROKEN, t_odd=odd, t_app=app)
    for name in ("exits", "builds"):
        with pytest.raises(KVPolicyError, match=f"'{name}'.*SystemExit"):
            load_task(name)
    problems = {info.name: info.problem for info in installed_tasks()}
    assert {name for name, problem in problems.items() if problem} == {"exits", "odd"}
    assert "reasoner" in problems or len(problems) > 2
    for name in ("m_exits", "m_builds", "m_odd"):
        with pytest.raises(KVPolicyError, match=f"'{name}'"):
            load_model(name)
    for name in ("c_exits", "c_odd", "c_app"):
        assert f"command '{name}'" in refusal(kvpolicy(name))
    assert kvpolicy("--help").status == 0
    assert "plan 'p_exits'" in refusal(kvpolicy("plan", "show", "p_exits"))


@pytest.mark.parametrize("text", ["raise SystemExit", "X = 3", "class X: pass"])
def test_broken_default_counts_as_none(
    text: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy.entry_points.DEFAULTS", "test.defaults")
    install("evil", {"test.defaults": {"model": "d_mod:X"}}, d_mod=text)
    assert default_name("model") is None
    assert DEFAULTS == "kvpolicy.defaults"


# The mechanism


def test_plugin_code_restores_what_it_replaced() -> None:
    before, out = dict(sys.modules), sys.stdout

    def replace() -> None:
        with plugin_code("it fails", KVPolicyError, imports=True):
            sys.modules["json"] = None  # type: ignore[assignment]
            assert sys.stdout is sys.stderr

    with pytest.raises(KVPolicyError, match="json"):
        replace()
    assert dict(sys.modules) == before
    assert sys.stdout is out


def test_texts_of_objects_that_raise_are_one_short_line() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise SystemExit

    assert shown(Odd()) == "an object of Odd"
    assert shown("a\nb") == r"'a\nb'"
    assert len(shown("x" * 10**6)) == 60
    assert error_summary(ValueError("a\n" * 10**5)).count("\n") == 0


RELOADS = """
import importlib.util
import sys

spec = importlib.util.find_spec("colorsys")
sys.modules["colorsys"] = importlib.util.module_from_spec(spec)
"""


def test_a_module_may_be_loaded_again_from_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import colorsys

    monkeypatch.setitem(sys.modules, "colorsys", colorsys)
    (tmp_path / "reloads.py").write_text(RELOADS + POLICY)
    assert load_policy_file(tmp_path / "reloads.py") == ["mine"]


RELOADS_A_PACKAGE = """
import importlib.util
import sys
import types

sys.modules["xml"] = importlib.util.module_from_spec(importlib.util.find_spec("xml"))
sys.modules["xml.sax"] = types.ModuleType("xml.sax")
"""


def test_a_package_that_is_loaded_again_may_replace_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import xml.sax

    for name, module in (("xml", xml), ("xml.sax", xml.sax)):
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "reloads.py").write_text(RELOADS_A_PACKAGE + POLICY)
    assert load_policy_file(tmp_path / "reloads.py") == ["mine"]


@pytest.mark.slow
@pytest.mark.needs_reasoner
def test_the_bundled_model_is_found_in_a_new_process() -> None:
    # transformers loads itself again while other modules import from it, the first time only.
    command = [sys.executable, "-m", "kvpolicy", "plan", "show", "skipkv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
