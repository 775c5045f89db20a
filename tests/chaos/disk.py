"""A small disk of a run's own, that a fault can fill: a tmpfs, where this process may mount one."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

SIZE_MIB = 256
BLOCK = b"\0" * (64 << 10)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[str]:
    """Mount one at a folder for a block; yields why there is none, in words, or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ("-t", "tmpfs", "-o", f"size={SIZE_MIB}m")
    try:
        subprocess.run(["mount", *options, "tmpfs", str(folder)], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        yield f"no tmpfs can be mounted: {(getattr(error, 'stderr', '') or str(error)).strip()}"
        return
    try:
        yield ""
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leave not a byte free on the disk for the length of a block."""
    filler = folder / "filler"
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (len(BLOCK), 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(descriptor, BLOCK[:size])
        yield
    finally:
        os.close(descriptor)
        filler.unlink()
