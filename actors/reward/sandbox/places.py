"""Files and folders that a confined program of this interpreter reads: Python, its packages, parts of the system.

None of them has data of the user, of a run, or of another process. Configuration in /etc is named file by file, since a
program that runs as root could read keys there otherwise.
"""

import os
import site
import sys

SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/nix/store", "/gnu/store"),
    # libraries by name, the time zone, names of users and of types of files
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/ld-musl-x86_64.path"),
    *("/etc/alternatives", "/etc/localtime", "/etc/timezone", "/etc/locale.alias", "/etc/locale.conf"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/os-release", "/etc/mime.types"),
    *("/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
    # the numbers of processors and bytes, by which libraries choose their threads and buffers
    *("/sys/devices/system/cpu", "/sys/devices/system/node", "/sys/kernel/mm/transparent_hugepage"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/version", "/proc/sys/vm/overcommit_memory"),
)
"""Places of the system."""
OWN = "/proc/self"
"""Place of the process that asks; of other processes /proc shows arguments and variables."""
_PARTS = ("bin", "lib", "lib32", "lib64", "share", "ssl", "pyvenv.cfg")
"""Parts of a folder with an interpreter. The folder itself may be the home of a user."""


def readable_places() -> list[str]:
    """Return the existing places that a program of this interpreter may read, in the process that starts it."""
    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    found = [os.path.join(prefix, part) for prefix in prefixes for part in _PARTS]  # noqa: PTH118 - at each start
    # packages of folders that a .pth file names, too
    packages = [
        path for path in (*site.getsitepackages(), *sys.path) if path.endswith(("site-packages", "dist-packages"))
    ]
    found += [os.path.realpath(sys.executable), *packages, *SYSTEM]
    return [path for path in dict.fromkeys(found) if os.path.exists(path)]  # noqa: PTH110
