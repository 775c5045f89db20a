"""What limits a run and which key is named, for each bottleneck, with numbers."""

import pytest

from actors.ops.screens.limits import limits
from tests.actors.ops.screens.progresses import PROGRESS, means, settings

ONE_MACHINE = {"settings": PROGRESS["settings"] | {"bus.control": "ipc"}}


@pytest.mark.parametrize(
    ("changes", "stage", "because", "change"),
    [
        (means(14.8, 0.4, 0.8), "sampling", "waits 60% of the time, and most groups are being sampled: 14.8",
         "up.inference"),
        (means(14.8) | {"engine_load": 100}, "sampling", "being sampled",
         "rollout.max_concurrent_groups (now 16): engines have room, 100 completions of 256"),
        (means(14.8) | {"engine_load": 100, "engine_slots": None}, "sampling", "of 16 slots", "up.inference"),
        (means(5.0, 0.4, 2.6), "sampling", "5.0 on average, of 16 slots",
         "up.inference, for more engines, or packer.max_async_level (now 1)"),
        (means(5.0, 0.4) | settings(max_async_level=0), "sampling", "5.0 on average", "packer.max_async_level (now 0)"),
        (means(4.0, 7.9, 0.8), "scoring", "with reward actors: 7.9 on average, of 8 at once",
         "up.reward, for more reward actors, or reward.max_concurrent_groups (now 8)"),
        (means(1.0, 3.0, 0.8), "scoring", "3.0 on average", "the functions of reward.functions"),
        (means(2.0, 0.4, 5.6), "packing", "scored and wait for the others of their step: 5.6", "packer.order: arrival"),
        (means(2.0, 0.4, 5.6) | settings(order="arrival"), "packing", "wait for the", "packer.oversampling_factor"),
        (means(2.0, 0.4, 1.0, 8.0), "packing", "on their way to the trainer: 8.0", "the network or the disk"),
        (means(2.0, 0.4, 1.0, 8.0) | ONE_MACHINE, "packing", "on their way", "the disk (ledger.path): batches reach"),
        (means(14.8) | ONE_MACHINE | {"cpu_cores": 2, "computing": 2}, "sampling", "being sampled",
         "rollout.max_tokens, for shorter completions, or another machine"),
        (means(14.8) | ONE_MACHINE | {"cpu_cores": 64, "computing": 2}, "sampling", "being sampled", "up.inference"),
        (means(14.8) | ONE_MACHINE | {"cpu_cores": None, "computing": 2}, "sampling", "sampled", "up.inference"),
        (means(2.0, 0.4, 3.0, 6.5) | {"idle": 0.04}, "training", "only 4% of the time, and 9.5 groups wait for it",
         "trainer.num_ranks (now 1) or packer.groups_per_step (now 8)"),
        ({"idle": 0.19} | settings(oversampling_factor=1.5), "training", "waits only 19%",
         "packer.oversampling_factor (now 1.5), lower or trainer.num_ranks"),
        ({"missing": ["trainer-1", "reward"]}, "training", "stands still, since trainer-1, reward is not there",
         "actors run trainer"),
        ({"missing": ["trainer-0", "inference"], "phase": "starting", "seconds": 3.0}, "training",
         "waits for the start of trainer-0, inference", ""),
        ({"missing": ["reward"]}, "scoring", "reward is not there", "actors run reward"),
        ({"missing": ["inference"]}, "sampling", "inference is not there", "actors run inference"),
        ({"eval_open": 30}, "sampling", "an evaluation comes first: 30 prompts to go", "eval.num_prompts"),
        ({"idle": None}, "unknown", "needs two trained steps", ""),
        ({"phase": "done"}, "nothing", "the run has ended", ""),
    ],
)  # fmt: skip
def test_the_slowest_stage_is_told_by_measured_waits_and_names_its_key(changes, stage, because, change):
    """A trainer that waits less than 20 % is the limit; else the stage where most groups are, full or not."""
    limit = limits(PROGRESS | changes)
    assert limit.stage == stage
    assert because in limit.because
    assert limit.change.startswith(change) if not change.startswith("actors run") else change in limit.change
    assert bool(limit.change) == bool(change)


def test_nothing_is_made_up_before_the_packer_has_been_heard():
    """No figures, no advice."""
    assert limits({}).stage == "unknown"
    assert limits({"phase": "failed", "failure": "refused"}).stage == "unknown"
