"""What a program could do to its grader and to the machine, tried in each way to confine it."""

import ctypes
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs
import pytest

from kvpolicy.lab.sandbox.run import run_program
from kvpolicy.lab.sandbox.walls import Wall

SECRET = "kvpolicy-test-secret"

# `victim` is a process of the same user, `grader` the process that runs the test, `outside` a
# folder of the test, `name` an abstract socket that it listens on, `address` where the grader has
# eight bytes, `mark` a name of files that must not appear, and n["NAME"] the number of a system
# call.
PRELUDE = """
import ctypes, fcntl, json, mmap, os, resource, signal, socket, stat, struct, sys, threading, time
victim, grader, outside, name, address, mark = {targets}
n = {numbers}
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *longs)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def machine_code(code):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    place = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_long)(place)()

def attempt(attack):
    try:
        attack()
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        return f"refused: {{error!r}}"
    return "succeeded"

outcomes = {{}}
"""


@attrs.frozen
class Attack:
    """One attack.

    Attributes:
        body: What it does. It is refused if it raises an exception.
        works: Whether it succeeds without a sandbox, for any user on any machine, which shows that
            the test can fail.
    """

    body: str
    works: bool = True


SIGNALS = {
    "kill": Attack("os.kill(victim, 9)"),
    "kill, to look": Attack("os.kill(victim, 0)"),
    "kill the grader, to look": Attack("os.kill(grader, 0)"),
    "kill the parent, to look": Attack("os.kill(os.getppid() or grader, 0)"),
    "killpg": Attack("os.killpg(victim, 9)"),
    "tkill": Attack('call(n["tkill"], victim, 9)'),
    "tgkill": Attack('call(n["tgkill"], victim, victim, 9)'),
    "rt_sigqueueinfo": Attack(
        'call(n["rt_sigqueueinfo"], victim, 10, struct.pack("3i", 10, 0, -1) + bytes(116))'
    ),
    "rt_tgsigqueueinfo": Attack(
        'call(n["rt_tgsigqueueinfo"], victim, victim, 10, bytes(8) + b"\\xff" * 4 + bytes(116))'
    ),
    "pidfd_open": Attack('call(n["pidfd_open"], victim, 0)'),
    "pidfd_send_signal": Attack(
        'call(n["pidfd_send_signal"], call(n["pidfd_open"], victim, 0), 9, None, 0)'
    ),
    "F_SETOWN": Attack("ours, _ = os.pipe()\nfcntl.fcntl(ours, fcntl.F_SETOWN, victim)"),
    "F_SETOWN_EX": Attack(
        'ours, _ = os.pipe()\nfcntl.fcntl(ours, 15, struct.pack("2i", 1, victim))'
    ),
    "F_SETSIG": Attack("ours, _ = os.pipe()\nfcntl.fcntl(ours, 10, 9)"),
    "O_ASYNC": Attack(
        "ours, _ = os.pipe()\nfcntl.fcntl(ours, fcntl.F_SETFL, os.O_NONBLOCK | 0o20000)"
    ),
    "FIOSETOWN": Attack(
        'ours, _ = os.pipe()\nfcntl.ioctl(ours, 0x8901, struct.pack("i", victim))', works=False
    ),
    "a lease": Attack('fcntl.fcntl(os.open("/dev/null", 0), 1024, 0)', works=False),
    "a timer for another process": Attack(
        'call(n["timer_create"], 0, None, ctypes.byref(ctypes.c_long()))'
    ),
}
OTHER_PROCESSES = {
    "prlimit": Attack("resource.prlimit(victim, resource.RLIMIT_NOFILE, (1, 1))"),
    "prlimit the grader, to look": Attack("resource.prlimit(grader, resource.RLIMIT_NOFILE)"),
    "process_vm_readv": Attack(
        "mine = ctypes.create_string_buffer(8)\n"
        'ours = struct.pack("2Q", ctypes.addressof(mine), 8)\n'
        'call(n["process_vm_readv"], grader, ours, 1, struct.pack("2Q", address, 8), 1, 0)',
        works=False,  # to a parent: Yama may forbid it
    ),
    "process_vm_writev": Attack(
        'mine = ctypes.create_string_buffer(b"changed!", 8)\n'
        'ours = struct.pack("2Q", ctypes.addressof(mine), 8)\n'
        'call(n["process_vm_writev"], grader, ours, 1, struct.pack("2Q", address, 8), 1, 0)',
        works=False,
    ),
    "ptrace": Attack('call(n["ptrace"], 16, victim, 0, 0)', works=False),
    "the grader's memory": Attack(
        'with open(f"/proc/{grader}/mem", "r+b", 0) as file:\n'
        "    file.seek(address)\n"
        '    file.write(b"changed!")',
        works=False,
    ),
    "the parent's memory": Attack('open(f"/proc/{os.getppid()}/mem", "r+b", 0)', works=False),
    "the first process's memory": Attack(
        'if os.getpid() == 1: raise OSError("its own")\nopen("/proc/1/mem", "r+b", 0)', works=False
    ),
    "environ": Attack('print(open(f"/proc/{victim}/environ").read())'),
    "environ of the parent": Attack('print(open(f"/proc/{os.getppid()}/environ").read())'),
    "cmdline": Attack('print(open(f"/proc/{victim}/cmdline").read())'),
    "maps": Attack('open(f"/proc/{victim}/maps").read()', works=False),
    "the list of processes": Attack(
        'if str(victim) not in os.listdir("/proc"): raise OSError("not listed")'
    ),
    "open files": Attack('os.listdir(f"/proc/{victim}/fd")', works=False),
    "links of processes": Attack('os.readlink(f"/proc/{victim}/exe")'),
    "pidfd_getfd": Attack('call(n["pidfd_getfd"], call(n["pidfd_open"], victim, 0), 0, 0)', False),
    "kcmp": Attack('call(n["kcmp"], os.getpid(), victim, 0, 0, 0)', works=False),
    "process_madvise": Attack('call(n["process_madvise"], 0, None, 0, 0, 0)', works=False),
    "setpriority": Attack("os.setpriority(os.PRIO_PROCESS, victim, 19)"),
    "sched_setaffinity": Attack("os.sched_setaffinity(victim, os.sched_getaffinity(0))"),
    "sched_setscheduler": Attack("os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0))"),
    "ioprio_set": Attack('call(n["ioprio_set"], 1, victim, 3 << 13)'),
}
NEW_PROCESSES = {
    "fork": Attack("os.fork() or os._exit(0)"),
    "vfork": Attack('import subprocess\nsubprocess.run(["/bin/true"])'),
    "clone": Attack('call(n["clone"], 17, 0, 0, 0, 0) or os._exit(0)'),
    "clone3": Attack(
        'call(n["clone3"], struct.pack("8Q", 0, 0, 0, 0, 17, 0, 0, 0), 64) or os._exit(0)'
    ),
    "execve": Attack('os.execv(sys.executable, ["python", "-c", "print(\'succeeded\')"])'),
    "execveat": Attack(
        "program = os.open(sys.executable, os.O_RDONLY)\n"
        'words = (ctypes.c_char_p * 4)(b"python", b"-c", b"print(\'succeeded\')", None)\n'
        'call(n["execveat"], program, b"", words, None, 0x1000)'
    ),
    "a program in memory": Attack('call(n["memfd_create"], b"program", 0)'),
    "secret memory": Attack('call(n["memfd_secret"], 0)', works=False),
    "posix_spawn": Attack('os.posix_spawn("/bin/true", ["true"], {})'),
}
NAMESPACES = {
    "unshare of users": Attack('call(n["unshare"], 0x10000000)', works=False),
    "unshare of files": Attack('call(n["unshare"], 0x400)'),
    "clone with namespaces": Attack(
        'call(n["clone"], 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)', works=False
    ),
    "a thread with namespaces": Attack(
        'call(n["clone"], 0x3D0F00 | 0x40000000, 0, 0, 0, 0)', works=False
    ),
    "setns": Attack('call(n["setns"], 0, 0)', works=False),
    "mount": Attack('call(n["mount"], b"t", b"/home", b"tmpfs", 0, None)', works=False),
    "umount": Attack('call(n["umount2"], b"/home", 2)', works=False),
    "pivot_root": Attack('call(n["pivot_root"], b".", b".")', works=False),
    "chroot": Attack('os.chroot("/")', works=False),
    "fsopen": Attack('call(n["fsopen"], b"tmpfs", 0)', works=False),
    "open_tree": Attack('call(n["open_tree"], -100, b"/", 1)', works=False),
    "mount_setattr": Attack('call(n["mount_setattr"], -100, b"/", 0, bytes(32), 32)', works=False),
    "setuid": Attack("os.setuid(0)", works=False),
    "setgroups": Attack("os.setgroups([0])", works=False),
    "capabilities": Attack(
        'call(n["capset"], struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[1 << 21] * 6))',
        works=False,
    ),
    "personality": Attack('call(n["personality"], 0xFFFFFFFF)'),
    "surviving the grader": Attack('call(n["prctl"], 1, 0, 0, 0, 0)'),
    "dumpable": Attack('call(n["prctl"], 4, 1, 0, 0, 0)'),
    "a filter of its own": Attack('call(n["seccomp"], 2, 0, struct.pack("I", 0x7FFF0000))'),
}
NETWORK = {
    "TCP": Attack("socket.socket()"),
    "UDP": Attack("socket.socket(type=socket.SOCK_DGRAM)"),
    "IPv6": Attack("socket.socket(socket.AF_INET6)", works=False),
    "a socket in the file system": Attack("socket.socket(socket.AF_UNIX)"),
    "an abstract socket": Attack('socket.socket(socket.AF_UNIX).connect("\\0" + name)'),
    "a pair of sockets": Attack("socket.socketpair()"),
    "datagrams from a pair": Attack(
        'one, _ = socket.socketpair(type=socket.SOCK_DGRAM)\none.sendto(b"x", "\\0" + name)',
        works=False,
    ),
    "netlink": Attack("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    "packets": Attack("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", works=False),
    "vsock": Attack("socket.socket(socket.AF_VSOCK)", works=False),
    "Bluetooth": Attack("socket.socket(31, socket.SOCK_RAW)", works=False),
    "crypto": Attack("socket.socket(38, socket.SOCK_SEQPACKET)", works=False),
}
KERNEL = {
    "io_uring": Attack('call(n["io_uring_setup"], 1, bytes(120))', works=False),
    "userfaultfd": Attack('call(n["userfaultfd"], 1)', works=False),
    "bpf": Attack('call(n["bpf"], 0, struct.pack("4I", 2, 4, 4, 1) + bytes(56), 72)', False),
    "keyctl": Attack('call(n["keyctl"], 0, -3, 0)', works=False),
    "add_key": Attack('call(n["add_key"], b"user", b"kvpolicy", b"x", 1, -2)', works=False),
    "request_key": Attack('call(n["request_key"], b"user", b"a", None, 0)', works=False),
    "perf_event_open": Attack(
        'call(n["perf_event_open"], struct.pack("2IQ", 1, 112, 0) + bytes(96), 0, -1, -1, 0)', False
    ),
    "inotify": Attack('call(n["inotify_init1"], 0)'),
    "fanotify": Attack('call(n["fanotify_init"], 0, 0)', works=False),
    "open_by_handle_at": Attack('call(n["open_by_handle_at"], -100, bytes(136), 0)', works=False),
    "name_to_handle_at": Attack(
        'call(n["name_to_handle_at"], -100, b"/", struct.pack("2i", 128, 0) + bytes(128),'
        " ctypes.byref(ctypes.c_int()), 0)",
        works=False,
    ),
    "shmget": Attack('made = call(n["shmget"], 0, 4096, 0o600)\nlibc.shmctl(made, 0, None)'),
    "msgget": Attack('made = call(n["msgget"], 0, 0o600)\nlibc.msgctl(made, 0, None)'),
    "semget": Attack('made = call(n["semget"], 0, 1, 0o600)\nlibc.semctl(made, 0, 0)'),
    "mq_open": Attack('call(n["mq_open"], mark.encode(), 0o102, 0o600, None)', works=False),
    "eventfd": Attack('call(n["eventfd2"], 0, 0)'),
    "signalfd": Attack('call(n["signalfd4"], -1, bytes(8), 8, 0)'),
    "timerfd": Attack('call(n["timerfd_create"], 1, 0)'),
    "epoll": Attack('call(n["epoll_create1"], 0)'),
    "mlock": Attack('call(n["mlockall"], 1)', works=False),
    "syslog": Attack('call(n["syslog"], 10, None, 0)', works=False),
    "init_module": Attack('call(n["init_module"], None, 0, b"")', works=False),
    "an unknown call": Attack("call(4000)", works=False),
    "a number beyond 32 bits": Attack('call(n["socket"] + 2**32, 2, 1, 0)', works=False),
    "a terminal's input": Attack('fcntl.ioctl(0, 0x5412, b"x")', works=False),
}
INTERFACES = {
    "the x32 interface": Attack("call(0x40000000 + 41, 2, 1, 0)", works=False),
    "the 32-bit interface": Attack(
        # mov eax, 359 (socket); mov ebx, 2; mov ecx, 1; xor edx, edx; int 0x80; ret
        'if os.uname().machine != "x86_64": raise OSError("no such interface")\n'
        'code = "b867010000bb02000000b90100000031d2cd80c3"\n'
        "if machine_code(bytes.fromhex(code)) < 0: raise OSError",
        works=False,
    ),
}
FILES = {
    "reading a user's file": Attack('print(open(f"{outside}/secret").read())'),
    "reading /etc": Attack('open("/etc/passwd").read()'),
    "listing the root": Attack(
        'if not {"boot", "var"} & set(os.listdir("/")): raise OSError("not listed")'
    ),
    "listing a user's folder": Attack("os.listdir(outside)"),
    "reading installed packages": Attack(
        "folders = [p for p in sys.path if os.path.isdir(p)]\n"
        'found = [f"{p}/{name}" for p in folders for name in ("site-packages", "dist-packages")]\n'
        "names = [f'{p}/{name}' for p in found if os.path.isdir(p) for name in os.listdir(p)]\n"
        "files = [name for name in names if os.path.isfile(name)]\n"
        'if not files: raise OSError("no file")\n'
        "open(files[0]).read()",
        works=False,  # an interpreter may have none
    ),
    "reading /sys": Attack('os.listdir("/sys/kernel")'),
    "reading the kernel's settings": Attack('open("/proc/sys/kernel/pid_max").read()'),
    "a disk": Attack('open("/dev/vda", "rb")', works=False),
    "writing a user's file": Attack('open(f"{outside}/secret", "w").write("changed")'),
    "emptying a user's file": Attack('os.open(f"{outside}/secret", os.O_RDONLY | os.O_TRUNC)'),
    "truncate": Attack('os.truncate(f"{outside}/secret", 0)'),
    "a new file": Attack('open(f"{outside}/new", "w")'),
    "a nameless file": Attack("os.open(outside, os.O_TMPFILE | os.O_WRONLY)", works=False),
    "a new folder": Attack('os.mkdir(f"{outside}/new")'),
    "a fifo": Attack('os.mkfifo(f"{outside}/new")'),
    "a device": Attack('os.mknod("device", 0o60600, os.makedev(254, 0))', works=False),
    "a device in /dev": Attack('os.mknod("/dev/x", 0o60600, os.makedev(254, 0))', works=False),
    "deleting": Attack('os.remove(f"{outside}/secret")'),
    "renaming": Attack('os.rename(f"{outside}/secret", f"{outside}/new")'),
    "a hard link": Attack('os.link(f"{outside}/secret", "link")', works=False),
    "a symbolic link": Attack(
        'os.symlink(f"{outside}/secret", "/home/link")\nopen("/home/link").read()', works=False
    ),
    "chmod": Attack('os.chmod(f"{outside}/secret", 0)'),
    "chown": Attack('os.chown(f"{outside}/secret", os.getuid(), os.getgid())'),
    "utime": Attack('os.utime(f"{outside}/secret", (0, 0))'),
    "setxattr": Attack('os.setxattr(f"{outside}/secret", "user.a", b"x")', works=False),
    "a file in /tmp": Attack('open("/tmp/" + mark, "w")'),
    "a file in /var/tmp": Attack('open("/var/tmp/" + mark, "w")'),
    "a file in /dev/shm": Attack('open("/dev/shm/" + mark, "w")'),
    "a file in /dev": Attack('open("/dev/" + mark, "w")', works=False),
    "a file in the root": Attack('open("/" + mark, "w")', works=False),
    "a file in the interpreter": Attack(
        'open(os.path.dirname(os.__file__) + "/" + mark, "w")', works=False
    ),
    "the script that confines": Attack('open(sys.orig_argv[-3], "a")', works=False),
    "files that are open": Attack(
        # Besides input, outputs and the pipe by which its end is seen.
        "import stat\n"
        "kinds = []\n"
        "for number in range(3, 256):\n"
        "    try: kinds.append(stat.S_IFMT(os.fstat(number).st_mode))\n"
        "    except OSError: pass\n"
        "if kinds == [stat.S_IFIFO]: raise OSError('only the pipe')",
        works=False,
    ),
}
LIMITS = {
    "more memory": Attack("bytearray(5 * 2**30)", works=False),
    "shared memory": Attack("mmap.mmap(-1, 5 * 2**30)"),
    "two hundred threads": Attack(
        "threading.stack_size(2**16)\n"
        "for _ in range(200): threading.Thread(target=time.sleep, args=(3,), daemon=True).start()"
    ),
    "a large file": Attack('open("large", "wb").write(bytes(2**25))', works=False),
    "many open files": Attack("_ = [os.dup(0) for _ in range(100)]"),
    "large pipes": Attack("fcntl.fcntl(os.pipe()[1], 1031, 2**20)"),
    "more processor time": Attack(
        "resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2)", works=False
    ),
    "more memory than allowed": Attack(
        "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)", works=False
    ),
    "more threads than allowed": Attack(
        "resource.setrlimit(resource.RLIMIT_NPROC, (resource.RLIM_INFINITY,) * 2)", works=False
    ),
}
GROUPS = {
    "signals": SIGNALS,
    "other processes": OTHER_PROCESSES,
    "new processes": NEW_PROCESSES,
    "namespaces": NAMESPACES,
    "network": NETWORK,
    "kernel": KERNEL,
    "files": FILES,
    # Each in a program of its own, because it may end it.
    **{name: {name: attack} for name, attack in {**INTERFACES, **LIMITS}.items()},
}
ATTACKS = [(group, name) for group, attacks in GROUPS.items() for name in attacks]


def program(attacks: dict[str, Attack], targets: tuple[object, ...]) -> str:
    """A program that tries attacks one after the other and prints what came of each."""
    parts = [PRELUDE.format(targets=targets, numbers=numbers_in(attacks))]
    for name, attack in attacks.items():
        body = attack.body.replace("\n", "\n    ")
        parts.append(f"def attack():\n    {body}\noutcomes[{name!r}] = attempt(attack)\n")
        # A program in its place would print nothing, and a killed one only what came before.
        parts.append("print(json.dumps(outcomes), flush=True)\n")
    return "".join(parts)


def numbers_in(attacks: dict[str, Attack]) -> dict[str, int]:
    """Numbers of the system calls that attacks name, on this machine."""
    import pyseccomp as seccomp

    names = re.findall(r'n\["(\w+)"\]', "".join(attack.body for attack in attacks.values()))
    return {name: seccomp.resolve_syscall(seccomp.Arch.NATIVE, name) for name in names}


@attrs.frozen
class Scene:
    """What attacks aim at; all of it is made by the test, and looked at afterwards."""

    victim: "subprocess.Popen[bytes]"
    outside: Path
    listener: socket.socket
    memory: "ctypes.Array[ctypes.c_char]"

    @property
    def targets(self) -> tuple[object, ...]:
        name = self.listener.getsockname()[1:].decode()
        address = ctypes.addressof(self.memory)
        return self.victim.pid, os.getpid(), str(self.outside), name, address, self.mark

    @property
    def mark(self) -> str:
        return f"kvpolicy-attack-{self.victim.pid}"

    def state(self) -> dict[str, object]:
        """All that an attack could have changed."""
        alive = self.victim.poll() is None
        files = {path.name: path.read_text() for path in self.outside.iterdir()}
        about = (self.outside / "secret").stat()
        self.listener.setblocking(False)
        try:
            self.listener.accept()
            is_called = True
        except BlockingIOError:
            is_called = False
        return {
            "victim": alive,
            "limits": alive and resource.prlimit(self.victim.pid, resource.RLIMIT_NOFILE),
            "priority": alive and os.getpriority(os.PRIO_PROCESS, self.victim.pid),
            "scheduler": alive and os.sched_getscheduler(self.victim.pid),
            "memory": self.memory.raw,
            "called": is_called,
            "files": files,
            "about": (about.st_mode, about.st_nlink, about.st_uid, about.st_mtime, about.st_ctime),
            "left": [path for path in self._places() if os.path.lexists(path)],
        }

    def _places(self) -> list[Path]:
        folders = ("/", "/tmp", "/var/tmp", "/dev/shm", "/dev", os.path.dirname(os.__file__))
        return [Path(folder, self.mark) for folder in folders]

    def clean(self) -> None:
        for path in self._places():
            path.unlink(missing_ok=True)


@contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    folder.mkdir(exist_ok=True)
    (folder / "secret").write_text(SECRET)
    os.utime(folder / "secret", (10**9, 10**9))
    with ExitStack() as stack:
        command = [shutil.which("sleep") or "sleep", "300"]
        victim = stack.enter_context(
            subprocess.Popen(command, env={"SECRET": SECRET}, start_new_session=True)
        )
        stack.callback(victim.kill)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"\0kvpolicy-{victim.pid}")
        listener.listen()
        found = Scene(victim, folder, listener, ctypes.create_string_buffer(b"original", 8))
        stack.callback(found.clean)
        yield found


def outcomes_of(attacks: dict[str, Attack], outside: Path) -> dict[str, str]:
    """What came of attacks that one program tried."""
    with scene(outside) as aims:
        before = aims.state()
        finished = run_program(program(attacks, aims.targets), "", time_s=20)
        assert aims.state() == before
    assert SECRET not in finished.stdout
    lines = finished.stdout.splitlines() or ["{}"]
    found: dict[str, str] = json.loads(lines[-1])
    if len(attacks) == 1 and not found:  # the program was killed for it
        assert finished.ending != "done", finished
        return dict.fromkeys(attacks, f"killed: {finished.ending}")
    return found


@pytest.mark.parametrize(
    "wall", ["bubblewrap", pytest.param("Landlock", marks=pytest.mark.slow)], indirect=True
)
def test_every_attack_is_refused(wall: Wall, tmp_path: Path) -> None:
    outcomes = {
        (group, name): outcome
        for number, (group, attacks) in enumerate(GROUPS.items())
        for name, outcome in outcomes_of(attacks, tmp_path / str(number)).items()
    }
    assert sorted(outcomes) == sorted(ATTACKS)
    refused = ("refused: ", "killed: ")
    assert {one: how for one, how in outcomes.items() if not how.startswith(refused)} == {}


@pytest.mark.parametrize("group", ["signals", "other processes", "namespaces", "files"])
def test_bubblewrap_keeps_programs_from_all_else_without_the_filter(
    wall: Wall, tmp_path: Path, group: str
) -> None:
    if not wall.has_folder:
        pytest.skip("this way consists of the filter and Landlock")
    allow_all = bytes.fromhex("060000000000ff7f")
    with scene(tmp_path / "outside") as aims:
        before = aims.state()
        source = program(GROUPS[group], aims.targets)
        unfiltered = attrs.evolve(wall, filter=allow_all)
        finished = run_program(source, "", time_s=20, wall=unfiltered)
        assert aims.state() == before
    assert SECRET not in finished.stdout
    refused = json.loads(finished.stdout.splitlines()[-1]).values()
    assert sum(outcome.startswith("refused") for outcome in refused) > len(refused) / 2


@pytest.mark.slow
@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("group", "name"), [one for one in ATTACKS if GROUPS[one[0]][one[1]].works]
)
def test_the_attack_succeeds_without_a_sandbox(tmp_path: Path, group: str, name: str) -> None:
    with scene(tmp_path / "outside") as aims:
        source = program({name: GROUPS[group][name]}, aims.targets)
        command = [sys.executable, "-I", "-S", "-c", source]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "succeeded" in ended.stdout, ended
