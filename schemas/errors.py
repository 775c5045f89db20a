"""Errors between a user and the program, and between two processes.

A `ConfigError` names the key for the user to change. A `DecodeError` is a peer's fault: the message is counted and
dropped, and the process continues. After a `ProtocolError` any further step would break the ledger's promise that each
group is trained exactly once or dropped for a counted reason, so the process stops.
"""


class ConfigError(ValueError):
    """Error of the configuration, the data or the model, for the user to correct.

    Each problem reads `path.to.key: problem, allowed values`. An actor exits with code 2 and the run ends.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class DecodeError(ValueError):
    """Error of received frames that are no valid message.

    Args:
        reason: one of REASONS, the label of the counter.
        detail: description for the log.
    """

    # a fixed set: a peer must not be able to create labels of a metric
    REASONS = (
        "malformed",
        "unknown_kind",
        "unknown_version",
        "unknown_table",
        "bad_header",
        "bad_array",
        "oversize",
        "unfinished",
    )

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in self.REASONS
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class ProtocolError(RuntimeError):
    """Contradiction between the ledger and the peers or the disk that no retry can resolve. The process stops."""


class PeerRefusedError(RuntimeError):
    """Refusal of this process by the packer (another build, another configuration), with the reason."""


class NameTakenError(PeerRefusedError):
    """Refusal of this process by the packer because a living process has the same name (exit code 4)."""


class RunFailedError(RuntimeError):
    """Failure of the run that a restart of the process would not help (exit code 3)."""


class MessageTooLargeError(RunFailedError):
    """Message beyond the limits of every receiver (schemas.limits), found by the sender.

    For a group the attempt fails as `too_large` and the run continues; otherwise the run fails.
    """
