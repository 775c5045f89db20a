"""Another run on this machine, which has the ports of a process that has just died, and sends to its successor.

On tcp without keys ports come again: a foreign packer answers heartbeats, foreign receivers swallow groups and batches,
and foreign senders reach whoever binds a port next. Here all of that happens on purpose, with real sockets.
"""

import contextlib
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import zmq

from bus import codec
from schemas.messages import Message, ObserverDirective
from tests.schemas.messages.examples import DIRECTIVE_FIELDS, EXAMPLES

RUN = "another run"
SECONDS = 0.6
"""For which the ports are taken: less than a packer waits for its own."""
LISTENING = "0A"
COPIES = 3


def ports_of(pid: int) -> set[int]:
    """The tcp ports on which a process listens."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(str(descriptor.readlink()))
    found = set()
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        words = line.split()
        if words[3] == LISTENING and f"socket:[{words[9]}]" in sockets:
            found.add(int(words[1].rpartition(":")[2], 16))
    return found


def stand_in(control: int, ports: Collection[int]) -> int:
    """Bind the ports of a dead process for a while: answer heartbeats, swallow everything else.

    Args:
        control: the port of the packer's control socket.
        ports: those of the dead process.

    Returns:
        messages that came.
    """
    came, until = 0, time.monotonic() + SECONDS
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(_bound(port, zmq.ROUTER if port == control else zmq.PULL)) for port in ports]
        while time.monotonic() < until:
            for socket in bound:
                while socket.poll(10):
                    came += 1
                    frames = socket.recv_multipart()
                    if socket.type == zmq.ROUTER:
                        directive = ObserverDirective(
                            **DIRECTIVE_FIELDS | {"run": RUN, "term": 99, "phase": "done"}, progress={}
                        )
                        socket.send_multipart([frames[0], *codec.encode(directive)])
    return came


def send_strange_messages(ports: Collection[int]) -> None:
    """Send groups, scored groups and batches of the other run to all of these ports."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            socket: zmq.Socket[bytes] = stack.enter_context(zmq.Context.instance().socket(zmq.PUSH))
            socket.setsockopt(zmq.LINGER, 500)
            socket.connect(f"tcp://127.0.0.1:{port}")
            for message in _strange_messages():
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart([b"stranger", *codec.encode(message)], zmq.NOBLOCK)


def _strange_messages() -> Iterator[Message]:
    for message in EXAMPLES.values():
        if message.kind in ("rollout_group", "scored_group", "step_batch"):
            yield from [message.model_copy(update={"run": RUN})] * COPIES


@contextlib.contextmanager
def _bound(port: int, kind: int) -> "Iterator[zmq.Socket[bytes]]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    deadline = time.monotonic() + SECONDS / 2
    try:
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
                break
            except zmq.ZMQError:  # the successor was faster, or the kernel still closes
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        yield socket
    finally:
        socket.close(0)
