"""Update the fields in `docs/reference/serving.md`: ``python tests/support/refresh_fields.py``.

It is that of `kvpolicy.serve.fields`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvpolicy.serve.fields import (
    CHAT,
    COMPLETION,
    IMAGE_URL,
    MESSAGE,
    REQUEST,
    STREAM_OPTIONS,
    Unserved,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "serving.md"
HEAD = "| field | of | taken, and changes nothing | instead of others |\n|---|---|---|---|\n"
_TABLE = re.compile(re.escape(HEAD) + r"(\|[^\n]*\n)*")

WHERE: dict[str, Mapping[str, Unserved]] = {
    "requests": REQUEST,
    "completions": {name: field for name, field in COMPLETION.items() if name not in REQUEST},
    "chats": {name: field for name, field in CHAT.items() if name not in REQUEST},
    "messages": MESSAGE,
    "image_url": IMAGE_URL,
    "stream_options": STREAM_OPTIONS,
}


def _rows() -> Iterator[tuple[str, str, str, str]]:
    for where, fields in WHERE.items():
        for name, field in fields.items():
            if field.harmless is None:
                yield name, where, "anything", ""
                continue
            taken = [f"`{json.dumps(value)}`" for value in (None, *field.harmless)]
            if field.where is not None:
                other, value = field.where
                taken.append(f'anything with `"{other}": {json.dumps(value)}`')
            is_usual = field.instead == Unserved().instead
            yield name, where, ", ".join(taken), "" if is_usual else field.instead


def table() -> str:
    """The list, in Markdown."""
    rows = sorted(_rows(), key=lambda row: (row[0], row[1]))
    return HEAD + "".join(
        f"| `{name}` | {where} | {taken} | {otherwise} |\n"
        for name, where, taken, otherwise in rows
    )


def listed() -> str:
    """The list as the page has it."""
    found = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return found[0]


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(listed(), table()), encoding="utf-8")
