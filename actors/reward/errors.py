"""Errors of groups that could not be scored, and of single calls of functions."""


class RewardError(Exception):
    """A group could not be scored.

    Args:
        reason: `reward_raised`, `reward_timeout`, `reward_invalid`, `reward_lost` or `too_large`.
        detail: text with the function's name.
        origin: function, error type, and place in the user's file, to tell errors apart; empty for other reasons.
    """

    def __init__(self, reason: str, detail: str, origin: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.reason, self.origin = reason, origin


class LateError(Exception):
    """A call in a worker process took longer than `reward.timeout`."""


class WorkerTracebackError(Exception):
    """Traceback of an exception in a worker process, as text; the cause of the RewardError about the exception."""

    def __str__(self) -> str:
        return f"in the worker process:\n{self.args[0]}"
