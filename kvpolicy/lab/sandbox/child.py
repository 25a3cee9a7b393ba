"""Confine this process and run an untrusted program in it; a script without dependencies.

Usage: ``python -I -S child.py JOB READY``, two file descriptors. ``JOB`` holds the program and its
limits as JSON, see `Job` in ``run.py``. A byte is written to ``READY`` when everything is in force
and the program is about to start. The steps below cannot be undone by the program.
"""

import ctypes
import json
import os
import resource
import signal
import site
import struct
import sys
import threading
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

# Numbers from the headers of the Linux kernel.
_NOSUID, _NODEV, _NOEXEC, _READ_ONLY = 2, 4, 8, 1
_SET_DEATH_SIGNAL, _KEEP_CAPABILITIES, _SET_SECCOMP, _NO_NEW_PRIVILEGES = 1, 8, 22, 38
_MODE_FILTER = 2
_CAPABILITIES_V3, _CAP_SETUID = 0x20080522, 1 << 7
# Landlock has the same system calls on all architectures.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
# Kinds of access to files that each version of Landlock knows; the last for all later versions.
_FILE_ACCESS = (13, 14, 15, 15, 16)

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Confine this process and run the program."""
    job_file, ready = int(sys.argv[1]), int(sys.argv[2])
    with open(job_file, "rb") as file:
        job = json.load(file)
    _checked("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if job["has_folder"]:
        _mount(job["folder_bytes"], job["folder_files"])
    _limit(job)
    if job["user"] is not None:
        _leave_root(job["user"], job["readable"])
    _libc.unshare(job["namespaces"])  # where the kernel allows it; nothing below relies on it
    _set_capabilities(0)
    _limit_threads(job["threads"])
    if not job["has_folder"]:
        _restrict_files(job["readable"], job["hidden"])
    _die_with_parent(job["parent"])
    sys.meta_path.append(_Packages(job["packages"]))
    _filter_system_calls(bytes.fromhex(job["filter"]))
    os.write(ready, b".")  # stays open: the other end sees the end of this process
    _run(job["program"])


def _mount(num_bytes: int, num_files: int) -> None:
    """Mount the writable folder, which the kernel deletes with the last process in it.

    bubblewrap could mount it, but does not limit the number of files.
    """
    options = f"size={num_bytes},nr_inodes={num_files},mode=0777".encode()
    flags = _NOSUID | _NODEV | _NOEXEC
    _checked("mount", b"tmpfs", b"/home", b"tmpfs", flags, options)
    # Over what bubblewrap mounted, if it could: only processes, not the kernel's settings.
    _libc.mount(b"proc", b"/proc", b"proc", flags | _READ_ONLY, b"subset=pid")
    os.chdir("/home")


def _limit(job: dict[str, Any]) -> None:
    for limit, value in (
        (resource.RLIMIT_CPU, job["cpu_s"]),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _leave_root(user: int, readable: list[str]) -> None:
    """Become a user that owns nothing: root may read every file and start any number of threads."""
    os.setgroups([])
    os.setresgid(user, user, user)
    _checked("prctl", _KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setresuid(user, user, user)
    if not all(os.access(path, os.R_OK) for path in readable):
        # The interpreter lies in a folder of root. Access to files stays root's, without its
        # privileges; Landlock restricts it to the interpreter.
        _set_capabilities(_CAP_SETUID)
        _libc.setfsuid(0)


def _set_capabilities(mask: int) -> None:
    header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
    # Effective, permitted and inheritable, in two halves.
    _checked("capset", header, struct.pack("=6I", mask, mask, 0, 0, 0, 0))


def _limit_threads(most: int) -> None:
    """Limit the number of threads, where the limit is this sandbox's own.

    Some kernels (before 5.14) and containers count all threads of the user. Then none can be
    started under the limit, and the user's limit stays.
    """
    limits = resource.getrlimit(resource.RLIMIT_NPROC)
    if limits[1] != resource.RLIM_INFINITY:
        most = min(most, limits[1])
    resource.setrlimit(resource.RLIMIT_NPROC, (most, limits[1]))
    trial = threading.Thread()
    try:
        trial.start()
        trial.join()
        limits = most, most
    except RuntimeError:
        pass
    resource.setrlimit(resource.RLIMIT_NPROC, limits)


def _restrict_files(readable: list[str], hidden: list[str]) -> None:
    """Allow to open only what is below some folders, and only to read, by Landlock."""
    version = _libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        sys.exit("the kernel has no Landlock")
    handled = (1 << _FILE_ACCESS[min(version, len(_FILE_ACCESS)) - 1]) - 1
    # Access to files; TCP (since version 4); signals and abstract sockets (since version 6).
    rules = struct.pack("=QQQ", handled, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _checked("syscall", _LANDLOCK_CREATE, rules, len(rules), 0)
    around = {os.path.dirname(folder) for folder in hidden}
    for path in readable:
        if path in around:  # everything in it but the hidden folders, and its list of names
            _allow(ruleset, path, _READ_FOLDER)
            inside = [entry.path for entry in os.scandir(path) if entry.path not in hidden]
        else:
            inside = [path]
        for one in inside:
            _allow(ruleset, one, _READ_FILE | (_READ_FOLDER if os.path.isdir(one) else 0))
    _checked("syscall", _LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    _checked("syscall", _LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", access, opened), 0)
    os.close(opened)


def _die_with_parent(parent: int | None) -> None:
    """Be killed when the parent ends, however it ends. Credentials that change undo this."""
    _checked("prctl", _SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        sys.exit("the parent process has ended")


class _Packages:
    """Finds packages outside the standard library by their folders alone."""

    def __init__(self, folders: dict[str, str]) -> None:
        self._folders = folders

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The package if it has this name."""
        if name not in self._folders:
            return None
        folder = self._folders[name]
        return spec_from_file_location(
            name, f"{folder}/__init__.py", submodule_search_locations=[folder]
        )


def _filter_system_calls(code: bytes) -> None:
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: number of instructions, and their address.
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    _checked("prctl", _SET_SECCOMP, _MODE_FILTER, program, 0, 0)


def _run(program: str) -> None:
    module = ModuleType("__main__")
    module.__file__ = "program.py"
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    sys.setrecursionlimit(50_000)  # contest solutions may use deep recursion
    site.setquit()  # exit() and quit(), which -S leaves out
    code = compile(program.encode(errors="replace"), "program.py", "exec", dont_inherit=True)
    exec(code, vars(module))


def _checked(function: str, *arguments: bytes | int | None) -> int:
    """Call a function of libc; end this process if it fails.

    Integers are passed as C longs, because ctypes would leave half of a register undefined.
    """
    converted = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result: int = getattr(_libc, function)(*converted)
    if result < 0:
        sys.exit(f"{function} failed: {os.strerror(ctypes.get_errno())}")
    return result


if __name__ == "__main__":
    main()
