"""A folder of blocks that have left memory: one file of safetensors each, with a checksum.

A node is written with all that it begins with, so what is found after a restart can be used.
Reading a file runs no code. What cannot be read, or is something else, is left out with a warning.

A write that fails, on a full disk for example, ends the writing for a while: the next tries are
further and further apart, so that a disk that stays full costs next to nothing.
"""

import json
import logging
import math
import os
import time
from array import array
from collections import abc
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvpolicy.engine.reuse.nodes import KEY_BYTES, Node
from kvpolicy.engine.reuse.parts import SequencePart
from kvpolicy.engine.reuse.tier import EvictionChoice, Tier
from kvpolicy.engine.snapshots.checked_file import CheckedFormat, UnreadableError
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.errors import OutputError, SnapshotError, error_summary
from kvpolicy.files import atomic_write, parse_json, remove_unfinished_writes

FORMAT = CheckedFormat("kvpolicy.prefix", version=2, holds="blocks of a prefix store")
_SUFFIX = ".safetensors"

# Seconds from a write that has failed to the next try; each further failure doubles them.
_WAIT_S, _MOST_WAIT_S = 30.0, 600.0

_log = logging.getLogger(__name__)


class Spill:
    """Nodes in the files of a folder.

    Attributes:
        folder: The folder.
        tier: What is there, in how many bytes.
        num_loads: Nodes that were read again.
        problem: Why nothing is written now; ``None``: it is.
    """

    def __init__(
        self, folder: str | os.PathLike[str], capacity: int, choice: EvictionChoice
    ) -> None:
        """Make the folder, for this user only, if it does not exist.

        Raises:
            OutputError: It cannot be made or read, or another process uses it.
        """
        self.folder = Path(folder)
        self.tier = Tier(capacity, choice)
        self.num_loads = 0
        self.problem: str | None = None
        self._wait_s, self._next_try_s = _WAIT_S, -math.inf
        self._identities: dict[str, dict[str, Any]] = {}  # one for all nodes that have it
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts are private
            self._lock = _locked(self.folder)
            remove_unfinished_writes(self.folder)
            self._files = sorted(self.folder.iterdir())
        except OSError as error:
            msg = (
                f"the folder {self.folder} of a prefix store cannot be used: "
                f"{error.strerror or error}; choose another one"
            )
            raise OutputError(msg) from error

    def found(self, forget: abc.Callable[[bytes], None]) -> list[Node]:
        """The nodes in the folder, each behind the one that it follows.

        Args:
            forget: Takes the key of a node that leaves, because there are too many.
        """
        headers: dict[bytes, dict[str, Any]] = {}
        for path in self._by_age():
            if path.suffix == _SUFFIX:
                header = _header(path)
                if header is not None:
                    headers[bytes.fromhex(header["key"])] = header
        nodes: dict[bytes, Node] = {}
        for key in headers:
            self._find(key, headers, nodes)
        for key in headers.keys() - nodes.keys():  # what they follow is not there any more
            _unlink(self._path(key))
        ordered = sorted(nodes.values(), key=lambda node: node.num_tokens)
        for node in nodes.values():
            self.tier.add(node, headers[node.key]["num_bytes"])
        by_key = dict(nodes)

        def leave(key: bytes) -> None:
            self.remove(by_key.pop(key))
            forget(key)

        self.tier.make_room(b"", 0, frozenset(), leave)
        return [node for node in ordered if node.key in by_key]

    def write(
        self, node: Node, in_use: abc.Set[bytes], forget: abc.Callable[[bytes], None]
    ) -> bool:
        """Write a node, and those that it follows; whether it is in the folder then.

        Args:
            node: The node; all of its chain is in memory or in the folder.
            in_use: Keys that stay in the folder.
            forget: Takes the key of another node that leaves the folder.
        """
        chain = node.chain
        keys = in_use | {one.key for one in chain}
        for one in chain:
            if one not in self.tier and not self._write(one, keys, forget):
                return False
        return True

    def load(self, node: Node) -> SequencePart | None:
        """What a node holds; ``None`` if its file is not what was written."""
        path = self._path(node.key)
        try:
            part = self._loaded(path, node)
        except Exception as error:  # data with a checksum that fits may still be another's
            _warn(path, error)
            return None
        with suppress(OSError):
            os.utime(path)  # so that those used last are found last
        self.tier.hit(node)
        self.num_loads += 1
        return part

    def remove(self, node: Node) -> None:
        """Remove the file of a node."""
        self.tier.remove(node)
        _unlink(self._path(node.key))

    def try_now(self) -> None:
        """Have the next write be tried, although one has failed a short time ago."""
        if self._next_try_s < math.inf:
            self._next_try_s = -math.inf

    def _loaded(self, path: Path, node: Node) -> SequencePart:
        """The part in a file; raises anything if it is not that of the node."""
        tensors, header = FORMAT.read(path)
        if header["key"] != node.key.hex() or array("q", header["token_ids"]) != node.token_ids:
            msg = "holds other tokens than its name says"
            raise UnreadableError(msg)
        snapshot = header["snapshot"]
        text = snapshot["identity"]
        snapshot["identity"] = self._identities.setdefault(text, parse_json(text))
        return SequencePart(
            SequenceSnapshot.unpacked(snapshot, tensors),
            tuple((first, last) for first, last in header["taken"]),
            header["num_answer"],
        )

    def _write(
        self, node: Node, in_use: abc.Set[bytes], forget: abc.Callable[[bytes], None]
    ) -> bool:
        if time.monotonic() < self._next_try_s or node.part is None:
            return False
        try:
            content = _content(node, node.part)
        except SnapshotError as error:  # it would be the same with the next one
            self._stop(str(error), "it goes on in memory")
            self._next_try_s = math.inf
            return False
        if not self.tier.make_room(node.key, len(content), in_use, forget):
            return False
        try:
            atomic_write(self._path(node.key), content, private=True)
        except OutputError as error:
            reason = getattr(error.__cause__, "strerror", None) or error
            self._stop(str(reason), "it goes on in memory, and tries again later")
            self._next_try_s = time.monotonic() + self._wait_s
            self._wait_s = min(2 * self._wait_s, _MOST_WAIT_S)
            return False
        self.tier.add(node, len(content))
        if self.problem is not None:
            self.problem = None
            _log.warning("the prefix store writes blocks to %s again", self.folder)
        return True

    def _stop(self, reason: str, what_next: str) -> None:
        """Note why nothing is written; it is logged once, until something is written again."""
        if self.problem is None:
            _log.warning(
                "the prefix store writes no more blocks to %s: %s; %s",
                self.folder,
                reason,
                what_next,
            )
        self.problem = f"{self.folder}: {reason}"

    def _find(
        self, key: bytes, headers: dict[bytes, dict[str, Any]], nodes: dict[bytes, Node]
    ) -> Node | None:
        """The node of a header, and of those that it follows; ``None`` if one is missing."""
        pending = [key]
        while pending:
            header = headers.get(pending[-1])
            if header is None:
                return None
            parent = None if header["parent"] is None else bytes.fromhex(header["parent"])
            if parent is not None and parent not in nodes:
                if parent in pending:  # a circle
                    return None
                pending.append(parent)
                continue
            own = pending.pop()
            turn_of = None if header["turn_of"] is None else bytes.fromhex(header["turn_of"])
            if own not in nodes:
                before = None if parent is None else nodes[parent]
                nodes[own] = Node(own, before, array("q", header["token_ids"]), None, turn_of)
        return nodes[key]

    def _by_age(self) -> list[Path]:
        def age(path: Path) -> float:
            try:
                return path.stat().st_mtime
            except OSError:
                return 0.0

        return sorted(self._files, key=age)

    def _path(self, key: bytes) -> Path:
        return self.folder / (key.hex() + _SUFFIX)


def _locked(folder: Path) -> FileLock:
    """Lock a folder against stores of other processes, until the lock is gone or this process is.

    Raises:
        OutputError: Another process has it.
    """
    # One for each folder in this process, so that a store may follow another one there.
    lock = FileLock(folder / ".lock", is_singleton=True, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        msg = (
            f"the folder {folder} of a prefix store is used by another process; wait for it, or "
            "choose another folder"
        )
        raise OutputError(msg) from error
    except (OSError, NotImplementedError):
        pass  # nothing can be written there, or its file system has no locks: it can be read
    return lock


def _content(node: Node, part: SequencePart) -> bytes:
    """The file of a node."""
    tensors, snapshot = part.snapshot.packed()
    snapshot["identity"] = json.dumps(snapshot["identity"], sort_keys=True)
    header = {
        "key": node.key.hex(),
        "parent": None if node.parent is None else node.parent.key.hex(),
        "token_ids": list(node.token_ids),
        "turn_of": None if node.turn_of is None else node.turn_of.hex(),
        "taken": part.taken,
        "num_answer": part.num_answer,
        "snapshot": snapshot,
    }
    return FORMAT.to_bytes(tensors, header)


def _header(path: Path) -> dict[str, Any] | None:
    """What a file says of its node; ``None``, with a warning, if it is not one that was written."""
    try:
        header = FORMAT.read_header(path)
        names = [header["key"], header["parent"], header["turn_of"]]
        sizes = {len(bytes.fromhex(name)) for name in names if name is not None}
        is_named = path.name == header["key"] + _SUFFIX
        if sizes == {KEY_BYTES} and is_named and array("q", header["token_ids"]):
            return header | {"num_bytes": path.stat().st_size}
        _warn(path, UnreadableError("has another name than what it holds"))
    except Exception as error:
        _warn(path, error)
    return None


def _unlink(path: Path) -> None:
    with suppress(OSError):  # of a folder that cannot be written, the file stays
        path.unlink(missing_ok=True)


def _warn(path: Path, error: Exception) -> None:
    known = isinstance(error, UnreadableError)
    problem = str(error) if known else f"is damaged: {error_summary(error)}"
    _log.warning("the prefix store leaves out %s: it %s", path, problem)
