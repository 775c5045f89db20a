"""What screens are told beyond the steps: who was heard when, and how full each stage is."""

import json

import pytest

from actors.packer.progress import FILE_SECONDS, FORGET_SECONDS, MEAN_SECONDS, Progress, ProgressFile
from actors.telemetry.writer import WriteError, Writer
from tests.actors.ledger.driver import Engine, Reward, Ring, Rollout, Trainer, policy, settings
from tests.ring.harness import SHORT_LEASE, ring_config


class Followed(Ring):
    """A driven machine, and the progress that follows it as the packer has it do."""

    def __init__(self, folder):
        super().__init__(settings())
        config = ring_config(
            folder, "inproc", rollout={"max_concurrent_groups": 4}, packer={"groups_per_step": 2}, bus=SHORT_LEASE
        )
        self.progress = Progress(config, self.machine)
        self.trainer, self.engine = Trainer("trainer-0"), Engine("inference-0", policy=policy(0))
        self.rollout, self.reward = Rollout("rollout-0"), Reward("reward-0")
        self.add(self.trainer, self.engine, self.rollout, self.reward)

    def heartbeat(self, *doubles):
        """These send heartbeats now."""
        for double in doubles:
            said = double.heartbeat()
            self.machine.heard(self.now, double.identity, said)
            self.progress.heard(self.now, double.identity, said)

    def values(self):
        """What a screen is told now."""
        return self.progress.values(self.now)

    def ages(self):
        """Seconds since each actor was heard, by name."""
        return {actor["name"]: actor["age"] for actor in self.values()["actors"]}


@pytest.fixture
def ring(tmp_path):
    """Four actors, two rounds after their start: 4 ordinals are issued (2 steps of 2 groups)."""
    made = Followed(tmp_path)
    made.turn()
    made.turn()
    return made


def test_actors_are_told_by_name_with_age_and_work(ring):
    """The one that does not send heartbeats grows old, and stays when its lease has ended, for some minutes."""
    assert ring.ages() == {"inference-0": 0.0, "reward-0": 0.0, "rollout-0": 0.0, "trainer-0": 0.0}
    engine, reward, _, trainer = ring.values()["actors"]
    assert (engine["kind"], engine["engine"], engine["version"]) == ("inference", "clean", 0)
    assert (reward["load"], trainer["next_step"]) == (0, 1)
    ring.wait(5.0, ring.reward)
    assert ring.ages() == {"inference-0": 0.0, "reward-0": 5.0, "rollout-0": 0.0, "trainer-0": 0.0}
    assert ring.values()["queues"]["scoring"][1] == 0
    ring.now += FORGET_SECONDS
    ring.turn(ring.reward)
    ring.progress.sample(ring.now)
    assert "reward-0" not in ring.ages()


def test_who_says_that_it_is_done_has_left_and_who_comes_back_was_restarted(ring):
    """A drained actor is not missed; a new boot of a name is one restart, a new name none."""
    ring.reward.phase = "done"
    ring.turn()
    assert "reward-0" not in ring.ages()
    ring.rollout.restart()
    ring.add(Rollout("rollout-1"))
    ring.turn()
    assert ring.values()["restarts"] == {"rollout-0": 1}
    assert {"rollout-0", "rollout-1"} <= ring.ages().keys()


def test_each_stage_counts_its_groups_against_its_room(ring):
    """4 issued: one is sampled and so with the reward actor, then settled; two more are, and make a step."""
    assert ring.values()["queues"] == {
        "sampling": (4, 4), "scoring": (0, 8), "scored": (0, 4), "packed": (0, 4), "batches": (0, 2)
    }  # fmt: skip
    first, *others = list(ring.rollout.to_sample)
    facts = ring.rollout.sample(first, policy(0))
    ring.turn()
    assert ring.values()["queues"] | {"sampling": (3, 4), "scoring": (1, 8)} == ring.values()["queues"]
    ring.score(facts)
    ring.decide()
    assert (
        ring.values()["queues"] | {"sampling": (3, 4), "scoring": (0, 8), "scored": (1, 4)} == ring.values()["queues"]
    )
    ring.lose = lambda direction, identity: direction == "batch"
    for hold in others[:2]:
        ring.score(ring.rollout.sample(hold, policy(0)))
    ring.turn()
    queues = ring.values()["queues"]
    assert (queues["scored"], queues["packed"], queues["batches"]) == ((1, 4), (2, 4), (1, 2))


def test_means_follow_what_lasts(ring):
    """The first sample counts whole; after MEAN_SECONDS two thirds of it are the new number."""
    ring.progress.sample(ring.now)
    assert ring.values()["means"]["sampling"] == 4.0
    ring.settle(ring.rollout, policy(0))
    ring.decide()
    ring.progress.sample(ring.now + MEAN_SECONDS)
    assert ring.values()["means"]["sampling"] == pytest.approx(4.0 * 0.368, abs=0.01)


def test_before_the_first_ticket_nothing_is_averaged(tmp_path):
    """Models load for minutes, and say nothing of the run's pace."""
    ring = Followed(tmp_path)
    ring.progress.sample(0.0)
    assert ring.values()["means"] == {}
    json.dumps(ring.values())


def test_progress_file_is_whole_and_written_now_and_then(tmp_path):
    """At once, after FILE_SECONDS, and when the phase changes; a folder that can't be written is named."""
    file = ProgressFile(tmp_path, Writer())
    assert file.is_due(0.0, "running")
    file.write(0.0, {"phase": "running", "step": 3})
    assert json.loads((tmp_path / "progress.json").read_text())["step"] == 3
    assert [file.is_due(FILE_SECONDS / 2, "running"), file.is_due(FILE_SECONDS, "running")] == [False, True]
    assert file.is_due(0.1, "finishing")
    with pytest.raises(WriteError, match=r"progress\.json"):
        ProgressFile(tmp_path / "gone", Writer()).write(0.0, {"phase": "running"})
