"""Tables of layers: one measured number for each decoder layer of a model.

A file is JSON::

    {"format": 1, "quantity": "sensitivity", "model": "org/name", "values": [0.0, 0.12, ...],
     "measured": {"block": 64, ...}}

``values`` has one number for each layer; ``measured`` says how they were found. An entry point of
the group ``kvpolicy.layer_tables`` maps a name to a package whose folder holds ``NAME.json``.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.entry_points import installed_file
from kvpolicy.errors import KVPolicyError
from kvpolicy.files import atomic_write, decode, parse_json, path_of, read_bytes
from kvpolicy.toolkit.tensor_files import with_content_hash

GROUP = "kvpolicy.layer_tables"

_FORMAT = 1
_SUFFIX = ".json"


class LayerTableError(KVPolicyError):
    """A table of layers cannot be read, or does not fit the model."""


@attrs.frozen
class LayerTable:
    """One number for each decoder layer of a model.

    Attributes:
        quantity: What was measured, such as ``"sensitivity"``.
        model: The model, as the user named it.
        values: A finite number for each layer, from layer 0.
        measured: How: settings and inputs, by name.
    """

    quantity: str
    model: str
    values: tuple[float, ...]
    measured: Mapping[str, int | float | str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if not self.values or not all(_is_number(value) for value in self.values):
            msg = (
                f"a table of layers needs a finite number for each layer, and got "
                f"{list(self.values)!r:.80}"
            )
            raise LayerTableError(msg)


def save_layer_table(path: str | Path, table: LayerTable) -> None:
    """Write a table, atomically.

    Args:
        path: The file; its name should end in ``.json``.
        table: The table.

    Raises:
        OutputError: The file cannot be written.
    """
    described = {"format": _FORMAT, **attrs.asdict(table)}
    atomic_write(Path(path), (json.dumps(described, indent=2) + "\n").encode())


def load_layer_table(reference: str | Path) -> LayerTable:
    """Read a table.

    Args:
        reference: Name of an installed table or path of a file; ``#HASH`` behind it is ignored.

    Raises:
        LayerTableError: There is no such file, or it holds no table.
    """
    name = str(reference).partition("#")[0]
    what = f"layer table '{name}'"
    try:
        found = parse_json(decode(_content(name), what, error=LayerTableError))
        if found["format"] != _FORMAT:
            raise ValueError
        return LayerTable(
            str(found["quantity"]),
            str(found["model"]),
            tuple(found["values"]),
            dict(found["measured"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        msg = (
            f"{what} does not hold a number for each layer in the form that this version of "
            "kvpolicy writes; `kvpolicy layers measure` makes one"
        )
        raise LayerTableError(msg) from error


def layer_table_with_hash(reference: Any) -> Any:
    """Add the hash of a table's file to its name: the converter of a knob that names a table.

    Args:
        reference: An installed name or a path, with or without ``#HASH`` behind it. What is no
            text is returned as it is, for the knob's validator.

    Raises:
        LayerTableError: There is no such file, or its hash differs from the given one.
    """
    return with_content_hash(reference, _content, "layer table", LayerTableError)


def _content(name: str) -> bytes:
    path = path_of(name, "a layer table", error=LayerTableError)
    if not (path.suffix or len(path.parts) > 1 or path.is_file()):
        path = installed_file(
            GROUP, name, suffix=_SUFFIX, what="layer table", error=LayerTableError
        )
    return read_bytes(path, f"layer table '{name}'", error=LayerTableError)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
