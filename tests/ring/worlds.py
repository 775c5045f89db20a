"""Environments for runs of the whole ring; workers import this file alone."""

import os
from pathlib import Path


class Letters:
    """Three turns; each earns the share of letters before `m`."""

    def __init__(self, fails_at: int = -1) -> None:
        self._fails_at = fails_at

    def reset(self, seed: int, **row: object) -> str:
        """Ask for letters."""
        self.columns = {"asked": seed % 7}
        self.turns = 0
        return f"Write letters {seed % 7}."

    def step(self, answer: str) -> tuple[str, float, bool, dict[str, int]]:
        """Count."""
        if self.turns == self._fails_at:
            raise ValueError("the board is broken")
        self.turns += 1
        reward = sum(letter < "m" for letter in answer) / max(1, len(answer))
        return "More.", reward, self.turns == 3, {"turn": self.turns}

    def get_reward(self) -> dict[str, float]:
        """Say how many turns there were."""
        return {"turns_taken": float(self.turns)}


class DiesOnce(Letters):
    """Ends its process in the first episode of the run; the file in `folder` tells."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._told = Path(folder) / "died"

    def step(self, answer: str) -> tuple[str, float, bool, dict[str, int]]:
        """Die once."""
        if not self._told.exists():
            self._told.touch()
            os._exit(3)
        return super().step(answer)


class FailsHalf(Letters):
    """Fails in the second turn of every other episode."""

    number = 0

    def reset(self, seed: int, **row: object) -> str:
        """Count the episodes of the process."""
        FailsHalf.number += 1
        self._fails_at = 1 if FailsHalf.number % 2 else -1
        return super().reset(seed, **row)
