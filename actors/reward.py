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

import numpy as np
import structlog

from actors.algorithms.advantages import combine_rewards, compute_advantages
from actors.faults import point
from actors.membership import Drain, Membership, StartOverError
from actors.rewards.score import NamedReward, RewardError, Scorer
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
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        rewards: list[NamedReward],
        exact_match: NamedReward,
        lose: Callable[[str], bool] | None = None,
    ) -> None:
        self._config, self._metrics = config, metrics
        self._rewards = {"train": rewards, "eval": [*rewards, exact_match]}
        threads = config.reward.max_concurrent_groups
        self._scorer = Scorer(config.reward.timeout, threads * len(self._rewards["eval"]))
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
                untold = any(held.failure for held in self._held.values())
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
            held.scored = self._scored(group, self._scorer.score(self._rewards[group.purpose], group))
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

    def _scored(
        self, group: RolloutGroup, rewards_FG: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"
    ) -> ScoredGroup:
        weights_F = np.array([reward.weight for reward in self._rewards["train"]])
        rewards_G = combine_rewards(rewards_FG[: len(weights_F)], weights_F)
        self._note_unscorable(group, int(np.isnan(rewards_G).sum()))
        if group.purpose == "train":
            for value in rewards_G[~np.isnan(rewards_G)]:
                self._metrics.observe("grpo_reward_value", float(value))
        return ScoredGroup(
            **group.__dict__,
            scorer=self.membership.name,
            reward_names=[reward.name for reward in self._rewards[group.purpose]],
            rewards_FG=rewards_FG,
            rewards_G=rewards_G,
            advantages_G=compute_advantages(rewards_G, self._config.reward.advantage),
        )

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
