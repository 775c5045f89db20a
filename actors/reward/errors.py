"""The error of a group that could not be scored."""


class RewardError(Exception):
    """A group could not be scored.

    Args:
        reason: `reward_raised`, `reward_timeout` or `reward_invalid`.
        detail: text with the function's name.
        origin: function, error type, and place in the user's file, to tell errors apart; empty for other reasons.
    """

    def __init__(self, reason: str, detail: str, origin: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.reason, self.origin = reason, origin
