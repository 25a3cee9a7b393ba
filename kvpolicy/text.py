"""Text of others on a terminal: control characters are shown as escapes and have no effect.

Data, labels, model output, docstrings of plugins and messages of exceptions may hold sequences that
move the cursor, write the clipboard, reverse the direction of a line, or hide what it says. The
zero-width joiners stay where they shape what is seen: in Persian, in Indic scripts and
in joined emoji.
"""

import json
from collections.abc import Callable
from unicodedata import bidirectional, category, combining

# Control and format characters (bidirectional marks, zero-width ones), line and paragraph
# separators, lone surrogates.
_CATEGORIES = {"Cc", "Cf", "Zl", "Zp", "Cs"}
# Invisible characters of other categories: fillers, and selectors that can carry hidden text. The
# selectors of emoji, U+FE00 to U+FE0F, are no such.
_INVISIBLE = {0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0xE0100, 0xE01F0)}
_NON_JOINER, _JOINER = "\u200c", "\u200d"
_VIRAMA = 9  # its canonical combining class


def visible(text: str) -> str:
    r"""A text as part of a line or a cell.

    Args:
        text: Any text.

    Returns:
        The text with control characters and line breaks as escapes: ``\u001b``, ``\n``.
    """
    return text if text.isprintable() and text.isascii() else _ONE_LINE.translate(text)


def visible_lines(text: str) -> str:
    """A text of several lines: as `visible`, with line feeds and tabs left as they are.

    Args:
        text: Any text.
    """
    return _LINES.translate(text)


def visible_json(text: str) -> str:
    """JSON with control characters within strings as escapes; it has the same value.

    Args:
        text: JSON.
    """
    return _JSON.translate(text)


def _escape(char: str) -> str:
    short = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(char)
    return short or (f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}")


def _escape_in_json(char: str) -> str:
    return json.dumps(char)[1:-1]


def _shapes(before: str, joiner: str, after: str) -> bool:
    """Whether a joiner changes how its neighbours are drawn (RFC 5892, appendices A.1 and A.2)."""
    if _VIRAMA in (combining(before), combining(after)):
        return True
    if bidirectional(before) in ("AL", "NSM") and bidirectional(after) == "AL":
        return True
    is_symbol = category(before) in ("So", "Sk") or before == "\ufe0f"
    return joiner == _JOINER and is_symbol and category(after) == "So"


class _Table(dict[int, str]):
    """What `str.translate` puts in place of each character; filled as characters are met."""

    def __init__(self, escape: Callable[[str], str], *, keep: str = "") -> None:
        super().__init__({ord(char): char for char in keep})
        self._escape = escape

    def __missing__(self, code: int) -> str:
        char = chr(code)
        is_shown = category(char) not in _CATEGORIES and code not in _INVISIBLE
        self[code] = char if is_shown else self._escape(char)
        return self[code]

    def translate(self, text: str) -> str:
        if _JOINER not in text and _NON_JOINER not in text:
            return text.translate(self)
        around = zip(f"\0{text}", text, f"{text[1:]}\0", strict=False)
        return "".join(
            char
            if char in (_JOINER, _NON_JOINER) and _shapes(before, char, after)
            else char.translate(self)
            for before, char, after in around
        )


_ONE_LINE = _Table(_escape)
_LINES = _Table(_escape, keep="\n\t")
_JSON = _Table(_escape_in_json, keep="\n")
