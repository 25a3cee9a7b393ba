"""Files of tensors that policies read: installed or not, safetensors, pinned by a hash."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import safetensors
from safetensors.torch import save
from torch import Tensor

from kvpolicy.entry_points import installed_file
from kvpolicy.errors import KVPolicyError
from kvpolicy.files import atomic_write, open_binary, parse_json, path_of, read_bytes

_SUFFIX = ".safetensors"
_PICKLES = (b"\x80", b"PK")  # first bytes of files of torch.save, old format and zip archive
_HASH_DIGITS = 8


@attrs.frozen(kw_only=True)
class TensorFiles:
    """One kind of files: safetensors, named by an installed package or by a path.

    A plan names a file with its hash, so that results with a file that was made again do not pass
    for results with the old one.

    Attributes:
        group: Group of entry points; each maps a name to a package whose folder holds
            ``NAME.safetensors``.
        what: What such a file is, for messages: ``"steering vector file"``.
        name: What an installed name stands for: ``"steering vector"``.
        made_by: What makes one, for messages: a command in backquotes.
        pickle_hint: What to do with a pickle, which is refused.
        error: Exception to raise.
    """

    group: str
    what: str
    name: str
    made_by: str
    pickle_hint: str
    error: type[KVPolicyError] = KVPolicyError

    def called(self, reference: str | Path) -> str:
        """How messages call a file."""
        return f"{self.what} '{_name(reference)}'"

    def with_hash(self, reference: Any) -> Any:
        """Add the hash of a file to its name: the converter of a knob that names one.

        Args:
            reference: An installed name or a path, with or without ``#HASH`` behind it. What is no
                text is returned as it is, for the knob's validator.

        Returns:
            The name or path with ``#HASH``.

        Raises:
            KVPolicyError: There is no such file, or its hash differs from the given one.
        """
        return with_content_hash(
            reference,
            lambda name: read_bytes(self.path(name), self.called(name), error=self.error),
            self.what,
            self.error,
        )

    def read(self, reference: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read a file.

        Args:
            reference: An installed name or a path; a hash behind it is not looked at.

        Returns:
            The tensors by name, and the metadata, whose values are JSON or text.

        Raises:
            KVPolicyError: There is no such file, or it is not safetensors.
        """
        name = _name(reference)
        path, what = self.path(name), self.called(name)
        try:
            with open_binary(path, what, error=self.error) as file:
                if file.read(2).startswith(_PICKLES):
                    msg = (
                        f"{what} is a pickle, and is refused, because reading one may run code; "
                        f"{self.pickle_hint}"
                    )
                    raise self.error(msg)
            with safetensors.safe_open(path, framework="pt") as opened:
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
                metadata = opened.metadata() or {}
        except OSError as error:
            msg = f"{what} cannot be read: {error.strerror or error}"
            raise self.error(msg) from error
        except safetensors.SafetensorError as error:
            msg = f"{what} is not safetensors ({error}); {self.made_by} writes one"
            raise self.error(msg) from error
        return tensors, {key: _parsed(value) for key, value in metadata.items()}

    def write(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Write a file atomically; arguments as for `to_bytes`.

        Raises:
            OutputError: It cannot be written.
        """
        atomic_write(path, self.to_bytes(tensors, metadata))

    def to_bytes(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> bytes:
        """The content of a file.

        Args:
            tensors: The tensors by name.
            metadata: One entry, plain data; safetensors writes several in no fixed order.
        """
        return save(
            dict(tensors),
            {key: json.dumps(value, sort_keys=True) for key, value in metadata.items()},
        )

    def path(self, name: str | Path) -> Path:
        """Where the file is.

        Raises:
            KVPolicyError: There is no such file.
        """
        path = path_of(name, f"a {self.name}", error=self.error)
        if path.suffix or len(path.parts) > 1 or path.is_file():
            if not os.path.lexists(path):
                msg = (
                    f"{self.called(name)} cannot be read: No such file or directory; "
                    f"{self.made_by} makes one"
                )
                raise self.error(msg)
            return path
        return installed_file(
            self.group, str(path), suffix=_SUFFIX, what=self.name, error=self.error
        )


def with_content_hash(
    reference: Any, read: Callable[[str], bytes], what: str, error: type[KVPolicyError]
) -> Any:
    """Add the hash of a file to its name, see `TensorFiles.with_hash`.

    Args:
        reference: A name with or without ``#HASH``, or what is no text.
        read: Reads the file of a name.
        what: What the file is, for messages.
        error: Exception to raise if the hash differs from the given one.
    """
    if not isinstance(reference, str):
        return reference
    name, _, given = reference.partition("#")
    found = hashlib.sha256(read(name)).hexdigest()[:_HASH_DIGITS]
    if given and given != found:
        msg = (
            f"{what} '{name}' has hash {found}, and the plan wants {given}: the file has "
            "changed; restore the old one, or leave '#' and the hash out"
        )
        raise error(msg)
    return f"{name}#{found}"


def _name(reference: str | Path) -> str | Path:
    return reference.partition("#")[0] if isinstance(reference, str) else reference


def _parsed(value: str) -> Any:
    try:
        return parse_json(value)
    except ValueError:
        return value
