"""The packer of a simulation: the real state machine of the ledger, in rounds of virtual time.

A round takes what has come, decides, and speaks after `round_seconds`, as the real one does after its commit. Nothing
is stored: the changes of a round are taken and forgotten, and the successor of a packer that dies has the machine with
all rounds of its predecessor, as the real one has from the ledger. Peers read their tickets and releases from the
machine's tables, of which a directive is the copy for the wire.

Between death and successor nothing is decided and nobody hears anything; what peers send meanwhile, or what the dead
packer had not taken into a round, they send again. The successor first tells each peer all that concerns it.

The machine's clock of leases stands still: living peers would only repeat their heartbeats, so heartbeats without news
are left out, and the death of a peer is told by `lose`, a lease after it or with its successor.
"""

from collections.abc import Callable

from actors.ledger import Group, GroupFacts, Machine, Verdict
from actors.simulate.events import Events
from actors.simulate.models import Times, round_seconds
from schemas.messages import Heartbeat

Told = Callable[[], None]
"""Function by which a peer looks at the state of the machine."""


class Packer:
    """Rounds over the ledger's machine.

    Args:
        events: the clock.
        times: figures of the models.
        machine: the state machine.
        after_round: called in each round after the decisions, before peers are told.
        tell_holders: called with the rows that a round has changed, once rollout actors can hear of them.
    """

    def __init__(
        self,
        events: Events,
        times: Times,
        machine: Machine,
        after_round: Callable[[], None],
        tell_holders: Callable[[list[Group]], None],
    ) -> None:
        self._events, self._times, self.machine = events, times, machine
        self._after_round, self._tell_holders = after_round, tell_holders
        self._lease_clock = events.now
        self._heartbeats: list[tuple[str, Heartbeat]] = []
        self._groups: list[tuple[GroupFacts, Callable[[Verdict], None]]] = []
        self._lost: list[str] = []
        self._is_planned, self._free_at = False, 0.0
        self._life, self._works_from = 0, 0.0
        self._untold: list[Group] = []
        """Rows of which the dead packer had not told their holders."""
        self.peers: set[str] = set()
        """Identities of the living peers."""
        self._listening: dict[str, Told] = {}
        """What peers do when the packer has news for them, by identity; rollout actors hear of rows alone."""
        self.num_rounds = 0

    def join(self, identity: str, told: Told | None = None) -> None:
        """Let a process take part."""
        self.peers.add(identity)
        if told is not None:
            self._listening[identity] = told

    def leave(self, identity: str) -> None:
        """Close the connection of a process that has died."""
        self.peers.discard(identity)
        self._listening.pop(identity, None)

    def hear(self, identity: str, heartbeat: Heartbeat) -> None:
        """Take a heartbeat into the next round."""
        self._heartbeats.append((identity, heartbeat))
        self.plan()

    def score(self, facts: GroupFacts, judged: Callable[[Verdict], None]) -> None:
        """Take a scored group into the next round; `judged` is told the verdict."""
        self._groups.append((facts, judged))
        self.plan()

    def lose(self, identity: str) -> None:
        """End the lease of a dead peer."""
        self._lost.append(identity)
        self.plan()

    @property
    def alive(self) -> bool:
        """Whether it works: it is not between a death and its successor."""
        return self._events.now >= self._works_from

    def die(self, restart_seconds: float) -> None:
        """Die; a successor works after `restart_seconds`."""
        self._life += 1
        self._free_at = self._works_from = self._events.now + restart_seconds
        self._is_planned = False
        self._events.at(self._works_from, self._tell_all, self._life)
        self.plan()

    def plan(self) -> None:
        """Hold a round as soon as the packer is free."""
        if not self._is_planned:
            self._is_planned = True
            self._events.at(self._free_at, self._round, self._life)

    def _round(self, life: int) -> None:
        if life != self._life:
            return
        machine, now = self.machine, self._events.now
        self._is_planned, self._free_at = False, now + self._round_seconds
        self.num_rounds += 1
        lost, self._lost = self._lost, []
        heartbeats, self._heartbeats = self._heartbeats, []
        groups, self._groups = self._groups, []
        for identity in lost:
            machine.lost(now, identity)
        for identity, heartbeat in heartbeats:
            # the heartbeat of a process that has died meanwhile comes over no connection
            if identity in self.peers:
                machine.heard(now, identity, heartbeat, self._lease_clock)
        for facts, judged in groups:
            judged(machine.scored(facts))
        machine.decide(now, self._lease_clock)
        self._after_round()
        changed = list(machine.take_changes().groups.values())
        # sorted, since a set has no order of its own: the simulation must not depend on hashes
        concerned = sorted(set().union(*machine.take_concerned()).intersection(self._listening))
        if concerned or changed:
            self._events.after(self._round_seconds + self._times.hop_seconds, self._tell, life, concerned, changed)

    @property
    def _round_seconds(self) -> float:
        return round_seconds(self._times, len(self.peers))

    def _tell_all(self, life: int) -> None:
        untold, self._untold = self._untold, []
        self._tell(life, sorted(self._listening), untold)

    def _tell(self, life: int, identities: list[str], changed: list[Group]) -> None:
        if life != self._life:
            self._untold.extend(changed)
            return
        for identity in identities:
            told = self._listening.get(identity)
            if told is not None:
                told()
        self._tell_holders(changed)
