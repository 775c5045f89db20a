"""Digest of the line of each step that a tracker was sent, in eight bytes a step: a run may have a million of them."""

import re
from array import array
from collections.abc import Iterator, Mapping

DIGEST = re.compile(r"[0-9a-f]{16}|")
"""Form of a digest: 16 hex digits, or empty where it is not known."""
ABSENT, UNKNOWN = (1 << 64) - 1, 0
"""Values of a step that was not sent, and of one that was sent with a line that is not known."""
MOST_MISSING = 1_000_000
"""Largest number of steps that may be missing in front of another one; more are a damaged file."""


class Digests(Mapping[int, str]):
    """Digests by step, in ascending order; empty: the step was sent, and its line is taken as equal."""

    def __init__(self) -> None:
        self._values = array("Q")
        """Value of each step from step 0 on; the last one is never ABSENT."""

    def __getitem__(self, step: int) -> str:
        value = self._values[step] if 0 <= step < len(self._values) else ABSENT
        if value == ABSENT:
            raise KeyError(step)
        return "" if value == UNKNOWN else f"{value:016x}"

    def __iter__(self) -> Iterator[int]:
        return (step for step, value in enumerate(self._values) if value != ABSENT)

    def __len__(self) -> int:
        return len(self._values) - self._values.count(ABSENT)

    @property
    def newest(self) -> int:
        """Newest step that was sent; -1: none."""
        return len(self._values) - 1

    def add(self, step: int, digest: str) -> None:
        """Add a step, or replace its digest.

        Raises:
            ValueError: the step or the digest can't be of a tracker's journal.
        """
        if not DIGEST.fullmatch(digest) or not 0 <= step <= self.newest + MOST_MISSING:
            raise ValueError(f"step {step} with the digest {digest!r}")
        self._values.extend([ABSENT] * (step + 1 - len(self._values)))
        self._values[step] = int(digest, 16) if digest else UNKNOWN

    def forget_after(self, step: int) -> None:
        """Forget all steps after one."""
        del self._values[max(0, step + 1) :]
        while self._values and self._values[-1] == ABSENT:
            self._values.pop()
