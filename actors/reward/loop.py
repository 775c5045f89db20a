"""The reward actor: groups in, scored groups out.

Consumes RolloutGroups from its inbox, releases and the packer's address from the directive. Emits ScoredGroups to the
packer. The main thread is the bus thread and never blocks: it reads, reports every held group in its heartbeats, and
drops copies of held groups. P13 (senders keep a group until its release): a scored group is kept, and sent again to
each new packer. Worker threads call the user's functions, under `reward.timeout`, then `score_group`, which is pure.
Once stuck functions have taken all threads, a new process takes over.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog

from actors.algorithms.advantages.shaping import environment_weights
from actors.process.fault_points import point
from actors.process.membership import Drain, Membership, StartOverError
from actors.reward.errors import RewardError
from actors.reward.functions import AdvantageFunction, NamedReward, StepReward
from actors.reward.group_scorer import GroupScorer
from actors.reward.workers import WorkerHost
from actors.telemetry.metrics import Metrics
from actors.telemetry.spans import span
from bus import threads
from bus.counts import EdgeCounts
from bus.data import Inbox, Outbox
from bus.fence import Fence
from schemas import limits
from schemas.config import RunConfig
from schemas.errors import ConfigError, MessageTooLargeError
from schemas.messages import AttemptFailure, RewardDirective, RewardHeartbeat, RolloutGroup, ScoredGroup

log = structlog.get_logger("reward")

POLL_SECONDS = 0.05
"""Longest wait for a group; the directive is looked at this often."""


@dataclass
class HeldGroup:
    """State of a group from arrival to release. All times are monotonic, in seconds."""

    group: RolloutGroup
    scored: ScoredGroup | None = None
    failure: AttemptFailure | None = None
    sent_at: float | None = None
    """Time of the last sending; None: not sent yet."""
    sent_in_term: int = -1
    """Term of the packer to which the group was sent last (a new packer has a new term)."""
    resend_after: float = 0.0
    """Seconds after `sent_at` until the group is sent again to the same packer; doubles with each sending."""


class RewardActor:
    """Actor that scores groups with the user's functions and sends the results to the packer.

    Args:
        config: configuration of the run.
        name: name in the run.
        metrics: destination of the `grpo_reward_*` metrics.
        rewards: functions whose weighted sum is the reward.
        exact_match: function measured on groups of evaluations, in addition.
        vocab_size: size of the policy's vocabulary, for the gibberish filter; 0 if the filter is not configured.
        steps: function of `reward.steps`; None if not configured.
        custom: function of `reward.advantage`; None for the built-in advantages.
        host: owner of the workers of functions with `python`, closed with this actor; None without such functions.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        rewards: list[NamedReward],
        exact_match: NamedReward,
        vocab_size: int = 0,
        steps: StepReward | None = None,
        custom: AdvantageFunction | None = None,
        host: WorkerHost | None = None,
    ) -> None:
        self._config, self.metrics, self._host = config, metrics, host
        weights = environment_weights(config.environments)
        # groups of a source of evaluations carry the name of the source
        of_evaluations = {label: one.environment for label, one in config.evaluations.items()}
        weights = {
            **weights,
            **{label: weights[one.label] for label, one in of_evaluations.items() if one.label in weights},
        }
        self._scorer = GroupScorer(
            config.reward, name, metrics, rewards, exact_match, vocab_size, steps, custom, weights
        )
        self._executor = threads.DaemonWorkers(config.reward.max_concurrent_groups, "score")
        self._unusable: ConfigError | None = None
        """Configuration error found while scoring; raised by the main loop, which ends the process."""
        self._worn_out = ""
        """Reason to start over; empty while this process can score."""
        self._num_scored, self._busy_seconds = 0, 0.0
        self._shown: set[tuple[str, ...]] = set()
        """Origins of user errors whose traceback has been logged; each is logged once."""
        self.held: dict[tuple[int, int], HeldGroup] = {}
        """Groups from arrival to release, by ordinal and attempt."""
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._packer: Outbox | None = None
        self._term, self._moves, self._fence = -1, 0, Fence()
        """Of the connection to the packer: its term, and the number of moves of the network before it; the run."""
        self._drain, self._hand_over = Drain(), Drain(seconds=math.inf)
        """Order to leave soon, and wish to hand over to a new process once all groups are finished."""
        self.on_raised: Callable[[BaseException], None] = lambda error: None
        """Called with each exception of a user function, in the thread that scored the group."""
        self.membership = Membership(config, RewardHeartbeat, name)
        self.name, self.liveness = name, self.membership.liveness
        self._inbox = Inbox("groups", self.membership.addresses, config.bus, name, self.membership.boot_id)

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        return [self.membership.counts, self._inbox.counts, *([self._packer.counts] if self._packer else [])]

    def run(self, metrics_url: str = "") -> None:
        """Run until the run is done, or this actor has drained.

        Raises:
            ConfigError: the data or a reward function can't work.
            StartOverError: a new process shall take over; also as `Membership.latest`.
            PeerRefusedError, PackerSilentError: as `Membership.latest`.
        """
        self._report(starting={"phase": "running", "metrics_url": metrics_url, "address": self._inbox.address})
        try:
            while not self.follow():
                # before the first directive the run of the groups that arrive is unknown: they stay in the socket
                if not self._fence.run:
                    self.membership.wait(POLL_SECONDS)
                    continue
                message = self._inbox.receive(POLL_SECONDS)
                # read all that has come before looking at the directive again: a group that waits here is in no
                # heartbeat
                while message is not None:
                    self.take(message)
                    message = self._inbox.receive(0)
        finally:
            self.close()

    def close(self) -> None:
        """Stop the worker threads without waiting, and close all sockets."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._scorer.close()
        self.membership.close()
        self._inbox.close()
        # under the lock: worker threads may be about to send
        with self._sending:
            if self._packer is not None:
                self._packer.close()
            self._packer = None
        # last, since it waits for killed processes
        if self._host is not None:
            self._host.close()

    def drain(self) -> None:
        """Take no new groups, and exit once all groups are released or the drain time is over. Thread-safe."""
        self._drain.begin()

    def leave(self) -> None:
        """Exit at the next turn, with work unfinished: the other processes of the run have gone. Thread-safe."""
        self._drain = Drain(seconds=0.0)
        self._drain.begin()

    def follow(self) -> bool:
        """Follow the newest directive. Return True when the actor shall exit."""
        if self._unusable is not None:
            raise self._unusable
        directive = self.membership.latest()
        if isinstance(directive, RewardDirective):
            self._fence.follow(directive.run, directive.term)
            # before sending below: a group that the packer has released must not be sent to it again
            with self._lock:
                for ordinal, attempt in directive.release.tolist():
                    self.held.pop((ordinal, attempt), None)
            if (directive.term, self.membership.num_moves) != (self._term, self._moves):
                self._connect_to_packer(directive)
        with self._lock:
            waiting = [held for held in self.held.values() if held.scored is not None]
        # outside of the lock, which worker threads need: encoding a large group takes milliseconds
        for held in waiting:
            self._send(held)
        self._report()
        self._start_over_if_due()
        done = directive is not None and directive.phase == "done"
        return done or self._drain.may_leave(holds_work=bool(self.held))

    def _connect_to_packer(self, directive: RewardDirective) -> None:
        """Connect to the packer of a directive; groups that an older connection has taken are sent again."""
        with self._sending:
            if self._packer is not None:
                self._packer.close()
            self._packer = Outbox("scored", directive.packer_address, self._config.bus, self.membership.name)
            self._term, self._moves = directive.term, self.membership.num_moves
            with self._lock:
                for held in self.held.values():
                    held.sent_in_term = -1

    def _start_over_if_due(self) -> None:
        """Start over once calls that never return have taken the threads, or after `reward.max_groups_per_process`.

        Raises:
            StartOverError: a new process shall take over. Groups not scored here are sent to it or to another one.
        """
        self._worn_out = self._worn_out or self._scorer.runner.worn_out
        if self._worn_out:
            self._drain.begin()
            # leaves when the packer knows all results and failures of this process, or the drain time is over
            with self._lock:
                untold = any(held.failure or held.scored for held in self.held.values())
            # groups without a result hold nothing up: their functions may never return
            if self._drain.may_leave(holds_work=untold):
                raise StartOverError(self._worn_out)
        # user functions may leak memory, so a process takes a limited number of groups
        limit = self._config.reward.max_groups_per_process
        if limit and self._num_scored >= limit:
            self._hand_over.begin()
        # once all held groups are settled, without a limit of its own: `reward.timeout` limits each group, and
        # `bus.peer_timeout` the absence of the packer. An order to drain goes first
        if self._hand_over.may_leave(holds_work=bool(self.held)) and not self._drain:
            raise StartOverError(
                f"{self._num_scored} groups have been scored here (reward.max_groups_per_process {limit})"
            )

    def take(self, message: object) -> None:
        """Hold a group and hand it to a worker thread. Drop other messages, copies of held groups, and other runs'."""
        # ScoredGroup is a subclass of RolloutGroup, but belongs to the packer
        if not isinstance(message, RolloutGroup) or isinstance(message, ScoredGroup):
            log.warning("unexpected message", kind=getattr(message, "kind", type(message).__name__))
            return
        if reason := self._fence.refuses(message.run):
            self._inbox.drop(message, reason)
            return
        key = (message.ordinal, message.attempt)
        with self._lock:
            # a copy, sent again before the sender knew that the group is here
            if key in self.held:
                return
            held = self.held[key] = HeldGroup(message)
        point("reward.taken")
        self._executor.run(self._score, held)

    def _score(self, held: HeldGroup) -> None:
        """Score a group, in a worker thread. Every outcome becomes a scored group, or a failure reported to the packer.

        A group released while waiting for a thread is skipped: it is settled elsewhere, and functions may cost money.
        """
        group, started = held.group, time.monotonic()
        with self._lock:
            if self.held.get((group.ordinal, group.attempt)) is not held:
                return
        try:
            with span("score", ordinal=group.ordinal, purpose=group.purpose, environment=group.environment):
                held.scored = self._scorer.score(group)
            point("reward.scored")
        except ConfigError as error:
            self._unusable = error
        except RewardError as error:
            first = error.origin not in self._shown
            self._shown.add(error.origin)
            if error.__cause__ is not None:
                self.on_raised(error.__cause__)
            self._fail(held, error.reason, str(error), traceback_of=error.__cause__ if first else None)
        except Exception as error:
            # errors of user code are RewardErrors: this one is a fault of the project, and may be of this group alone
            log.exception("scoring failed", ordinal=group.ordinal)
            self._fail(held, "internal", f"{type(error).__name__}: {error}")
        else:
            seconds = time.monotonic() - started
            # not exact without a lock, which a limit on leaks and a mean do not need
            self._num_scored += 1
            self._busy_seconds += seconds
            self.metrics.observe("grpo_reward_score_seconds", seconds)
            self.metrics.count("grpo_reward_groups_total", purpose=group.purpose)
            self._send(held)

    def _fail(self, held: HeldGroup, reason: str, detail: str, traceback_of: BaseException | None = None) -> None:
        ordinal = held.group.ordinal
        log.warning("group not scored", ordinal=ordinal, reason=reason, detail=detail, exc_info=traceback_of)
        self.metrics.count("grpo_reward_failures_total", reason=reason)
        held.failure = AttemptFailure(
            ordinal=held.group.ordinal, attempt=held.group.attempt, reason=reason, detail=limits.cut(detail)
        )

    def _send(self, held: HeldGroup) -> None:
        """Send a scored group unless this term's packer has it, or again after `resend_after` without a release.

        Called by worker threads and by the bus thread.
        """
        with self._sending:
            now = time.monotonic()
            late = held.sent_at is not None and now - held.sent_at > held.resend_after
            if self._packer is None or held.scored is None or (held.sent_in_term == self._term and not late):
                return
            try:
                sent = self._packer.try_send(held.scored)
            except MessageTooLargeError as error:
                held.scored = None
                self._fail(held, "too_large", str(error))
                return
            # without room in the socket, or without a connection, `follow` tries again in its next turn
            if sent:
                point("reward.sent")
                held.sent_at, held.sent_in_term = now, self._term
                held.resend_after = max(2 * held.resend_after, self._config.bus.resend_after)

    def _report(self, starting: dict[str, str] | None = None) -> None:
        with self._lock:
            holds = np.array(sorted(self.held), np.int64).reshape(-1, 2)
            load = sum(held.scored is None and held.failure is None for held in self.held.values())
            failures = [held.failure for held in self.held.values() if held.failure][: limits.HEARTBEAT_FAILURES]
        self.metrics.set("grpo_reward_held_groups", len(holds))
        self.metrics.set("grpo_reward_queue_groups", load)
        said = {"holds": holds, "load": load, "failures": failures}
        said |= {"calls": self._scorer.runner.num_calls, "late_calls": self._scorer.runner.num_late}
        said |= {"scored": self._num_scored, "busy_seconds": self._busy_seconds}
        said |= {"notes": self._scorer.notes[: limits.HEARTBEAT_NOTES]}
        if starting is not None:
            self.membership.start(**said, **starting)
        else:
            # draining either way: rollouts get this actor no more
            phase = (self._hand_over if self._hand_over else self._drain).phase
            self.membership.report(urgent=bool(failures), phase=phase, **said)
