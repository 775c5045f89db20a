"""Worker processes of this machine: started, named to their sockets, and killed with everything below them."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, Self

import structlog
import zmq
import zmq.asyncio

from actors.environments import worker
from actors.environments.output import PrintedLines
from actors.environments.place import End, OnFrame
from actors.environments.spec import EnvironmentSpec
from actors.environments.worker.guard import TOO_MANY_PROCESSES
from actors.environments.worker.processes import below, kill_all, kill_left, snapshot

log = structlog.get_logger("environments")

PROGRAM = Path(worker.__file__).parent / "__main__.py"
KILL_SECONDS = 15.0
"""Time for a guard to kill everything below it, before this process does it."""
FOR_THE_INTERPRETER = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}
"""Variables for the worker alone. The first is as -P, which Python before 3.11 does not know.

The last gives sets one order in all workers: examples that are made of sets would otherwise differ within a group.
"""
READ_BYTES = 1 << 16


class LocalProcess:
    """A worker process of this machine, from its start to its end."""

    def __init__(self, place: "LocalPlace", spec: EnvironmentSpec, name: str, identity: bytes) -> None:
        self._place, self._spec, self._name, self._identity = place, spec, name, identity
        self._process: asyncio.subprocess.Process | None = None
        self._is_ended = False
        self.has_spoken = False
        """True once a frame of the worker has come: its guard runs."""
        self.seen: dict[int, int] = {}
        """Processes at the last look, with their starts; the guard is one of them."""

    @property
    def pid(self) -> int:
        """Id of the process, which is the worker's guard; 0 if it has not started."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_running(self) -> bool:
        """Whether the process has started and not ended."""
        return self._process is not None and self._process.returncode is None

    async def run(self) -> End:
        """Start the process, and wait for its end. Everything below the process has then ended too."""
        spec, limit = self._spec, self._spec.limits.processes
        arguments = [str(PROGRAM), self._place.address, self._identity.decode(), str(os.getpid()), str(limit)]
        variables = {**os.environ, **spec.variables}
        ours = {name: value for name, value in FOR_THE_INTERPRETER.items() if name not in variables}
        async with _printed() as streams:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    spec.python or sys.executable,
                    *arguments,
                    *ours,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=streams["stdout"].write_end,
                    stderr=streams["stderr"].write_end,
                    cwd=spec.directory or None,
                    env=variables | ours,
                    start_new_session=True,
                )
            except OSError as error:
                return End(f"can't be started: {error}")
            printing = [self._place.start(self._print(name, stream)) for name, stream in streams.items()]
            try:
                code = await self._until_over(self._process)
            finally:
                await asyncio.wait(printing, timeout=1.0)
        if code == TOO_MANY_PROCESSES:
            return End(f"was killed: it had more than {limit} processes (limit of processes)", "processes")
        return End(f"was killed by signal {-code}" if code < 0 else f"ended with status {code}")

    async def _until_over(self, process: asyncio.subprocess.Process) -> int:
        """Wait for the end of the process, and return its code."""
        if self._is_ended:
            # asked for while it was being started
            self.kill_now()
        try:
            return await process.wait()
        finally:
            # after a cancellation
            self.kill_now()
            if process.returncode is not None:
                kill_left(process.pid, self.seen)

    async def send(self, data: bytes) -> None:
        """Send a frame; one for a worker that is gone is dropped."""
        await self._place.send(self._identity, data)

    def kill(self) -> None:
        """Let the guard kill the worker with everything below it; do it here if there is no guard, or it takes long."""
        self._is_ended = True
        if self._process is None or not self.is_running:
            return
        if not self.has_spoken:
            # there may be no guard yet
            self.kill_now()
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
            # the user's code may have stopped it
            self._process.send_signal(signal.SIGCONT)
        asyncio.get_running_loop().call_later(KILL_SECONDS, self.kill_now)

    def kill_now(self) -> None:
        """Kill the guard and the worker with everything below them, if they have not ended."""
        self._is_ended = True
        if self.is_running:
            kill_all(self.pid, self.seen)

    async def _print(self, name: str, stream: "_Stream") -> None:
        """Log what the worker prints."""
        stream.close_write_end()
        lines = PrintedLines()
        while data := await stream.reader.read(READ_BYTES):
            for text in lines.add(data):
                log.info(text, **self._spec.labels, worker=self._name, stream=name)
        for text in lines.end():
            log.info(text, **self._spec.labels, worker=self._name, stream=name)


class LocalPlace:
    """Worker processes of this machine, and the socket that they connect to.

    Args:
        spec: what the workers run; None: each process is given its own.
        on_frame: called with each frame of a worker.
    """

    def __init__(self, spec: EnvironmentSpec | None, on_frame: OnFrame) -> None:
        self._spec, self._on_frame = spec, on_frame
        self._processes: dict[bytes, LocalProcess] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        """Bind the socket."""
        # a short path: addresses of ipc have at most 107 bytes
        self._folder = tempfile.TemporaryDirectory(prefix="env-", ignore_cleanup_errors=True)
        self.address = f"ipc://{self._folder.name}/w"
        # the context of the process: ending one of our own waits without a limit for the threads of libzmq
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(self.address)
        self.start(self._receive())
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the socket. All processes have ended."""
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._socket.close(0)
            self._folder.cleanup()

    def process(self, name: str, identity: bytes, spec: EnvironmentSpec | None = None) -> LocalProcess:
        """Return a process that has not been started.

        Args:
            name: name of the worker, which its successors have too.
            identity: identity of this process on the socket.
            spec: what this worker runs; None: what all run.
        """
        runs = spec or self._spec
        assert runs is not None
        # a process is forgotten by `look` once it has ended
        self._processes[identity] = LocalProcess(self, runs, name, identity)
        return self._processes[identity]

    async def send(self, identity: bytes, data: bytes) -> None:
        """Send a frame to a worker."""
        with contextlib.suppress(zmq.ZMQError):  # the worker is gone, which fails its calls
            await self._socket.send_multipart([identity, data])

    async def look(self) -> None:
        """Note the processes below each worker, for the case that its guard is killed."""
        # one search for all, in a thread: it takes milliseconds for each thousand processes of the machine
        processes = await asyncio.to_thread(snapshot)
        for identity, one in list(self._processes.items()):
            if one.is_running:
                # with those of the last look: they are no longer below a worker that has just ended
                before = [n for n, started in one.seen.items() if n in processes and processes[n].started == started]
                one.seen = below([one.pid, *before], processes)
            elif one.pid:
                del self._processes[identity]

    async def _receive(self) -> None:
        while True:
            identity, data = (await self._socket.recv_multipart())[:2]
            if (one := self._processes.get(identity)) is not None:
                one.has_spoken = True
            self._on_frame(identity, data)

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine in the background, until the end of the place."""
        task = asyncio.get_running_loop().create_task(work)
        # asyncio itself holds only a weak reference to a running task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Stream:
    """Pipe from a worker. Of our own: asyncio's wait for a process also waits for all who hold its pipes."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, write_end: int) -> None:
        self.reader, self._transport, self.write_end = reader, transport, write_end

    @classmethod
    async def open(cls) -> Self:
        """Return a new pipe."""
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        pipe = os.fdopen(read_end, "rb", 0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        return cls(reader, transport, write_end)

    def close_write_end(self) -> None:
        """Close our copy of the worker's end, so that the stream ends with the worker."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        """Close both ends."""
        self.close_write_end()
        self._transport.close()


@contextlib.asynccontextmanager
async def _printed() -> AsyncIterator[dict[str, _Stream]]:
    """Open the streams of a worker by name, and close them."""
    streams = {name: await _Stream.open() for name in ("stdout", "stderr")}
    try:
        yield streams
    finally:
        for stream in streams.values():
            stream.close()
