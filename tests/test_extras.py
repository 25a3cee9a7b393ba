"""The line that installs an extra installs it from where kvpolicy came from."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.extras import command_for


def written(folder: Path, **more: Any) -> str:
    return json.dumps({"url": folder.as_uri(), **more})


def test_an_extra_comes_from_where_the_package_did(tmp_path: Path) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    editable = {"dir_info": {"editable": True}}
    assert command_for(("ray",), written(clone, **editable)) == f"pip install -e '{clone}[ray]'"
    assert command_for(("ray", "serve"), written(clone)) == f"pip install '{clone}[ray,serve]'"


@pytest.mark.parametrize("source", [None, json.dumps({"url": "file:///no/such/folder"})])
def test_an_extra_comes_from_the_index_else(source: str | None) -> None:
    assert command_for(("ray",), source) == "pip install 'kvpolicy[ray]'"


def test_an_extra_comes_from_a_repository() -> None:
    source = json.dumps({"url": "https://example.org/k.git", "vcs_info": {"vcs": "git"}})
    assert (
        command_for(("ray",), source)
        == "pip install 'kvpolicy[ray] @ git+https://example.org/k.git'"
    )
