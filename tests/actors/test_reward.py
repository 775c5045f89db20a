"""The reward actor's handling of groups; calling functions is tested in tests/actors/rewards."""

import numpy as np
import pytest
from structlog.testing import capture_logs

from actors.reward import RewardActor
from actors.rewards.score import NamedReward
from actors.telemetry.metrics import Metrics
from schemas.errors import ConfigError
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
def make_actor(tmp_path):
    """Reward actors that talk to nobody."""
    made = []

    def make(*rewards: NamedReward) -> RewardActor:
        config, exact_match = ring_config(tmp_path, "inproc"), NamedReward("exact_match", 0.0, {}, ones)
        made.append(RewardActor(config, "reward-0", Metrics("reward"), list(rewards), exact_match))
        return made[-1]

    yield make
    for actor in made:
        actor._pool.shutdown()
        actor._scorer.close()
        actor._inbox.close()


@pytest.fixture
def actor(make_actor):
    """Weighs lengths by 2 and only measures ones."""
    return make_actor(NamedReward("lengths", 2.0, {}, lengths), NamedReward("ones", 0.0, {}, ones))


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


def test_each_distinct_error_of_a_function_is_logged_with_its_traceback_once(make_actor):
    """Four groups: two fail at one line with different messages, two at another; each line's traceback comes once."""

    def judge(prompts, completions, answer, **_):
        if answer[0] < 2:
            raise KeyError(answer[0])
        raise KeyError(answer[0])

    actor = make_actor(NamedReward("judge", 1.0, {}, judge))
    with capture_logs() as lines:
        for i in range(4):
            actor._take(group().model_copy(update={"ordinal": i, "columns": {"answer": i}}))
            wait_until(lambda i=i: actor._held[i, 1].failure, "failed")
    assert [line["detail"].partition(" (")[0] for line in lines] == [f"judge raised KeyError: {i}" for i in range(4)]
    assert [isinstance(line["exc_info"], KeyError) for line in lines] == [True, False, True, False]


def test_group_that_no_function_scores_is_counted_and_said_but_not_each_time(make_actor):
    """Of three groups with 2 completions, the first has one that is scored; the second and third are said once."""

    def picky(prompts, completions, answer, **_):
        return [1.0 if answer[0] == 0 and i == 0 else None for i in range(len(completions))]

    actor = make_actor(NamedReward("picky", 1.0, {}, picky))
    with capture_logs() as lines:
        for i in range(3):
            actor._take(group().model_copy(update={"ordinal": i, "columns": {"answer": i}}))
            wait_until(lambda i=i: actor._held[i, 1].scored, "scored")
    assert [(line["ordinal"], line["environment"], line["functions"]) for line in lines] == [(1, "e", ["picky"])]
    sample = "grpo_reward_unscorable_completions_total"
    assert actor._metrics.registry.get_sample_value(sample, {"purpose": "train"}) == 5.0


def test_column_that_would_replace_what_was_sampled_ends_the_actor_in_words(actor):
    """The mistake is in the data's layout, so no other group would fare better."""
    actor._take(group().model_copy(update={"columns": {"answer": "bb", "completions": "of the data"}}))
    wait_until(lambda: actor._unusable, "refused")
    with pytest.raises(ConfigError, match=r"environments\[\].path: e has a column 'completions'.*rename the column"):
        actor._follow()
