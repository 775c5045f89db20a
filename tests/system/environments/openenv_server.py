"""An OpenEnv server on a free port, which it prints: `python openenv_server.py KIND SESSIONS`."""

import socket
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class EchoAction(Action):
    """A message of at most twenty letters."""

    message: str = Field(max_length=20)


class EchoObservation(Observation):
    """The message, as in the package's own template."""

    echoed_message: str = ""
    message_length: int = 0


class Echo(Environment):
    """The template's environment, with an end and a fault."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> EchoObservation:
        """Say what came with the reset."""
        return EchoObservation(echoed_message=f"{seed} {sorted(row.items())}", reward=0.0)

    def step(self, action: EchoAction, timeout_s: float | None = None, **more: Any) -> EchoObservation:
        """Echo; the reward is a tenth for each letter."""
        if action.message == "boom":
            raise KeyError("no such key")
        length, done = len(action.message), action.message == "bye"
        return EchoObservation(echoed_message=action.message, message_length=length, reward=length * 0.1, done=done)

    def num_tasks(self, split: str) -> int:
        """Count the tasks of a split."""
        return {"train": 7, "test": 2}[split]

    @property
    def state(self) -> State:
        """Nothing is kept."""
        return State()


class Adder(MCPEnvironment):
    """An environment of tools, whose steps have rewards."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("adder")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Observation:
        """Say what to do."""
        return Observation(metadata={"task": "add"})

    def step(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        """Reward each call that the tool takes."""
        return self._rewarded(super().step(action, timeout_s, **more))

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        """Reward each call that the tool takes."""
        return self._rewarded(await super().step_async(action, timeout_s, **more))

    def _rewarded(self, observation: Observation) -> Observation:
        if isinstance(observation, CallToolObservation) and observation.error is None:
            observation.reward = 0.5
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        """Nothing is kept."""
        return State()


def main() -> None:
    """Serve."""
    kind, sessions = sys.argv[1], int(sys.argv[2])
    classes = (Echo, EchoAction, EchoObservation) if kind == "echo" else (Adder, CallToolAction, CallToolObservation)
    app = create_fastapi_app(*classes, max_concurrent_envs=sessions, env_name=kind)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
