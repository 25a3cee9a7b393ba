"""A shell is offered installed names, and files, where either is wanted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpolicy.cli.app import run


@pytest.fixture
def offered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., list[str]]:
    """What bash offers for the last of some words."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "skip.toml").touch()
    (tmp_path / "skip.txt").touch()
    (tmp_path / "reason").mkdir()

    def offer(*words: str) -> list[str]:
        line = ["kvpolicy", *words]
        monkeypatch.setenv("_KVPOLICY_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(line))
        monkeypatch.setenv("COMP_CWORD", str(len(line) - 1))
        with pytest.raises(SystemExit):
            run([])
        return capsys.readouterr().out.split()

    return offer


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("words", "some", "none"),
    [
        (("run", "--policy", "h"), {"h2o", "h2o_last"}, {"rkv"}),
        (("run", "--policy", "h2o+prot"), {"h2o+protect"}, {"protect"}),
        (("ablate", "--policies", "full,r"), {"full,rkv"}, {"rkv"}),
        (("run", "--plan", "skip"), {"skipkv", "skip.toml"}, {"skip.txt"}),
        (("plan", "show", "skip"), {"skipkv", "skip.toml"}, {"skip.txt"}),
        (("run", "--model", "reas"), {"reasoner", "reason/"}, {"skip.toml"}),
        (("ablate", "--task", "nee"), {"needle"}, {"multikey"}),
        (("check", "skip"), {"skipkv"}, {"skip.toml"}),
    ],
)
def test_names_and_files_are_offered(
    offered: Callable[..., list[str]], words: tuple[str, ...], some: set[str], none: set[str]
) -> None:
    found = set(offered(*words))
    assert some <= found
    assert not none & found
