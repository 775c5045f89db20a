"""Examples of an environment that makes its own: a number and a split, of which the environment makes the prompt."""

from actors.datasets.base import Example
from schemas.config.data import Split


class Numbered:
    """Numbers from 0.

    Args:
        split: `train` or `eval`.
        num_examples: how many; None for no end.
    """

    def __init__(self, split: Split, num_examples: int | None) -> None:
        self._split, self.num_examples = split, num_examples

    def example(self, index: int) -> Example:
        """Return example `index`, without a prompt."""
        return Example("", {"index": index, "split": self._split}, is_known_by_columns=True)
