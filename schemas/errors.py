"""The errors that cross a boundary: between a user and us, or between two processes.

A `ConfigError` is the user's to mend and names the key. A `DecodeError` is a peer's fault: the frame is counted and
dropped, the process lives. A `ProtocolError` means that going on would break the promise of the ledger: the process
stops.
"""


class ConfigError(ValueError):
    """The configuration can't be used. Each problem reads `path.to.key: what is wrong, what is allowed`."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class DecodeError(ValueError):
    """Frames that are not a message of ours. `reason` is one of a few words that a counter can carry as a label."""

    REASONS = ("malformed", "unknown_kind", "unknown_version", "bad_header", "bad_array", "oversize")

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in self.REASONS
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class ProtocolError(RuntimeError):
    """The ledger and the world disagree in a way that no retry mends."""


class PeerRefusedError(RuntimeError):
    """The packer refuses this process (another build, a newer process of the same name) and says why."""


class RunFailedError(RuntimeError):
    """The run can't go on, and starting a process again would not help."""
