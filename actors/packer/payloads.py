"""Scored groups in memory: a cache of the ledger's payloads, by ordinal."""

from actors.ledger import Machine, Store
from bus import codec
from schemas.errors import ProtocolError
from schemas.messages import ScoredGroup


class Payloads:
    """Groups of the steps to come, and of evaluations under way.

    Args:
        store: ledger with the payloads of all groups that are not trained yet.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_ordinal: dict[int, ScoredGroup] = {}

    def add(self, group: ScoredGroup) -> None:
        """Keep a group whose payload the next commit stores."""
        self._by_ordinal[group.ordinal] = group

    def load(self, ordinal: int) -> ScoredGroup:
        """Return a settled group, from the ledger if it is not in memory (after a restart).

        Raises:
            ProtocolError: the ledger's payload is of another kind.
        """
        if ordinal not in self._by_ordinal:
            message = codec.decode(self._store.payloads([ordinal])[0])
            if not isinstance(message, ScoredGroup):
                raise ProtocolError(f"the ledger's payload of ordinal {ordinal} is a {message.kind}")
            self._by_ordinal[ordinal] = message
        return self._by_ordinal[ordinal]

    def forget_trained(self, machine: Machine, at_least: int) -> None:
        """Drop trained groups and those of evaluations, once there are more than `at_least` groups in memory."""
        if len(self._by_ordinal) <= at_least:  # a scan in every round would cost more than the memory is worth
            return
        for ordinal in list(self._by_ordinal):
            row = machine.groups.rows.get(ordinal)
            # ordinals below 0 are those of evaluations
            if ordinal < 0 or row is None or (row.step or machine.trained_step + 1) <= machine.trained_step:
                del self._by_ordinal[ordinal]
