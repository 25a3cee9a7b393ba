"""The page itself: markup, style and program in one file that asks nobody for anything.

What models wrote is data and stays data: texts of the page are escaped by the template, texts of
samples lie in blocks that no HTML parser looks into and become text nodes, and a
Content-Security-Policy lets nothing run or load but the one style sheet and the one program
whose hashes it names.
"""

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvpolicy.lab.report.bundle import bundle
from kvpolicy.lab.report.encoding import to_json

_ASSETS = files("kvpolicy.lab.report") / "assets"

_STYLE = ("page", "charts", "samples", "kept")


def render(*, title: str, data: dict[str, Any], blocks: list[str]) -> str:
    """Make the page.

    Args:
        title: What it is called.
        data: What ``assets/data.js`` reads.
        blocks: What it opens later, packed.

    Returns:
        The HTML.
    """
    style = "\n".join(_read(f"{name}.css") for name in _STYLE)
    program = bundle("main", lambda name: _read(f"{name}.js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(_read("page.html"))
    return template.render(
        title=printable(title),
        policy=_policy(style, program),
        style=Markup(style),
        program=Markup(program),
        data=Markup(as_json(data)),
        blocks=blocks,
        groups=data["groups"],
        series=data["series"],
        printable=printable,
    )


def as_json(value: Any) -> str:
    """Plain data as JSON that may stand in a script element, and that any browser can read."""
    text = to_json(value)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def printable(text: object) -> str:
    """A text that HTML can hold: letters that are none are replaced."""
    encoded = str(text).encode("utf-8", "replace").decode("utf-8")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", encoded)


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _policy(style: str, program: str) -> str:
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(program)}",
            f"style-src {_hash(style)}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
