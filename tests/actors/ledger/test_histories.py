"""Random histories: crashes, lost messages, copies and failures in any order, judged after every round.

What must hold at every moment, and that any history ends well once the trouble does. A failing seed is a test of its
own: `test_..[seed]` repeats it exactly.
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import pytest

from actors.ledger import GroupState, Machine, replies
from tests.actors.ledger.driver import Double, Engine, Reward, Ring, Rollout, Trainer, facts_of, settings

SEEDS = range(24)
ACTIONS = 260
CALM_TURNS = 150
FINISHED = {"train": ("trained", "durable"), "eval": ("settled",)}


class Walk:
    """A ring in trouble. Each action is what one process may do or suffer next."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.trouble = True
        ranks, level = rng.choice([1, 1, 2]), rng.choice([0, 1, 3])
        groups, limit = rng.choice([1, 2, 3]), rng.choice([level, 8])
        order = rng.choice(["ordinal", "arrival", "shared"])
        shared = {
            "shares": {"slow": 0.3, "fast": 0.7},
            "allowance": (limit - level) * groups,
            "max_concurrent_groups": 4,
        }
        chosen = settings(
            groups_per_step=groups,
            max_steps=rng.choice([3, 6]),
            num_ranks=ranks,
            order="ordinal" if order == "ordinal" else "arrival",
            max_async_level=level,
            max_off_policy_steps=limit,
            **(shared if order == "shared" else {}),
            max_resample_times=rng.choice([0, 1, 3]),
            group_timeout=20.0,
            reward_timeout=20.0,
            eval_every_steps=rng.choice([0, 2]),
            eval_at_start=rng.random() < 0.5,
            eval_at_end=rng.random() < 0.5,
        )
        self.ring = Ring(chosen, num_evals=2)
        self.ring.lose = lambda what, who: self.trouble and rng.random() < 0.15
        self.rollouts = [self.ring.add(Rollout(f"a{i}", slots=rng.choice([1, 2, 4]))) for i in range(2)]
        self.rewards = [self.ring.add(Reward(f"r{i}", boot=1 + 100 * i)) for i in range(2)]
        self.engines = [self.ring.add(Engine(f"e{i}")) for i in range(rng.choice([1, 2]))]
        self.trainers = [
            self.ring.add(Trainer(f"t{r}", rank=r, num_ranks=ranks, last_step=chosen.max_steps)) for r in range(ranks)
        ]

    @property
    def machine(self) -> Machine:
        """Of the packer that runs now."""
        return self.ring.machine

    def act(self) -> None:
        """One random action."""
        happens = {
            self.round: 30,
            self.heartbeat: 40,
            self.time: 12,
            self.sample: 20,
            self.send: 20,
            self.score: 20,
            self.fail: 3,
            self.train: 12,
            self.load: 12,
            self.crash: 2,
            self.packer_crash: 1,
        }
        self.rng.choices(list(happens), list(happens.values()))[0]()

    def calm_turn(self) -> None:
        """Everybody does all that can be done, and nothing goes wrong."""
        for double in self.ring.doubles:
            if double.over:
                double.restart()
        self.ring.wait(1.0)
        self.load()
        for rollout in self.rollouts:
            for _ in range(len(rollout.to_sample)):
                self.sample(rollout)
            for _ in range(len(rollout.to_send)):
                self.send(rollout)
        for reward in self.rewards:
            for facts in list(reward.held.values()):
                self.ring.score(facts)
        self.train()

    # --- actions -------------------------------------------------------------------------------------------------

    def round(self) -> None:
        """The packer does a round; sometimes it dies before it has said what it committed."""
        self.machine.decide(self.ring.now)
        self.ring.commit()
        if self.rng.random() < 0.02:
            self.ring.restart_packer()
        self.ring.decide()

    def heartbeat(self) -> None:
        """One process sends heartbeats."""
        self.ring.heartbeat(self.rng.choice(self.ring.doubles))

    def time(self) -> None:
        """The clock goes on."""
        self.ring.now += self.rng.choice([0.1, 0.3, 1.0, 1.0, 2.5])

    def crash(self) -> None:
        """A process dies, and its supervisor starts it again."""
        self.rng.choice(self.ring.doubles).restart()

    def packer_crash(self) -> None:
        """What it has heard and decided since its last commit is gone."""
        self.machine.decide(self.ring.now)
        self.ring.restart_packer()

    def sample(self, rollout: Rollout | None = None) -> None:
        """The first ticket that some engine may sample is sampled."""
        rollout = rollout or self.rng.choice(self.rollouts)
        for hold in rollout.to_sample:
            ticket = rollout.held[hold]
            for policy in (engine.policy for engine in self.engines if engine.policy):
                if policy == ticket.policy if ticket.policy else policy.version >= ticket.min_version:
                    facts = rollout.sample(hold, policy)
                    if self.rng.random() < 0.3:
                        rollout.sampled[hold] = replace(facts, rejected_as="zero_variance")
                    return

    def send(self, rollout: Rollout | None = None) -> None:
        """To a reward actor that the directive names; it may have died since."""
        rollout = rollout or self.rng.choice(self.rollouts)
        peers = rollout.directive.rewards if rollout.directive else []
        if rollout.to_send and peers:
            hold, peer = self.rng.choice(rollout.to_send), self.rng.choice(peers)
            rollout.sent_to[hold] = f"{peer.name}/{peer.boot_id}"
            for reward in self.rewards:
                if reward.identity == rollout.sent_to[hold]:
                    reward.get(rollout.sampled[hold])

    def score(self) -> None:
        """A scored group reaches the packer, which may well die before its commit; then it comes again."""
        reward = self.rng.choice(self.rewards)
        good = [hold for hold in reward.held if hold not in reward.failed]
        if good:
            self.ring.score(reward.held[self.rng.choice(good)])

    def fail(self) -> None:
        """An attempt goes wrong at either holder, or a bad copy arrives."""
        holder = self.rng.choice([*self.rollouts, *self.rewards])
        holds = holder.to_sample if isinstance(holder, Rollout) else list(holder.held)
        if not holds:
            return
        hold = self.rng.choice(holds)
        if self.rng.random() < 0.5 and isinstance(holder, Rollout) and self.engines[0].policy:
            bad = facts_of(holder.held[hold], self.engines[0].policy).__dict__ | {"num_completions": 99}
            self.ring.score(type(facts_of(holder.held[hold], self.engines[0].policy))(**bad))
        else:
            holder.fail(hold)

    def train(self) -> None:
        """Every rank that has its next batch trains it."""
        for trainer in self.trainers:
            if trainer.can_train and not trainer.over:
                trainer.train()

    def load(self) -> None:
        """Engines switch to what they were told to serve."""
        for engine in self.engines:
            engine.load(self.trainers[0])


def test_a_ring_without_trouble_finishes() -> None:
    """The doubles do their work: what follows is not true for lack of anything happening."""
    walk = Walk(seed=1)
    walk.trouble = False
    for _ in range(60):
        walk.calm_turn()
    assert walk.machine.phase == "done"
    assert walk.machine.groups.counters["copies_dropped"] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_any_history_keeps_the_promise_and_ends_well(seed: int) -> None:
    """Always issued = trained + dropped + in flight, and the store can be taken over; in the end all is trained."""
    walk = Walk(seed)
    for number in range(ACTIONS):
        walk.act()
        if number % 8 == 0:
            walk.ring.commit()
            check_equation(walk.ring)
            check_indices(walk.machine)
            check_slots(walk)
        if number % 40 == 0:
            check_restore(walk.ring)
        for double in walk.ring.doubles:
            if double.over:
                double.restart()
    walk.trouble = False
    for _ in range(CALM_TURNS):
        if walk.machine.phase == "done":
            break
        walk.calm_turn()
    assert walk.machine.phase == "done"
    check_end(walk)


def check_equation(ring: Ring) -> None:
    """issued = trained + dropped + in flight, each counted from the rows, in the store as in memory."""
    counts = ring.store.counts()
    for purpose, issued in ring.machine.groups.num_issued.items():
        rows = {(state, reason): n for (p, state, reason), n in counts.items() if p == purpose}
        trained = sum(n for (state, _), n in rows.items() if state in FINISHED[purpose])
        dropped = sum(n for (state, _), n in rows.items() if state == "dropped")
        in_flight = sum(n for (state, _), n in rows.items() if state not in (*FINISHED[purpose], "dropped"))
        assert issued == trained + dropped + in_flight
        assert dropped == ring.machine.groups.num_dropped(purpose)
        by_state = Counter[str]()
        for (state, _), n in rows.items():
            by_state[state] += n
        assert by_state == {state.value: n for state, n in ring.machine.groups.counts(purpose).items()}


def check_indices(machine: Machine) -> None:
    """What is kept to save searching is what a search of the rows finds."""
    groups = machine.groups
    rows = groups.rows.values()
    held: dict[str, set[int]] = {}
    for row in rows:
        if row.holder is not None:
            assert row.state is GroupState.ISSUED
            held.setdefault(row.holder, set()).add(row.ordinal)
    issued = {row.ordinal for row in rows if row.state is GroupState.ISSUED}
    settled = [row for row in rows if row.state is GroupState.SETTLED and row.ordinal >= 0]
    assert groups.held_by == held
    assert set(groups.waiting) == issued - {ordinal for ordinals in held.values() for ordinal in ordinals}
    assert groups.open_evals == {ordinal for ordinal in issued if ordinal < 0}
    assert list(groups.settled) == [row.ordinal for row in sorted(settled, key=lambda row: row.arrival or 0)]
    assert all(row.failures <= row.attempt for row in rows)


def check_slots(walk: Walk) -> None:
    """No rollout samples more groups at once than it has room for (P9)."""
    for rollout in walk.rollouts:
        assert len(rollout.to_sample) <= rollout.slots


def check_restore(ring: Ring) -> None:
    """A packer that starts from the store now, and hears the same heartbeats, knows and says the same."""
    for _ in range(3):  # the first may free names and tickets, which makes room for others with the next ones
        heartbeats = {double.identity: double.heartbeat() for double in ring.doubles if not double.over}
        for identity, heartbeat in heartbeats.items():
            ring.machine.heard(ring.now, identity, heartbeat)
        ring.probe()
        ring.machine.decide(ring.now)
        ring.commit()
    restored = ring.new_machine()
    ring.restore(restored)
    assert memory_of(restored) == memory_of(ring.machine)
    for identity, heartbeat in heartbeats.items():
        restored.heard(ring.now, identity, heartbeat)
    restored.decide(ring.now)
    assert restored.groups.num_issued == ring.machine.groups.num_issued
    assert restored.steps.composed == ring.machine.steps.composed
    assert words(restored, heartbeats) == words(ring.machine, heartbeats)
    # these words have reached nobody
    ring.machine.tell_everybody()


def memory_of(machine: Machine) -> dict[str, Any]:
    """All that must survive a packer."""
    groups, evaluations = machine.groups, machine.evaluations
    not_stored = {"issued_at": 0, "sampled_from": 0}
    rows = {o: asdict(row) | not_stored for o, row in sorted(groups.rows.items())}
    return {
        "rows": rows,
        "issued": groups.num_issued,
        "dropped": {purpose: +counts for purpose, counts in groups.dropped.items()},
        "counters": groups.counters,
        "unreported": sorted(groups.unreported_drops),
        "held": groups.held_by,
        "waiting": set(groups.waiting),
        "settled": list(groups.settled),
        "digests": machine.digests,
        "steps": (machine.steps.composed, machine.steps.chains, machine.steps.last),
        "progress": (machine.trained_step, machine.durable_step, machine.recorded_step),
        "gang": (machine.gang.incarnation, machine.gang.checkpoint),
        "engines": (machine.engines.target, machine.engines.update_id),
        "evaluations": (evaluations.done, evaluations.policy, evaluations.open),
    }


def words(machine: Machine, identities: Iterable[str]) -> dict[str, Any]:
    """The directives of these peers; who was heard first does not matter."""
    machine.tell_everybody()
    states, said = replies.directives(machine), {}
    for identity in identities:
        state = states[identity.encode()]
        assert state is not None
        arrays = {name: array.tolist() for name, array in state.arrays().items()}
        # the newest loads travel with each answer (`replies.loads`), whatever the directive was made with
        said[identity] = state.model_dump() | arrays | {state.loads: None}
    return said


def check_end(walk: Walk) -> None:
    """The witness of the trainers, who know nothing of the ledger's code: every ordinal once, or dropped (P20)."""
    ring = walk.ring
    walk.calm_turn()
    check_equation(ring)
    assert ring.store.trained_twice() == 0
    for trainer in walk.trainers:
        witness = trainer.disk.witness[ring.settings.max_steps]
        trained = [ordinal for step in witness for ordinal in step.ordinals]
        dropped = [drop.ordinal for step in witness for drop in step.dropped]
        assert sorted(trained + dropped) == list(range(ring.machine.groups.num_issued["train"]))
        assert [len(step.ordinals) for step in witness] == [ring.settings.groups_per_step] * ring.settings.max_steps
        assert trainer.disk.chains[ring.settings.max_steps] == ring.machine.steps.chains[ring.settings.max_steps]
    states = ring.machine.groups.counts("train")
    assert set(states) <= {GroupState.DURABLE, GroupState.DROPPED}
    if ring.settings.order == "ordinal":
        for number, step in ring.machine.steps.composed.items():
            for ordinal in step.ordinals:
                oldest = ring.row(ordinal).oldest_version
                assert oldest is not None
                assert number - 1 - oldest <= ring.settings.max_async_level


def test_doubles_are_what_the_walk_says() -> None:
    """Each action finds somebody to do it."""
    walk = Walk(seed=0)
    assert {type(double) for double in walk.ring.doubles} == {Rollout, Reward, Engine, Trainer}
    assert all(isinstance(double, Double) for double in walk.ring.doubles)
