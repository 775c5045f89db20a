"""The machine with what the search has found in it mended, so that the search can go on.

Each mistake has a test in `test_search.py` that fails as expected on the machine as it is. Once the machine has a
remedy of its own, that test says so, and the one here goes.
"""

from typing import Any

from actors.ledger import Machine
from actors.ledger.peers import Peers
from schemas.messages import Beat
from tests.explore.packer import Product


class RememberingPeers(Peers):
    """Knows the last beat of a process whose lease has ended: one that is older says what is true no more (P3)."""

    def __init__(self, lease: float) -> None:
        super().__init__(lease)
        self.sequences: dict[str, int] = {}

    def heard(self, now: float, identity: str, beat: Beat) -> tuple[bool, str | None]:
        """Take note of a beat that is newer than all of its process."""
        if beat.sequence <= self.sequences.get(identity, 0) and not self.refusal_of(identity):
            return False, None
        self.sequences[identity] = beat.sequence
        return super().heard(now, identity, beat)


class MendedMachine(Machine):
    """As it will be."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.peers = RememberingPeers(self.settings.lease)

    def _follow_trainer(self) -> None:
        """A rank can't be blamed for not seeing a checkpoint that it may have looked for before it was there."""
        before, could_see = self.failure, self.durable_step > 0
        super()._follow_trainer()
        if not could_see and "sees none of the checkpoints" in self.failure:
            self.failure = before


MENDED = Product(machine=MendedMachine)
