"""Job: a run with its nodes, as each kind of cluster gets it."""

import hashlib
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from actors.launch.placement import Node, place
from schemas.config import RunConfig, load_config
from schemas.errors import ConfigError

CALL_SECONDS = 120.0
"""Longest call of a program of a cluster that only takes the job in."""
PROVISION_SECONDS = 7200.0
"""Longest call of a program that first rents the machines."""


@dataclass(frozen=True)
class Program:
    """Program of a kind of cluster that takes jobs in.

    Args:
        target: kind of cluster, as `--on` names it.
        seconds: limit of a call.
        missing: what to do if the program is not there.
        failed: text for another exit code than 0; `{words}` stands for what the program has said.
    """

    target: str
    seconds: float
    missing: str
    failed: str

    def call(self, command: list[str], text: str | None = None) -> str:
        """Run the program with an input, and return its output; without `text` both are the terminal's.

        Raises:
            ConfigError: the program is not there, does not end in time, or ends with another exit code than 0.
        """
        program, where = command[0], f"--on {self.target}"
        try:
            done = subprocess.run(
                command, input=text, capture_output=text is not None, text=True, check=False, timeout=self.seconds
            )
        except OSError as error:
            raise ConfigError(f"{where}: {program} can't be started: {error.strerror}; {self.missing}") from error
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"{where}: {program} has not ended within {self.seconds:g} s; look whether it has taken the job, or "
                "give it the output of --dry-run by hand"
            ) from error
        if done.returncode:
            raise ConfigError(f"{where}: {self.failed.format(words=(done.stderr or '').strip())}")
        return done.stdout or ""


@dataclass(frozen=True)
class Job:
    """Run that a cluster is asked to run.

    Args:
        path: absolute path of run.yaml.
        overrides: overrides of the configuration.
        config: the configuration with these overrides.
        nodes: nodes with their actors; hosts are `node-0` and so on, since the cluster has not chosen yet.
    """

    path: Path
    overrides: tuple[str, ...]
    config: RunConfig
    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, path: Path, overrides: list[str]) -> "Job":
        """Return the job of a run.yaml.

        Raises:
            ConfigError: the configuration can't be used, the nodes do not fit the processes, or the bus would not be
                encrypted between nodes.
        """
        config = load_config(path, overrides)
        nodes = tuple(place(config, [f"node-{rank}" for rank in range(config.launch.nodes)]))
        idle = [str(node.rank) for node in nodes if not node.actors]
        problems = []
        if idle:
            problems.append(
                f"launch.nodes: no process is left for node {', '.join(idle)}; lower it, or raise up.rollout"
            )
        if len(nodes) > 1 and not (config.bus.keys or config.bus.allow_plaintext):
            problems.append(
                "bus.keys: is required with launch.nodes above 1 (`actors keys new DIR` makes some, in a folder that "
                "all nodes see), or set bus.allow_plaintext: true on a network that only you can reach"
            )
        if problems:
            raise ConfigError(*problems)
        return cls(path, tuple(overrides), config, nodes)

    @property
    def name(self) -> str:
        """Name for schedulers that allow lower-case letters, digits and `-` alone."""
        return self.name_of(self.config)

    @staticmethod
    def name_of(config: RunConfig) -> str:
        """Return the name of a run for such schedulers: it begins with a letter, and ends in a digest of `output_dir`.

        Two runs of one run.yaml would replace each other under the same name.
        """
        name = "".join(c if c.isalnum() else "-" for c in config.name.lower()).strip("-")
        digest = hashlib.sha256(config.output_dir.encode()).hexdigest()[:6]
        return f"{name if name[:1].isalpha() else f'run-{name}'.rstrip('-')}-{digest}"

    def memory_gib(self) -> float:
        """Return `launch.memory_per_node` in GiB."""
        memory = self.config.launch.memory_per_node
        return int(memory[:-2]) / (1024 if memory.endswith("Mi") else 1)

    def node_command(self, rank: str, nodes: str, program: str, path: PurePath | None = None) -> str:
        """Return the shell command of a node.

        Args:
            rank: shell word for the number of the node, as `"$SLURM_NODEID"`.
            nodes: shell word for the list of all nodes.
            program: shell words that start `actors`.
            path: run.yaml on the nodes; None: as here.
        """
        words = [shlex.quote(str(self.path if path is None else path)), *map(shlex.quote, self.overrides)]
        return f"{program} node --rank {rank} --nodes {nodes} {' '.join(words)}"

    def program(self) -> str:
        """Return the shell words that start `actors` on a node that shares this machine's disk.

        Without commands that prepare an environment it is this very interpreter.
        """
        if self.config.launch.commands:
            return "actors"
        return f"{shlex.quote(sys.executable)} -P -m actors"


def restarting(command: str) -> str:
    """Return shell lines that start a command again when it was killed, and exit as batch systems should see it.

    The end of a run and an orderly stop are 0, so that no batch system kills the other nodes while they drain.
    """
    return "\n".join(
        [
            "# handlers, so that bash waits for the node to drain; the node gets each signal itself",
            "trap : TERM USR1",
            "for attempt in 1 2 3 4 5 6 7 8 9 10; do",
            f"  {command} &",
            "  node=$!",
            "  while kill -0 $node 2>/dev/null; do wait $node; done",
            "  wait $node",
            "  code=$?",
            "  case $code in",
            "    0 | 75 | 143) exit 0 ;;",
            '    134 | 135 | 137 | 139) echo "node ended with $code, started again" >&2; sleep 1 ;;',
            "    *) exit $code ;;",
            "  esac",
            "done",
            "exit $code",
        ]
    )


def script_with_run_yaml(job: Job, rank: str, nodes: str) -> str:
    """Return the shell script of a node that does not share this machine's disk: it brings run.yaml along.

    Args:
        job: run with its nodes.
        rank: shell word for the number of the node.
        nodes: shell word for the list of all nodes.
    """
    text = job.path.read_text(encoding="utf-8")
    end = "END_OF_RUN_YAML"
    assert end not in text
    lines = [*job.config.launch.commands, f"cat > run.yaml <<'{end}'", text.removesuffix("\n"), end]
    command = job.node_command(rank, nodes, "actors", PurePath("run.yaml"))
    return "\n".join([*lines, restarting(command), ""])


class _Dumper(yaml.SafeDumper):
    """YAML writer without anchors; texts of several lines stay as they are."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: equal parts are written twice."""
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def yaml_text(*documents: Any) -> str:
    """Return plain values as YAML documents."""
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)
    return text
