"""A disk of a few kilobytes that a test can fill: a tmpfs that only a child process sees."""

import ctypes
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER of sched.h
_PRIVATE = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE of sys/mount.h


def on_small_disk(folder: Path, num_bytes: int, body: Callable[[], None]) -> None:
    """Call a function in a child process in which a folder is a small disk.

    The test fails if the function does, and is skipped where no such disk can be made: that needs
    Linux, and the right to have name spaces of one's own.

    Args:
        folder: An existing folder.
        num_bytes: Size of the disk.
        body: What to call.
    """
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_child, args=(theirs, folder, num_bytes, body))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with torch's idle threads
        child.start()
    theirs.close()
    try:
        kind, text = ours.recv()
    except EOFError:
        kind, text = "failed", "the child process was killed"
    child.join()
    if kind == "skipped":
        pytest.skip(f"no small disk can be made here: {text}")
    if kind == "failed":
        pytest.fail(text, pytrace=False)


def fill(folder: Path) -> Path:
    """Leave no byte free on the disk of a folder; the file that fills it."""
    path = folder / "of somebody else"
    with path.open("ab", buffering=0) as file:
        for size in (4096, 1):
            while True:
                try:
                    file.write(bytes(size))
                except OSError:
                    break
    return path


def _child(pipe: Connection, folder: Path, num_bytes: int, body: Callable[[], None]) -> None:
    try:
        _mount(folder, num_bytes)
    except OSError as error:
        pipe.send(("skipped", str(error)))
        return
    try:
        body()
    except BaseException:  # a failed test, too
        pipe.send(("failed", traceback.format_exc()))
    else:
        pipe.send(("passed", ""))


def _mount(folder: Path, num_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        msg = "only Linux has name spaces"
        raise OSError(msg)
    user, group = os.getuid(), os.getgid()
    _check(libc.unshare(_NEW_USER | _NEW_MOUNTS if user else _NEW_MOUNTS), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _check(libc.mount(b"none", b"/", None, _PRIVATE, None), "mount")
    options = f"size={num_bytes}".encode()
    _check(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options), "mount")


def _check(status: int, call: str) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
