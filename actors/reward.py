"""The reward actor: groups in, scored groups out.

Consumes RolloutGroups from its inbox, releases and the packer's address from State. Emits ScoredGroups. Its main
thread is the bus thread: it reads, always, whatever the scorers do, names in its beats all it has read, and drops a
second copy of what it holds (P13). Scoring runs in threads, each group under `reward.timeout`. A scored group is kept
until State releases it, and is sent again when the packer has a new term. When functions that never return have used
the process up, it starts over as soon as the packer knows of the failures; what it has not scored is sent to the next.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import structlog
from numpy.typing import NDArray

from actors.algorithms.advantages import GroupRewards, Steps, check_advantages, group_advantages, token_advantages
from actors.algorithms.advantages.group import Floats, Ints
from actors.algorithms.filters import filter_completions, mask_completions
from actors.algorithms.shaping import combine_rewards, shape, shape_functions
from actors.faults import point
from actors.membership import Drain, Membership, StartOverError
from actors.rewards.score import AdvantageFunction, NamedReward, RewardError, Scorer, StepReward
from actors.telemetry.metrics import Metrics
from bus.counts import EdgeCounts
from bus.data import Inbox, Outbox
from schemas.config import RunConfig
from schemas.errors import ConfigError
from schemas.messages import AttemptFailure, RewardBeat, RewardState, RolloutGroup, ScoredGroup

log = structlog.get_logger("reward")

POLL_SECONDS = 0.05
UNSCORABLE_WORTH_SAYING_SECONDS = 60.0


@dataclass
class _Held:
    """A group from its arrival to its release."""

    group: RolloutGroup
    scored: ScoredGroup | None = None
    failure: AttemptFailure | None = None
    sent_at: float | None = None
    sent_in_term: int = -1
    resend_after: float = 0.0


class RewardActor:
    """Scores groups.

    Args:
        rewards: functions summed into the reward.
        exact_match: function measured on evaluation groups besides.
        steps: function of `reward.steps`.
        custom: function of `reward.advantage`, where its type is that.
        vocab_size: tokens of the policy's vocabulary, for the filter gibberish; 0 where it is not configured.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        rewards: list[NamedReward],
        exact_match: NamedReward,
        lose: Callable[[str], bool] | None = None,
        vocab_size: int = 0,
        steps: StepReward | None = None,
        custom: AdvantageFunction | None = None,
    ) -> None:
        self._config, self._metrics, self._vocab_size = config, metrics, vocab_size
        self._rewards = {"train": rewards, "eval": [*rewards, exact_match]}
        self._steps, self._custom = steps, custom
        reward, threads = config.reward, config.reward.max_concurrent_groups
        num_calls = threads * len(self._rewards["eval"])
        self._scorer = Scorer(reward.timeout, num_calls, reward.timeout_retries, reward.on_timeout, self._note_late)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="score")
        self._unusable: ConfigError | None = None
        self._worn_out = ""
        self._shown: set[tuple[str, ...]] = set()
        self._said_unscorable_at = -UNSCORABLE_WORTH_SAYING_SECONDS
        self._held: dict[tuple[int, int], _Held] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._packer: Outbox | None = None
        self._term = -1
        self._drain = Drain()
        self.membership = Membership(config, RewardBeat, name, lose=lose)
        self._inbox = Inbox("groups", self.membership.addresses, config.bus, name, self.membership.boot_id)

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        return [self.membership.counts, self._inbox.counts, *([self._packer.counts] if self._packer else [])]

    def run(self, metrics_url: str = "") -> None:
        """Until the run is done, or drained."""
        self._report(starting={"phase": "running", "metrics_url": metrics_url, "address": self._inbox.address})
        try:
            while not self._follow():
                message = self._inbox.receive(POLL_SECONDS)
                while message is not None:
                    self._take(message)
                    message = self._inbox.receive(0)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._scorer.close()
            self.membership.close()
            self._inbox.close()
            if self._packer is not None:
                self._packer.close()

    def drain(self) -> None:
        """Be named to rollouts no more; end when all groups have been released, or late. From any thread."""
        self._drain.begin()

    def _follow(self) -> bool:
        """Do what the newest State says; True at the end."""
        if self._unusable is not None:
            raise self._unusable
        state = self.membership.latest()
        if isinstance(state, RewardState):
            with self._lock:
                for ordinal, attempt in state.release.tolist():
                    self._held.pop((ordinal, attempt), None)
            self._connect(state)
        self._send_waiting()
        self._report()
        self._start_over_when_worn_out()
        done = state is not None and state.phase == "done"
        return done or self._drain.may_leave(holds_work=bool(self._held))

    def _start_over_when_worn_out(self) -> None:
        """Leave for a new process that is not used up by calls that never return."""
        self._worn_out = self._worn_out or self._scorer.worn_out
        if self._worn_out:
            self._drain.begin()
            with self._lock:
                untold = any(held.failure or held.scored for held in self._held.values())
            if self._drain.may_leave(holds_work=untold):
                raise StartOverError(self._worn_out)

    def _connect(self, state: RewardState) -> None:
        """Follow the packer to its address of this term."""
        if state.term == self._term:
            return
        with self._sending:
            if self._packer is not None:
                self._packer.close()
            self._packer = Outbox("scored", state.packer_address, self._config.bus, self.membership.name)
            self._term = state.term

    def _take(self, message: object) -> None:
        if not isinstance(message, RolloutGroup) or isinstance(message, ScoredGroup):
            log.warning("unexpected message", kind=getattr(message, "kind", type(message).__name__))
            return
        key = (message.ordinal, message.attempt)
        with self._lock:
            if key in self._held:
                return
            held = self._held[key] = _Held(message)
        point("reward.taken")
        self._pool.submit(self._score, held)

    def _score(self, held: _Held) -> None:
        """Score one group, in a thread; whatever happens becomes a scored group or a failure."""
        group, started = held.group, time.monotonic()
        try:
            held.scored = self._scored(group)
            point("reward.scored")
        except ConfigError as error:
            self._unusable = error
        except RewardError as error:
            first = error.origin not in self._shown
            self._shown.add(error.origin)
            self._fail(held, error.reason, str(error), traceback_of=error.__cause__ if first else None)
        except Exception as error:
            log.exception("scoring failed", ordinal=group.ordinal)
            self._fail(held, "internal", f"{type(error).__name__}: {error}")
        else:
            self._metrics.observe("grpo_reward_score_seconds", time.monotonic() - started)
            self._metrics.count("grpo_reward_groups_total", purpose=group.purpose)
            self._send(held)

    def _scored(self, group: RolloutGroup) -> ScoredGroup:
        """The group with what the user's functions make of it.

        Raises:
            RewardError, ConfigError: as for `Scorer.score`.
        """
        rewards_FG = self._scorer.score(self._rewards[group.purpose], group)
        rewards = self._rewards_of(group, rewards_FG)
        self._note_unscorable(group, int((~rewards.scored_G).sum()))
        if group.purpose == "train":
            for value in rewards.rewards_G[rewards.scored_G]:
                self._metrics.observe("grpo_reward_value", float(value))
        return ScoredGroup(
            **group.__dict__ | {"loss_mask": self._loss_mask(group)},
            scorer=self.membership.name,
            reward_names=[reward.name for reward in self._rewards[group.purpose]],
            rewards_FG=rewards_FG,
            rewards_G=rewards.rewards_G,
            **self._advantages(group, rewards),
        )

    def _rewards_of(self, group: RolloutGroup, rewards_FG: Floats) -> GroupRewards:
        """One reward per completion: each function's shaped and weighted, summed, and that shaped."""
        rewards, reward = self._rewards["train"], self._config.reward
        shaped_FG = shape_functions(rewards_FG[: len(rewards)], [reward.shaping for reward in rewards])
        weights_F = np.array([reward.weight for reward in rewards])
        total_G = combine_rewards(shaped_FG, weights_F, none_as_zero=reward.none_as_zero)
        return GroupRewards(shape(total_G, reward.shaping), group.lengths_G, shaped_FG, weights_F)

    def _advantages(self, group: RolloutGroup, rewards: GroupRewards) -> dict[str, NDArray[np.float32]]:
        """The advantage fields; an evaluated group is not trained on, and has zeros."""
        config = self._config.reward.advantage
        if group.purpose == "eval":
            return {"advantages_G": np.zeros(group.num_completions, np.float32)}
        if config.level != "token":
            advantages_G = group_advantages(rewards, config, partial(self._call_custom, group))
            return {"advantages_G": advantages_G.astype(np.float32)}
        offsets, steps = group.completion_offsets, self._call_steps(group)
        advantages_N = token_advantages(rewards.rewards_G, offsets, group.loss_mask, config, steps)
        means_G = np.add.reduceat(advantages_N, offsets[:-1]) / group.lengths_G
        return {"advantages_G": means_G.astype(np.float32), "token_advantages": advantages_N.astype(np.float32)}

    def _call_steps(self, group: RolloutGroup) -> list[Steps] | None:
        if self._steps is None:
            return None
        (steps,) = self._scorer.call([self._steps], group, required=False)
        return steps or [[]] * group.num_completions  # it was late: no completion has any

    def _call_custom(self, group: RolloutGroup, rewards_PG: Floats, lengths_PG: Ints) -> Floats:
        assert self._custom is not None
        (values,) = self._scorer.call([self._custom.on(rewards_PG, lengths_PG)], group, required=True)
        try:
            return check_advantages(values, rewards_PG.shape)
        except (TypeError, ValueError) as error:
            raise RewardError("reward_invalid", f"{self._custom.name} {error}") from error

    def _note_late(self, group: RolloutGroup, words: str, outcome: str) -> None:
        """From the scorer: functions that are late, and what comes next."""
        self._metrics.count("grpo_reward_timeouts_total", outcome=outcome)
        log.warning("reward function late", ordinal=group.ordinal, detail=words, outcome=outcome)

    def _loss_mask(self, group: RolloutGroup) -> NDArray[np.uint8]:
        """Without the completions that filters mask.

        Here, so that the payload which the packer digests and stores is what is trained: neither a replay nor another
        filter, later, changes anything of it.
        """
        if group.purpose == "eval":
            return group.loss_mask
        found, masked_G = filter_completions(group, self._config.reward, self._vocab_size)
        for name, found_G in found.items():
            self._metrics.count("grpo_reward_filtered_completions_total", int(found_G.sum()), filter=name)
        self._metrics.count("grpo_reward_masked_completions_total", int(masked_G.sum()))
        return mask_completions(group.loss_mask, group.completion_offsets, masked_G)

    def _note_unscorable(self, group: RolloutGroup, count: int) -> None:
        """Count completions to which no function applied; a group of nothing else is said, once in a while."""
        self._metrics.count("grpo_reward_unscorable_completions_total", count, purpose=group.purpose)
        now = time.monotonic()
        if count == group.num_completions and now - self._said_unscorable_at >= UNSCORABLE_WORTH_SAYING_SECONDS:
            self._said_unscorable_at = now
            log.warning(
                "nothing to learn from a group: every reward function returned None for every completion",
                ordinal=group.ordinal,
                environment=group.environment,
                functions=[reward.name for reward in self._rewards["train"]],
            )

    def _fail(self, held: _Held, reason: str, detail: str, traceback_of: BaseException | None = None) -> None:
        ordinal = held.group.ordinal
        log.warning("group not scored", ordinal=ordinal, reason=reason, detail=detail, exc_info=traceback_of)
        self._metrics.count("grpo_reward_failures_total", reason=reason)
        held.failure = AttemptFailure(
            ordinal=held.group.ordinal, attempt=held.group.attempt, reason=reason, detail=detail
        )

    def _send_waiting(self) -> None:
        """Send what the packer of this term has not got, and what has been waiting for long."""
        with self._lock:
            waiting = [held for held in self._held.values() if held.scored is not None]
        for held in waiting:
            self._send(held)

    def _send(self, held: _Held) -> None:
        """Send a scored group unless this term's packer has it; from the scorer's thread and from the bus thread."""
        with self._sending:
            now = time.monotonic()
            late = held.sent_at is not None and now - held.sent_at > held.resend_after
            if self._packer is None or held.scored is None or (held.sent_in_term == self._term and not late):
                return
            if self._packer.try_send(held.scored):
                point("reward.sent")
                held.sent_at, held.sent_in_term = now, self._term
                held.resend_after = max(2 * held.resend_after, self._config.bus.resend_after)

    def _report(self, starting: dict[str, str] | None = None) -> None:
        with self._lock:
            holds = np.array(sorted(self._held), np.int64).reshape(-1, 2)
            load = sum(held.scored is None and held.failure is None for held in self._held.values())
            failures = [held.failure for held in self._held.values() if held.failure]
        self._metrics.set("grpo_reward_held_groups", len(holds))
        self._metrics.set("grpo_reward_queue_groups", load)
        if starting is not None:
            self.membership.start(holds=holds, load=load, failures=failures, **starting)
        else:
            self.membership.report(
                urgent=bool(failures), phase=self._drain.phase, holds=holds, load=load, failures=failures
            )
