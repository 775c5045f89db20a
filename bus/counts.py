"""Counters of an edge, as plain numbers. Telemetry reads the counters at each scrape; the bus knows no metrics."""

from collections import Counter
from dataclasses import dataclass, field

from schemas.errors import DecodeError

REFUSALS = {
    "plaintext": "the peer speaks plaintext, and this socket is encrypted; is bus.keys set there?",
    "wrong_server_key": "the peer expects another key of this socket: its bus.keys differ, or its address is old",
    "unlisted_key": "the peer's key is not in client.public of bus.keys",
    "incomplete": "the peer left, or was silent, before it had shown a key; peers that speak plaintext may do so too",
    "malformed": "the peer's bytes are no CURVE handshake",
    "not_accepted": "this process has no descriptors left for a connection; raise its hard limit (ulimit -Hn)",
}
"""Reasons to refuse a connection: label of the counter → text for the log."""
DROP_REASONS = (*DecodeError.REASONS, "foreign_run", "old_term")
"""Reasons to drop frames: no valid message (`DecodeError`), or not for this process (`bus.fence`)."""


@dataclass
class EdgeCounts:
    """Counters of an edge since the process started: messages, bytes, drops and refusals by reason."""

    edge: str
    num_messages: int = 0
    num_bytes: int = 0
    # all reasons are there from the start as 0: a counter that appears with 1 shows no rise in Prometheus
    dropped: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(DROP_REASONS, 0)))
    next_drop_log: float = 0.0
    """Earliest time (`time.monotonic`) of the next log line about drops."""
    refused: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REFUSALS, 0)))
    next_refusal_log: float = 0.0
    """Earliest time (`time.monotonic`) of the next log line about refusals."""

    def add(self, size: int) -> None:
        """Count a message of `size` bytes."""
        self.num_messages += 1
        self.num_bytes += size
