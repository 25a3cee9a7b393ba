"""Write the catalogue of messages (`tests/messages`) again; its cases are in `message_cases`."""

import json
import tempfile
from importlib import import_module
from pathlib import Path

import message_cases

from kvpolicy.errors import KVPolicyError

FOLDER = Path(__file__).parents[1] / "messages"
PACKAGES = sorted(path.stem for path in Path(message_cases.__path__[0]).glob("[a-z]*.py"))


def catalogue(package: str) -> dict[str, str]:
    """The recorded message of each case of a package."""
    path = FOLDER / f"{package}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def printed(package: str, folder: Path) -> dict[str, str]:
    """The message of each case of a package; paths in ``folder`` begin with FOLDER."""
    messages = {}
    for number, (name, case) in enumerate(import_module(f"message_cases.{package}").CASES.items()):
        place = folder / str(number)
        place.mkdir()
        try:
            text = case(place)
        except KVPolicyError as error:
            text = str(error)
        assert isinstance(text, str), f"case {name!r} of {package} is not refused"
        messages[name] = text.replace(str(place), "FOLDER").strip()
    return messages


if __name__ == "__main__":
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as folder:
            text = json.dumps(printed(package, Path(folder)), indent=2, ensure_ascii=False)
        (FOLDER / f"{package}.json").write_text(text + "\n", encoding="utf-8")
