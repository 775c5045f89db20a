"""Failures of environments, each with a name that is counted. No failure becomes a reward."""

from schemas.messages import EnvironmentFailure


class EpisodeError(RuntimeError):
    """Failure of an episode. Its text names the environment and the worker, and says what to change.

    Args:
        cause: what failed.
        trace: the user's traceback; empty where there is none.
    """

    def __init__(self, cause: EnvironmentFailure, words: str, trace: str = "") -> None:
        super().__init__(words)
        self.cause, self.trace = cause, trace
