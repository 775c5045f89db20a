"""Failures of environments, each with a name that is counted. No failure becomes a reward."""

from typing import Literal

Cause = Literal["env_load", "env_reset", "env_step", "env_score", "env_timeout", "env_lost"]
"""Part that failed: loading the user's code, one of its functions, a function's time limit, or the worker process."""


class EpisodeError(RuntimeError):
    """Failure of an episode. Its text names the environment and the worker, and says what to change.

    Args:
        cause: what failed.
        trace: the user's traceback; empty where there is none.
    """

    def __init__(self, cause: Cause, words: str, trace: str = "") -> None:
        super().__init__(words)
        self.cause, self.trace = cause, trace
