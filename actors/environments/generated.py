"""Environments whose examples are made up: endless in train, and strictly held out in eval.

Whether a prompt belongs to eval is a property of the prompt itself (a hash of it), so that no train example can ever
equal an eval one, however long the run.
"""

import random
import zlib
from collections.abc import Callable

from actors.environments.base import Example
from schemas.config.data import ArithmeticConfig, ReverseTextConfig, Split

HELD_OUT_OF = 16
"""One prompt in so many belongs to eval."""
MAX_DRAWS = 10_000


class Generated:
    """Draws until the prompt belongs to the split; the draw is seeded by (seed, split, index) alone."""

    num_examples: int | None = None

    def __init__(self, draw: Callable[[random.Random], Example], split: Split, seed: int) -> None:
        self._draw, self._split, self._seed = draw, split, seed

    def example(self, index: int) -> Example:
        """Example `index` of the split."""
        rng = random.Random(f"{self._seed} {self._split} {index}")
        for _ in range(MAX_DRAWS):
            example = self._draw(rng)
            held_out = zlib.crc32(str(example.prompt).encode()) % HELD_OUT_OF == 0
            if held_out == (self._split == "eval"):
                return example
        raise ValueError(
            f"no {self._split} example in {MAX_DRAWS} draws: the environment has too few different prompts"
        )


class ReverseText(Generated):
    """`abcd=` is to be answered with `dcba`."""

    def __init__(self, config: ReverseTextConfig, split: Split, seed: int) -> None:
        def draw(rng: random.Random) -> Example:
            length = rng.randint(config.min_letters, config.max_letters)
            word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length))
            return Example(prompt=f"{word}=", columns={"answer": word[::-1]})

        super().__init__(draw, split, seed)


class Arithmetic(Generated):
    """`12+30=` is to be answered with `42`."""

    def __init__(self, config: ArithmeticConfig, split: Split, seed: int) -> None:
        results: dict[str, Callable[[int, int], int]] = {
            "+": lambda a, b: a + b,
            "-": lambda a, b: a - b,
            "*": lambda a, b: a * b,
        }

        def draw(rng: random.Random) -> Example:
            operation = rng.choice(config.operations)
            left, right = rng.randint(0, config.max_operand), rng.randint(0, config.max_operand)
            return Example(
                prompt=f"{left}{operation}{right}=", columns={"answer": str(results[operation](left, right))}
            )

        super().__init__(draw, split, seed)
