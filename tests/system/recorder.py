"""Write the payload of every frame that passes a device to a file until SIGTERM: `recorder.py DEVICE FILE`, as root."""

import contextlib
import signal
import socket
import sys
from pathlib import Path

ALL_PROTOCOLS = 0x0003
BUFFER_BYTES = 64 << 20
BEYOND_LIMIT = 33
"""SO_RCVBUFFORCE: root may have more than net.core.rmem_max."""
PACKET_STATISTICS, SOL_PACKET = 6, 263


def record(device: str, path: Path) -> int:
    """Returns 1 when the kernel has lost frames: then a word that is not in the file may have crossed all the same."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as tap:
        tap.setsockopt(socket.SOL_SOCKET, BEYOND_LIMIT, BUFFER_BYTES)
        tap.bind((device, 0))
        tap.settimeout(0.2)
        with path.open("wb") as file:
            while not stopped:
                with contextlib.suppress(TimeoutError, OSError):  # a device that is down says so and goes on later
                    file.write(tap.recv(1 << 17))
        lost = int.from_bytes(tap.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)[4:], sys.byteorder)
    if lost:
        print(f"{lost} frames were lost", file=sys.stderr)
    return bool(lost)


if __name__ == "__main__":
    sys.exit(record(sys.argv[1], Path(sys.argv[2])))
