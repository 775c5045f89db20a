"""Agents of the tests in a worker: the adapter as an environment that drives, with an address and key of its own."""

from typing import Any

from actors.environments.adapters import agent_command

KEY = "key-of-the-session"


class Program(agent_command.Env):
    """An agent that is a program."""

    async def run(self, example: dict[str, Any], policy: object) -> dict[str, float | None] | None:  # type: ignore[override]
        """Run it for a session that nobody serves."""
        return await super().run(example, "http://127.0.0.1:9/s/key/v1", KEY)
