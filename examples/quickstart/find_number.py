"""A game of several turns."""

import random


class FindNumber:
    """Hidden number from 1 to 28; the right guess earns 1. Nothing but the answers tells games apart."""

    def reset(self, index, split):
        """Return the first message."""
        self.low, self.high = 1, 28
        self.number = random.Random(f"{split} {index}").randint(1, 28)
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
