"""An Open Reward Standard server on a free port, which it prints: `python ors_server.py`."""

import socket

import uvicorn
from ors import Environment, Server, Split, TextBlock, ToolOutput, tool
from pydantic import BaseModel


class Number(BaseModel):
    """Argument of the tools."""

    value: int


class Sums(Environment):
    """Sums: a hint costs, the answer finishes."""

    @classmethod
    def list_splits(cls) -> list[Split]:
        """Two."""
        return [Split(name="main", type="train"), Split(name="held_out", type="test")]

    @classmethod
    def list_tasks(cls, split: str) -> list[dict[str, int]]:
        """Count on."""
        return [{"n": n} for n in range({"main": 5, "held_out": 2}[split])]

    def get_prompt(self) -> list[TextBlock]:
        """Ask."""
        return [TextBlock(text=f"What is {self.task_spec['n']} + 1?")]

    @tool
    def hint(self, number: Number) -> ToolOutput:
        """Get a hint."""
        if number.value == 13:
            raise KeyError("no such key")
        return ToolOutput(blocks=[TextBlock(text="x" * 10_000)], reward=-0.25)

    @tool
    def answer(self, number: Number) -> ToolOutput:
        """Answer."""
        right = number.value == self.task_spec["n"] + 1
        return ToolOutput(blocks=[TextBlock(text="Thanks.")], reward=float(right), finished=True)


def main() -> None:
    """Serve."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(Server([Sums]).app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
