"""A task with a tool."""

import random


class Calculator:
    """Product of two numbers. Public methods are tools, except `reset` and `get_reward`."""

    def reset(self, index: int, split: str) -> str:
        """Return the question."""
        a, b = random.Random(f"{split} {index}").choices(range(100, 1000), k=2)
        self.columns, self.num_calls = {"answer": a * b}, 0
        return f"What is {a} times {b}?"

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        self.num_calls += 1
        return a * b

    def get_reward(self) -> dict[str, float]:
        """Return the number of calls: measured with weight 0, since the answer earns the reward."""
        return {"calls": float(self.num_calls)}
