"""The control plane: a DEALER in each actor, connected to the packer's ROUTER. Each side has one thread.

`ControlClient` sends a Beat every `bus.beat_interval`, and at once after an urgent report. `ControlServer` answers each
Beat with the newest State published for the peer, and pushes a changed State. Both carry absolute values, so a single
Beat or State may be lost, doubled or late (P6). Sockets are small (8 messages per peer) and never block: a message
without room is dropped.
"""

from bus.control.client import ControlClient, identity_of
from bus.control.server import PUSH_INTERVAL_SECONDS, ControlServer

__all__ = ["PUSH_INTERVAL_SECONDS", "ControlClient", "ControlServer", "identity_of"]
