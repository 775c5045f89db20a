"""The trainer as a gang: forming, breaking, adoption, roll back, what is durable (P19, P21)."""

from actors.ledger import GroupState
from tests.actors.ledger.driver import Engine, Ring, Rollout, Trainer, manifest_of, policy, settings


def ring_of(num_ranks: int = 1, save_every: int = 2, **changes: object) -> tuple[Ring, list[Trainer], Rollout]:
    """Ranks t0, …, a rollout, an engine that serves version 0 for good (steps lag at will)."""
    ring = Ring(settings(num_ranks=num_ranks, max_async_level=9, **changes))
    ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=99))
    last = ring.settings.max_steps
    ranks = [
        Trainer(f"t{r}", rank=r, num_ranks=num_ranks, save_every=save_every, last_step=last) for r in range(num_ranks)
    ]
    ring.add(*ranks)
    for _ in range(3):
        ring.turn()
    ring.settle(rollout, policy(0))
    ring.turn()
    return ring, ranks, rollout


def train(ring: Ring, ranks: list[Trainer], steps: int) -> None:
    """All ranks train this many steps."""
    for _ in range(steps):
        for _ in range(3):
            ring.turn()
        for rank in ranks:
            rank.train()
    ring.turn()


def states(ring: Ring) -> str:
    """First letters of the states of all groups: i, s, c, t, d (durable), x (dropped)."""
    rows = ring.machine.groups.rows
    return "".join("x" if rows[o].state is GroupState.DROPPED else rows[o].state[0] for o in sorted(rows))


def test_a_gang_forms_when_all_ranks_have_beaten() -> None:
    """One of two waits; then both run in incarnation 1, from checkpoint 0 (P19)."""
    ring = Ring(settings(num_ranks=2))
    first, second = Trainer("t0", num_ranks=2), Trainer("t1", rank=1, num_ranks=2)
    ring.add(first)
    ring.turn()
    assert (first.directive.order, first.incarnation) == ("wait", 0)
    ring.add(second)
    ring.turn()
    assert [(t.directive.order, t.incarnation, t.next_step) for t in (first, second)] == [("run", 1, 1)] * 2


def test_a_gang_waits_until_its_ranks_have_read_their_checkpoints_back() -> None:
    """A rank that starts has sent heartbeats without any; forming now would throw its checkpoints away (P19)."""
    ring, (trainer,), _ = ring_of()
    train(ring, [trainer], 2)
    trainer.restart()
    saved, trainer.phase = trainer.disk.chains, "starting"
    trainer.disk.chains = {}
    ring.turn()
    assert trainer.directive.order == "wait"
    trainer.disk.chains, trainer.phase = saved, "running"
    ring.turn()
    assert (trainer.directive.checkpoint, trainer.next_step) == (2, 3)


def test_a_gang_starts_from_the_newest_checkpoint_that_all_ranks_have() -> None:
    """Rank 1 lacks step 2, and step 3 has another history: step 1 it is (P19)."""
    ring, ranks, _ = ring_of(num_ranks=2, save_every=1)
    train(ring, ranks, 3)
    for rank in ranks:
        rank.restart()
        rank.disk.chains[3] = "of another history"
    del ranks[1].disk.chains[2]
    ring.turn()
    assert [rank.directive.checkpoint for rank in ranks] == [1, 1]


def test_when_one_rank_dies_the_others_are_told_to_exit_and_all_start_again() -> None:
    """Incarnation 2, from the checkpoint of step 2 (P19)."""
    ring, ranks, _ = ring_of(num_ranks=2)
    train(ring, ranks, 3)
    ranks[0].restart()
    ring.turn()
    assert ranks[1].over
    assert ring.machine.gang.members == {}
    ranks[1].restart()
    ring.turn()
    assert [(rank.incarnation, rank.next_step) for rank in ranks] == [(2, 3), (2, 3)]


def test_a_rank_that_misses_its_lease_breaks_the_gang() -> None:
    """It is told to exit when it is back: its gang is no more (P19)."""
    ring, (trainer,), _ = ring_of()
    ring.wait(4, trainer)
    assert ring.machine.gang.members == {}
    ring.turn()
    assert trainer.over


def test_a_rank_that_took_the_order_of_a_gang_that_broke_while_it_loaded_is_told_to_exit() -> None:
    """It missed its lease loading; a new gang formed with it; then it says that it runs in the old one (P19)."""
    ring = Ring(settings())
    trainer = ring.add(Trainer("t"))
    ring.lose = lambda what, who: what == "directive"
    ring.turn()
    assert ring.machine.gang.incarnation == 1
    ring.wait(4, trainer)
    ring.turn()
    assert ring.machine.gang.incarnation == 2
    trainer.incarnation = 1
    ring.lose = lambda what, who: False
    ring.turn()
    assert trainer.over


def test_a_restarted_packer_adopts_a_gang_that_runs_on() -> None:
    """Same incarnation, no roll back, nothing trained again (P19)."""
    ring, (trainer,), _ = ring_of()
    train(ring, [trainer], 3)
    ring.restart_packer()
    changed = ring.machine.take_changes()
    ring.heartbeat(trainer)
    ring.machine.decide(ring.now)
    assert not changed.groups
    assert not ring.machine.take_changes().groups, "no row is written again"
    assert (ring.machine.gang.incarnation, ring.machine.trained_step, trainer.over) == (1, 3, False)
    train(ring, [trainer], 1)
    assert ring.machine.trained_step == 4


def test_a_restarted_packer_adopts_a_gang_that_was_told_to_run_and_is_loading() -> None:
    """Its ranks know their order and do not say so yet; they are its members by name and boot (P19)."""
    ring = Ring(settings())
    ring.add(Trainer("t"))
    ring.lose = lambda what, who: what == "directive"
    ring.turn()
    ring.restart_packer()
    ring.turn()
    assert ring.machine.gang.incarnation == 1
    assert ring.machine.gang.members == {0: "t/1"}


def test_a_restarted_packer_waits_for_all_ranks_and_dissolves_a_gang_that_lost_one_meanwhile() -> None:
    """Rank 0 has a new boot: rank 1, which still runs in the old gang, must exit too (P19)."""
    ring, ranks, _ = ring_of(num_ranks=2)
    train(ring, ranks, 2)
    ranks[0].restart()
    ring.restart_packer()
    ring.heartbeat(ranks[1])
    ring.decide()
    assert not ranks[1].over, "the others may just not have sent a heartbeat yet"
    ring.turn()
    ring.turn()
    assert ranks[1].over
    ranks[1].restart()
    ring.turn()
    assert [(rank.incarnation, rank.next_step) for rank in ranks] == [(2, 3), (2, 3)]


def test_a_restarted_packer_does_not_adopt_a_gang_that_had_broken() -> None:
    """That it broke is in the store: its last rank is told to exit (P19)."""
    ring, ranks, _ = ring_of(num_ranks=2)
    ring.kill(ranks[0])
    ring.lose = lambda what, who: what == "directive"
    ring.wait(4)
    ring.lose = lambda what, who: False
    ring.restart_packer()
    ring.turn()
    assert ranks[1].over


def test_a_new_gang_is_a_new_lineage() -> None:
    """Its version 2 is not the dead one's version 2 (P4)."""
    ring, (trainer,), _ = ring_of()
    train(ring, [trainer], 2)
    trainer.restart()
    ring.turn()
    assert [manifest.policy for manifest in trainer.published] == [policy(2, lineage=2)]


def test_groups_are_trained_when_all_ranks_are_past_their_step() -> None:
    """The slower rank counts (P21)."""
    ring, ranks, _ = ring_of(num_ranks=2)
    ring.turn()
    ranks[0].train()
    ring.turn()
    assert ring.machine.trained_step == 0
    ranks[1].train()
    ring.turn()
    assert ring.machine.trained_step == 1
    assert states(ring).startswith("ttcc")


def test_groups_are_durable_when_every_rank_has_a_good_checkpoint_of_their_step() -> None:
    """Step 2 is saved; step 3 is not; a checkpoint of another history does not count (P21)."""
    ring, (trainer,), _ = ring_of()
    train(ring, [trainer], 3)
    assert states(ring) == "ddddttcc"
    trainer.disk.chains[3] = "of another history"
    ring.turn()
    assert ring.machine.durable_step == 2


def test_a_new_gang_trains_again_what_came_after_its_checkpoint() -> None:
    """Step 3 goes back to composed, is replayed from the same groups, and is trained once in the live lineage (P21)."""
    ring, (trainer,), _ = ring_of()
    train(ring, [trainer], 3)
    trainer.restart()
    ring.turn()
    assert states(ring) == "ddddcccc"
    assert ring.machine.trained_step == 2
    train(ring, [trainer], 2)
    assert states(ring) == "dddddddd"
    assert [step.ordinals for step in trainer.trained] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_what_was_durable_is_not_when_the_gang_starts_from_an_older_checkpoint() -> None:
    """The last checkpoint is damaged: the run is not done until there is a good one again (P21, P27)."""
    ring, (trainer,), _ = ring_of(save_every=1, max_steps=2)
    train(ring, [trainer], 2)
    assert (ring.machine.durable_step, ring.machine.phase) == (2, "done")
    trainer.restart()
    del trainer.disk.chains[2]
    ring.turn()
    assert (ring.machine.trained_step, ring.machine.durable_step, ring.machine.phase) == (1, 1, "running")
    assert states(ring) == "ddcc"
    train(ring, [trainer], 1)
    assert (ring.machine.durable_step, ring.machine.phase) == (2, "done")
    assert states(ring) == "dddd"


def test_a_restarted_packer_knows_what_is_trained_and_durable() -> None:
    """Before any trainer has sent a heartbeat (P21)."""
    ring, (trainer,), _ = ring_of()
    train(ring, [trainer], 3)
    ring.turn()
    ring.restart_packer()
    assert (ring.machine.trained_step, ring.machine.durable_step, ring.machine.recorded_step) == (3, 2, 3)


def test_a_rank_past_the_last_step_is_told_to_finish() -> None:
    """It stays, so that its last version can be evaluated (P27)."""
    ring, (trainer,), _ = ring_of(max_steps=1)
    train(ring, [trainer], 1)
    assert trainer.directive.order == "finish"


def test_recorded_steps_are_confirmed_to_the_trainer_at_once() -> None:
    """It keeps its reports until then."""
    ring, _, _ = ring_of()
    ring.machine.note_recorded(1)
    assert {identity: state.recorded_step for identity, state in ring.decide().items()} == {"t0/1": 1}


def test_a_trained_step_is_told_to_all_at_once() -> None:
    """Also to those that have not sent a heartbeat since (P6)."""
    ring, (trainer,), _ = ring_of()
    ring.turn()
    trainer.train()
    ring.heartbeat(trainer)
    assert {identity: state.step for identity, state in ring.decide().items()} == {"a/1": 1, "e/1": 1, "t0/1": 1}


def test_only_versions_of_the_live_lineage_are_passed_on() -> None:
    """Whatever else a publisher still lists (P4, P22)."""
    ring, (trainer,), _ = ring_of()
    trainer.published = [manifest_of(policy(7, lineage=9))]
    ring.turn()
    assert ring.machine.engines.target.policy == policy(0)
