"""The page: markup, style and program in one HTML file that loads nothing.

Texts that models wrote are never interpreted: the template escapes texts of the page; texts of
samples are in compressed blocks, which no HTML parser reads, and become text nodes; and a
Content-Security-Policy allows only the one style sheet and the one program whose hashes it names.

The program is made of JavaScript modules. Browsers do not load modules for a page that is opened as
a file, so `bundle` turns each module into a function that returns what the module exports.
"""

import base64
import hashlib
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvpolicy.lab.looks import COLOURS
from kvpolicy.lab.report.encoding import to_json

_ASSETS = files("kvpolicy.lab.report") / "assets"

_STYLE = ("colours", "page", "charts", "samples", "kept")

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const) (\w+)", re.MULTILINE)


def render(*, title: str, data: dict[str, Any], blocks: list[str]) -> str:
    """Render the page.

    Args:
        title: Its title.
        data: Plain data for ``assets/data.js``.
        blocks: Packed texts and records, which the page opens on demand.

    Returns:
        The HTML.
    """
    style = "\n".join([*(_read(f"{name}.css") for name in _STYLE), _colours()])
    program = bundle("main", lambda name: _read(f"{name}.js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(_read("page.html"))
    return template.render(
        title=printable(title),
        policy=_security_policy(style, program),
        style=Markup(style),
        program=Markup(program),
        data=Markup(as_json(data)),
        blocks=blocks,
        groups=data["groups"],
        series=data["series"],
        printable=printable,
    )


def as_json(value: Any) -> str:
    """Plain data as JSON that is safe within a script element."""
    text = to_json(value)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def printable(text: object) -> str:
    """A text that HTML can hold: letters that are none are replaced."""
    encoded = str(text).encode("utf-8", "replace").decode("utf-8")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", encoded)


def bundle(main: str, read: Callable[[str], str]) -> str:
    """Bundle a JavaScript module with everything it imports.

    Supported are ``import { a, b } from "./name.js";`` at the beginning of a line,
    ``export function``, ``export async function`` and ``export const``.

    Args:
        main: Name of the module.
        read: Returns the text of a module by its name.

    Returns:
        A program without imports; each module occurs once, after those it imports.
    """
    done: dict[str, str] = {}
    _add_module(main, read, done, [])
    return "\n".join(done.values())


def _add_module(
    name: str, read: Callable[[str], str], done: dict[str, str], importers: list[str]
) -> None:
    assert name not in importers, " imports ".join([*importers, name])
    text = read(name)
    for imported in _IMPORT.finditer(text):
        if imported[2] not in done:
            _add_module(imported[2], read, done, [*importers, name])
    exported = ", ".join(found[2] for found in _EXPORT.finditer(text))
    body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const \1 = module_\2;", text))
    done[name] = f"const module_{name} = (() => {{\n{body}return {{ {exported} }};\n}})();"


def _colours() -> str:
    """Style of the colours of policies: a variable of each for both themes, and its class."""
    light = "".join(f"--{name}-series: {one.light}; " for name, one in COLOURS.items())
    dark = "".join(f"--{name}-series: {one.dark}; " for name, one in COLOURS.items())
    by_system = f':root:not([data-theme="light"]) {{ {dark}}}'
    return "\n".join(
        [
            f":root {{ {light}}}",
            f"@media (prefers-color-scheme: dark) {{ {by_system} }}",
            f':root[data-theme="dark"] {{ {dark}}}',
            *(f".c-{name} {{ --own: var(--{name}-series); }}" for name in COLOURS),
        ]
    )


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _security_policy(style: str, program: str) -> str:
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
