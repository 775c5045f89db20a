"""A game of several turns."""

import random


class FindNumber:
    """Hidden number from 1 to 16; the right guess earns 1."""

    def reset(self, seed):
        """Return the first message."""
        self.low, self.high, self.number = 1, 16, random.Random(seed).randint(1, 16)
        return "Find my number, from 1 to 16."

    def step(self, answer):
        """Return the next message, the reward of this turn, and whether the game is over."""
        guess = int(answer) if answer.isdecimal() else 0
        if guess == self.number:
            return "right", 1.0, True
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return f"higher, from {self.low} to {self.high}", 0.0, False
        self.high = min(self.high, guess - 1)
        return f"lower, from {self.low} to {self.high}", 0.0, False
