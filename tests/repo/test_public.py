"""The public surface: who writes a signature down can import every class in it from `kvpolicy`."""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import attrs

import kvpolicy
from kvpolicy import errors

ROOT = Path(__file__).parents[2]
PUBLIC = {name: getattr(kvpolicy, name) for name in kvpolicy.__all__}
# Of classes that users are given, what only the engine builds and calls.
OF_THE_ENGINE = re.compile(
    r"(LayerRows|RequestStream|Run|SequenceSnapshot|Stream|Tracks)\.__init__"
    r"|Engine\.(__init__|rules|stream)|LayerPlan\.slab|PrefixStore\.(add|drop|find|find_turn|link)"
    r"|Run\.(active|cache|evictor|waiting)|(Compaction|DueSlot|Extension|Output|Step)\.\w+"
    r"|PolicyCache\.(core|sequences)|SequenceSnapshot\.(contents|costs)"
    r"|Stack\.(evict|listening|score|select|slab)"
)


def _functions(name: str, value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """A public function, or the methods and properties of a public class, with their names."""
    if not inspect.isclass(value):
        yield name, value
        return
    for member, found in vars(value).items():
        function = found.fget if isinstance(found, property) else found
        function = getattr(function, "__func__", function)
        is_public = member[0] != "_" or (member == "__init__" and not attrs.has(value))
        if inspect.isfunction(function) and is_public:
            yield f"{name}.{member}", function


def _classes(annotation: Any) -> Iterator[type]:
    """The classes in an annotation."""
    if isinstance(annotation, list):
        parts: tuple[Any, ...] = tuple(annotation)
    else:
        parts = get_args(annotation)
        if not parts and inspect.isclass(annotation):
            yield annotation
    for part in parts:
        yield from _classes(part)


def _named() -> Iterator[tuple[str, type]]:
    """Every class of kvpolicy that a public signature or field names, with where it does."""
    for name, value in PUBLIC.items():
        hints = []
        if inspect.isclass(value):
            fields = get_type_hints(value).items()
            hints += [(f"{name}.{field}", hint) for field, hint in fields if field[0] != "_"]
        if inspect.isclass(value) or inspect.isfunction(value):
            for place, function in _functions(name, value):
                hints += [(place, hint) for hint in get_type_hints(function).values()]
        for place, hint in hints:
            for found in _classes(hint):
                if found.__module__.startswith("kvpolicy") and not OF_THE_ENGINE.fullmatch(place):
                    yield place, found


def test_classes_of_public_signatures_are_public() -> None:
    public = [*PUBLIC.values(), *vars(errors).values()]
    missing = {
        f"{place}: {found.__module__}.{found.__qualname__}"
        for place, found in _named()
        if not any(found is one for one in public)
    }
    assert sorted(missing) == []
    assert {"Stack", "ResolvedPlan"} <= {found.__name__ for _, found in _named()}


def test_documents_import_what_is_public() -> None:
    folders = "attention|cache|engine|hf|hooks|model|plan|state"
    inner = re.compile(rf"^(?:from|import) kvpolicy\.(?:{folders})\b.*", re.M)
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")]
    found = [
        f"{file.name}: {line}"
        for file in files
        for line in inner.findall(file.read_text(encoding="utf-8"))
    ]
    assert found == []
