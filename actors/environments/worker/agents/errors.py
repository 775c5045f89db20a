"""Failures of agents. Each has the cause under which it is counted; none becomes a reward."""

from typing import ClassVar


class AgentError(RuntimeError):
    """Failure of an agent that is a program."""

    cause: ClassVar[str]
    """Cause under which the failure is counted."""


class AgentStartError(AgentError):
    """Failure before the program runs: a file that can't be copied, a placeholder without a column."""

    cause = "env_reset"


class AgentExitError(AgentError):
    """End of the program that is no result: a status, a signal, too many processes."""

    cause = "agent_exit"


class AgentTimeoutError(AgentError):
    """Program that was killed at its limit of time."""

    cause = "env_timeout"


class AgentRewardError(AgentError):
    """Reward file that holds no reward."""

    cause = "env_score"
