"""Runs an untrusted program in this process, with limits; a script with no dependencies.

Usage: ``python -I sandbox_child.py PROGRAM CPU_SECONDS MEMORY_BYTES``. The script lowers the
resource limits of its process, blocks the system calls that open sockets, start programs or
processes, or signal other processes (seccomp, which needs no privilege), and then runs the program.
The program cannot raise the limits or unblock the calls.

Files are not hidden: the program can read and write all files that its user can.
"""

import ctypes
import os
import platform
import resource
import runpy
import struct
import sys

MAX_FILE_BYTES = 64 * 2**20

# System call numbers and audit architecture, from the headers of the Linux kernel.
_MACHINES = {
    "x86_64": (0xC000003E, {
        "socket": 41, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62,
        "ptrace": 101, "tkill": 200, "process_vm_readv": 310, "process_vm_writev": 311,
        "execveat": 322, "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_open": 434,
        "clone3": 435,
    }),
    "aarch64": (0xC00000B7, {
        "socket": 198, "clone": 220, "execve": 221, "kill": 129, "ptrace": 117, "tkill": 130,
        "process_vm_readv": 270, "process_vm_writev": 271, "execveat": 281,
        "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_open": 434, "clone3": 435,
    }),
}  # fmt: skip
_X32 = 0x40000000  # x32 system calls on x86-64, all refused
_CLONE_THREAD = 0x00010000

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE, _ABSENT = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16


def can_confine() -> bool:
    """Whether programs can be confined on this machine."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def main() -> None:
    """Lower the limits, block system calls, and run the program."""
    program, cpu_s, memory_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _limit(cpu_s, memory_bytes)
    _block_system_calls()
    sys.argv = [program]
    sys.setrecursionlimit(50_000)  # contest solutions may use deep recursion
    runpy.run_path(program, run_name="__main__")


def _limit(cpu_s: int, memory_bytes: int) -> None:
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _block_system_calls() -> None:
    machine, numbers = _MACHINES[platform.machine()]
    code = _filter(machine, numbers)
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: number of instructions, and their address.
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(program), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            sys.exit(f"the kernel does not support confinement: {os.strerror(ctypes.get_errno())}")


def _filter(machine: int, numbers: dict[str, int]) -> bytes:
    """A system call filter as a BPF program."""
    refused = [n for name, n in numbers.items() if name not in ("clone", "clone3")]
    lines = [
        _line(_LOAD, _MACHINE_AT),
        _line(_EQUAL, machine, yes=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER_AT),
        _line(_AT_LEAST, _X32, no=1),
        _line(_RETURN, _REFUSE),
        # Report clone3 as not implemented, so that libraries fall back to clone.
        _line(_EQUAL, numbers["clone3"], no=1),
        _line(_RETURN, _ABSENT),
    ]
    for number in refused:
        lines += [_line(_EQUAL, number, no=1), _line(_RETURN, _REFUSE)]
    lines += [
        _line(_EQUAL, numbers["clone"], yes=1),
        _line(_RETURN, _ALLOW),
        # Threads may be started, processes may not.
        _line(_LOAD, _FIRST_ARGUMENT_AT),
        _line(_ANY_BIT, _CLONE_THREAD, no=1),
        _line(_RETURN, _ALLOW),
        _line(_RETURN, _REFUSE),
    ]
    return b"".join(lines)


def _line(code: int, operand: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; ``yes`` and ``no`` are numbers of instructions to skip."""
    return struct.pack("@HBBI", code, yes, no, operand)


if __name__ == "__main__":
    main()
