"""A game of several turns."""

import random


class FindNumber:
    """Hidden number in a range of 28; the right guess earns 1. Every fifth game is held out from training."""

    def reset(self, index, split):
        """Return the first message."""
        pool = [(a, a + 27, n) for a in range(1, 6) for n in range(a, a + 28) if (split == "eval") == (not (a + n) % 5)]
        self.low, self.high, self.number = random.Random(index).choice(pool)
        return f"from {self.low} to {self.high}"

    def step(self, answer):
        """Return the range that is left, the reward of this turn, and whether the game is over."""
        guess = int(answer) if answer.isdecimal() else 0
        if guess == self.number:
            return "right", 1.0, True
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return f"from {self.low} to {self.high}", 0.0, False
