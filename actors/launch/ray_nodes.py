"""Ray: a placement group with a bundle per node, and in each bundle one process wrapper that runs `actors node`.

    actors launch ──Ray──▶ wrapper per node ──▶ actors node ──▶ actors

`actors launch` stays in the foreground: it asks the wrappers every second, starts again what was killed, also a wrapper
whose Ray node is lost, and passes SIGTERM and SIGINT on. Nothing of a run goes through Ray but these calls. If
`actors launch` dies, Ray ends the wrappers, and the kernel their nodes; the same command resumes the run.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from actors.launch.job import Job
from actors.process.exits import EXIT_DONE, EXIT_START_OVER
from schemas.errors import ConfigError

POLL_SECONDS = 1.0
CALL_SECONDS = 60.0
"""Time limit of a call of a wrapper; a wrapper that does not answer is given up."""
PLACE_SECONDS = 600.0
"""Time limit for Ray to find the nodes, at the start and for a lost one."""
MAX_RESTARTS = 10
"""Most restarts of one node."""
KILLED = tuple(-number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS))
"""Exit codes of a node after which it is started again."""
STOPPED = (EXIT_DONE, EXIT_START_OVER, 128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of orderly ends."""


class NodeProcess:
    """Wrapper of one node's `actors node`, on that node."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Return the address of the node, as Ray knows it."""
        import ray.util

        return str(ray.util.get_node_ip_address())

    def start(self, arguments: Sequence[str], commands: Sequence[str]) -> int:
        """Start `actors node`; return its pid.

        Args:
            arguments: words behind `actors node`.
            commands: shell commands before it; with these `actors` is looked up in PATH, else it is this interpreter's.
        """
        words = [*arguments, "--parent", str(os.getpid())]
        if commands:
            text = "\n".join([*commands, f"exec actors node {shlex.join(words)}"])
            command = ["bash", "-c", text]
        else:
            command = [sys.executable, "-P", "-m", "actors", "node", *words]
        self._process = subprocess.Popen(command)
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code; None while the node runs."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the node."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def describe(job: Job) -> str:
    """Return the placement group and the command of each node as text."""
    lines = [f"placement group, STRICT_SPREAD: {len(job.nodes)} bundles of {_bundle(job)}"]
    names = ",".join(f"ADDRESS{node.rank}" for node in job.nodes)
    lines += [f"actors node {shlex.join(_arguments(job, node.rank, names))}" for node in job.nodes]
    return "\n".join(lines) + "\n"


def follow(job: Job) -> str:
    """Run the job on a Ray cluster, until it ends; return the last words.

    Raises:
        ConfigError: Ray is not installed or not reachable, or has no place for the nodes.
        SystemExit: the run has failed or was stopped; with the exit code of the first such node.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--on ray: Ray is not installed; install grpo-actors[ray]") from error
    if job.config.launch.image:
        raise ConfigError("launch.image: is not used by --on ray; start Ray in its containers, and remove it")
    try:
        # the address is taken from RAY_ADDRESS, else it is the cluster of this machine
        ray.init(address="auto", log_to_driver=True, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--on ray: no cluster is reachable: {error}; set RAY_ADDRESS, or run `ray start`") from error
    nodes = _Nodes(ray, job)
    try:
        code = nodes.run()
    finally:
        nodes.end()
        ray.shutdown()
    if code != EXIT_DONE:
        print(f"the run has ended with {code}; the same command resumes it", file=sys.stderr)
        raise SystemExit(code)
    return f"done; the run is in {job.config.output}"


class _Nodes:
    """Nodes of a run on a Ray cluster."""

    def __init__(self, ray: Any, job: Job) -> None:
        self._ray, self._job = ray, job
        self._group: Any = None
        self._wrappers: list[Any] = []
        self._hosts: list[str] = []
        self._restarts = [0] * len(job.nodes)
        self._codes: list[int | None] = [None] * len(job.nodes)
        self._stopping = 0

    def run(self) -> int:
        """Run until all nodes have ended; return the first exit code that is no 0."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._place()
        output = self._job.config.output
        print(f"nodes: {', '.join(self._hosts)}\nwatch:   actors top {output}")
        print("stop:    Ctrl-C (drains, and saves a checkpoint)\nresume:  the same command", flush=True)
        for rank in range(len(self._wrappers)):
            self._start(rank)
        told = 0
        while None in self._codes:
            if self._stopping and not told:
                told = self._stopping
                self._tell_all(signal.SIGTERM)
            for rank, code in enumerate(self._codes):
                if code is None:
                    self._look(rank)
            # a node that fails ends the run; the others would wait for it
            if any(code not in (None, *STOPPED) for code in self._codes) and not told:
                told = signal.SIGTERM
                self._tell_all(signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        failed = [code for code in self._codes if code not in STOPPED]
        return next((code for code in [*failed, *self._codes] if code), EXIT_DONE)

    def end(self) -> None:
        """Give the nodes back. A node that still runs is killed with its wrapper."""
        for wrapper in self._wrappers:
            self._ray.kill(wrapper)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)

    def _place(self) -> None:
        """Reserve the nodes, make a wrapper in each, and ask for the addresses."""
        from ray.util.placement_group import placement_group

        bundles = [_bundle(self._job)] * len(self._job.nodes)
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        with self._limits("no place for the nodes"):
            self._ray.get(self._group.ready(), timeout=PLACE_SECONDS)
            self._wrappers = [self._wrapper(rank) for rank in range(len(bundles))]
            self._hosts = self._ray.get([one.address.remote() for one in self._wrappers], timeout=PLACE_SECONDS)

    def _wrapper(self, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = _bundle(self._job)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
        return self._ray.remote(NodeProcess).options(**options).remote()

    def _start(self, rank: int) -> None:
        arguments = _arguments(self._job, rank, ",".join(self._hosts))
        self._call(rank, "start", arguments, list(self._job.config.launch.commands))

    def _look(self, rank: int) -> None:
        """Ask for a node's exit code; start the node again if it was killed, or its wrapper is gone."""
        try:
            code = self._call(rank, "poll")
        except self._ray.exceptions.RayError as error:
            if self._stopping:
                self._codes[rank] = 128 + self._stopping
                return
            self._count(rank, f"its wrapper is gone ({type(error).__name__})")
            self._replace(rank)
            return
        if code in KILLED and not self._stopping:
            self._count(rank, f"killed by {signal.Signals(-code).name}")
            self._start(rank)
        elif code is not None:
            self._codes[rank] = code if code >= 0 else 128 - code

    def _replace(self, rank: int) -> None:
        """Make another wrapper for a node, on whichever machine Ray finds for its bundle."""
        deadline = time.monotonic() + PLACE_SECONDS
        while True:
            self._ray.kill(self._wrappers[rank])
            self._wrappers[rank] = self._wrapper(rank)
            with self._limits(f"no place for node {rank}"):
                try:
                    address = self._wrappers[rank].address.remote()
                    self._hosts[rank] = self._ray.get(address, timeout=max(1.0, deadline - time.monotonic()))
                    break
                # the bundle is still that of the lost machine, for as long as Ray has not noticed the loss
                except self._ray.exceptions.ActorDiedError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(POLL_SECONDS)
        self._start(rank)
        # the others connect to the packer's address, which they were told at their start
        if self._job.nodes[rank].has_packer:
            for other, code in enumerate(self._codes):
                if other != rank and code is None:
                    self._restart_elsewhere(other)

    def _restart_elsewhere(self, rank: int) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._call(rank, "signal", int(signal.SIGKILL))
            deadline = time.monotonic() + CALL_SECONDS
            while self._call(rank, "poll") is None and time.monotonic() < deadline:
                time.sleep(0.1)
            self._start(rank)

    def _count(self, rank: int, why: str) -> None:
        """Count a restart.

        Raises:
            ConfigError: there were too many.
        """
        self._restarts[rank] += 1
        print(f"node {rank}: {why}; started again", file=sys.stderr, flush=True)
        if self._restarts[rank] > MAX_RESTARTS:
            raise ConfigError(f"--on ray: node {rank} was started {MAX_RESTARTS} times and ended each time: {why}")

    def _tell_all(self, number: int) -> None:
        for rank, code in enumerate(self._codes):
            if code is None:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._call(rank, "signal", int(number))

    def _call(self, rank: int, method: str, *arguments: Any) -> Any:
        return self._ray.get(getattr(self._wrappers[rank], method).remote(*arguments), timeout=CALL_SECONDS)

    @contextlib.contextmanager
    def _limits(self, what: str) -> Any:
        try:
            yield
        except (self._ray.exceptions.GetTimeoutError, self._ray.exceptions.ActorDiedError) as error:
            raise ConfigError(
                f"--on ray: {what} within {PLACE_SECONDS:.0f} s: the cluster needs {len(self._job.nodes)} nodes with "
                f"{_bundle(self._job)} free each (launch.nodes, launch.gpus_per_node, launch.cpus_per_node)"
            ) from error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = number


def _bundle(job: Job) -> dict[str, float]:
    launch = job.config.launch
    found: dict[str, float] = {"CPU": launch.cpus_per_node or 1}
    return found | ({"GPU": launch.gpus_per_node} if launch.gpus_per_node else {})


def _arguments(job: Job, rank: int, hosts: str) -> list[str]:
    # output_dir is that of here, wherever Ray starts its workers
    given = {override.partition("=")[0] for override in job.overrides}
    places = [] if "output_dir" in given else [f"output_dir={job.config.output}"]
    path: Path = job.path
    return ["--rank", str(rank), "--nodes", hosts, str(path), *places, *job.overrides]
