"""What runs inside the sandbox: closes it around itself, then executes the program from standard input.

    python -I -S -B inside.py REPORT_FD TOKEN CPU_SECONDS MEMORY FILE_BYTES OPEN_FILES  < program

Standard library only. In this order: limits, capabilities dropped, no new privileges, Landlock, seccomp. To REPORT_FD goes
one of ``open: REASON`` (not closed, nothing was run), ``memory``, ``end: TOKEN`` (the program reached its end).

Sources: landlock(7), seccomp(2), capabilities(7), linux/filter.h. Seccomp's program is classic BPF: 8 bytes an instruction,
it loads 32-bit words of {nr, arch, instruction pointer, args[6]} and ends in an action. x86-64 only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import traceback
from pathlib import Path

# System calls of x86-64 that are answered with EPERM.
DENIED = {
    **{"socket": 41, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322},
    **{"kill": 62, "tkill": 200, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424},
    **{"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_open": 434, "pidfd_getfd": 438},
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427},  # a way around this filter
    **{"truncate": 76, "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452},  # what Landlock leaves open
    **{"chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260},
    **{"setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198},
    **{"fremovexattr": 199, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280},
    **{"mount": 165, "umount2": 166, "unshare": 272, "setns": 308, "open_by_handle_at": 304, "chroot": 161},
    **{"bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248, "request_key": 249, "keyctl": 250},
    **{"shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "setpriority": 141, "sched_setscheduler": 144},
}
CLONE, CLONE3, TGKILL, PRLIMIT = 56, 435, 234, 302
CLONE_THREAD = 0x00010000
X32 = 0x40000000
AUDIT_ARCH_X86_64 = 0xC000003E
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, JEQ, JGE, JSET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NR, ARCH, ARG0 = 0, 4, 16

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, CAPSET, SECCOMP = 444, 445, 446, 126, 317
PR_SET_NO_NEW_PRIVS = 38
FS_READ = 0b1101  # execute, read a file, read a folder
FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # bits that a version of Landlock knows

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def syscall(number: int, *arguments: object) -> int:
    found = int(libc.syscall(ctypes.c_long(number), *arguments))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


def limit(cpu: int, memory: int, file_bytes: int, open_files: int) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (lowest, lowest))


def drop_capabilities() -> None:
    header = struct.pack("=II", 0x20080522, 0)  # version 3, this process
    syscall(CAPSET, header, bytes(24))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")


def confine_files(work: str) -> None:
    """Everything that Landlock can forbid is forbidden, but for reading Python's folders and anything in `work`."""
    version = syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    every = (1 << FS_RIGHTS.get(version, FS_RIGHTS[5])) - 1
    rules = syscall(LANDLOCK_CREATE, struct.pack("=Q", every), ctypes.c_size_t(8), ctypes.c_uint32(0))
    readable = {sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr", "/lib", "/lib64", str(Path(os.__file__).parent)}
    for folder, rights in [(path, FS_READ) for path in sorted(readable)] + [(work, every)]:
        try:
            handle = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, handle), 0)
        os.close(handle)
    syscall(LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def filter_calls() -> None:
    program: list[bytes] = []

    def add(code: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        program.append(struct.pack("=HBBI", code, if_true, if_false, value))

    add(LOAD, ARCH)
    add(JEQ, AUDIT_ARCH_X86_64, 1, 0)
    add(RETURN, KILL)
    add(LOAD, NR)
    add(JGE, X32, 0, 1)
    add(RETURN, KILL)
    for number in sorted(DENIED.values()):
        add(JEQ, number, 0, 1)
        add(RETURN, ERRNO | errno.EPERM)
    add(JEQ, CLONE3, 0, 1)
    add(RETURN, ERRNO | errno.ENOSYS)  # glibc then takes clone, whose flags can be seen
    add(JEQ, CLONE, 0, 4)
    add(LOAD, ARG0)
    add(JSET, CLONE_THREAD, 0, 1)
    add(RETURN, ALLOW)
    add(RETURN, ERRNO | errno.EPERM)
    add(JEQ, TGKILL, 0, 4)
    add(LOAD, ARG0)
    add(JEQ, os.getpid(), 0, 1)
    add(RETURN, ALLOW)
    add(RETURN, ERRNO | errno.EPERM)
    add(JEQ, PRLIMIT, 0, 4)
    add(LOAD, ARG0)
    add(JEQ, 0, 0, 1)
    add(RETURN, ALLOW)
    add(RETURN, ERRNO | errno.EPERM)
    add(RETURN, ALLOW)
    code = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("=HxxxxxxQ", len(program), ctypes.addressof(code))
    syscall(SECCOMP, 1, 0, header)


def main() -> None:
    report = int(sys.argv[1])
    token, (cpu, memory, file_bytes, open_files) = sys.argv[2], map(int, sys.argv[3:7])
    source = sys.stdin.buffer.read()
    try:
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise OSError(errno.ENOSYS, f"{platform.system()} on {platform.machine()}")
        limit(cpu, memory, file_bytes, open_files)
        drop_capabilities()
        confine_files(str(Path.cwd()))
        filter_calls()
    except OSError as error:
        os.write(report, f"open: {error}".encode())
        raise SystemExit(3) from None
    sys.argv = ["program"]
    module = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(source, "program", "exec"), module)
    except MemoryError:
        os.write(report, b"memory")
        raise SystemExit(1) from None
    except SystemExit:
        raise SystemExit("the program exited by itself") from None
    except BaseException as error:  # noqa: BLE001 - whatever the program raises is its result
        sys.stderr.write("".join(traceback.format_exception_only(error))[-2000:])
        raise SystemExit(1) from None
    os.write(report, f"end: {token}".encode())


if __name__ == "__main__":
    main()
