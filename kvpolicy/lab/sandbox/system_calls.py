"""The system calls that a confined program may make; the kernel refuses all others.

A list of what is allowed and not of what is forbidden: new kernels bring new calls. It holds what
Python, its standard library and numpy need to compute, to read modules, to start threads and, where
there is a folder for it, to write. None of them starts a process or a program, opens
a socket, signals, inspects or limits another process, or changes namespaces, mounts or users.
"""

import errno
import tempfile
from functools import cache

from kvpolicy.errors import TaskError
from kvpolicy.extras import install_extra

_ALWAYS = """
    access alarm brk chdir clock_getres clock_gettime clock_nanosleep close close_range dup dup2
    dup3 exit exit_group faccessat faccessat2 fadvise64 fchdir fstat fstatfs futex getcpu getcwd
    getdents getdents64 getegid geteuid getgid getgroups getitimer getpid getppid getrandom
    getresgid getresuid getrlimit getrusage gettid gettimeofday getuid lseek lstat madvise mmap
    mprotect mremap msync munmap nanosleep newfstatat pause pipe pipe2 poll ppoll pread64 preadv
    pselect6 read readlink readlinkat readv restart_syscall rseq rt_sigaction rt_sigpending
    rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_getaffinity sched_yield
    select set_robust_list set_tid_address setitimer sigaltstack stat statx sysinfo time times
    umask uname write writev
"""
_WRITING = """
    chmod copy_file_range creat fallocate fchmod fchmodat fdatasync fsync ftruncate link linkat
    mkdir mkdirat pwrite64 pwritev rename renameat renameat2 rmdir sendfile symlink symlinkat
    truncate unlink unlinkat utimensat
"""

# Of `open`: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND and __O_TMPFILE, on x86-64 and ARM64.
_WRITE_FLAGS = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000 | 0o20000000
# CLONE_VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID, and what
# musl adds, DETACHED: a thread. Any other flag makes a process or a namespace.
_CLONE_THREAD, _CLONE_FLAGS = 0x10000, 0x3D0F00 | 0x400000
_ALL_BITS = 2**64 - 1

# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; not F_SETOWN, F_SETSIG, F_NOTIFY, leases.
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)
_F_SETFL, _O_ASYNC = 4, 0o20000
# TCGETS (isatty), FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
_IOCTL_COMMANDS = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)
_PR_SET_NAME = 15


@cache
def filter_code(*, writes: bool) -> bytes:
    """Compile the filter for this machine.

    Args:
        writes: Whether files may be written, created and deleted. Which ones is not for a filter
            to say, because it does not see paths.

    Returns:
        A BPF program for the kernel's seccomp.

    Raises:
        TaskError: libseccomp or its Python binding is not installed.
    """
    try:
        import pyseccomp as seccomp
    except ImportError as error:
        msg = f"the package pyseccomp is missing ({install_extra('tasks')})"
        raise TaskError(msg) from error
    except (RuntimeError, OSError) as error:
        msg = "the library libseccomp is missing (on Debian and Ubuntu: libseccomp2)"
        raise TaskError(msg) from error

    def allow(name: str, *conditions: tuple[int, int, int]) -> None:
        """Allow a call if for each ``(argument, mask, value)`` the masked argument is the value."""
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        if number == _UNKNOWN:
            return  # libseccomp is older than the call: refused, as other new calls
        masks = [seccomp.Arg(at, seccomp.MASKED_EQ, mask, value) for at, mask, value in conditions]
        rules.add_rule(seccomp.ALLOW, number, *masks)

    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    # Calls of 32-bit programs and, on x86-64, of the x32 interface.
    rules.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.KILL_PROCESS)
    for name in (_ALWAYS + (_WRITING if writes else "")).split():
        allow(name)
    for name, flags_at in (("open", 1), ("openat", 2)):
        allow(name, *([] if writes else [(flags_at, _WRITE_FLAGS, 0)]))
    allow("clone", (0, _ALL_BITS ^ _CLONE_FLAGS | _CLONE_THREAD, _CLONE_THREAD))
    for command in _FCNTL_COMMANDS:
        allow("fcntl", (1, _ALL_BITS, command))
    allow("fcntl", (1, _ALL_BITS, _F_SETFL), (2, _O_ASYNC, 0))
    for command in _IOCTL_COMMANDS:
        allow("ioctl", (1, _ALL_BITS, command))
    allow("prlimit64", (0, _ALL_BITS, 0))  # of this process; hard limits cannot be raised
    allow("setrlimit")
    allow("prctl", (0, _ALL_BITS, _PR_SET_NAME))
    # glibc starts threads with `clone` where there is no `clone3`, whose flags lie in memory.
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


_UNKNOWN = -1  # what libseccomp answers for names that it does not know
