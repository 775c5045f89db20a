"""From a sampled group to a scored one: the user's functions, then `score_group`, then figures for logs and metrics."""

import time
from dataclasses import replace

import numpy as np
import structlog
from numpy.typing import NDArray

from actors.algorithms.advantages import StepRewards, check_advantages
from actors.algorithms.advantages.shaping import EnvironmentWeights, RewardColumns
from actors.algorithms.scoring import GroupScore, ScoringRules, custom_arguments, score_group
from actors.algorithms.turns import turn_steps
from actors.reward.builtin import exact_match, unmeasured
from actors.reward.constant_rewards import ConstantRewards
from actors.reward.errors import RewardError
from actors.reward.functions import AdvantageFunction, NamedReward, StepReward
from actors.reward.logged import RewardLog
from actors.reward.runner import FunctionRunner
from actors.reward.scorer import Scorer
from actors.telemetry.metrics import Metrics
from actors.telemetry.spans import SHORT_SECONDS, span
from schemas.config.actors import RewardConfig
from schemas.messages import RolloutGroup, ScoredGroup

log = structlog.get_logger("reward")

UNSCORABLE_WORTH_SAYING_SECONDS = 60.0
"""Shortest time between two warnings about groups to which no function applies."""


class GroupScorer:
    """Scorer of groups, for any number of threads.

    Args:
        config: section `reward` of the configuration.
        name: name of the reward actor.
        metrics: destination of the `grpo_reward_*` metrics.
        rewards: functions whose weighted sum is the reward.
        match: function measured on groups of evaluations, in addition.
        vocab_size: size of the policy's vocabulary, for the gibberish filter; 0 if the filter is not configured.
        steps: function of `reward.steps`; None if not configured.
        custom: function of `reward.advantage`; None for the built-in advantages.
        environments: weights of the rewards of environments, by label and name.
    """

    def __init__(
        self,
        config: RewardConfig,
        name: str,
        metrics: Metrics,
        rewards: list[NamedReward],
        match: NamedReward,
        vocab_size: int = 0,
        steps: StepReward | None = None,
        custom: AdvantageFunction | None = None,
        environments: EnvironmentWeights | None = None,
    ) -> None:
        self._config, self._name, self._metrics = config, name, metrics
        self._log = RewardLog()
        rewards, match = [replace(one, log=self._log) for one in rewards], replace(match, log=self._log)
        # the last row of an evaluation is exact_match, which is measured and not part of the reward
        self._rewards = {"train": rewards, "eval": [*rewards, match]}
        weights_F = np.array([one.weight for one in rewards])
        columns = RewardColumns(weights_F, [one.shaping for one in rewards], environments or {})
        self._rules = ScoringRules(config, columns, vocab_size)
        self._steps, self._custom = steps, custom
        # each group calls its functions at the same time; evaluations call the most
        num_calls = config.max_concurrent_groups * len(self._rewards["eval"])
        self._caller = Scorer(config.timeout, num_calls, config.timeout_retries, config.on_timeout, self._note_late)
        self._constant_rewards = ConstantRewards()
        self._said_unscorable_at = -UNSCORABLE_WORTH_SAYING_SECONDS

    @property
    def runner(self) -> FunctionRunner:
        """Runner of the user's functions, with counts of calls and the reason to start over."""
        return self._caller.runner

    @property
    def notes(self) -> list[str]:
        """Reports on functions that return the same value for all completions."""
        return self._constant_rewards.words

    def close(self) -> None:
        """Stop calling functions."""
        self.runner.close()

    def score(self, group: RolloutGroup) -> ScoredGroup:
        """Return the group with rewards and advantages: the user's functions first, then the pure part.

        Raises:
            RewardError, ConfigError: as `Scorer.score`.
        """
        self._log.open(group)
        try:
            return self._score(group)
        finally:
            # also of a group that fails, whose late calls may still log
            self._log.take(group)

    def _score(self, group: RolloutGroup) -> ScoredGroup:
        rewards = self._rewards_of(group)
        with span("reward functions", least=SHORT_SECONDS):
            functions_FG = self._caller.score(rewards, group)
        # between the functions of the run and what an evaluation measures besides
        place = len(self._rewards["train"])
        rewards_FG = np.concatenate([functions_FG[:place], group.environment_rewards_EG, functions_FG[place:]])
        rewards_FG[:, group.failed_G] = np.nan
        names = [reward.name for reward in rewards]
        names[place:place] = group.environment_reward_names
        steps: list[StepRewards] | None = None
        # an evaluation has no advantages, and steps serve nothing else
        if self._config.steps_are_turns:
            steps = turn_steps(group)
        elif self._steps is not None and group.purpose != "eval":
            (found,) = self._caller.call([self._steps], group, required=False)
            # None: the function was late, so no completion has steps
            steps = found or [[]] * group.num_completions
        custom_1S = self._call_custom(group, rewards_FG)
        score = score_group(group, rewards_FG, self._rules, steps, custom_1S)
        self._measure(group, rewards_FG, score)
        logged = self._log.take(group)
        return ScoredGroup(
            **group.__dict__ | {"loss_mask": score.loss_mask_N},
            scorer=self._name,
            reward_names=names,
            rewards_FG=rewards_FG,
            rewards_G=score.rewards_G,
            advantages_G=score.advantages_G,
            token_advantages=score.token_advantages_N,
            logged_columns=logged.columns,
            logged_metrics=logged.means,
        )

    def _rewards_of(self, group: RolloutGroup) -> list[NamedReward]:
        """Return the functions for a group. An environment need not have the column that the built-in match reads."""
        rewards = self._rewards[group.purpose]
        is_played = bool(group.transcripts) and group.purpose == "eval"
        if is_played and rewards[-1].function is exact_match and "answer" not in group.columns:
            return [*rewards[:-1], replace(rewards[-1], function=unmeasured)]
        return rewards

    def _call_custom(self, group: RolloutGroup, rewards_FG: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Return the values of the user's advantage function; None if it is not configured or not needed."""
        arguments = custom_arguments(group, rewards_FG, self._rules) if self._custom is not None else None
        if self._custom is None or arguments is None:
            return None
        # required: nothing can stand in for an advantage, so a late function fails the attempt
        (values,) = self._caller.call([self._custom.on(*arguments)], group, required=True)
        try:
            return check_advantages(values, arguments[0].shape)
        except (TypeError, ValueError) as error:
            raise RewardError("reward_invalid", f"{self._custom.name} {error}") from error

    def _measure(self, group: RolloutGroup, rewards_FG: NDArray[np.float64], score: GroupScore) -> None:
        """Count and log the figures of a scored group."""
        num_unscorable, now = int((~score.scored_G).sum()), time.monotonic()
        self._metrics.count("grpo_reward_unscorable_completions_total", num_unscorable, purpose=group.purpose)
        # at most once a minute: a function that never applies would fill the log with a line per group
        silent_seconds = now - self._said_unscorable_at
        if num_unscorable == group.num_completions and silent_seconds >= UNSCORABLE_WORTH_SAYING_SECONDS:
            self._said_unscorable_at = now
            log.warning(
                "nothing to learn from a group: every reward function returned None for every completion",
                ordinal=group.ordinal,
                environment=group.environment,
                functions=[reward.name for reward in self._rewards["train"]],
            )
        if group.purpose == "eval":
            return
        names = [*(reward.name for reward in self._rewards["train"]), *group.environment_reward_names]
        for words in self._constant_rewards.note(names, rewards_FG, is_chat=not isinstance(group.prompt, str)):
            log.warning("reward function returns one value", detail=words)
        for value in score.rewards_G[score.scored_G]:
            self._metrics.observe("grpo_reward_value", float(value))
        for name, found_G in score.found.items():
            self._metrics.count("grpo_reward_filtered_completions_total", int(found_G.sum()), filter=name)
        self._metrics.count("grpo_reward_masked_completions_total", int(score.masked_G.sum()))

    def _note_late(self, group: RolloutGroup, words: str, outcome: str) -> None:
        """Log and count late functions, with the outcome decided by the scorer."""
        self._metrics.count("grpo_reward_timeouts_total", outcome=outcome)
        log.warning("reward function late", ordinal=group.ordinal, detail=words, outcome=outcome)
