"""Containers of podman and docker: the command line that starts one, and its removal."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .commands import Command
from .folders import Folder

RUNTIMES = ("podman", "docker")
OF_THE_MACHINE = ("PATH", "LD_LIBRARY_PATH", "USER", "LOGNAME", "SHELL", "SSL_CERT_FILE", "SSL_CERT_DIR", "TMPDIR")
"""Variables that mean something else in a container, which gets none of them unasked."""
OF_THE_RUNTIME = (
    *("PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "USER", "LOGNAME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"),
    *("XDG_DATA_HOME", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT"),
    *("DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", "CONTAINER_HOST", "CONTAINERS_CONF", "REGISTRY_AUTH_FILE"),
)
"""Variables that podman and docker read themselves: the container gets those of these names by the command line."""
REMOVE_SECONDS = 60.0
FAILED = 125
"""Status with which podman and docker tell that they have failed themselves."""
NAME = "container"
"""File in the folder of a trajectory that has a container."""


def found_runtime(name: str) -> str:
    """Return the path of a container runtime; empty if there is none.

    Args:
        name: name or path; empty: podman, or else docker.
    """
    return next((path for one in ([name] if name else RUNTIMES) if (path := shutil.which(one))), "")


@dataclass(frozen=True)
class Container:
    """A container for a trajectory, named like the trajectory's folder.

    Args:
        runtime: path of podman or docker.
        image: image to run.
        options: further options of `run`.
        processes: most processes; 0: any number.
    """

    runtime: str
    image: str
    options: Sequence[str]
    processes: int

    def arguments(
        self, folder: Folder, words: Sequence[str], variables: Mapping[str, str], named: Sequence[str]
    ) -> list[str]:
        """Return the command that runs a command in the container.

        All users of the machine see arguments, so variables are passed by name: the runtime takes their values from its
        own environment (`environment`).

        Args:
            folder: mounted, as far as the program may write it, under its own path.
            words: the command.
            variables: environment of the command.
            named: variables that the user has named: the container gets them, whatever they mean on the machine.
        """
        options = ["--rm", "--name", folder.root.name, "--network", "host", "--workdir", str(folder.work)]
        options += ["--volume", f"{folder.shared}:{folder.shared}"]
        if self.processes:
            options += ["--pids-limit", str(self.processes)]
        if "docker" in Path(self.runtime).name:
            # the worker could not remove files of another user
            options += ["--user", f"{os.getuid()}:{os.getgid()}"]
        for name, value in variables.items():
            if name in named or name not in OF_THE_MACHINE:
                options += ["--env", f"{name}={value}" if name in OF_THE_RUNTIME else name]
        return [self.runtime, "run", *options, *self.options, self.image, *words]


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of podman or docker: variables of this process, and those for the container."""
    own = {name: os.environ[name] for name in OF_THE_RUNTIME if name in os.environ}
    return {name: value for name, value in variables.items() if name not in OF_THE_RUNTIME} | own


async def remove_container(runtime: str, root: Path) -> str:
    """Remove the container of a trajectory, if it has one; return words on a failure.

    With docker a container belongs to a daemon, and ends with no process of this machine's user.
    """
    if not runtime or not (root / NAME).exists():
        return ""
    variables = environment({"AGENT_EXAMPLE_FILE": f"{root}/removed"})
    command = Command([runtime, "rm", "--force", root.name], variables, Path("/"), "AGENT_EXAMPLE_FILE")
    ended = await command.run(REMOVE_SECONDS)
    text = ended.output.text().strip()
    # a container removes itself (--rm), unless it was killed
    is_gone = (ended.reason == "ended" and not ended.status) or "no such container" in text.lower()
    return "" if is_gone else f"the container {root.name} may be left: {text[-500:]}"
