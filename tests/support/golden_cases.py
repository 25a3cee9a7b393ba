"""The recorded cases of the manifest, with their arrays."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

FOLDER = Path(os.environ.get("KVPOLICY_GOLDEN", Path(__file__).parents[1] / "golden"))


@attrs.frozen
class Case:
    """One recorded call or stream."""

    file: str
    family: str
    args: dict[str, Any] = attrs.field(repr=False)

    def arrays(self) -> dict[str, np.ndarray]:
        path = FOLDER / self.file
        if not path.exists():
            pytest.skip(f"{path} is listed but missing")
        with np.load(path) as stored:
            return dict(stored)

    @property
    def is_bfloat16(self) -> bool:
        return self.args.get("dtype") == "bfloat16"

    def tensor(self, array: np.ndarray) -> Tensor:
        """A recorded array in the dtype of the recording."""
        return torch.from_numpy(array).to(torch.bfloat16 if self.is_bfloat16 else torch.float32)


def recorded(family: str) -> Any:
    """Run a test once for every case of a family, as in ``manifest.json``."""
    listed = json.loads((FOLDER / "manifest.json").read_text())["cases"]
    cases = [
        Case(case["file"], case["family"], case["args"])
        for case in listed
        if case["family"] == family
    ]
    return pytest.mark.parametrize("case", cases, ids=[case.file[:-4] for case in cases])


def recorded_related(prefix: str) -> Any:
    """Run a test once for every case in ``related/`` whose file name begins with ``prefix``."""
    return _parametrized(_cases_in("related", lambda case: case["file"].startswith(prefix)))


def recorded_press(press: str) -> Any:
    """Run a test once for every case of one press of kvpress, in either folder."""
    folders = ("related", "related-kvpress")

    def is_wanted(case: dict[str, Any]) -> bool:
        return bool(case["args"].get("press") == press)

    return _parametrized([case for one in folders for case in _cases_in(one, is_wanted)])


def _cases_in(folder: str, wanted: Callable[[dict[str, Any]], bool]) -> list[Case]:
    manifest = FOLDER / folder / "manifest.json"
    listed = json.loads(manifest.read_text())["cases"] if manifest.exists() else []
    return [
        Case(f"{folder}/{case['file']}", case["system"], {**case["args"], "about": case})
        for case in listed
        if wanted(case)
    ]


def _parametrized(cases: list[Case]) -> Any:
    assert cases, "no recorded case is wanted"
    ids = [case.file.partition("/")[2][:-4] for case in cases]
    return pytest.mark.parametrize("case", cases, ids=ids)
