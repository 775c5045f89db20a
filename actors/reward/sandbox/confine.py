"""Confinement of the calling process, for Linux: limits of the kernel, a filter of system calls, a list of places.

Nothing here can be undone, all of it is inherited by `execve`, and none of it needs rights. A confined process has no
sockets, no child processes and no signals to others. It writes in one folder, and reads the places of `places.py`.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from actors.reward.sandbox.places import OWN

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
CLONE_THREAD = 0x10000
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
"""Numbers of system calls, the same on all architectures."""
LANDLOCK_RULE_PATH_BENEATH, LANDLOCK_CREATE_RULESET_VERSION = 1, 1
LANDLOCK_WRITES = 0b1_1111_1111_0010
"""Rights to write, remove and make files and folders, of Landlock's first version."""
LANDLOCK_EXECUTE, LANDLOCK_WRITE_FILE, LANDLOCK_READ_FILE, LANDLOCK_READ_DIR = 0b1, 0b10, 0b100, 0b1000
LANDLOCK_TRUNCATE = 1 << 14
"""Right to cut a file, of Landlock's third version (Linux 6.2)."""
LANDLOCK_OF_FILES = LANDLOCK_EXECUTE | LANDLOCK_WRITE_FILE | LANDLOCK_READ_FILE | LANDLOCK_TRUNCATE
"""Rights that a single file can have; the others are those of folders."""
CAPABILITIES_VERSION = 0x20080522
EPERM, ENOSYS = 1, 38
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""Instructions of the filter: load a word, jumps by a comparison with a constant, and the end."""
NUMBER_AT, ARCHITECTURE_AT, ARGUMENT_AT = 0, 4, 16
"""Places in the description of a system call; of an argument its low word."""


AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Kernel's names of the architectures."""
CALLS: dict[str, tuple[int | None, int | None]] = {
    # network, and sockets of this machine, as those of the run's actors
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    # signals to other processes, and their memory and descriptors
    "kill": (62, 129), "tkill": (200, 130), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    # further processes
    "fork": (57, None), "vfork": (58, None),
    # other namespaces and file systems, and parts of the kernel that have had holes
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "bpf": (321, 280), "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    # changes of files that Landlock leaves alone
    "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    # objects that outlive a process
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # a place before all other processes
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
}  # fmt: skip
"""Numbers of refused system calls on x86_64 and aarch64; None where a call does not exist."""
ALLOWED_IN_PART = {"clone": (56, 220), "tgkill": (234, 131), "prlimit64": (302, 261)}
"""Numbers of system calls whose arguments decide."""
UNKNOWN = {"clone3": (435, 435), "openat2": (437, 437)}
"""Numbers of system calls whose arguments a filter can't read. They are refused as if the kernel had none of them, and
the C library then takes the older call."""
OPENS = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
"""Numbers of `open` and `openat`, each with the position of its flags. A file that is opened for reading may be emptied
by the same call (O_TRUNC), for which Landlock before Linux 6.2 asks no right to write."""
X32_BIT = 0x40000000


@dataclass(frozen=True)
class Limits:
    """Limits of a process."""

    memory_bytes: int = 1 << 30
    """Address space."""
    file_bytes: int = 16 << 20
    """Size of each file that it writes."""
    files: int = 64
    """Files open at the same time."""
    cpu_seconds: int = 10
    """Computing time, after which the kernel ends the process with SIGXCPU."""


class NotConfinedError(RuntimeError):
    """The kernel lacks a part of the confinement without which a program of the policy must not run."""


def apply(limits: Limits, folder: str | None, readable: Sequence[str]) -> bool:
    """Confine this process; return whether its files are confined too, for which Linux has to be 5.13 or newer.

    Args:
        limits: limits of the process.
        folder: only folder in which files may be written; None for none.
        readable: existing files and folders that may be read, in addition to what /proc says of this process.

    Raises:
        NotConfinedError: the kernel has no filter of system calls, or refuses a rule about files. As root an
            unconfined program could end every process of the machine.
    """
    for kind, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))
    limit_cpu(limits.cpu_seconds)
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # without effect for a user other than root; with no_new_privs no program gets them back
    library.capset(struct.pack("Ii", CAPABILITIES_VERSION, 0), bytes(24))
    files_are_confined = _confine_files(library, folder, readable)
    if not _filter_calls(library):
        raise NotConfinedError(
            f"this kernel ({platform.system()} {platform.release()}, {platform.machine()}) refuses a filter of system "
            "calls (seccomp), without which answers of the policy are not run; allow seccomp in the container's profile"
        )
    return files_are_confined


def landlock_version() -> int:
    """Return the version of the kernel's Landlock, 1 since Linux 5.13; below 1 if there is none, or it is off."""
    library = ctypes.CDLL(None)
    return int(library.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION))


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after so many further seconds of computing. A later call replaces this one."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    bound = int(used.ru_utime + used.ru_stime + seconds) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _confine_files(library: ctypes.CDLL, folder: str | None, readable: Sequence[str]) -> bool:
    """Restrict writing to a folder and /dev/null, and reading to some places; return False without Landlock.

    The kernel also refuses such a process the memory and the environment variables of all others, since they have
    fewer restrictions.

    Raises:
        NotConfinedError: Landlock is there, and refuses a rule.
    """
    version = landlock_version()
    if version < 1:
        return False
    cut = LANDLOCK_TRUNCATE if version >= 3 else 0
    reads = LANDLOCK_EXECUTE | LANDLOCK_READ_FILE | LANDLOCK_READ_DIR
    own = LANDLOCK_WRITES | LANDLOCK_READ_FILE | LANDLOCK_READ_DIR | cut
    allowed = [
        ("/dev/null", LANDLOCK_READ_FILE | LANDLOCK_WRITE_FILE | cut),
        (OWN, LANDLOCK_READ_FILE | LANDLOCK_READ_DIR),
    ]
    allowed += [(place, reads) for place in readable] + ([(folder, own)] if folder else [])
    handled = struct.pack("Q", reads | LANDLOCK_WRITES | cut)
    ruleset = _checked(library.syscall(LANDLOCK_CREATE_RULESET, handled, len(handled), 0), "a set of rules")
    try:
        for path, rights in allowed:
            _allow(library, ruleset, path, rights)
        _checked(library.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "the rules together")
    finally:
        os.close(ruleset)
    return True


def _allow(library: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    """Add the rights on a place, and on all that is below it, to a set of rules."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        # removed since the list was made, so there is nothing to read
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= LANDLOCK_OF_FILES
        rule = struct.pack("=Qi", rights, place)
        _checked(library.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0), path)
    finally:
        os.close(place)


def _checked(result: int, what: str) -> int:
    """Return the result of a system call of Landlock.

    Raises:
        NotConfinedError: the call has failed.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise NotConfinedError(f"Landlock refuses {what}: {errno.errorcode.get(number, number)}")
    return result


def _filter_calls(library: ctypes.CDLL) -> bool:
    """Refuse system calls with EPERM; return False if the kernel, or this architecture, has no filter."""
    if platform.machine() not in AUDIT:
        return False
    code = b"".join(struct.pack("HBBI", *one) for one in _instructions(platform.machine(), os.getpid()))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    return bool(library.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0)


def _instructions(machine: str, own: int) -> Sequence[tuple[int, int, int, int]]:
    """Return the filter: (operation, jump if true, jump if false, constant), jumps in instructions to skip."""
    refuse, column = (RETURN, 0, 0, REFUSE | EPERM), list(AUDIT).index(machine)
    refused = [numbers[column] for numbers in CALLS.values()]
    clone, tgkill, prlimit64 = (numbers[column] for numbers in ALLOWED_IN_PART.values())
    found = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, AUDIT[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        # the second set of numbers of x86, through which the others could be reached; no other has such numbers
        (AT_LEAST, 0, 1, X32_BIT),
        (RETURN, 0, 0, KILL),
    ]
    for number in (one for one in refused if one is not None):
        found += [(EQUAL, 0, 1, number), refuse]
    for numbers in UNKNOWN.values():
        found += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, REFUSE | ENOSYS)]
    for number, position in OPENS[machine]:
        found += [
            # to empty a file takes the right to write
            (EQUAL, 0, 5, number),
            (LOAD, 0, 0, ARGUMENT_AT + 8 * position),
            (HAS_BITS, 0, 2, os.O_TRUNC),
            (HAS_BITS, 1, 0, os.O_WRONLY | os.O_RDWR),
            refuse,
            (LOAD, 0, 0, NUMBER_AT),
        ]
    found += [
        # threads, but no processes
        (EQUAL, 0, 3, clone),
        (LOAD, 0, 0, ARGUMENT_AT),
        (HAS_BITS, 9, 0, CLONE_THREAD),
        refuse,
        # signals to its own threads, as abort() sends one
        (EQUAL, 0, 3, tgkill),
        (LOAD, 0, 0, ARGUMENT_AT),
        (EQUAL, 5, 0, own),
        refuse,
        # limits of this process, not of others
        (EQUAL, 0, 3, prlimit64),
        (LOAD, 0, 0, ARGUMENT_AT),
        (EQUAL, 1, 0, 0),
        refuse,
        (RETURN, 0, 0, ALLOW),
    ]
    return found
