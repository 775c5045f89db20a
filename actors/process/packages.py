"""Packages and programs that an installation may lack. Nothing is imported or started to find out."""

import os
import shutil
from importlib.util import find_spec


def is_installed(name: str) -> bool:
    """Return whether a package is installed, with code of its own.

    A package whose folder only holds other packages does not count: flash-attn-4 installs `flash_attn/cute`, so
    `flash_attn` can be imported without a single function of flash-attn 2 in it.
    """
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def c_compiler() -> str | None:
    """Return the C compiler with which Triton builds kernels for GPUs; None if there is none."""
    named = os.environ.get("CC")
    return next(filter(shutil.which, [named] if named else ["gcc", "clang"]), None)
