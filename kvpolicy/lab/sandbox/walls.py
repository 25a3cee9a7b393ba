"""The two ways to keep a program from everything around it.

bubblewrap gives it an empty file system and namespaces of its own. Where that is not installed or
the kernel refuses it, Landlock lets it open nothing but the interpreter's files. Both come with the
filter of system calls and the limits of ``child.py``. There is no third way: where neither works,
programs are not run.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.sandbox.interpreter import Interpreter, describe_interpreter
from kvpolicy.lab.sandbox.system_calls import filter_code

# CLONE_NEWCGROUP, NEWUTS, NEWIPC, NEWUSER and NEWNET: what a process can enter by itself.
_NEW_USER = 0x10000000
_NEW_NAMESPACES = 0x02000000 | 0x04000000 | 0x08000000 | _NEW_USER | 0x40000000

# Users that systemd lends to services; no file is theirs. One of them is drawn for each program.
FIRST_USER, NUM_USERS = 61184, 4336
_LENDING = 1 << 5 | 1 << 6 | 1 << 7  # CAP_KILL, CAP_SETGID and CAP_SETUID

# Not imported, because it needs Linux. In bubblewrap, its path tells nothing of this machine.
_SCRIPT, _SCRIPT_INSIDE = str(Path(__file__).with_name("child.py")), "/child.py"


@attrs.frozen
class Wall:
    """One way to confine programs.

    Attributes:
        name: What it is, with version.
        command: Command line that runs ``child.py``, without the script's arguments.
        readable: Files and folders that programs can read.
        hidden: Folders in these that they cannot read.
        packages: Folders of packages that they can import, by name.
        filter: The filter of system calls, as a BPF program.
        has_folder: Whether there is a file system of its own, with a folder that programs can
            write to.
        lends_user: Whether programs run as a user of their own, because this process is root.
        namespaces: Flags of the namespaces that ``child.py`` enters if the kernel allows it.
    """

    name: str
    command: list[str]
    readable: list[str]
    hidden: list[str]
    packages: dict[str, str]
    filter: bytes = attrs.field(repr=False)
    has_folder: bool
    lends_user: bool
    namespaces: int


def bubblewrap(*, proc: bool = True) -> Wall:
    """Namespaces of its own and an empty file system, by bubblewrap.

    Args:
        proc: Whether the new file system has a ``/proc``, which the kernel refuses in some
            containers; else the folder is empty, and so ``/dev/stdin`` does not exist.

    Raises:
        TaskError: It is not installed, or a part that it needs is missing.
    """
    _check_platform()
    program = shutil.which("bwrap")
    if program is None:
        msg = "bubblewrap is not installed"
        raise TaskError(msg)
    code, interpreter = filter_code(writes=True), describe_interpreter()
    lends_user = _lends_user()
    # A process of bubblewrap in the namespace ends it with the grader. One of the same user would
    # be in reach of the program, which the kernel then ends directly.
    user = [] if lends_user else ["--unshare-user", "--as-pid-1"]
    return Wall(
        name=_version(program) + ("" if proc else ", without /proc"),
        command=[
            *(program, "--die-with-parent", "--new-session", *user),
            *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
            *("--unshare-cgroup-try", "--hostname", "sandbox"),
            # For the script, which gives them up before it starts the program.
            *("--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"),
            *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
            *_files(interpreter),
            *("--proc" if proc else "--dir", "/proc", "--dir", "/home"),
            # In memory, without a limit: nobody may write there.
            *("--remount-ro", "/"),
            *("--", *_python(interpreter), _SCRIPT_INSIDE),
        ],
        readable=interpreter.readable,
        hidden=interpreter.hidden,
        packages=interpreter.packages,
        filter=code,
        has_folder=True,
        lends_user=lends_user,
        namespaces=_NEW_USER if lends_user else 0,
    )


def landlock() -> Wall:
    """No writing, and no reading but of the interpreter's files, by seccomp and Landlock.

    Raises:
        TaskError: A part that it needs is missing.
    """
    _check_platform()
    code, interpreter = filter_code(writes=False), describe_interpreter()
    return Wall(
        name="seccomp and Landlock",
        command=[*_python(interpreter), _SCRIPT],
        readable=interpreter.readable,
        hidden=interpreter.hidden,
        packages=interpreter.packages,
        filter=code,
        has_folder=False,
        lends_user=_lends_user(),
        namespaces=_NEW_NAMESPACES,
    )


def _lends_user() -> bool:
    """Whether this process is root, and can start and end processes of `FIRST_USER` and later.

    In a container, root may lack the capabilities for it or have no other users; it is then
    treated as an ordinary user, which it is outside.
    """
    if os.geteuid() != 0:
        return False
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    maps = Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines()
    users = [range(int(first), int(first) + int(n)) for first, _, n in map(str.split, maps)]
    wanted = (FIRST_USER, FIRST_USER + NUM_USERS - 1)
    return capabilities & _LENDING == _LENDING and any(
        all(user in one for user in wanted) for one in users
    )


def _check_platform() -> None:
    if sys.platform != "linux":
        msg = f"this system is no Linux (it is {sys.platform})"
        raise TaskError(msg)


def _version(program: str) -> str:
    try:
        found = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        msg = f"{program} cannot be run ({error})"
        raise TaskError(msg) from error
    return found.stdout.strip() or program


def _python(interpreter: Interpreter) -> list[str]:
    """The interpreter without packages, variables, and files that it would write."""
    return [interpreter.executable, "-I", "-S", "-B", "-X", "utf8"]


def _files(interpreter: Interpreter) -> list[str]:
    """Options that put the interpreter, its script and harmless devices into an empty root."""
    options = ["--ro-bind", _SCRIPT, _SCRIPT_INSIDE]
    for folder in interpreter.folders:
        options += ["--ro-bind", folder, folder]
    for folder in interpreter.hidden:
        options += ["--tmpfs", folder]
    for path in interpreter.readable:
        if path not in interpreter.folders:
            options += ["--ro-bind", path, path]
    for folder in interpreter.hidden:
        options += ["--remount-ro", folder]
    for link, target in interpreter.links.items():
        options += ["--symlink", target, link]
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        options += ["--dev-bind", device, device]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        options += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    return options
