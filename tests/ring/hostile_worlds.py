"""Environments that go to the limits of messages; workers import this file alone."""


class Names:
    """One turn, with as many rewards as `number` says."""

    def __init__(self, number: int) -> None:
        self.number = number

    def reset(self, seed: int, **row: object) -> str:
        """Ask."""
        return "Say something."

    def step(self, answer: str) -> tuple[str, None, bool]:
        """End."""
        return "", None, True

    def get_reward(self) -> dict[str, float]:
        """Give all of them."""
        return {f"reward_{number}": float(number) for number in range(self.number)}


class Talks:
    """Three turns; each answer has a text of `characters` letters."""

    def __init__(self, characters: int) -> None:
        self.text = "abcde" * (characters // 5)

    def reset(self, seed: int, **row: object) -> str:
        """Ask at length."""
        self.turns = 0
        return self.text

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Answer at length."""
        self.turns += 1
        return self.text, float(len(answer)), self.turns == 3
