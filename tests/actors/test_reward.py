"""The reward actor's handling of groups; calling functions is tested in tests/actors/rewards."""

import numpy as np
import pytest

from actors.reward import RewardActor
from actors.rewards.score import NamedReward
from actors.telemetry.metrics import Metrics
from schemas.messages import RolloutGroup
from tests.ring.harness import ring_config, wait_until


def group(purpose: str = "train") -> RolloutGroup:
    """Two completions, `a` and `bb`."""
    return RolloutGroup(
        run="r", sender="rollout-0", ordinal=0 if purpose == "train" else -1, attempt=1, purpose=purpose,
        environment="e", example_key="k", prompt="p", columns={"answer": "bb"}, completions=["a", "bb"],
        finish_reasons=["stop", "stop"], prompt_ids=np.array([1], np.int32),
        completion_offsets=np.array([0, 1, 3], np.int64), token_ids=np.array([5, 6, 7], np.int32),
        loss_mask=np.ones(3, np.uint8), logprobs=np.full(3, -1, np.float32),
        segments=np.array([[0, 1, 0], [1, 1, 0]], np.int64), segment_temperatures=np.ones(2, np.float32),
    )  # fmt: skip


def lengths(prompts, completions, **_):
    """1 and 2 for the group above."""
    return [float(len(text)) for text in completions]


def ones(prompts, completions, **_):
    """1 for all."""
    return [1.0] * len(completions)


@pytest.fixture
def actor(tmp_path):
    """Weighs lengths by 2 and only measures ones."""
    config = ring_config(tmp_path, "inproc")
    rewards = [NamedReward("lengths", 2.0, {}, lengths), NamedReward("ones", 0.0, {}, ones)]
    made = RewardActor(config, "reward-0", Metrics("reward"), rewards, NamedReward("exact_match", 0.0, {}, ones))
    yield made
    made._pool.shutdown()
    for scorer in made._scorers.values():
        scorer.close()
    made._inbox.close()


def test_train_group_gets_weighted_rewards_and_advantages(actor):
    """2·1 + 0·1 = 2 and 2·2 + 0·1 = 4, so the advantages around their mean 3 are −1 and 1."""
    actor._take(group())
    held = actor._held[0, 1]
    scored = wait_until(lambda: held.scored, "scored")
    assert scored.reward_names == ["lengths", "ones"]
    assert scored.rewards_FG.tolist() == [[1.0, 2.0], [1.0, 1.0]]
    assert scored.rewards_G.tolist() == [2.0, 4.0]
    assert scored.advantages_G.tolist() == [-1.0, 1.0]


def test_eval_group_is_measured_by_exact_match_besides(actor):
    """The last row of an evaluation is exact_match; it is no part of the reward."""
    actor._take(group("eval"))
    scored = wait_until(lambda: actor._held[-1, 1].scored, "scored")
    assert scored.reward_names == ["lengths", "ones", "exact_match"]
    assert scored.rewards_G.tolist() == [2.0, 4.0]


def test_second_copy_of_a_held_group_is_not_scored_again(actor):
    """A rollout that sends again what this actor holds costs nothing (P13)."""
    actor._take(group())
    first = actor._held[0, 1]
    wait_until(lambda: first.scored, "scored")
    actor._take(group())
    assert actor._held == {(0, 1): first}
    assert actor._metrics.registry.get_sample_value("grpo_reward_groups_total", {"purpose": "train"}) == 1.0


def test_message_of_another_kind_is_dropped(actor):
    """A scored group that comes in on the groups edge is not scored again."""
    actor._take(group())
    scored = wait_until(lambda: actor._held[0, 1].scored, "scored")
    actor._held.clear()
    actor._take(scored)
    assert actor._held == {}
