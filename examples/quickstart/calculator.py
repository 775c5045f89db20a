"""A task with two tools."""

import random

LETTERS = "ABCDEFGH"


class Calculator:
    """Calculator with a number from 1 to 6 under each letter, which only its tools see.

    Public methods are tools, except `reset` and `get_reward`. Every fifth pair of letters is held out from training.
    """

    def reset(self, index: int, split: str) -> str:
        """Return a question, for example `K*D=?`."""
        rng = random.Random(f"{split} {index}")
        self.memory = {letter: rng.randint(1, 6) for letter in LETTERS}
        pairs = [(a, b) for a in LETTERS for b in LETTERS if a != b and is_held_out(a, b) == (split == "eval")]
        (a, b), sign = rng.choice(pairs), rng.choice("+*")
        x, y = self.memory[a], self.memory[b]
        self.columns, self.num_calls = {"answer": x + y if sign == "+" else x * y}, 0
        return f"{a}{sign}{b}=?"

    def add(self, a: str, b: str) -> int:
        """Add the numbers under two letters."""
        self.num_calls += 1
        return self.memory[a] + self.memory[b]

    def multiply(self, a: str, b: str) -> int:
        """Multiply the numbers under two letters."""
        self.num_calls += 1
        return self.memory[a] * self.memory[b]

    def get_reward(self) -> dict[str, float]:
        """Return the number of calls: measured with weight 0, since the answer earns the reward."""
        return {"calls": float(self.num_calls)}


def is_held_out(a: str, b: str) -> bool:
    """Return whether a pair of letters is in no question of training."""
    return (ord(a) + ord(b)) % 5 == 0
