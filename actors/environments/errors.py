"""Failures of environments, each with a name that is counted. No failure becomes a reward."""

from collections.abc import Mapping
from typing import Any

from schemas.messages import EnvironmentFailure


class EpisodeError(RuntimeError):
    """Failure of an episode. Its text names the environment and the worker, and says what to change.

    Args:
        cause: what failed.
        trace: the user's traceback; empty where there is none.
        said: the worker's message about an exception of the user's code; empty where there is none.
        is_bystander: True if the episode has lost its worker through no fault of its own: another one was too late, or
            the worker ended while this episode had no call under way. Played again elsewhere, it may well succeed.
    """

    def __init__(
        self,
        cause: EnvironmentFailure,
        words: str,
        trace: str = "",
        said: Mapping[str, Any] | None = None,
        *,
        is_bystander: bool = False,
    ) -> None:
        super().__init__(words)
        self.cause, self.trace, self.said, self.is_bystander = cause, trace, said or {}, is_bystander
