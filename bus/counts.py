"""What went over an edge, as plain numbers. Telemetry reads them when it is scraped; the bus knows no metrics."""

from collections import Counter
from dataclasses import dataclass, field

from schemas.errors import DecodeError

REFUSALS = {
    "plaintext": "no key: it speaks plaintext, and this socket is encrypted",
    "wrong_server_key": "it knows another key for this socket than ours: other keys, or an old address",
    "unlisted_key": "its key is not in client.public of bus.keys",
    "incomplete": "it left, or said nothing, before it had shown a key; who speaks plaintext may see that first",
    "malformed": "what it sent is no handshake",
}
"""Why a peer was not let in, in words."""


@dataclass
class EdgeCounts:
    """Messages, bytes, frames dropped and peers refused by reason, and seconds blocked, since the process started."""

    edge: str
    num_messages: int = 0
    num_bytes: int = 0
    blocked_seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(DecodeError.REASONS, 0)))
    next_drop_log: float = 0.0
    refused: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REFUSALS, 0)))
    next_refusal_log: float = 0.0

    def add(self, size: int) -> None:
        """One message of `size` bytes."""
        self.num_messages += 1
        self.num_bytes += size
