"""Several modules of JavaScript as one program.

Browsers do not load modules from files that lie beside a page opened as a file, and the page is
to be one file. So each module becomes a function that gives what the module exports; nothing
else of it can be seen by others. Understood are the forms that we write:
``import { a, b } from "./name.js";`` at the beginning of a line, ``export function``,
``export async function`` and ``export const``.
"""

import re
from collections.abc import Callable

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const) (\w+)", re.MULTILINE)


def bundle(main: str, read: Callable[[str], str]) -> str:
    """Put a module and all that it imports together.

    Args:
        main: Its name.
        read: Gives the text of a module by its name.

    Returns:
        A program without imports, each module in it once and after those it imports.
    """
    done: dict[str, str] = {}
    _add(main, read, done, [])
    return "\n".join(done.values())


def _add(name: str, read: Callable[[str], str], done: dict[str, str], waiting: list[str]) -> None:
    assert name not in waiting, f"{' imports '.join([*waiting, name])}"
    text = read(name)
    for needed in _IMPORT.finditer(text):
        if needed[2] not in done:
            _add(needed[2], read, done, [*waiting, name])
    exported = ", ".join(found[2] for found in _EXPORT.finditer(text))
    body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const \1 = module_\2;", text))
    done[name] = f"const module_{name} = (() => {{\n{body}return {{ {exported} }};\n}})();"
