"""Actors that `actors up` has from a fork server (`actors.ops.up.fork_server`), and the fork servers of a run.

Two fork servers: one for actors that need no torch, and one with torch, forked from the first, for actors that compute
with the model on the CPU. A process that computes on a GPU is started as a program of its own, since CUDA allows no
fork of a process that has used it, and libraries may do so when they are imported.
"""

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import structlog

from actors.ops.device_plan import COMPUTING
from actors.ops.up.fork_server import GO, MAX_BYTES, PYTHON, READY, SERVER, fork_here, num_threads
from actors.process.devices import has_gpu
from schemas.config import RunConfig

log = structlog.get_logger("up")

READY_SECONDS = 120.0
"""Time for the imports of a fork server; without it, actors import by themselves."""
ANSWER_SECONDS = 5.0
"""Time for a fork server to fork; it takes some milliseconds."""
MAX_DEATHS = 3
"""Deaths of a fork server after which actors start without it."""
PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): orphans among the descendants become children of this process."""
FIRST, WITH_TORCH = "first", "with torch"
"""Names of the two servers."""
ALL_KINDS = (
    "actors.cli",
    "actors.runtime",
    "actors.datasets",
    "actors.engines.http.client",
    "actors.engines.http.server",
    "actors.environments.own_examples",
    "actors.inference.loop",
    "actors.learner.checkpoints",
    "actors.ledger",
    "actors.packer.loop",
    "actors.reward.making",
    "actors.rollout.environments",
    "actors.rollout.group",
    "actors.rollout.loop",
    "actors.trainer.loop",
    "actors.models.tokenizer",
    "bus.weights.filesystem",
)
"""Modules of the first fork server: what actors of all kinds import at their start. None imports torch."""


class ForkedProcess:
    """Process that a fork server has forked, as a child of this process. Its members are those of subprocess.Popen."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid, self.args = pid, args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # this process ignores SIGCHLD, so codes are not kept; as subprocess.Popen
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has exited."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """Fork server, started at once.

    Args:
        modules: modules that it imports.
        origin: fork server that forks this one; None: a fork of this process if that has a single thread, else a
            program of its own.
        stderr: descriptor for what it has to say; None: of this process.
    """

    def __init__(self, modules: Sequence[str], origin: "ForkServer | None" = None, stderr: int | None = None) -> None:
        self._channel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.has_been_ready, self._started = False, time.monotonic()
        self.why_dead = ""
        """Why it is of no use any more; empty while it is."""
        # one thread for each library: threads would not live on in a fork
        self._environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        output = sys.stderr.fileno() if stderr is None else stderr
        self.process: ForkedProcess | subprocess.Popen[bytes]
        with far:
            if origin is not None:
                self.process = origin.fork(modules, self._environment, output, (far.fileno(),), serves=True)
            elif num_threads() == 1:
                # this process has imported most of the modules already
                self._environment = dict(os.environ)
                self.process = ForkedProcess(fork_here(far, modules, output), ["fork server"])
            else:
                command = [sys.executable, *PYTHON, SERVER, str(far.fileno()), str(os.getpid()), *modules]
                self.process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=output,
                    env=self._environment,
                    start_new_session=True,
                    pass_fds=(far.fileno(),),
                )

    @property
    def dead(self) -> bool:
        """True once it has ended, is closed, or does not answer."""
        return bool(self.why_dead)

    def is_ready(self) -> bool:
        """Return whether the modules are imported, and the server has not died since."""
        with contextlib.suppress(BlockingIOError):
            while not self.dead:
                # nothing comes unasked but the first message, and the end
                if self._receive(socket.MSG_DONTWAIT) == READY:
                    self.has_been_ready = True
                else:
                    self.why_dead = "it has ended"
        if not self.has_been_ready and not self.dead and time.monotonic() - self._started > READY_SECONDS:
            self.why_dead = f"its modules were not imported within {READY_SECONDS:g} s"
        return self.has_been_ready and not self.dead

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        inherited: Sequence[int] = (),
        serves: bool = False,
    ) -> ForkedProcess:
        """Fork a process, in a session of its own.

        Args:
            command: arguments of `actors`; modules for a fork server.
            environment: all its variables.
            output: descriptor of its stdout and stderr.
            inherited: descriptors that it has under the same numbers.
            serves: True for a fork server.

        Raises:
            OSError: the server has ended, or does not answer within ANSWER_SECONDS, and is dead then; or it has no room
                for another process now, or the request is too long.
        """
        known = self._environment
        request = {
            "command": list(command),
            "variables": {name: value for name, value in environment.items() if known.get(name) != value},
            "removed": [name for name in known if name not in environment],
            "numbers": list(inherited),
            "serves": serves,
        }
        message = json.dumps(request).encode()
        if len(message) >= MAX_BYTES:
            raise OSError(errno.E2BIG, f"a request of {len(message)} bytes for a fork server, {MAX_BYTES - 1} at most")
        reading, writing = os.pipe()
        try:
            _adopt(True)
            pid = self._ask(message, [reading, output, *inherited])
            # not ours if the system refuses adoption: told here, where the caller can start a program instead
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.write(writing, GO)
            return ForkedProcess(pid, [sys.executable, *PYTHON, "actors", *command])
        finally:
            _adopt(False)
            os.close(reading)
            # without GO, a process that was forked all the same exits
            os.close(writing)

    def _ask(self, message: bytes, descriptors: Sequence[int]) -> int:
        """Send a request; return the pid of the answer."""
        try:
            socket.send_fds(self._channel, [message], descriptors)
            self._channel.settimeout(ANSWER_SECONDS)
            answer = self._receive()
            self._channel.settimeout(None)
            if not answer:
                raise ConnectionResetError("the fork server has ended")
        except TimeoutError as error:
            self.close(f"it has not answered within {ANSWER_SECONDS:g} s")
            raise TimeoutError(f"the fork server has not answered within {ANSWER_SECONDS:g} s") from error
        except OSError:
            self.close("it has ended")
            raise
        if not int(answer):
            raise BlockingIOError(errno.EAGAIN, "the fork server has no room for another process")
        return int(answer)

    def close(self, why: str = "it was closed") -> None:
        """End the server, and keep the first reason. The processes that it has forked live on."""
        self.why_dead = self.why_dead or why
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    def _receive(self, flags: int = 0) -> bytes:
        """Return the next message; empty if the server has ended."""
        try:
            return self._channel.recv(MAX_BYTES, flags)
        except ConnectionResetError:
            return b""


def _adopt(adopts: bool) -> None:
    """Make orphans of descendants children of this process, or no longer: a fork server's orphans, and no others."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


class ForkServers:
    """Fork servers of a run: started at once, and again if they have died.

    Args:
        config: configuration of the run.
        kinds: kinds of the actors of this machine.
        stderr: as for `ForkServer`.
    """

    def __init__(self, config: RunConfig, kinds: Sequence[str], stderr: int | None = None) -> None:
        self._stderr = stderr
        self._modules: dict[str, Sequence[str]] = {}
        """Modules of each server; the second is forked from the first."""
        # other systems than Linux can't hand over a child
        if config.up.fork_server and sys.platform == "linux":
            self._modules[FIRST] = ALL_KINDS
            if computing := computing_modules(config, kinds):
                self._modules[WITH_TORCH] = computing
        self._servers: dict[str, ForkServer] = {}
        self._deaths = 0
        self._ended: list[ForkServer] = []
        """Servers whose process may not have exited yet."""
        # now, while this process has a single thread
        for name in self._modules:
            self._running(name)

    def is_ready(self, kind: str) -> bool:
        """Return whether a process of this kind can be started now. Starts a server that is missing."""
        self._ended = [server for server in self._ended if server.process.poll() is None]
        name = self._name(kind)
        return name is None or self._running(name) is not None

    def of(self, kind: str) -> ForkServer | None:
        """Return the server for processes of this kind; None: they are started as programs of their own."""
        name = self._name(kind)
        return None if name is None else self._servers.get(name)

    def close(self) -> None:
        """End all servers."""
        for server in self._servers.values():
            server.close()
        self._ended += self._servers.values()
        self._servers.clear()

    def _name(self, kind: str) -> str | None:
        name = WITH_TORCH if kind in COMPUTING else FIRST
        return name if name in self._modules and self._deaths < MAX_DEATHS else None

    def _running(self, name: str) -> ForkServer | None:
        """Return a server that is ready; None: it starts, or could not be started."""
        server = self._servers.get(name)
        if server is None:
            self._start(name)
            return None
        if server.is_ready():
            return server
        if server.dead:
            server.close()
            self._ended.append(self._servers.pop(name))
            # one that has not come to its first fork would end the same way again
            self._died(server.has_been_ready, server.why_dead)
        return None

    def _start(self, name: str) -> None:
        origin = None if name == FIRST else self._running(FIRST)
        if name != FIRST and origin is None:
            return
        try:
            self._servers[name] = ForkServer(self._modules[name], origin, self._stderr)
        except OSError as error:
            if origin is None or not origin.dead:  # else seen at the next look
                self._died(origin is not None, str(error))

    def _died(self, may_come_back: bool, why: str) -> None:
        """Count the death of a server; after too many, end all."""
        self._deaths = self._deaths + 1 if may_come_back else MAX_DEATHS
        log.warning("fork server has ended", reason=why, deaths=self._deaths, most_deaths=MAX_DEATHS)
        if self._deaths >= MAX_DEATHS:
            self.close()


def computing_modules(config: RunConfig, kinds: Sequence[str]) -> Sequence[str]:
    """Return the modules for actors that compute; empty if they start as programs of their own, as with GPUs."""
    if has_gpu() or not set(kinds) & set(COMPUTING):
        return ()
    modules = ["safetensors.torch", "actors.learner.ranks"]
    if config.inference.engine.loads_model:
        modules += ["actors.learner.learner", "actors.models.loading"]
        modules += ["peft"] if config.model.lora is not None else []
        modules += ["actors.engines.embedded.engine"] if config.inference.engine.type == "embedded" else []
    return modules
