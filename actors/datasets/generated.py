"""Generated examples, endless in both splits. A hash of the prompt decides the split.

So no train example ever equals an eval example, however long the run.
"""

import random
import zlib
from collections.abc import Callable

from actors.datasets.base import Example
from schemas.config.data import ArithmeticConfig, ReverseTextConfig, Split

HELD_OUT_OF = 16
"""Share of eval among all prompts: 1 in 16."""
MAX_DRAWS = 10_000
"""Draws for an example of a split before a ValueError."""


class Generated:
    """Endless examples of a split: draws, seeded by (seed, split, index), until a prompt belongs to the split."""

    num_examples: int | None = None
    """None: endless."""

    def __init__(self, draw: Callable[[random.Random], Example], split: Split, seed: int) -> None:
        self._draw, self._split, self._seed = draw, split, seed

    def example(self, index: int) -> Example:
        """Return example `index` of the split.

        Raises:
            ValueError: no prompt of 10 000 draws belongs to the split.
        """
        rng = random.Random(f"{self._seed} {self._split} {index}")
        for _ in range(MAX_DRAWS):
            example = self._draw(rng)
            # crc32, since Python's own hash of a text differs between processes
            held_out = zlib.crc32(str(example.prompt).encode()) % HELD_OUT_OF == 0
            if held_out == (self._split == "eval"):
                return example
        raise ValueError(
            f"no {self._split} example in {MAX_DRAWS} draws: the environment has too few different prompts; raise "
            "max_letters or max_operand"
        )


class ReverseText(Generated):
    """Prompts such as `abcd=` with the answer `dcba`; letters a–z, min_letters to max_letters of them."""

    def __init__(self, config: ReverseTextConfig, split: Split, seed: int) -> None:
        def draw(rng: random.Random) -> Example:
            length = rng.randint(config.min_letters, config.max_letters)
            word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length))
            return Example(prompt=f"{word}=", columns={"answer": word[::-1]})

        super().__init__(draw, split, seed)


class Arithmetic(Generated):
    """Prompts such as `12+30=` with the answer `42`; operands 0 to max_operand."""

    def __init__(self, config: ArithmeticConfig, split: Split, seed: int) -> None:
        results: dict[str, Callable[[int, int], int]] = {
            "+": lambda a, b: a + b,
            "-": lambda a, b: a - b,
            "*": lambda a, b: a * b,
        }

        def draw(rng: random.Random) -> Example:
            operation = rng.choice(config.operations)
            left, right = rng.randint(0, config.max_operand), rng.randint(0, config.max_operand)
            # the answer is text, as completions are
            return Example(
                prompt=f"{left}{operation}{right}=", columns={"answer": str(results[operation](left, right))}
            )

        super().__init__(draw, split, seed)
