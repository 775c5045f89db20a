"""The control plane: a DEALER in each actor, connected to the packer's ROUTER. Each side has one thread.

`ControlClient` sends a heartbeat every `bus.beat_interval`, and at once after an urgent report. `ControlServer` answers
each heartbeat with the newest directive published for the peer, and pushes a changed directive. Both carry absolute
values, so a single heartbeat or directive may be lost, doubled or late (P6). Sockets are small (8 messages per peer)
and never block: a message without room is dropped.
"""

from bus.control.client import ControlClient, identity_of
from bus.control.repeats import Repeated
from bus.control.server import PUSH_INTERVAL_SECONDS, ControlServer

__all__ = ["PUSH_INTERVAL_SECONDS", "ControlClient", "ControlServer", "Repeated", "identity_of"]
