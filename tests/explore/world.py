"""One world: a packer with its ledger, the processes around it, what is on the wire, and the time.

A world never changes: `after(action)` is another one, which shares with it whatever the action has not touched. In one
action one process does one thing; what it says in it arrives at once, unless the action's fates say otherwise:

    Action("sample", "a0", (2, 1))                            a0 finishes attempt 1 of ordinal 2
    Action("heartbeat", "a0", fates=(("heartbeat of a0", "hold"),))  stays on the wire, and may arrive whenever
    Action("round", detail=("commit", 0))                      the packer dies between its commit and its first word
    Action("round", detail=("send", 2))                        … with two of its messages sent

So a message that is held may overtake and be overtaken by any other. A process that dies starts again at once, with a
new boot id, and says nothing before its first heartbeat; what was sent to the old one finds nobody.
"""

import copy
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from actors.ledger import GroupFacts, Settings
from bus.fence import Fence
from schemas.errors import ProtocolError
from schemas.messages import Directive, Heartbeat, ObserverDirective, PolicyVersion, RolloutDirective
from tests.actors.ledger.driver import Hold
from tests.explore import rules
from tests.explore.packer import PACKER, Batch, Lost, Packer, Parcel, Product, Stored
from tests.explore.peers import STRAY, Disk, Rank, Sampler, Scorer, Server, Watched, identity_of
from tests.explore.values import Names, clone, key_of

START_SECONDS = 100.0
MAX_ON_THE_WIRE = 4
BOOTS = 100
"""Of one name, at most: boot ids of processes of two names differ, as real ones do."""
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

    def with_fates(self, *fates: tuple[str, str]) -> "Action":
        """The same, with these fates alone."""
        return self._replace(fates=fates)


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
    forks: int = 0
    """How often the run may be forked or rewound."""
    ghosts: bool = False
    """Whether the packer may hear a process after its death, and after its successor."""
    strays: tuple[str, ...] = ()
    """Names under which somebody may start another process by hand."""
    first_boot: int = 1
    """Boot ids count from here on: those of two runs differ."""
    peers: dict[str, type[Watched]] = field(default_factory=dict)
    """Other doubles than the usual ones, by name: a test's bug in a peer."""


class World:
    """See above. `owned` are the parts that are this world's alone and may be changed while it is made."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.now = scenario, START_SECONDS
        self.packer = Packer(scenario.product, scenario.settings, scenario.num_evals, Stored(), self.now)
        self.peers: dict[str, Any] = {peer.label: peer for peer in _peers(scenario)}
        self._by_kind: dict[type, list[str]] = {
            kind: [name for name, peer in self.peers.items() if isinstance(peer, kind)]
            for kind in (Sampler, Scorer, Server, Rank)
        }
        self.disk = Disk()
        self.num_forks = 0
        self.wire: tuple[Parcel, ...] = ()
        self.silent: tuple[tuple[str, float], ...] = ()
        """Whose heartbeats are lost, and until when."""
        self.highest = -1
        """The last train ordinal that anybody has got a ticket for."""
        self.said: tuple[Parcel, ...] = ()
        """What was sent in the action that made this world."""
        self.heard: dict[str, tuple[str, float, float]] = {}
        """Of each name: its process, when that was last heard, and first after a lease of silence."""
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
            rules.check_ranks(self.all(Rank), self.disk, stored)
        if stored is not before.packer.stored or self.disk is not before.disk:
            rules.check_disk(self.disk, stored)
        if settings.turns and self._owned.intersection(self.peers):
            live = [peer for peer in (*self.all(Rank), *self.all(Server)) if self._is_steady(peer)]
            rules.check_turns(live)
        if self.packer.over and not before.packer.over:
            rules.check_end(self.all(Rank), self.disk, settings, self.highest, stored)

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
        to, content = parcel.to, parcel.content
        if to == PACKER:
            packer = self._own_packer()
            if isinstance(content, GroupFacts) and Fence(packer.machine.run).refuses(parcel.run):
                return
            packer.inflow = (*packer.inflow, content)
            if not isinstance(content, GroupFacts):
                self._note_heard(content[0])
            return
        label = self._label_of(to)
        if label is None:
            return  # that process is dead
        self._hand_over(self._own(label), parcel)

    def _hand_over(self, peer: Watched, parcel: Parcel) -> None:
        """A process gets a message; one of another run, or a directive of an older term, changes nothing (P1, P2)."""
        content, run = parcel.content, self.scenario.product.run
        rule = "P1" if peer.run and parcel.run != run else ""
        if isinstance(content, Directive | Batch) and content.term < peer.term:
            rule = rule or "P2"
        before = self._mind_of(peer) if rule else None
        if isinstance(content, Directive):
            self._take_state(peer, content)
        elif isinstance(content, GroupFacts):
            peer.receive(parcel.run, content)  # type: ignore[attr-defined]
        else:
            peer.receive(parcel.run, *content)  # type: ignore[attr-defined]
        if rule:
            rules.demand(before == self._mind_of(peer), rule, f"{peer.identity} of {run} takes {parcel}")

    def _mind_of(self, peer: Watched) -> Hashable:
        peer.cached = None
        key = (peer.key(self.names), peer.run, peer.term, peer.identity)
        peer.cached = None
        return key

    def _misdeliver(self, action: Action) -> None:
        """A message of another run comes, since this run's process has an address that one of that run had."""
        parcel: Parcel = action.detail
        name = parcel.to.partition("/")[0]
        if parcel.to == PACKER:
            inflow = self.packer.inflow
            self._arrive(parcel)
            taken = len(self.packer.inflow) > len(inflow) and isinstance(parcel.content, GroupFacts)
            rules.demand(not taken, "P1", f"the packer of {self.scenario.product.run} takes {parcel}")
        elif name in self.peers and self.peers[name].run:
            self._hand_over(self._own(name), parcel)

    def _label_of(self, identity: str) -> str | None:
        """The process of this identity, if it lives."""
        name = identity.partition("/")[0]
        found = [label for label in (name, name + STRAY) if label in self.peers]
        return next((o for o in found if self.peers[o].identity == identity and self.peers[o].started), None)

    def _note_heard(self, identity: str) -> None:
        """A heartbeat has come."""
        label = self._label_of(identity)
        if label is None:
            return
        known, last, since = self.heard.get(label, ("", 0.0, 0.0))
        if known != identity:
            since = 0.0  # nobody has missed it yet
        elif self.now - last >= self.scenario.settings.lease:
            since = self.now
        self.heard = self.heard | {label: (identity, self.now, since)}

    def _is_steady(self, peer: Watched) -> bool:
        """Whether a process was heard throughout the last lease, so that nobody may take it for gone."""
        known, last, since = self.heard.get(peer.label, ("", 0.0, 0.0))
        lease = self.scenario.settings.lease
        return known == peer.identity and self.now - last < lease <= self.now - since

    def _take_state(self, peer: Watched, directive: Directive) -> None:
        if Fence(peer.run, peer.term).refuses(directive.run, directive.term):
            return
        if directive.refusal:
            self._refuse(peer, directive)
            return
        sent_to = dict(peer.sent_to) if isinstance(peer, Sampler) else {}
        peer.take(directive, peer.clock)
        if isinstance(peer, Sampler):
            self._check_given_up(peer, sent_to)
        if isinstance(peer, Rank):
            self.disk = peer.disk
        if not isinstance(directive, ObserverDirective):
            known = peer.counted is not None and peer.counted[0] == directive.term
            peer.counted = peer.counted if known and self._is_steady(peer) else (directive.term, self.now)
        if isinstance(peer, Sampler) and peer.held:
            self.highest = max(self.highest, *(ordinal for ordinal, _ in peer.held))
        if peer.over:
            self._restart(peer)

    def _refuse(self, peer: Watched, directive: Directive) -> None:
        """It ends; its supervisor starts it again later, and nobody a stray process.

        Only for its name, which another process has that lives; and the one that had it first keeps it (P3).
        """
        what = f"{peer.identity} lives and is refused: {directive.refusal}"
        rules.demand(isinstance(directive, ObserverDirective) and directive.name_taken, "P3", what)
        lease, nobody = self.scenario.settings.lease, ("", 0.0, 0.0)
        _, other_at, _ = self.heard.get(peer.name if peer.stray else peer.name + STRAY, nobody)
        rules.demand(self.now - other_at <= 2 * lease, "P3", f"{what}, and nobody else has its name")
        known, at, since = self.heard.get(peer.label, nobody)
        steady = known == peer.identity and self.now - at < lease
        had_it = peer.counted is not None and peer.counted[0] == directive.term and peer.counted[1] >= since
        rules.demand(not (steady and had_it), "P3", f"{what}, and it had the name")
        peer.started = not peer.stray
        self._restart(peer)

    def _restart(self, peer: Watched) -> None:
        """Its heartbeats die with it: a connection is in order, and the next process has one of its own."""
        if not self.scenario.ghosts:
            self.wire = tuple(parcel for parcel in self.wire if parcel.label != f"heartbeat of {peer.label}")
        kept = {name: getattr(peer, name) for name in ("stray", "started")}
        peer.restart()
        peer.__dict__.update(kept)

    # --- what may happen -----------------------------------------------------------------------------------------

    def _heartbeat(self, action: Action) -> None:
        if action.who in dict(self.silent) or not self._own(action.who).started:
            raise ImpossibleError(str(action))
        self._post([self._heartbeat_of(self._own(action.who))], action)

    def _stray(self, action: Action) -> None:
        """Somebody starts another process under the name of this one, which sends a heartbeat at once."""
        peer = self._own(action.who + STRAY)
        if peer.started:
            raise ImpossibleError(str(action))
        peer.started = True
        self._post([self._heartbeat_of(peer)], action)

    def _heartbeat_of(self, peer: Watched) -> Parcel:
        return Parcel(f"heartbeat of {peer.label}", PACKER, (peer.identity, peer.heartbeat()), peer.run)

    def _round(self, action: Action) -> None:
        """The packer's; `detail`: after which stage it dies, and how many messages it has sent by then."""
        packer = self._own_packer()
        last, num_sent = action.detail or ("", 0)
        parcels = packer.round(self.now, last, num_sent)
        lost = tuple(Lost(identity) for identity in sorted(packer.probes) if self._label_of(identity) is None)
        packer.inflow = (*packer.inflow, *lost)
        if last:
            self.packer = packer.successor(self.now)
        self._post(parcels, action)

    def _deliver(self, action: Action) -> None:
        """Something that was on the wire arrives."""
        if action.detail >= len(self.wire):
            raise ImpossibleError(str(action))
        parcel = self.wire[action.detail]
        self.wire = self.wire[: action.detail] + self.wire[action.detail + 1 :]
        counted = {label: peer.counted for label, peer in self.peers.items()}
        label = self._label_of(parcel.to) if isinstance(parcel.content, RolloutDirective) else None
        if label is not None:
            self._own(label).misled = True
        self._arrive(parcel)
        if (label := self._label_of(parcel.to)) is not None:
            self.peers[label].counted = counted[label]  # it tells of a past

    def _crash(self, action: Action) -> None:
        """A process dies, and its supervisor starts it again."""
        if action.who == PACKER:
            self.packer = self.packer.successor(self.now)
            self._owned.add(PACKER)
        else:
            peer = self._own(action.who)
            peer.started = peer.started and not peer.stray
            self._restart(peer)

    def _fork(self, action: Action) -> None:
        """The packer ends, and is started with --fork; `detail`: the step that the run was rewound to before."""
        if self.num_forks >= self.scenario.forks:
            raise ImpossibleError(str(action))
        self.num_forks += 1
        self.packer = self.packer.forked(self.now, action.detail)
        self._owned.add(PACKER)
        if action.detail is not None:
            self.disk = self.disk.up_to(action.detail)
            self.disk = replace(self.disk, writer=-1)  # no trainer that still lives writes any more

    def _silence(self, action: Action) -> None:
        """The heartbeats of a process get lost for as long as its lease lasts."""
        until = self.now + self.scenario.settings.lease + 1.0
        self.silent = (*(one for one in self.silent if one[0] != action.who), (action.who, until))

    def _second(self, action: Action) -> None:
        """A second passes, after which everybody sends heartbeats."""
        self.now += 1.0
        self.silent = tuple(one for one in self.silent if one[1] > self.now)
        silent = {name for name, _ in self.silent}
        for name in self.peers:
            peer = self._own(name)
            knew = (dict(peer.sent_to), set(peer.failed)) if isinstance(peer, Sampler) else None
            peer.second()
            if isinstance(peer, Sampler):
                what = f"no directive comes, and {name} gives up a group that it has sent"
                rules.demand(knew == (peer.sent_to, peer.failed.keys()), "P13", what)
            if name not in silent and peer.started:
                self._post([self._heartbeat_of(peer)], action)
        self._own_packer().time_has_passed = True

    def _pause(self, action: Action) -> None:
        """A lease passes in which nobody sends heartbeats: the network, or the packer's machine, stands still."""
        self.now += self.scenario.settings.lease
        for name in self.peers:
            self._own(name).clock += self.scenario.settings.lease
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
        if hold not in sampler.to_send or identity not in sampler.receivers_for(hold):
            raise ImpossibleError(str(action))
        label = f"group {_name(hold)} to {identity.partition('/')[0]}"
        self._post([Parcel(label, identity, sampler.send(hold, identity), sampler.run)], action)

    def _check_given_up(self, sampler: Sampler, sent_to: dict[Hold, str]) -> None:
        """No group is sent again or fails while the reward actor that it was sent to lives and holds it (P13).

        One that has got a late group a moment ago may not have named it in time.
        """
        for hold, receiver in sent_to.items():
            label = self._label_of(receiver)
            if hold in sampler.sent_to or hold not in sampler.held or label is None or sampler.misled:
                continue
            holder = self.peers[label]
            other = self.peers.get(holder.name if holder.stray else holder.name + STRAY)
            if other is not None and other.started:
                continue  # the directive may name either of them
            new = holder.clock - holder.got.get(hold, holder.clock) < self.scenario.settings.lease
            if not (new and (sampler.is_late(hold) or hold in sampler.failed)):
                what = f"{sampler.name} gives {_name(hold)} up, and {receiver} lives and holds it"
                rules.demand(not (hold in holder.held and self._is_steady(holder)), "P13", what)

    def _drain(self, action: Action) -> None:
        """A reward actor is told to leave: it takes no new groups, and finishes what it holds."""
        scorer = self._own(action.who)
        if scorer.phase != "running" or not scorer.run:
            raise ImpossibleError(str(action))
        scorer.phase = "draining"

    def _leave(self, action: Action) -> None:
        """It has finished; its supervisor starts another one."""
        if not self._own(action.who).can_leave:
            raise ImpossibleError(str(action))
        self._restart(self._own(action.who))

    def _score(self, action: Action) -> None:
        """A reward actor sends a scored group."""
        scorer = self._own(action.who)
        if action.detail not in scorer.to_send:
            raise ImpossibleError(str(action))
        parcel = Parcel(f"scored {_name(action.detail)}", PACKER, scorer.send(action.detail), scorer.run)
        self._post([parcel], action)

    def _load(self, action: Action) -> None:
        """An engine switches to what it was told to serve (P22)."""
        server, before = self._own(action.who), self.peers[action.who].policy
        if server.target not in [manifest.policy for manifest in self._publisher.published]:
            raise ImpossibleError(str(action))
        server.policy = server.target
        if before is not None and server.policy is not None:
            dead = before.lineage <= self.packer.machine.engines.dead_lineage
            forward = dead or server.policy.version >= before.version
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

    def _look(self, action: Action) -> None:
        """An engine looks at whose turn it is."""
        server = self._own(action.who)
        if not server.can_look:
            raise ImpossibleError(str(action))
        server.look()

    def _follow(self, action: Action) -> None:
        """An engine does what it was told when it looked."""
        server = self._own(action.who)
        if server.order is None:
            raise ImpossibleError(str(action))
        server.follow()

    def _close(self, action: Action) -> None:
        """Rank 0 reports the step that it has published, and begins to save it if that is due."""
        self._rank_with(self._can_close, action).close()

    def _save(self, action: Action) -> None:
        """The checkpoint is written."""
        rank = self._rank_with(lambda rank: rank.to_save is not None, action)
        rank.save()
        self.disk = rank.disk
        if rank.over:
            self._restart(rank)

    def _rank_with(self, able: Callable[[Rank], bool], action: Action) -> Rank:
        rank = self._own(action.who)
        if not able(rank):
            raise ImpossibleError(str(action))
        return rank  # type: ignore[no-any-return]

    def _can_train(self, rank: Rank) -> bool:
        """The ranks train a step together: none is ahead of another by more than the step under way."""
        others = [(other.incarnation, other.next_step) for other in self.all(Rank) if self._is_of_the_gang(other)]
        together = all(one == rank.incarnation and step >= rank.next_step for one, step in others)
        return rank.can_train and together

    def _is_of_the_gang(self, rank: Rank) -> bool:
        """Whether others wait for it: a process that nobody has asked, or that was replaced, is not waited for."""
        return rank.incarnation > 0 or not (rank.stray or rank.name + STRAY in self.peers)

    def _can_close(self, rank: Rank) -> bool:
        """A save begins after the save before it."""
        return rank.to_close and rank.to_save is None

    # --- who can do what -----------------------------------------------------------------------------------------

    def all(self, kind: type) -> list[Any]:
        """The processes of a kind."""
        return [self.peers[name] for name in self._by_kind[kind]]

    @property
    def _publisher(self) -> Rank:
        return max((rank for rank in self.all(Rank) if rank.rank == 0), key=lambda rank: int(rank.incarnation))

    def _policies_for(self, sampler: Sampler, hold: Hold) -> list[PolicyVersion]:
        """What the engines serve that may sample a ticket (P10)."""
        ticket = sampler.held[hold]
        named = {identity_of(engine) for engine in sampler.engines}
        able = [server for server in self.all(Server) if server.holds_device or not self.scenario.settings.turns]
        served = [server.policy for server in able if server.policy and server.identity in named]
        if ticket.policy:
            return [policy for policy in served if policy == ticket.policy]
        return [policy for policy in served if policy.version >= ticket.min_version]

    def work(self) -> Iterator[Action]:
        """Everything that a process could do now but send heartbeats."""
        published = [manifest.policy for manifest in self._publisher.published]
        for server in self.all(Server):
            if server.target in published:
                yield Action("load", server.label)
            if server.can_look:
                yield Action("look", server.label)
            if server.order is not None:
                yield Action("follow", server.label)
        for rank in self.all(Rank):
            yield from self._rank_work(rank)
        for sampler in self.all(Sampler):
            yield from self._sampler_work(sampler)
        for scorer in self.all(Scorer):
            if scorer.can_leave:
                yield Action("leave", scorer.label)
            for hold in scorer.to_send:
                yield Action("score", scorer.label, hold)

    def _rank_work(self, rank: Rank) -> Iterator[Action]:
        able = {
            "read": rank.can_read,
            "publish": rank.to_publish,
            "close": self._can_close(rank),
            "save": rank.to_save is not None,
            "train": self._can_train(rank),
        }
        yield from (Action(verb, rank.label) for verb, can in able.items() if can)

    def _sampler_work(self, sampler: Sampler) -> Iterator[Action]:
        for hold in sampler.to_sample:
            for policy in self._policies_for(sampler, hold)[:1]:
                yield Action("sample", sampler.label, (hold, policy))
        for hold in sampler.to_send:
            receivers = sampler.receivers_for(hold)
            for i in range(len(receivers)):
                yield Action("send", sampler.label, (hold, receivers[(hold[0] + i) % len(receivers)]))

    def news(self) -> Iterator[Action]:
        """The heartbeats that are due."""
        silent = {name for name, _ in self.silent}
        for name, peer in self.peers.items():
            if name not in silent and peer.started and peer.words() != peer.said:
                yield Action("heartbeat", name)

    # --- what it is ----------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> Names:
        """How identities are called in keys: the newest process of a name is the same whatever its number."""
        identities = tuple(peer.identity for peer in self.peers.values())
        if identities not in _names:
            known = {
                f"{peer.name}/{boot}": f"{label}-{peer.boot - boot}"
                for label, peer in self.peers.items()
                for boot in range(1 + peer.boot // BOOTS * BOOTS, peer.boot + 1)
            }
            _names[identities] = known
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
        parts += [self.disk.writer, self.num_forks]
        parts += [self._key_of(parcel) for parcel in self.wire]
        judged = [peer for label, peer in self.peers.items() if isinstance(peer, Scorer) or self.scenario.strays]
        parts += [tuple(self._is_steady(peer) for peer in judged)]  # what P3 and P13 are judged by
        return hash(tuple(parts))

    def _key_of(self, parcel: Parcel) -> Hashable:
        label, to, content, _ = parcel
        if isinstance(content, Directive):
            rewards = [self.names.get(identity_of(peer)) for peer in getattr(content, "rewards", ())]
            content = (key_of(content, {}, 0.0), tuple(rewards))
        elif isinstance(content, Batch):
            content = (content.term < self.packer.machine.term, content.incarnation, content.step)
        elif not isinstance(content, GroupFacts):
            identity, heartbeat = content
            old = self._is_old(identity, heartbeat)
            content = (self.names.get(identity), old, None if old else key_of(heartbeat, {}, 0.0))
        return label, self.names.get(to, to), content

    def _is_old(self, identity: str, heartbeat: Heartbeat) -> bool:
        """Whether the packer has heard, or will refuse, what comes now."""
        packer = self.packer
        heard = [event[1].sequence for event in packer.inflow if isinstance(event, tuple) and event[0] == identity]
        known = packer.machine.peers.heartbeat_of(identity)
        newest = max([*heard, known.sequence if known else 0])
        return bool(packer.machine.peers.refusal_of(identity)) or newest >= heartbeat.sequence


_names: dict[tuple[str, ...], dict[str, str]] = {}


def _peers(scenario: Scenario) -> Iterator[Watched]:
    last, ranks = scenario.settings.max_steps, scenario.settings.num_ranks
    kinds = {"Sampler": Sampler, "Scorer": Scorer, "Server": Server, "Rank": Rank} | scenario.peers
    given: dict[str, tuple[type[Watched], dict[str, Any]]] = {}
    for number in range(scenario.num_rollouts):
        given[f"a{number}"] = kinds["Sampler"], {"slots": 2, "lease": scenario.settings.lease}
    for number in range(scenario.num_rewards):
        given[f"r{number}"] = kinds["Scorer"], {}
    for number in range(scenario.num_engines):
        given[f"e{number}"] = kinds["Server"], {}
    for rank in range(ranks):
        own = {"rank": rank, "num_ranks": ranks, "save_every": scenario.save_every, "last_step": last}
        own["turns"] = scenario.settings.turns
        given[f"t{rank}"] = kinds["Rank"], own
    yield from (
        kind(name, boot=scenario.first_boot + BOOTS * i, **own) for i, (name, (kind, own)) in enumerate(given.items())
    )
    for number, name in enumerate(scenario.strays, start=len(given)):
        kind, own = given[name]
        yield kind(name, boot=scenario.first_boot + BOOTS * number, stray=True, started=False, **own)


def _name(hold: Hold) -> str:
    return f"{hold[0]}.{hold[1]}"
