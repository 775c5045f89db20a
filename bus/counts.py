"""What went over an edge, as plain numbers. Telemetry reads them when it is scraped; the bus knows no metrics."""

from collections import Counter
from dataclasses import dataclass, field

from schemas.errors import DecodeError


@dataclass
class EdgeCounts:
    """Messages, bytes, frames dropped by reason, and seconds spent blocked, since the process started."""

    edge: str
    num_messages: int = 0
    num_bytes: int = 0
    blocked_seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(DecodeError.REASONS, 0)))
    next_drop_log: float = 0.0

    def add(self, size: int) -> None:
        """One message of `size` bytes."""
        self.num_messages += 1
        self.num_bytes += size
