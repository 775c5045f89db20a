"""Going back: what a fork keeps, what it gives up, and what may still be heard of the dead history (P5, P23)."""

from collections.abc import Iterator

import pytest

from actors.ledger import GroupState
from schemas.errors import ProtocolError
from tests.actors.ledger.driver import Engine, Reward, Ring, Rollout, Trainer, settings

MAX_STEPS = 8


class Run:
    """A ring with one actor of each kind, all of which do what they can."""

    def __init__(self) -> None:
        self.ring = Ring(settings(max_steps=MAX_STEPS))
        self.rollout = self.ring.add(Rollout("rollout-0", slots=8))
        self.reward, self.engine = self.ring.add(Reward("reward-0")), self.ring.add(Engine("inference-0"))
        self.trainer = self.ring.add(Trainer("trainer-0", last_step=MAX_STEPS, save_every=2))

    def work(self, until_step: int) -> None:
        """Turn until this step is trained; the trainer goes no further."""
        for _ in range(100):
            self.ring.turn()
            if self.trainer.over:
                self.trainer.restart()
            if self.engine.target:
                self.engine.load(self.trainer)
            for hold in self.rollout.to_sample:
                if self.engine.policy and self.engine.policy.version >= self.rollout.held[hold].min_version:
                    self.rollout.sample(hold, self.engine.policy)
            for hold in self.rollout.to_send:
                facts = self.rollout.sampled[hold]
                self.rollout.sent_to[hold] = self.reward.identity
                self.ring.score(facts)
            if self.trainer.can_train and self.trainer.next_step <= until_step:
                self.trainer.train()
            if self.ring.machine.trained_step == until_step:
                return
        raise AssertionError(f"step {until_step} is not trained")

    def fork(self, at_most: int | None = None) -> None:
        """The packer is started again, and told to go back."""
        self.ring.restart_packer()
        self.ring.machine.rewind(at_most)
        self.ring.commit()

    def forked(self) -> set[int]:
        """The ordinals given up, as the store has them."""
        return {row.ordinal for row in self.ring.store.groups() if row.reason == "forked"}


@pytest.fixture
def run() -> Iterator[Run]:
    """At step 5, with step 6 in the trainer's hands."""
    made = Run()
    made.work(5)
    made.ring.turn()
    assert made.trainer.can_train
    yield made
    made.ring.store.close()


def test_a_fork_keeps_the_step_that_was_saved_while_the_packer_was_away(run: Run) -> None:
    """The trainer trains on without a packer and saves step 6; that is the newest checkpoint, and nothing is lost."""
    run.trainer.train()
    assert max(run.trainer.disk.chains) == 6
    assert run.ring.machine.durable_step == 4
    run.fork()
    run.trainer.restart()
    run.work(MAX_STEPS)
    assert run.forked() == {12, 13}, "what was admitted beyond step 6, and no more"
    trained = [ordinal for step in run.trainer.trained for ordinal in step.ordinals]
    assert trained == [*range(12), *range(14, 18)]
    assert run.ring.machine.phase == "done"


def test_a_fork_is_carried_out_though_its_packer_dies_before_a_trainer_comes(run: Run) -> None:
    """What it was told is stored; until a gang forms nothing is issued or composed, and the run is not done."""
    run.fork()
    run.ring.restart_packer()
    assert run.ring.machine.rewind_order is not None
    assert run.ring.machine.phase == "starting"
    run.trainer.restart()
    run.work(6)
    assert run.ring.machine.rewind_order is None
    assert min(run.forked()) == 8, "step 5 was not saved, and is sampled again"
    run.ring.restart_packer()
    assert run.ring.machine.rewind_order is None


def test_a_trainer_of_before_a_fork_is_told_to_exit_whatever_it_knows(run: Run) -> None:
    """A pod that lives on names the next step of the dead history, also after the new gang has formed (P5)."""
    old = run.trainer
    run.fork(at_most=2)
    run.ring.heartbeat(old)
    run.ring.decide()
    assert old.over
    run.ring.doubles.remove(old)
    run.trainer = run.ring.add(Trainer("trainer-0", boot=9, last_step=MAX_STEPS, save_every=2, disk=old.disk))
    for step in [step for step in old.disk.chains if step > 2]:  # as begin_at does
        del old.disk.chains[step]
    run.work(3)
    old.over = False
    run.ring.heartbeat(old)
    run.ring.decide()
    run.work(4)
    assert run.ring.machine.gang.lineage == 2


def test_a_step_that_no_history_has_is_still_a_sign_of_lost_commits(run: Run) -> None:
    """After a fork as before one: the checkpoint's chain is neither the ledger's nor a dead one (P5)."""
    run.fork()
    run.trainer.restart()
    run.work(6)
    run.trainer.disk.chains[7] = "nobody's"
    with pytest.raises(ProtocolError, match="knows step 7"):
        run.ring.turn()


def test_examples_that_were_given_up_come_again_once_each_and_in_order(run: Run) -> None:
    """Before new ones, also when the packer is started again in the middle of them."""
    given_up = {row.ordinal: row.example for row in run.ring.store.groups() if row.ordinal >= 4}
    run.fork(at_most=2)
    for step in [step for step in run.trainer.disk.chains if step > 2]:
        del run.trainer.disk.chains[step]
    run.trainer.restart()
    run.work(3)
    run.ring.restart_packer()
    run.work(MAX_STEPS)
    again = {row.origin: row.example for row in run.ring.store.groups() if row.origin in given_up}
    assert again == {ordinal: given_up[ordinal] for ordinal in again}
    assert list(again) == sorted(again)
    assert len(again) == min(len(given_up), 2 * (MAX_STEPS - 2))
    assert {row.state for row in run.ring.store.groups() if row.origin in given_up} == {GroupState.DURABLE}


def test_going_back_with_the_same_groups_gives_nothing_up(run: Run) -> None:
    """The steps after the checkpoint are trained again as they were composed."""
    before = [step.ordinals for step in run.ring.store.steps()]
    run.ring.restart_packer()
    run.ring.machine.rewind(2, sample_anew=False)
    run.ring.commit()
    for step in [step for step in run.trainer.disk.chains if step > 2]:
        del run.trainer.disk.chains[step]
    run.trainer.restart()
    run.work(MAX_STEPS)
    assert run.forked() == set()
    assert [step.ordinals for step in run.trainer.trained][: len(before)] == before
