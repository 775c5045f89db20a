"""Scored groups in memory: a cache of the ledger's payloads, by ordinal."""

from actors.ledger import Machine, Store
from actors.ledger.stored_groups import stored_group
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
            self._by_ordinal[ordinal] = stored_group(self._store.payloads([ordinal])[0])
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
