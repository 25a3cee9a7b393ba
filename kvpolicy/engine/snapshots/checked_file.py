"""Files of tensors with a header and a checksum of both: what was written is read, or nothing.

A file is safetensors. Its metadata has one entry of JSON, ``{"version": ..., "header": TEXT,
"checksum": ...}``, and TEXT is JSON again, so that the checksum is one of the very characters that
are read. Reading a file runs no code.
"""

import hashlib
import json
from collections import abc
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from kvpolicy.errors import error_summary
from kvpolicy.files import parse_json

Header = dict[str, Any]


class UnreadableError(Exception):
    """A file that is not what was written; the message goes on after its name: "is damaged"."""


@attrs.frozen
class CheckedFormat:
    """One kind of such files.

    Attributes:
        key: The name of the entry in the metadata.
        version: The version that is written and read.
        holds: What a file holds, for messages: ``"a snapshot of a sequence"``.
    """

    key: str
    version: int
    holds: str

    def to_bytes(self, tensors: abc.Mapping[str, Tensor], header: Header) -> bytes:
        """The content of a file.

        Args:
            tensors: Contiguous tensors on the CPU, by name.
            header: Plain data.
        """
        text = json.dumps(header)
        entry = {"version": self.version, "header": text, "checksum": _checksum(text, tensors)}
        # A single entry: safetensors writes several in no fixed order.
        return save(dict(tensors), {self.key: json.dumps(entry)})

    def read(self, path: Path) -> tuple[dict[str, Tensor], Header]:
        """The tensors and the header that were written.

        Raises:
            UnreadableError: It cannot be read, holds something else, is of another version, or
                differs in a bit from what was written.
        """
        with _open(path) as opened:
            entry = self._entry(opened)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if entry["checksum"] != _checksum(entry["header"], tensors):
            msg = "is damaged: its checksum is another"
            raise UnreadableError(msg)
        return tensors, _parsed(entry["header"])

    def read_header(self, path: Path) -> Header:
        """The header alone, which is not compared with its checksum; raises as `read`."""
        with _open(path) as opened:
            return _parsed(self._entry(opened)["header"])

    def _entry(self, opened: Any) -> dict[str, Any]:
        metadata = opened.metadata() or {}
        if self.key not in metadata:
            msg = f"holds tensors, but not {self.holds}"
            raise UnreadableError(msg)
        entry = _parsed(metadata[self.key])
        if entry.get("version") != self.version:
            found = entry.get("version")
            msg = f"has version {found!r:.20} of its format, and version {self.version} is read"
            raise UnreadableError(msg)
        if not {"header", "checksum"} <= entry.keys() or type(entry["header"]) is not str:
            msg = "is damaged: its header is missing"
            raise UnreadableError(msg)
        return entry


@contextmanager
def _open(path: Path) -> abc.Iterator[Any]:
    """A file of safetensors, opened; what goes wrong is an `UnreadableError`."""
    try:
        if path.exists() and not path.is_file():  # opening a FIFO would wait
            msg = "cannot be read: it is no regular file"
            raise UnreadableError(msg)
        with path.open("rb"):
            pass  # safetensors names no reason
        with safetensors.safe_open(path, framework="pt") as opened:
            yield opened
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        msg = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UnreadableError(msg) from error
    except safetensors.SafetensorError as error:
        msg = f"is not safetensors, or not all of it ({error})"
        raise UnreadableError(msg) from error


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        msg = f"is damaged: {error_summary(error)}"
        raise UnreadableError(msg) from error
    if not isinstance(found, dict):
        msg = "is damaged: its header is no object of JSON"
        raise UnreadableError(msg)
    return found


def _checksum(text: str, tensors: abc.Mapping[str, Tensor]) -> str:
    """Of the header, and of names, types, shapes and bytes of the tensors."""
    found = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
