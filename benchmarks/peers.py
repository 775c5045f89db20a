"""A real `PackerActor` with its ledger, among peers simulated in the same process.

    with lone_packer(config) as ring:
        ring.turn()        heartbeats and groups arrive; the packer runs a round; the peers follow their directives

No socket sends anything, and no other thread runs: events go directly into the packer's inflow, and directives and
batches are taken at the point where the packer hands them over. A group is a copy of one template per version, stamped
with its ticket, so the peers take little time; `packer_seconds` excludes their time.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from actors.assembly import make_packer
from actors.ledger.store import digest_of
from actors.ledger.witness import START, next_chain
from actors.packer.inflow import BeatHeard, GroupArrived, PeerLost
from actors.telemetry.metrics import Metrics
from bus import codec
from schemas.config import RunConfig
from schemas.messages import (
    AttemptFailure,
    CheckpointInfo,
    Directive,
    Heartbeat,
    InferenceDirective,
    InferenceHeartbeat,
    Manifest,
    ObserverDirective,
    PolicyVersion,
    RewardDirective,
    RewardHeartbeat,
    RolloutDirective,
    RolloutHeartbeat,
    ScoredGroup,
    StepBatch,
    StepReport,
    Ticket,
    TrainerDirective,
    TrainerHeartbeat,
    single_turn,
)

Hold = tuple[int, int]
EVERY_FAILURE, EVERY_COPY, EVERY_POISON, EVERY_RESTART = 997, 1009, 20011, 10007
"""Ordinals per event: a failed first attempt, a group that arrives twice, a poison group, a death of its rollout."""


class Peer:
    """Base of all peers: name, boot id, term of the packer, sequence number."""

    kind: type[Heartbeat]

    def __init__(self, run: str, name: str) -> None:
        self.run, self.name, self.boot, self.term, self.sequence = run, name, 1, 0, 0

    @property
    def identity(self) -> str:
        """ZeroMQ identity."""
        return f"{self.name}/{self.boot}"

    def heartbeat(self) -> Heartbeat:
        """Return the current heartbeat."""
        self.sequence += 1
        said = {"name": self.name, "boot_id": str(self.boot), "sequence": self.sequence, "phase": "running"}
        return self.kind(run=self.run, term=self.term, **said, **self.fields())

    def hear(self, directive: Directive) -> None:
        """Take in a directive. A new process only observes until its heartbeat names the term (P3)."""
        self.term = directive.term
        if not isinstance(directive, ObserverDirective):
            self.obey(directive)

    def fields(self) -> dict[str, Any]:
        """Return the fields of this kind's heartbeat."""
        raise NotImplementedError

    def obey(self, directive: Any) -> None:
        """Carry out the directive."""


class Rollout(Peer):
    """Rollout actor that samples a ticket at once and keeps the group until its release."""

    kind = RolloutHeartbeat

    def __init__(self, run: str, name: str, slots: int) -> None:
        super().__init__(run, name)
        self.slots = slots
        self.held: dict[Hold, Ticket] = {}
        self.to_send: list[Ticket] = []
        self.failures: dict[Hold, AttemptFailure] = {}

    def fields(self) -> dict[str, Any]:
        """Return slots, holds and failures.

        A slot is busy until the group is sent; failures are repeated until the release.
        """
        free = max(0, self.slots - len(self.to_send))
        return {"free_slots": free, "failures": list(self.failures.values()), "holds": pairs(self.held)}

    def obey(self, directive: RolloutDirective) -> None:
        """Discard released groups and accept tickets."""
        for hold in map(tuple, directive.release.tolist()):
            self.held.pop(hold, None)
            self.failures.pop(hold, None)
        for ticket in directive.tickets:
            hold = ticket.ordinal, ticket.attempt
            if hold not in self.held:
                self.held[hold] = ticket
                self._sample(hold, ticket)

    def _sample(self, hold: Hold, ticket: Ticket) -> None:
        number, attempt = hold
        if number > 0 and (number % EVERY_POISON == 0 or (number % EVERY_FAILURE == 0 and attempt == 1)):
            self.failures[hold] = AttemptFailure(ordinal=number, attempt=attempt, reason="engine", detail="it broke")
        else:
            self.to_send.append(ticket)

    @property
    def dies(self) -> bool:
        """True if this process ends before it sends its groups."""
        return any(t.ordinal > 0 and t.ordinal % EVERY_RESTART == 0 and t.attempt == 1 for t in self.to_send)

    def restart(self) -> None:
        """Become a new process with the same name and without memory."""
        self.boot, self.term, self.sequence = self.boot + 1, 0, 0
        self.held, self.to_send, self.failures = {}, [], {}


class Reward(Peer):
    """Reward actor that holds each group until its release."""

    kind = RewardHeartbeat

    def __init__(self, run: str, name: str) -> None:
        super().__init__(run, name)
        self.held: set[Hold] = set()

    def fields(self) -> dict[str, Any]:
        """Return the holds."""
        return {"address": f"inproc://{self.name}", "load": len(self.held), "failures": [], "holds": pairs(self.held)}

    def obey(self, directive: RewardDirective) -> None:
        """Discard released groups."""
        self.held.difference_update(map(tuple, directive.release.tolist()))


class Engine(Peer):
    """Inference actor that serves the version of the directive at once."""

    kind = InferenceHeartbeat

    def __init__(self, run: str, name: str) -> None:
        super().__init__(run, name)
        self.policy: PolicyVersion | None = None
        self.tokens = 0

    def fields(self) -> dict[str, Any]:
        """Return the served policy and the number of generated tokens."""
        seconds = {"pause": 0.001, "gather": 0.0, "wire": 0.01, "load": 0.01}
        rest = {"load": 0, "generated_tokens": self.tokens, "holds_two_versions": False, "update_seconds": seconds}
        engine_state = "clean" if self.policy else "starting"
        return {"url": "http://127.0.0.1:1", "engine_state": engine_state, "policy": self.policy} | rest

    def obey(self, directive: InferenceDirective) -> None:
        """Switch to the version of the directive."""
        if directive.manifest is not None:
            self.policy = directive.manifest.policy


class Trainer(Peer):
    """Trainer that trains a batch at once, saves every `save_every` steps and keeps `keep_last` checkpoints."""

    kind = TrainerHeartbeat

    def __init__(self, run: str, name: str, save_every: int, keep_last: int, max_steps: int) -> None:
        super().__init__(run, name)
        self.save_every, self.keep_last, self.max_steps = save_every, keep_last, max_steps
        self.incarnation, self.next_step, self.chain = 0, 1, START
        self.checkpoints: list[CheckpointInfo] = []
        self.published: list[Manifest] = []
        self.reports: list[StepReport] = []
        self.batches: dict[int, StepBatch] = {}
        self.keep_version = 0

    def fields(self) -> dict[str, Any]:
        """Return checkpoints, received batches and progress."""
        return {
            "rank": 0,
            "num_ranks": 1,
            "address": "inproc://trainer",
            "incarnation": self.incarnation,
            "next_step": self.next_step,
            "checkpoints": self.checkpoints,
            "published": self.published,
            "reports": self.reports,
            "received": np.array(sorted(self.batches), np.int64),
        }

    def obey(self, directive: TrainerDirective) -> None:
        """Join the gang; discard recorded reports."""
        self.reports = [report for report in self.reports if report.step > directive.recorded_step]
        self.keep_version = directive.keep_version
        if not self.incarnation and directive.incarnation:
            self.incarnation = directive.incarnation
            self._publish(0)

    def try_send(self, batch: StepBatch) -> bool:
        """Take a batch in place of the packer's outbox. The packer pays the cost of sending."""
        codec.encode(batch)
        self.batches[batch.step] = batch
        return True

    def close(self) -> None:
        """Do nothing; an outbox has this method."""

    def work(self) -> None:
        """Train one step if its batch has arrived."""
        batch = self.batches.pop(self.next_step, None)
        if batch is None:
            return
        step, self.next_step = batch.step, batch.step + 1
        self.chain = next_chain(self.chain, step, batch.ordinals.tolist(), batch.dropped, batch.digests)
        values = {"loss": 0.1, "mismatch_kl": 0.01, "tokens": float(batch.token_ids.size), "seconds_wait_batch": 0.1}
        self.reports.append(StepReport(step=step, values=values))
        self._publish(step)
        if step % self.save_every == 0 or step == self.max_steps:
            saved = [*self.checkpoints, CheckpointInfo(step=step, chain=self.chain)]
            self.checkpoints = saved[-self.keep_last :]

    def _publish(self, version: int) -> None:
        policy = PolicyVersion(lineage=self.incarnation, version=version)
        uri = f"/weights/{policy}"
        made = Manifest(policy=policy, channel="filesystem", content="full", uri=uri, digest=uri, num_bytes=1)
        kept = [m for m in self.published[:-2] if m.policy.version >= self.keep_version]
        self.published = [*kept, *self.published[-2:], made]


class LonePacker:
    """Packer among its peers. `packer_seconds` and `packer_cpu_seconds` count its rounds alone."""

    def __init__(self, config: RunConfig, num_rollouts: int = 4, num_rewards: int = 2) -> None:
        self.config, self.metrics = config, Metrics("packer")
        self.packer = make_packer(config, "packer-0", self.metrics)
        self.packer_seconds = self.packer_cpu_seconds = 0.0
        run, trainer = str(self.packer.store.run), config.trainer
        slots = 2 * config.packer.groups_per_step
        self.rollouts = [Rollout(run, f"rollout-{i}", slots) for i in range(num_rollouts)]
        self.rewards = [Reward(run, f"reward-{i}") for i in range(num_rewards)]
        self.engine = Engine(run, "inference-0")
        saved = trainer.checkpoint
        self.trainer = Trainer(run, "trainer-0", saved.interval, saved.num_resumable, trainer.max_steps)
        self.peers: list[Peer] = [*self.rollouts, *self.rewards, self.engine, self.trainer]
        self._directives: dict[bytes, Directive | None] = {}
        self._template = template(config, run)
        self._divert()

    def _divert(self) -> None:
        """Redirect directives and batches from the packer's sockets to the peers, and close the sockets."""
        control, outboxes = self.packer._control, self.packer.batches.outboxes
        control.close()
        control.publish = lambda told, **_: self._directives.update(told)  # type: ignore[method-assign]
        outboxes[self.trainer.identity] = self.trainer  # type: ignore[assignment]

    @property
    def num_trained(self) -> int:
        """Number of groups trained so far."""
        return self.packer.machine.trained_step * self.config.packer.groups_per_step

    @property
    def over(self) -> bool:
        """True if the run has ended."""
        return self.packer.over

    def turn(self) -> None:
        """Let the peers work and send heartbeats, run a round of the packer, and let the peers obey."""
        self.trainer.work()
        self.packer._control._clock.listened()  # its thread does not run: leases end by the wall clock here
        for group in self._groups():
            frames = [bytes(frame) for frame in codec.encode(group)]
            self.packer.inflow.put(GroupArrived(group, frames, digest_of(frames)))
        for peer in self.peers:
            self.packer.inflow.put(BeatHeard(peer.identity, peer.heartbeat(), time.monotonic()))
        started, cpu_started = time.perf_counter(), time.thread_time()
        self.packer.run_round(0.0)
        self.packer_seconds += time.perf_counter() - started
        self.packer_cpu_seconds += time.thread_time() - cpu_started
        for peer in self.peers:
            directive = self._directives.get(peer.identity.encode())
            if directive is not None:
                peer.hear(directive)
        self._directives.clear()

    def _groups(self) -> Iterator[ScoredGroup]:
        """Return all sampled groups, scored; some arrive twice."""
        for number, rollout in enumerate(self.rollouts):
            reward = self.rewards[number % len(self.rewards)]
            if rollout.dies:
                self.packer.inflow.put(PeerLost(rollout.identity))  # as the control server's probe finds
                rollout.restart()
            for ticket in rollout.to_send:
                reward.held.add((ticket.ordinal, ticket.attempt))
                group = self._stamp(rollout.identity, reward.name, ticket)
                yield group
                if ticket.ordinal % EVERY_COPY == 0:
                    yield group
            self.engine.tokens += self._template.token_ids.size * len(rollout.to_send)
            rollout.to_send = []

    def _stamp(self, sender: str, scorer: str, ticket: Ticket) -> ScoredGroup:
        group = self._template
        policy = self.engine.policy
        assert policy is not None
        if (policy.lineage, policy.version) != tuple(group.segments[0, 1:3]):
            segments = group.segments.copy()
            segments[:, 1:3] = policy.lineage, policy.version
            group = self._template = group.model_copy(update={"segments": segments})
        stamped = {"ordinal": ticket.ordinal, "attempt": ticket.attempt, "purpose": ticket.purpose}
        named = {"sender": sender, "scorer": scorer, "example_key": ticket.example_key}
        return group.model_copy(update=stamped | named)

    def close(self) -> None:
        """End the packer's threads and close the ledger."""
        self.packer._inbox.close()
        self.packer.batches.close()
        if self.packer._backups is not None:
            self.packer._backups.close()
        self.packer.store.close()


def template(config: RunConfig, run: str) -> ScoredGroup:
    """Return a group of `rollout.group_size` completions of `rollout.max_tokens` tokens, with a prompt of 64 tokens."""
    rng = np.random.default_rng(0)
    size, tokens = config.rollout.group_size, config.rollout.max_tokens
    starts = np.arange(size) * tokens
    rewards = rng.random(size)
    return ScoredGroup(
        run=run,
        sender="",
        ordinal=0,
        attempt=1,
        purpose="train",
        environment=config.environments[0].label,
        example_key="",
        prompt="Natalia sold clips to 48 of her friends in April, and then half as many in May. How many altogether?",
        columns={"answer": "72"},
        completions=["She sold 48 / 2 = 24 clips in May, so 48 + 24 = 72 clips altogether. " * (tokens // 24)] * size,
        stop_conditions=["stop"] * size,
        token_ids=rng.integers(0, 50_000, size * tokens).astype(np.int32),
        loss_mask=np.ones(size * tokens, np.uint8),
        logprobs=-rng.random(size * tokens).astype(np.float32),
        **single_turn(
            rng.integers(0, 50_000, 64).astype(np.int32),
            np.append(starts, size * tokens),
            np.stack([starts, np.zeros_like(starts), np.zeros_like(starts)], axis=1),
        ),
        segment_temperatures=np.ones(size, np.float32),
        scorer="",
        reward_names=["exact_match"],
        rewards_FG=rewards[None],
        rewards_G=rewards,
        advantages_G=(rewards - rewards.mean()).astype(np.float32),
    )


def pairs(holds: Any) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """Return holds as an array for a heartbeat."""
    return np.array(list(holds), np.int64).reshape(-1, 2)


@contextlib.contextmanager
def lone_packer(config: RunConfig) -> Iterator[LonePacker]:
    """Yield a packer among its peers; close it at the end of the block."""
    ring = LonePacker(config)
    try:
        yield ring
    finally:
        ring.close()
