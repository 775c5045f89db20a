"""One world: a packer with its ledger, the processes around it, what is on the wire, and the time.

A world never changes: `after(action)` is another one, which shares with it whatever the action has not touched. In one
action one process does one thing; what it says in it arrives at once, unless the action's fates say otherwise:

    Action("sample", "a0", (2, 1))                            a0 finishes attempt 1 of ordinal 2
    Action("beat", "a0", fates=(("beat of a0", "hold"),))      its beat stays on the wire, and may arrive whenever
    Action("round", detail=("commit", 0))                      the packer dies between its commit and its first word
    Action("round", detail=("send", 2))                        … with two of its messages sent

So a message that is held may overtake and be overtaken by any other. A process that dies starts again at once, with a
new boot id, and says nothing before its first beat; what was sent to the old one finds nobody.
"""

import copy
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from actors.ledger import GroupFacts, Settings
from schemas.errors import ProtocolError
from schemas.messages import Beat, Policy, State
from tests.actors.ledger.driver import Hold
from tests.explore import rules
from tests.explore.packer import PACKER, Packer, Parcel, Product, Stored
from tests.explore.peers import Disk, Rank, Sampler, Scorer, Server, Watched, identity_of
from tests.explore.values import Names, clone, key_of

START_SECONDS = 100.0
MAX_ON_THE_WIRE = 4
FATES = ("lose", "hold", "double")


class Action(NamedTuple):
    """What happens next. `fates` are those of the messages, by label, that do not simply arrive."""

    verb: str
    who: str = ""
    detail: Any = None
    fates: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        words = [self.verb, self.who, "" if self.detail is None else str(self.detail)]
        return " ".join(word for word in words if word) + "".join(f" [{fate} {label}]" for label, fate in self.fates)


class ImpossibleError(Exception):
    """There is nothing that this action could be done with."""


@dataclass(frozen=True)
class Scenario:
    """A run to be searched. `cursed` are keys of examples that nobody can sample, `flat` those that are filtered."""

    name: str
    settings: Settings
    product: Product = field(default_factory=Product)
    num_rollouts: int = 2
    num_rewards: int = 2
    num_engines: int = 1
    num_evals: int = 0
    save_every: int = 2
    cursed: frozenset[str] = frozenset()
    flat: frozenset[str] = frozenset()
    ghosts: bool = False
    """Whether the packer may hear a process after its death, and after its successor."""
    peers: dict[str, type[Watched]] = field(default_factory=dict)
    """Other doubles than the usual ones, by name: a test's bug in a peer."""


class World:
    """See above. `owned` are the parts that are this world's alone and may be changed while it is made."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.now = scenario, START_SECONDS
        self.packer = Packer(scenario.product, scenario.settings, scenario.num_evals, Stored(), self.now)
        self.peers: dict[str, Any] = {peer.name: peer for peer in _peers(scenario)}
        self._by_kind: dict[type, list[str]] = {
            kind: [name for name, peer in self.peers.items() if isinstance(peer, kind)]
            for kind in (Sampler, Scorer, Server, Rank)
        }
        self.disk = Disk()
        self.wire: tuple[Parcel, ...] = ()
        self.silent: tuple[tuple[str, float], ...] = ()
        """Whose beats are lost, and until when."""
        self.highest = -1
        """The last train ordinal that anybody has got a ticket for."""
        self.said: tuple[Parcel, ...] = ()
        """What was sent in the action that made this world."""
        self._owned: set[str] = {PACKER, *self.peers}

    # --- how it changes ------------------------------------------------------------------------------------------

    def after(self, action: Action) -> "World":
        """The world after an action.

        Raises:
            Violation: it breaks a rule.
            ImpossibleError: it can't happen here.
        """
        new = copy.copy(self)
        for name in ("names", "key"):
            new.__dict__.pop(name, None)
        new.peers, new.said, new._owned = dict(self.peers), (), set()
        try:
            getattr(new, "_" + action.verb)(action)
        except ProtocolError as error:
            raise rules.Violation("P5", str(error)) from error
        new._check(self)
        return new

    def _own(self, name: str) -> Any:
        """A process of this world's own."""
        peer = self.peers.get(name)
        if peer is None:
            raise ImpossibleError(name)
        if name not in self._owned:
            self._owned.add(name)
            peer = self.peers[name] = clone(peer)
            peer.cached = None
            if isinstance(peer, Rank):
                peer.disk = self.disk
        return peer

    def _own_packer(self) -> Packer:
        if PACKER not in self._owned:
            self._owned.add(PACKER)
            self.packer = copy.copy(self.packer)
        return self.packer

    def _check(self, before: "World") -> None:
        """The rules that an action may have broken."""
        stored, settings = self.packer.stored, self.scenario.settings
        if stored is not before.packer.stored:
            rules.check_commit(before.packer.stored, stored, settings)
        if self.said:
            rules.check_told([parcel for parcel in self.said if parcel.to != PACKER], stored)
        if self.packer.machine.term != before.packer.machine.term:
            rules.check_restart(stored, self.packer.machine)
        rules.demand(not self.packer.machine.failure, "P11", self.packer.machine.failure)
        if any(name in self._owned for name in self._by_kind[Rank]):
            rules.check_ranks(self.all(Rank), self.disk)
        if stored is not before.packer.stored or self.disk is not before.disk:
            rules.check_disk(self.disk, stored)
        if self.packer.over and not before.packer.over:
            rules.check_end(self.all(Rank), self.disk, settings, self.highest)

    # --- messages ------------------------------------------------------------------------------------------------

    def _post(self, parcels: list[Parcel], action: Action) -> None:
        """Messages leave; each arrives, or meets its fate."""
        self.said += tuple(parcels)
        fates = dict(action.fates)
        for parcel in parcels:
            fate = fates.get(parcel.label, "")
            if fate in ("hold", "double"):
                self.wire = (*self.wire, parcel)[-MAX_ON_THE_WIRE:]
            if fate in ("", "double"):
                self._arrive(parcel)

    def _arrive(self, parcel: Parcel) -> None:
        _, to, content = parcel
        if to == PACKER:
            packer = self._own_packer()
            packer.inflow = (*packer.inflow, content)
            return
        name = to.partition("/")[0]
        if self.peers[name].identity != to:
            return  # that process is dead
        peer = self._own(name)
        if isinstance(content, State):
            self._take_state(peer, content)
        elif isinstance(content, GroupFacts):
            peer.get(content)
        else:
            peer.receive(*content)

    def _take_state(self, peer: Watched, state: State) -> None:
        rules.demand(not state.refusal, "P3", f"{peer.identity} lives and is refused: {state.refusal}")
        peer.take(state)
        if isinstance(peer, Sampler) and peer.held:
            self.highest = max(self.highest, *(ordinal for ordinal, _ in peer.held))
        if peer.over:
            self._restart(peer)

    def _restart(self, peer: Watched) -> None:
        """Its beats die with it: a connection is in order, and the next process has one of its own."""
        if not self.scenario.ghosts:
            self.wire = tuple(parcel for parcel in self.wire if parcel.label != f"beat of {peer.name}")
        peer.restart()

    # --- what may happen -----------------------------------------------------------------------------------------

    def _beat(self, action: Action) -> None:
        if action.who in dict(self.silent):
            raise ImpossibleError(str(action))
        self._post([self._beat_of(self._own(action.who))], action)

    def _beat_of(self, peer: Watched) -> Parcel:
        return Parcel(f"beat of {peer.name}", PACKER, (peer.identity, peer.beat()))

    def _round(self, action: Action) -> None:
        """The packer's; `detail`: after which stage it dies, and how many messages it has sent by then."""
        packer = self._own_packer()
        last, num_sent = action.detail or ("", 0)
        parcels = packer.round(self.now, last, num_sent)
        if last:
            self.packer = packer.successor(self.now)
        self._post(parcels, action)

    def _deliver(self, action: Action) -> None:
        """Something that was on the wire arrives."""
        if action.detail >= len(self.wire):
            raise ImpossibleError(str(action))
        parcel = self.wire[action.detail]
        self.wire = self.wire[: action.detail] + self.wire[action.detail + 1 :]
        self._arrive(parcel)

    def _crash(self, action: Action) -> None:
        """A process dies, and its supervisor starts it again."""
        if action.who == PACKER:
            self.packer = self.packer.successor(self.now)
            self._owned.add(PACKER)
        else:
            self._restart(self._own(action.who))

    def _silence(self, action: Action) -> None:
        """The beats of a process get lost for as long as its lease lasts."""
        until = self.now + self.scenario.settings.lease + 1.0
        self.silent = (*(one for one in self.silent if one[0] != action.who), (action.who, until))

    def _second(self, action: Action) -> None:
        """A second passes, after which everybody beats."""
        self.now += 1.0
        self.silent = tuple(one for one in self.silent if one[1] > self.now)
        silent = {name for name, _ in self.silent}
        for name in self.peers:
            peer = self._own(name)
            peer.second()
            if name not in silent:
                self._post([self._beat_of(peer)], action)
        self._own_packer().time_has_passed = True

    def _pause(self, action: Action) -> None:
        """A lease passes in which nobody beats: the network, or the packer's machine, stands still."""
        self.now += self.scenario.settings.lease
        self._own_packer().time_has_passed = True

    def _sample(self, action: Action) -> None:
        """A rollout finishes a ticket; `detail`: which, and with which policy."""
        hold, policy = action.detail
        sampler = self._own(action.who)
        if hold not in sampler.to_sample or policy not in self._policies_for(sampler, hold):
            raise ImpossibleError(str(action))
        if sampler.held[hold].example_key in self.scenario.cursed:
            sampler.fail(hold)
        else:
            facts = sampler.sample(hold, policy)
            if facts.example_key in self.scenario.flat:
                sampler.sampled[hold] = replace(facts, rejected_as="zero_variance")

    def _fail(self, action: Action) -> None:
        """A rollout or a reward actor gives an attempt up."""
        holder = self._own(action.who)
        if action.detail not in holder.held or action.detail in holder.failed:
            raise ImpossibleError(str(action))
        if isinstance(holder, Sampler) and action.detail in holder.sampled:
            raise ImpossibleError(str(action))
        holder.fail(action.detail)

    def _send(self, action: Action) -> None:
        """A rollout sends a group; `detail`: which, and to whom."""
        hold, identity = action.detail
        sampler = self._own(action.who)
        if hold not in sampler.to_send or identity not in map(identity_of, sampler.rewards):
            raise ImpossibleError(str(action))
        label = f"group {_name(hold)} to {identity.partition('/')[0]}"
        self._post([Parcel(label, identity, sampler.send(hold, identity))], action)

    def _score(self, action: Action) -> None:
        """A reward actor sends a scored group."""
        scorer = self._own(action.who)
        if action.detail not in scorer.to_send:
            raise ImpossibleError(str(action))
        self._post([Parcel(f"scored {_name(action.detail)}", PACKER, scorer.send(action.detail))], action)

    def _load(self, action: Action) -> None:
        """An engine switches to what it was told to serve (P22)."""
        server, before = self._own(action.who), self.peers[action.who].policy
        if server.target not in [manifest.policy for manifest in self._publisher.published]:
            raise ImpossibleError(str(action))
        server.policy = server.target
        if before is not None and server.policy is not None:
            forward = server.policy.version >= before.version
            rules.demand(forward, "P22", f"{server.name} goes back from {before} to {server.policy}")

    def _train(self, action: Action) -> None:
        """A rank trains its next step, and rank 0 publishes it."""
        self._rank_with(self._can_train, action).train()

    def _read(self, action: Action) -> None:
        """A rank that has started looks which checkpoints there are."""
        self._rank_with(lambda rank: rank.can_read, action).read()

    def _publish(self, action: Action) -> None:
        """Rank 0 publishes what it starts from."""
        self._rank_with(lambda rank: rank.to_publish, action).publish()

    def _close(self, action: Action) -> None:
        """Rank 0 reports the step that it has published, and begins to save it if that is due."""
        self._rank_with(self._can_close, action).close()

    def _save(self, action: Action) -> None:
        """The checkpoint is written."""
        rank = self._rank_with(lambda rank: rank.to_save is not None, action)
        rank.save()
        self.disk = rank.disk

    def _rank_with(self, able: Callable[[Rank], bool], action: Action) -> Rank:
        rank = self._own(action.who)
        if not able(rank):
            raise ImpossibleError(str(action))
        return rank  # type: ignore[no-any-return]

    def _can_train(self, rank: Rank) -> bool:
        """The ranks train a step together: none is ahead of another by more than the step under way."""
        others = [(other.incarnation, other.next_step) for other in self.all(Rank)]
        together = all(one == rank.incarnation and step >= rank.next_step for one, step in others)
        return rank.can_train and together

    def _can_close(self, rank: Rank) -> bool:
        """A save begins after the save before it."""
        return rank.to_close and rank.to_save is None

    # --- who can do what -----------------------------------------------------------------------------------------

    def all(self, kind: type) -> list[Any]:
        """The processes of a kind."""
        return [self.peers[name] for name in self._by_kind[kind]]

    @property
    def _publisher(self) -> Rank:
        rank: Rank = self.all(Rank)[0]
        return rank

    def _policies_for(self, sampler: Sampler, hold: Hold) -> list[Policy]:
        """What the engines serve that may sample a ticket (P10)."""
        ticket = sampler.held[hold]
        served = [server.policy for server in self.all(Server) if server.policy]
        if ticket.policy:
            return [policy for policy in served if policy == ticket.policy]
        return [policy for policy in served if policy.version >= ticket.min_version]

    def work(self) -> Iterator[Action]:
        """Everything that a process could do now but beat."""
        published = [manifest.policy for manifest in self._publisher.published]
        for server in self.all(Server):
            if server.target in published:
                yield Action("load", server.name)
        for rank in self.all(Rank):
            yield from self._rank_work(rank)
        for sampler in self.all(Sampler):
            yield from self._sampler_work(sampler)
        for scorer in self.all(Scorer):
            for hold in scorer.to_send:
                yield Action("score", scorer.name, hold)

    def _rank_work(self, rank: Rank) -> Iterator[Action]:
        able = {
            "read": rank.can_read,
            "publish": rank.to_publish,
            "close": self._can_close(rank),
            "save": rank.to_save is not None,
            "train": self._can_train(rank),
        }
        yield from (Action(verb, rank.name) for verb, can in able.items() if can)

    def _sampler_work(self, sampler: Sampler) -> Iterator[Action]:
        for hold in sampler.to_sample:
            for policy in self._policies_for(sampler, hold)[:1]:
                yield Action("sample", sampler.name, (hold, policy))
        rewards = sampler.rewards
        for hold in sampler.to_send:
            for i in range(len(rewards)):
                yield Action("send", sampler.name, (hold, identity_of(rewards[(hold[0] + i) % len(rewards)])))

    def news(self) -> Iterator[Action]:
        """The beats that are due."""
        silent = {name for name, _ in self.silent}
        for name, peer in self.peers.items():
            if name not in silent and peer.words() != peer.said:
                yield Action("beat", name)

    # --- what it is ----------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> Names:
        """How identities are called in keys: the newest process of a name is the same whatever its number."""
        identities = tuple(peer.identity for peer in self.peers.values())
        if identities not in _names:
            _names[identities] = {
                f"{name}/{boot}": f"{name}-{peer.boot - boot}"
                for name, peer in self.peers.items()
                for boot in range(1, peer.boot + 1)
            }
        return _names[identities]

    @cached_property
    def key(self) -> int:
        """Equal for two worlds that will behave the same; what nobody decides by is left out."""
        names, packer = self.names, self.packer
        parts: list[Hashable] = [peer.key(names) for peer in self.peers.values()]
        parts += [packer.key(names, self.now), tuple((name, until - self.now) for name, until in self.silent)]
        parts += [tuple(packer.machine.peers.refusal_of(peer.identity) for peer in self.peers.values())]
        parts += [tuple(peer.term == packer.machine.term for peer in self.peers.values())]  # who may take a place (P3)
        parts += [tuple((step, one.chain, one.reports) for step, one in self.disk.checkpoints.items())]
        parts += [self._key_of(parcel) for parcel in self.wire]
        return hash(tuple(parts))

    def _key_of(self, parcel: Parcel) -> Hashable:
        label, to, content = parcel
        if isinstance(content, State):
            rewards = [self.names.get(identity_of(peer)) for peer in getattr(content, "rewards", ())]
            content = (key_of(content, {}, 0.0), tuple(rewards))
        elif not isinstance(content, GroupFacts) and isinstance(content[1], Beat):
            identity, beat = content
            old = self._is_old(identity, beat)
            content = (self.names.get(identity), old, None if old else key_of(beat, {}, 0.0))
        return label, self.names.get(to, to), content

    def _is_old(self, identity: str, beat: Beat) -> bool:
        """Whether the packer has heard, or will refuse, what comes now."""
        packer = self.packer
        heard = [event[1].sequence for event in packer.inflow if isinstance(event, tuple) and event[0] == identity]
        known = packer.machine.peers.beat_of(identity)
        newest = max([*heard, known.sequence if known else 0])
        return bool(packer.machine.peers.refusal_of(identity)) or newest >= beat.sequence


_names: dict[tuple[str, ...], dict[str, str]] = {}


def _peers(scenario: Scenario) -> Iterator[Watched]:
    last, ranks = scenario.settings.max_steps, scenario.settings.num_ranks
    kinds = {"Sampler": Sampler, "Scorer": Scorer, "Server": Server, "Rank": Rank} | scenario.peers
    for number in range(scenario.num_rollouts):
        yield kinds["Sampler"](f"a{number}", slots=2)
    for number in range(scenario.num_rewards):
        yield kinds["Scorer"](f"r{number}")
    for number in range(scenario.num_engines):
        yield kinds["Server"](f"e{number}")
    for rank in range(ranks):
        yield kinds["Rank"](f"t{rank}", rank=rank, num_ranks=ranks, save_every=scenario.save_every, last_step=last)


def _name(hold: Hold) -> str:
    return f"{hold[0]}.{hold[1]}"
