"""The reward actor's handling of groups; calling functions is tested in tests/actors/reward."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

import actors.process.membership
from actors.packer.settings import settings_of
from actors.process.membership import StartOverError
from actors.reward import loop
from actors.reward.functions import AdvantageFunction, NamedReward, StepReward
from actors.reward.loop import RewardActor
from actors.reward.runner import FunctionRunner
from actors.telemetry.metrics import Metrics
from bus.counts import EdgeCounts
from schemas import limits
from schemas.config.data import ShapingConfig
from schemas.errors import ConfigError
from schemas.messages import RewardDirective, RolloutGroup, single_turn
from tests.ring.harness import ring_config, wait_until


def group(purpose: str = "train") -> RolloutGroup:
    """Two completions, `a` and `bb`."""
    return RolloutGroup(
        run="r", sender="rollout-0", ordinal=0 if purpose == "train" else -1, attempt=1, purpose=purpose,
        environment="e", example_key="k", prompt="p", columns={"answer": "bb"}, completions=["a", "bb"],
        stop_conditions=["stop", "stop"], token_ids=np.array([5, 6, 7], np.int32),
        loss_mask=np.ones(3, np.uint8), logprobs=np.full(3, -1, np.float32),
        **single_turn(np.array([1], np.int32), np.array([0, 1, 3]), np.array([[0, 1, 0], [1, 1, 0]])),
        segment_temperatures=np.ones(2, np.float32),
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

    def make(*rewards: NamedReward, own: dict[str, Any] | None = None, **section: Any) -> RewardActor:
        config = ring_config(tmp_path, "inproc", reward={"advantage": {"type": "mean"}} | section)
        exact_match = NamedReward("exact_match", 0.0, {}, ones)
        functions = {"vocab_size": 64} | (own or {})
        made.append(RewardActor(config, "reward-0", Metrics("reward"), list(rewards), exact_match, **functions))
        return made[-1]

    yield make
    for actor in made:
        actor.close()


@pytest.fixture
def tell(monkeypatch):
    """Gives an actor a directive of the groups' run, whose packer is away."""

    def told(actor: RewardActor) -> None:
        release = np.zeros((0, 2), np.int64)
        state = RewardDirective.model_construct(
            run="r", term=1, phase="running", packer_address="inproc://nobody", release=release
        )
        monkeypatch.setattr(actor.membership, "latest", lambda: state)
        assert actor.follow() is False

    return told


@pytest.fixture
def actor(make_actor):
    """Weighs lengths by 2 and only measures ones."""
    return make_actor(NamedReward("lengths", 2.0, {}, lengths), NamedReward("ones", 0.0, {}, ones))


def test_train_group_gets_weighted_rewards_and_advantages(actor):
    """2·1 + 0·1 = 2 and 2·2 + 0·1 = 4, so the advantages around their mean 3 are −1 and 1."""
    actor.take(group())
    held = actor.held[0, 1]
    scored = wait_until(lambda: held.scored, "scored")
    assert scored.reward_names == ["lengths", "ones"]
    assert scored.rewards_FG.tolist() == [[1.0, 2.0], [1.0, 1.0]]
    assert scored.rewards_G.tolist() == [2.0, 4.0]
    assert scored.advantages_G.tolist() == [-1.0, 1.0]


def test_the_heartbeat_tells_the_work_of_the_functions(make_actor, tell):
    """A group that was scored in 50 ms."""

    def slow(prompts, completions, **_):
        time.sleep(0.05)
        return [1.0] * len(completions)

    actor = make_actor(NamedReward("slow", 1.0, {}, slow))
    actor.take(group())
    held = actor.held[0, 1]
    wait_until(lambda: held.scored, "scored")
    tell(actor)
    reported = actor.membership.reported
    assert reported["scored"] == 1
    assert 0.05 <= reported["busy_seconds"] < 60.0


def test_eval_group_is_measured_by_exact_match_besides(actor):
    """The last row of an evaluation is exact_match; it is no part of the reward."""
    actor.take(group("eval"))
    scored = wait_until(lambda: actor.held[-1, 1].scored, "scored")
    assert scored.reward_names == ["lengths", "ones", "exact_match"]
    assert scored.rewards_G.tolist() == [2.0, 4.0]


def test_second_copy_of_a_held_group_is_not_scored_again(actor):
    """A rollout that sends again what this actor holds costs nothing (P13)."""
    actor.take(group())
    first = actor.held[0, 1]
    wait_until(lambda: first.scored, "scored")
    actor.take(group())
    assert actor.held == {(0, 1): first}
    assert actor.metrics.registry.get_sample_value("grpo_reward_groups_total", {"purpose": "train"}) == 1.0


def test_group_that_is_released_before_its_turn_is_not_scored(make_actor):
    """One thread is busy with the first group; the second is settled elsewhere meanwhile, and costs no call."""
    begun, gate, called = threading.Event(), threading.Event(), []

    def gated(prompts, completions, **_):
        called.append(prompts[0])
        begun.set()
        assert gate.wait(60.0)
        return [1.0] * len(completions)

    actor = make_actor(NamedReward("gated", 1.0, {}, gated), max_concurrent_groups=1)
    actor.take(group())
    assert begun.wait(60.0)
    actor.take(group().model_copy(update={"ordinal": 1, "prompt": "released"}))
    del actor.held[1, 1]
    gate.set()
    scored_by(actor, group().model_copy(update={"ordinal": 2, "prompt": "after it"}))
    assert called == ["p", "after it"]


def test_group_of_another_run_is_dropped_and_counted(actor, tell):
    """A rollout of another run has this one's old address; the group's numbers are those of one of ours (P1)."""
    tell(actor)
    actor.take(group().model_copy(update={"run": "another run"}))
    assert actor.held == {}
    assert [edge.dropped["foreign_run"] for edge in actor.edges if edge.edge == "groups"] == [1]
    scored_by(actor, group())
    assert list(actor.held) == [(0, 1)]


def test_message_of_another_kind_is_dropped(actor):
    """A scored group that comes in on the groups edge is not scored again."""
    actor.take(group())
    scored = wait_until(lambda: actor.held[0, 1].scored, "scored")
    actor.held.clear()
    actor.take(scored)
    assert actor.held == {}


def test_each_distinct_error_of_a_function_is_logged_with_its_traceback_once(make_actor):
    """Four groups: two fail at one line with different messages, two at another; each line's traceback comes once."""

    def judge(prompts, completions, answer, **_):
        if answer[0] < 2:
            raise KeyError(answer[0])
        raise KeyError(answer[0])

    actor = make_actor(NamedReward("judge", 1.0, {}, judge))
    with capture_logs() as lines:
        for i in range(4):
            actor.take(group().model_copy(update={"ordinal": i, "columns": {"answer": i}}))
            wait_until(lambda i=i: actor.held[i, 1].failure, "failed")
    assert [line["detail"].partition(" (")[0] for line in lines] == [f"judge raised KeyError: {i}" for i in range(4)]
    assert [isinstance(line["exc_info"], KeyError) for line in lines] == [True, False, True, False]


def test_group_that_no_function_scores_is_counted_and_said_but_not_each_time(make_actor):
    """Of three groups with 2 completions, the first has one that is scored; the second and third are said once."""

    def picky(prompts, completions, answer, **_):
        return [1.0 if answer[0] == 0 and i == 0 else None for i in range(len(completions))]

    actor = make_actor(NamedReward("picky", 1.0, {}, picky))
    with capture_logs() as lines:
        for i in range(3):
            actor.take(group().model_copy(update={"ordinal": i, "columns": {"answer": i}}))
            wait_until(lambda i=i: actor.held[i, 1].scored, "scored")
    assert [(line["ordinal"], line["environment"], line["functions"]) for line in lines] == [(1, "e", ["picky"])]
    sample = "grpo_reward_unscorable_completions_total"
    assert actor.metrics.registry.get_sample_value(sample, {"purpose": "train"}) == 5.0


def test_column_that_would_replace_what_was_sampled_ends_the_actor_in_words(actor):
    """The mistake is in the data's layout, so no other group would fare better."""
    actor.take(group().model_copy(update={"columns": {"answer": "bb", "completions": "of the data"}}))
    with pytest.raises(ConfigError, match=r"environments\[\].path: e has a column 'completions'.*rename the column"):
        wait_until(actor.follow, "refused")


def test_filtered_completions_are_counted_and_masked_and_their_rewards_stay_in_the_baseline(make_actor):
    """The second of rewards 1 and 2 was cut off: its tokens leave the loss, the first one's advantage stays −0.5."""
    cut = group().model_copy(update={"stop_conditions": ["stop", "length"]})
    for mask, loss_mask in ((False, [1, 1, 1]), (True, [1, 0, 0])):
        actor = make_actor(NamedReward("lengths", 1.0, {}, lengths), mask_truncated_completions=mask)
        scored = scored_by(actor, cut)
        assert scored.loss_mask.tolist() == loss_mask
        assert scored.advantages_G.tolist() == [-0.5, 0.5]
        assert value(actor, "grpo_reward_filtered_completions_total", filter="truncated") == 1
        assert value(actor, "grpo_reward_masked_completions_total") == int(mask)


def test_evaluation_groups_are_not_filtered(make_actor):
    """What is measured is measured whole, and counts as no finding."""
    actor = make_actor(NamedReward("lengths", 1.0, {}, lengths), mask_truncated_completions=True)
    cut = group("eval").model_copy(update={"stop_conditions": ["length", "length"]})
    assert scored_by(actor, cut).loss_mask.tolist() == [1, 1, 1]
    assert value(actor, "grpo_reward_filtered_completions_total", filter="truncated") == 0


def scored_by(actor, taken):
    """The group as it goes to the packer."""
    actor.take(taken)
    return wait_until(lambda: actor.held[taken.ordinal, 1].scored, "scored")


def use_up(actor):
    """One group is scored and counted."""
    actor.take(group())
    wait_until(lambda: value(actor, "grpo_reward_groups_total", purpose="train") == 1.0, "scored")


def value(actor, metric, **labels):
    """Of a metric of this actor."""
    return actor.metrics.registry.get_sample_value(metric, labels)


OWN = {"path": "mine:f"}
"""What stands in a configuration for a function that a test hands to the actor."""


def test_rewards_are_shaped_by_function_then_weighted_then_shaped_as_a_sum(make_actor):
    """Lengths 1 and 2: (1 − 1) · 10 and (2 − 1) · 10, times 2 is 0 and 20, clipped 5; what was returned is kept."""
    shaped = NamedReward("lengths", 2.0, {}, lengths, ShapingConfig(bias=-1.0, scale=10.0))
    scored = scored_by(make_actor(shaped, shaping={"clip": 5.0}), group())
    assert scored.rewards_FG.tolist() == [[1.0, 2.0]]
    assert scored.rewards_G.tolist() == [0.0, 5.0]
    assert scored.advantages_G.tolist() == [-2.5, 2.5]


@pytest.mark.parametrize(
    ("none_as_zero", "rewards", "advantages"), [(False, [np.nan, 2], [0, 0]), (True, [0, 2], [-1, 1])]
)
def test_completion_that_no_function_scores_is_left_out_or_counts_as_zero(
    make_actor, none_as_zero, rewards, advantages
):
    """TRL's way by default, ms-swift's by `reward.none_as_zero`."""
    actor = make_actor(NamedReward("f", 1.0, {}, lambda **_: [None, 2.0]), none_as_zero=none_as_zero)
    scored = scored_by(actor, group())
    np.testing.assert_array_equal(scored.rewards_G, rewards)
    assert scored.advantages_G.tolist() == advantages


def test_advantages_of_the_step_come_centred_from_a_group(make_actor):
    """Deviation and eps are the step's; what is there before is as good as `mean`, whatever reads it."""
    scored = scored_by(make_actor(NamedReward("f", 1.0, {}, lengths), advantage={"type": "batch_std"}), group())
    assert (scored.advantages_G.tolist(), scored.token_advantages.size) == ([-0.5, 0.5], 0)


def test_process_supervision_gives_each_token_its_own_advantage(make_actor):
    """Steps of 1 and 2 tokens with rewards 1, 0, 0.5: z-scores 1, −1, 0, so tokens 1 | −1, 0; means 1 and −½."""
    steps = StepReward("judge", 0.0, {}, lambda completion_ids, **_: [[(1, 1.0)], [(1, 0.0), (2, 0.5)]])
    advantage = {"type": "process", "eps": 0.0}
    actor = make_actor(NamedReward("f", 1.0, {}, lengths), own={"steps": steps}, steps=OWN, advantage=advantage)
    scored = scored_by(actor, group())
    assert scored.token_advantages.tolist() == [1.0, -1.0, 0.0]
    assert scored.advantages_G.tolist() == [1.0, -0.5]
    assert scored.rewards_G.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ({"type": "mean"}, [-0.5, 0.0, 0.0]),
        ({"type": "gae", "discount": 0.5, "reward_norm": "mean"}, [-0.5, 0.0, 0.0]),
    ],
)
def test_mask_no_eos_with_zero_takes_the_reward_and_leaves_the_tokens(make_actor, advantage, expected):
    """1 and 2: the second was cut off. Its reward is in the mean, then it is 0; its tokens stay in the loss."""
    made = make_actor(NamedReward("l", 1.0, {}, lengths), advantage=advantage, mask_no_eos_with_zero=True)
    cut = group().model_copy(update={"stop_conditions": ["stop", "length"]})
    scored = scored_by(made, cut)
    assert scored.advantages_N.tolist() == expected
    assert scored.loss_mask.tolist() == [1, 1, 1]
    assert scored.rewards_G.tolist() == [1.0, 2.0]


def test_gae_discounts_the_reward_from_the_end(make_actor):
    """Rewards 1 and 2 at the ends of 1 and 2 tokens, γ = ½."""
    advantage = {"type": "gae", "discount": 0.5}
    scored = scored_by(make_actor(NamedReward("f", 1.0, {}, lengths), advantage=advantage), group())
    assert scored.token_advantages.tolist() == [1.0, 1.0, 2.0]


def test_custom_advantage_is_called_with_arrays_and_kwargs_and_not_for_evaluations(make_actor):
    """Rewards (1, 2) · lengths (1, 2) · 3."""
    calls = []

    def custom(rewards, lengths, factor):
        calls.append((rewards.tolist(), lengths.tolist()))
        return rewards * lengths * factor

    own = {"custom": AdvantageFunction("mine", 0.0, {"factor": 3.0}, custom)}
    actor = make_actor(NamedReward("f", 1.0, {}, lengths), own=own, advantage={"type": "custom"} | OWN)
    assert scored_by(actor, group()).advantages_G.tolist() == [3.0, 12.0]
    assert scored_by(actor, group("eval")).advantages_G.tolist() == [0.0, 0.0]
    assert calls == [([[1.0, 2.0]], [[1, 2]])]


@pytest.mark.parametrize(
    ("function", "reason", "words"),
    [
        (lambda rewards, lengths: rewards[0], "reward_invalid", "mine returned an array (2,), expected (1, 2)"),
        (lambda rewards, lengths: [[0.0, np.inf]], "reward_invalid", "mine returned inf, expected finite numbers"),
        (lambda rewards, lengths: "ab", "reward_invalid", "mine could not convert"),
        (lambda rewards, lengths: 1 / 0, "reward_raised", "mine raised ZeroDivisionError"),
        (None, "reward_timeout", "mine took more than 0.05 s (reward.timeout)"),
    ],
)
def test_bad_custom_advantage_fails_the_attempt_by_name(make_actor, hanging, function, reason, words):
    """As a reward function does; nothing stands in for one that is late."""
    own = {"custom": AdvantageFunction("mine", 0.0, {}, function or (lambda rewards, lengths: hanging.hang()))}
    timeouts = {"timeout": 0.05, "timeout_retries": 0}
    actor = make_actor(NamedReward("f", 1.0, {}, lengths), own=own, advantage={"type": "custom"} | OWN, **timeouts)
    actor.take(group())
    failure = wait_until(lambda: actor.held[0, 1].failure, "failed")
    assert (failure.reason, failure.detail[: len(words)]) == (reason, words)


def test_function_that_is_late_is_called_again_counted_and_said(make_actor, hanging):
    """By default it then applies to nothing: the group is scored by the other, and nobody waits longer."""
    slow = NamedReward("slow", 1.0, {}, hanging.hang)
    actor = make_actor(slow, NamedReward("f", 1.0, {}, lengths), timeout=0.4)
    with capture_logs() as lines:
        scored = scored_by(actor, group())
    np.testing.assert_array_equal(scored.rewards_FG, [[np.nan, np.nan], [1.0, 2.0]])
    assert scored.rewards_G.tolist() == [1.0, 2.0]
    counted = {outcome: value(actor, "grpo_reward_timeouts_total", outcome=outcome) for outcome in ("retried", "none")}
    assert counted == {"retried": 1.0, "none": 1.0}
    assert [(line["ordinal"], line["outcome"]) for line in lines] == [(0, "retried"), (0, "none")]
    assert all(line["detail"] == "slow took more than 0.4 s (reward.timeout)" for line in lines)


@pytest.mark.parametrize("stages", ["rewards", "steps", "custom"])
def test_packer_waits_as_long_as_scoring_may_take(tmp_path, stages):
    """Each call as often as it is repeated: 2 · 3 s for the functions, as much again for steps and for custom."""
    own = {"steps": {"steps": OWN, "advantage": {"type": "gae"}}, "custom": {"advantage": {"type": "custom"} | OWN}}
    config = ring_config(tmp_path, "inproc", reward={"timeout": 3.0, "timeout_retries": 1} | own.get(stages, {}))
    assert settings_of(config).reward_timeout == (6.0 if stages == "rewards" else 12.0)


def test_worn_out_process_leaves_when_what_it_has_scored_is_settled(make_actor, monkeypatch):
    """Else a group whose functions always hang would be scored again and again, and each time used a process up."""
    monkeypatch.setattr(actors.process.membership, "FAREWELL_SECONDS", 0.0)
    actor = make_actor(NamedReward("f", 1.0, {}, lengths))
    scored_by(actor, group())
    monkeypatch.setattr(FunctionRunner, "worn_out", "used up")
    assert actor.follow() is False
    actor.held.clear()
    time.sleep(0.01)
    with pytest.raises(StartOverError, match="used up"):
        actor.follow()


def test_used_up_process_leaves_no_group_behind_however_long_it_takes(make_actor, monkeypatch):
    """A judge that takes ten minutes would be paid twice; rollouts hear at once that they shall send elsewhere."""
    now = time.monotonic()
    monkeypatch.setattr(actors.process.membership, "time", SimpleNamespace(monotonic=lambda: now))
    actor = make_actor(NamedReward("f", 1.0, {}, lengths), max_groups_per_process=1)
    use_up(actor)
    for seconds in (0.0, 1.0, 30.0, 600.0):
        now += seconds
        assert actor.follow() is False
    assert actor.membership.reported["phase"] == "draining"
    actor.held.clear()
    with pytest.raises(StartOverError, match=r"1 groups have been scored here \(reward.max_groups_per_process 1\)"):
        actor.follow()


def test_order_to_leave_is_obeyed_in_time_by_a_process_that_is_used_up(make_actor, monkeypatch):
    """SIGTERM after 15 minutes in which its group has not been settled: it leaves after 20 s, and ends."""
    now = time.monotonic()
    monkeypatch.setattr(actors.process.membership, "time", SimpleNamespace(monotonic=lambda: now))
    actor = make_actor(NamedReward("f", 1.0, {}, lengths), max_groups_per_process=1)
    use_up(actor)
    assert actor.follow() is False
    now += 900.0
    actor.drain()
    now += 19.0
    assert actor.follow() is False
    now += 2.0
    assert actor.follow() is True


def test_after_a_move_scored_groups_are_sent_again_over_a_new_connection(actor, tell, monkeypatch):
    """The old connection is dead, and TCP would find out a minute later."""
    boxes = []

    class Box:
        counts = EdgeCounts("scored")

        def __init__(self, *arguments):
            self.sent, self.closed = [], False
            boxes.append(self)

        def try_send(self, scored):
            self.sent.append(scored.ordinal)
            return True

        def close(self):
            self.closed = True

    monkeypatch.setattr(loop, "Outbox", Box)
    tell(actor)
    scored_by(actor, group())
    tell(actor)
    assert [box.sent for box in boxes] == [[0]]
    monkeypatch.setattr(type(actor.membership), "num_moves", 1)
    tell(actor)
    tell(actor)
    assert [box.sent for box in boxes] == [[0], [0]]
    assert [box.closed for box in boxes] == [True, False]


def test_group_that_the_packer_would_not_take_fails_its_attempt_in_words(actor, tell, monkeypatch):
    """A scored group is larger than what came in: at the bound the attempt fails, and the actor goes on."""
    tell(actor)
    monkeypatch.setattr(limits, "MESSAGE_BYTES", 100)
    actor.take(group())
    failure = wait_until(lambda: actor.held[0, 1].failure, "failed")
    assert failure.reason == "too_large"
    assert "bytes, and 100 are the most that travel" in failure.detail
    assert actor.held[0, 1].scored is None
