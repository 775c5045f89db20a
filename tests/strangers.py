"""What somebody does who was not let in on the keys."""

from collections.abc import Sequence
from contextlib import suppress

import zmq


def knock(stranger: "zmq.Socket[bytes]", frames: Sequence[bytes]) -> None:
    """Sends, unless the stranger was refused before it came to that: then its socket leads nowhere any more."""
    with suppress(zmq.Again):
        stranger.send_multipart(frames, zmq.NOBLOCK)
