"""The sentences that users read when something is refused: one catalogue, tested as a whole.

Other tests assert the class of an error and the option that it names, so that a sentence can be
rewritten in one place: `python tests/support/refresh_messages.py` writes the catalogue again, and
its diff is what a reviewer reads.
"""

from pathlib import Path

import pytest
from refresh_messages import PACKAGES, catalogue, printed

from kvpolicy.compat import has_states

# Commands whose default model is the bundled one.
_WITH_REASONER = [
    pytest.param(one, marks=[pytest.mark.needs_reasoner] if one in ("cli", "lab") else [])
    for one in PACKAGES
]


@pytest.mark.parametrize("package", _WITH_REASONER)
def test_sentences_are_those_of_the_catalogue(package: str, tmp_path: Path) -> None:
    if package == "model" and not has_states():
        pytest.skip("models of older transformers fail in other words")
    expected, actual = catalogue(package), printed(package, tmp_path)
    differing = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
    assert {name: actual.get(name) for name in differing} == {
        name: expected.get(name) for name in differing
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_sentences_are_sentences(package: str) -> None:
    """A sentence says something, ends, and shows no repr of an object of ours."""
    wrong = {
        name: text
        for name, text in catalogue(package).items()
        if len(text.split()) < 4 or " object at 0x" in text or "Traceback" in text
    }
    assert not wrong
