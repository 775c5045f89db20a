"""The packer: admits work, keeps the ledger, packs training steps.

Three threads. The control server's hears beats and answers them; the inbox's reads scored groups, always; this one, the
only one that touches machine, ledger and batches, goes round:

    take all beats and groups that have come → decide → commit → publish States, send batches, report

Nothing leaves the process before the commit of the round that decided it. Nothing here blocks on a send: a batch that
finds no room stays pending. The round waits for the next event, at most until the next lease could end.
"""

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import structlog

from actors.algorithms.advantages import with_step_advantages
from actors.algorithms.batches import build_batches
from actors.algorithms.curriculum import Curriculum
from actors.algorithms.filters import rejected_as
from actors.algorithms.lag import surplus_groups
from actors.algorithms.pools import ASIDE
from actors.environments import Environment
from actors.faults import point
from actors.ledger import Changes, ExampleRef, GroupFacts, GroupState, Machine, Settings, Step, Store, Verdict, replies
from actors.membership import new_boot_id
from actors.record import RunRecord
from actors.telemetry.metrics import Metrics
from actors.telemetry.reporter import Reporter
from bus import codec
from bus.control import ControlServer
from bus.counts import EdgeCounts
from bus.data import Inbox, Outbox
from bus.topology import Addresses
from schemas.config import RunConfig
from schemas.config.resolved import write_resolved
from schemas.config.resume import as_tree, differences, refusal
from schemas.errors import ConfigError, ProtocolError, RunFailedError
from schemas.messages import Beat, Message, ObserverState, Policy, ScoredGroup, StepBatch, TrainerBeat

log = structlog.get_logger("packer")

ROUND_SECONDS = 0.25
LINGER_SECONDS = 30.0
"""How long the packer stays after the end for peers that have not said that they leave."""


@dataclass
class _Inflow:
    """What the other threads have put down for the next round."""

    events: "queue.SimpleQueue[tuple[str, Any]]" = field(default_factory=queue.SimpleQueue)

    def take(self, timeout: float) -> list[tuple[str, Any]]:
        """All events that are there, after waiting for the first."""
        try:
            taken = [self.events.get(timeout=timeout)]
        except queue.Empty:
            return []
        while True:
            try:
                taken.append(self.events.get_nowait())
            except queue.Empty:
                return taken


class PackerActor:
    """Runs the ledger's machine against the world.

    Args:
        train, evaluation: environments by label.
        curriculum: draws the next train example; its state is saved with each commit that issues something.
        store: the ledger.
        reporter: what the run leaves behind.
        started_at: wall-clock time of the command, for summary.json.
        fork: whether a configuration of another identity may go on from the newest checkpoint (P23).

    Raises:
        ConfigError: the ledger belongs to a run of another identity.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        train: Mapping[str, Environment],
        evaluation: Mapping[str, Environment],
        curriculum: Curriculum,
        store: Store,
        reporter: Reporter,
        started_at: float | None = None,
        lose: Callable[[str], bool] | None = None,
        fork: bool = False,
    ) -> None:
        self._config, self._name, self._metrics, self._store = config, name, metrics, store
        self._train, self._evaluation = train, evaluation
        self._labels, self._curriculum = list(train), curriculum
        self._inflow = _Inflow()
        self._draining = self._reading = False
        self.on_turn: Callable[[], None] = lambda: None
        """Called at the end of each round."""
        self._last_round = time.monotonic()
        addresses = Addresses(config)
        self._inbox = Inbox("scored", addresses, config.bus, name, new_boot_id())
        extra: dict[str, Any] = {"lose": lose} if lose else {}
        self._control = ControlServer(addresses.control, self._heard, bus=config.bus, **extra)
        self._outboxes: dict[str, Outbox] = {}
        self._sent: dict[tuple[str, int], float] = {}
        self._payloads: dict[int, ScoredGroup] = {}
        self._built: dict[tuple[int, int], list[StepBatch]] = {}
        self._machine = Machine(
            settings_of(config),
            store.run,
            store.term,
            time.monotonic(),
            self._draw_example,
            self._eval_examples(),
            self._inbox.address,
        )
        self._restore(fork, started_at)
        self.record = RunRecord(config, store, self._machine, metrics, reporter, self._payload, started_at)

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        return [self._control.counts, self._inbox.counts, *(outbox.counts for outbox in list(self._outboxes.values()))]

    def run(self, metrics_url: str = "") -> None:
        """Until the run is done and everybody has left, or drained.

        Raises:
            RunFailedError: the run can't go on.
        """
        self._reading = True
        self.record.metrics_target = ("packer", self._name, metrics_url)
        self._control.start()
        reader = threading.Thread(target=self._read, name="scored", daemon=True)
        reader.start()
        try:
            self._rounds()
        finally:
            self._reading = False
            reader.join(2.0)
            self._control.close()
            self._inbox.close()
            for outbox in self._outboxes.values():
                outbox.close()
            self._store.close()

    def drain(self) -> None:
        """End after this round: all that matters is committed. From any thread."""
        self._draining = True

    # --- other threads -------------------------------------------------------------------------------------------

    def _heard(self, identity: bytes, beat: Beat) -> None:
        self._inflow.events.put(("beat", (identity.decode("utf-8", "replace"), beat)))

    def _read(self) -> None:
        while self._reading:
            message = self._inbox.receive(0.2)
            if message is not None:
                self._inflow.events.put(("group", message))

    # --- the round -----------------------------------------------------------------------------------------------

    def _rounds(self) -> None:
        was_over = self._over
        try:
            while not self._draining and not self._over:
                self._round(self._inflow.take(ROUND_SECONDS))
            self._see_off(self._config.bus.lease if was_over else 0.0)
        except (ProtocolError, RunFailedError) as error:
            self._refuse_everybody(str(error))
            raise
        if self._machine.failure:
            raise RunFailedError(self._machine.failure)

    @property
    def _over(self) -> bool:
        return self._machine.phase in ("done", "failed")

    def _see_off(self, at_least: float) -> None:
        """Go on until all peers know how the run has ended and have left (P27).

        The packer of a run that was over before it started stays for one lease: others are starting too, and whoever
        finds it gone waits for it until bus.peer_timeout.
        """
        now = time.monotonic()
        stay_until, leave_at = now + at_least, now + LINGER_SECONDS
        self._round([])
        while not self._draining and now < leave_at and (now < stay_until or not self._machine.everybody_left):
            self._round(self._inflow.take(ROUND_SECONDS))
            now = time.monotonic()

    def _refuse_everybody(self, reason: str) -> None:
        """Tell all who beat within two leases why the packer ends, so that they need not wait for bus.peer_timeout.

        The machine is asked for nothing any more: it and the world disagree.
        """
        refusal = ObserverState(
            run=self._machine.run,
            term=self._machine.term,
            phase="failed",
            step=self._machine.trained_step,
            max_steps=self._machine.settings.max_steps,
            refusal=reason,
            progress={},
        )
        leave_at = time.monotonic() + 2 * self._config.bus.lease
        while not self._draining and time.monotonic() < leave_at:
            for kind, event in self._inflow.take(ROUND_SECONDS):
                if kind == "beat":
                    self._control.publish({event[0].encode(): refusal})

    def _round(self, events: list[tuple[str, Any]]) -> None:
        now = time.monotonic()
        if now - self._last_round > self._config.bus.lease / 2:
            self._machine.stood_still(now)  # this process did, and its peers' beats wait to be heard
        self._last_round = now
        settled: dict[int, tuple[str, list[bytes]]] = {}
        for kind, event in events:
            if kind == "beat":
                self._machine.heard(now, *event)
                self.record.heard(*event)
            else:
                self._take(event, settled)
        point("packer.taken")
        self._machine.decide(now)
        self.record.follow([self._eval_groups(version) for version in self._take_finished_evals()])
        self._machine.note_evaluated(self.record.take_evaluated())
        self._commit(settled)
        point("packer.committed")
        self.record.conclude()
        self._send_batches(now)
        self._control.publish(replies.states(self._machine, self.record.progress))
        point("packer.told")
        self._forget_trained()
        self.on_turn()

    def _take(self, message: Message, settled: dict[int, tuple[str, list[bytes]]]) -> None:
        """A scored group, judged by the machine; its payload goes into the same commit as the verdict."""
        if not isinstance(message, ScoredGroup) or message.run != self._machine.run:
            log.warning("message of another run or kind", kind=message.kind, run=message.run)
            return
        frames = [bytes(frame) for frame in codec.encode(message)]
        digest = hashlib.sha256(b"".join(frames)).hexdigest()
        facts = facts_of(message, digest, rejected_as(message.rewards_G, self._config.packer))
        verdict = self._machine.scored(facts)
        self._metrics.count(
            "grpo_packer_completion_tokens_total",
            message.token_ids.size,
            purpose=message.purpose,
            verdict=verdict.value,
        )
        if verdict is Verdict.SETTLED:
            settled[message.ordinal] = (digest, frames)
            self._payloads[message.ordinal] = message
        if verdict in (Verdict.SETTLED, Verdict.FILTERED):
            self.record.settled(message)
            self._note_difficulty(message)

    def _note_difficulty(self, group: ScoredGroup) -> None:
        """What its rewards say of the example; in the same commit as the verdict."""
        scores = group.rewards_G[~np.isnan(group.rewards_G)]
        if self._curriculum.pools is not None and group.purpose == "train" and scores.size:
            example = self._machine.groups.rows[group.ordinal].example
            self._curriculum.pools.note(self._labels.index(example.environment), example.index, float(scores.mean()))

    def _commit(self, settled: dict[int, tuple[str, list[bytes]]]) -> None:
        changes: Changes = self._machine.take_changes()
        changes.values.update(self.record.take_values())
        changes.pools = self._moved_in_pools()
        if changes or settled:
            if "num_issued" in changes.values:
                changes.values["curriculum"] = list(self._curriculum.counts)
            started = time.monotonic()
            self._store.commit_patiently(changes, settled)
            self._metrics.observe("grpo_packer_commit_seconds", time.monotonic() - started)

    def _moved_in_pools(self) -> dict[str, str]:
        pools = self._curriculum.pools
        if pools is None:
            return {}
        for pool in ASIDE:
            self._metrics.set("grpo_packer_pool_examples", pools.sizes[pool], pool=pool)
        return pools.take_changes()

    def _send_batches(self, now: float) -> None:
        """Offer each rank the steps it should have; what finds no room is offered again in the next round."""
        wanted, pending = self._machine.batches_wanted(), 0
        still = {(identity, step.step) for identity, _, step in wanted}
        self._sent = {key: at for key, at in self._sent.items() if key in still}
        for identity, beat, step in wanted:
            sent = self._sent.get((identity, step.step))
            if sent is not None and now - sent < self._config.bus.resend_after:
                continue
            if self._outbox(identity, beat).try_send(self._batch(step, beat.rank)):
                self._sent[identity, step.step] = now
                point("packer.between_ranks")
            else:
                pending += 1
        self._metrics.set("grpo_packer_pending_batches", pending)

    def _outbox(self, identity: str, beat: TrainerBeat) -> Outbox:
        if identity not in self._outboxes:
            for gone in [i for i in self._outboxes if i not in self._machine.gang.members.values()]:
                self._outboxes.pop(gone).close()
            self._outboxes[identity] = Outbox("steps", beat.address, self._config.bus, "packer")
        return self._outboxes[identity]

    def _batch(self, step: Step, rank: int) -> StepBatch:
        """The batch of a rank, built from payloads, ordinals and settings alone (P18)."""
        key = (step.step, self._machine.gang.incarnation)
        if key not in self._built:
            self._built = {k: v for k, v in self._built.items() if k[0] >= step.step - 1}
            payloads = [self._payload(ordinal) for ordinal in step.ordinals]
            groups = with_step_advantages(payloads, self._config.reward)
            self._built[key] = build_batches(
                groups,
                self._config.trainer.num_ranks,
                self._config.packer.sequence_len,
                self._config.trainer.num_minibatches,
                run=self._machine.run,
                term=self._machine.term,
                incarnation=self._machine.gang.incarnation,
                step=step.step,
                dropped=list(step.dropped),
                digests=list(step.digests),
            )
        return self._built[key][rank]

    def _payload(self, ordinal: int) -> ScoredGroup:
        if ordinal not in self._payloads:
            message = codec.decode(self._store.payloads([ordinal])[0])
            if not isinstance(message, ScoredGroup):
                raise ProtocolError(f"the ledger's payload of ordinal {ordinal} is a {message.kind}")
            self._payloads[ordinal] = message
        return self._payloads[ordinal]

    def _forget_trained(self) -> None:
        """Payloads in memory are those of groups that no rank has trained yet; all others are in the ledger."""
        if len(self._payloads) <= 4 * self._config.packer.groups_per_step:
            return
        rows = self._machine.groups.rows
        for ordinal in list(self._payloads):
            row = rows.get(ordinal)
            if ordinal < 0 or row is None or (row.step or self._machine.trained_step + 1) <= self._machine.trained_step:
                del self._payloads[ordinal]

    # --- examples ------------------------------------------------------------------------------------------------

    def _draw_example(self) -> ExampleRef:
        environment, index = self._curriculum.draw()
        label = self._labels[environment]
        for number, num_examples in self._curriculum.take_given_back():
            log.warning(
                "all examples of an environment were easy or hard; they are drawn again (packer.pools)",
                environment=self._labels[number],
                examples=num_examples,
            )
        return ExampleRef(label, index, self._train[label].example(index).key(label))

    def _eval_examples(self) -> list[ExampleRef]:
        asked = self._config.eval.num_prompts
        examples = []
        for label, environment in self._evaluation.items():
            size = asked if environment.num_examples is None else min(asked, environment.num_examples)
            examples += [ExampleRef(label, index, environment.example(index).key(label)) for index in range(size)]
        return examples

    def _take_finished_evals(self) -> list[int]:
        finished, self._machine.finished_evals = self._machine.finished_evals, []
        return finished

    def _eval_groups(self, version: int) -> tuple[int, list[ScoredGroup]]:
        rows = self._machine.groups.rows.values()
        settled = [g for g in rows if g.policy and g.policy.version == version and g.state is GroupState.SETTLED]
        return version, [self._payload(group.ordinal) for group in sorted(settled, key=lambda g: -g.ordinal)]

    def _restore(self, fork: bool, started_at: float | None) -> None:
        """Take over the ledger, if this configuration may go on with it."""
        values, machine = self._store.values(), self._machine
        found = differences(values.get("config", {}), self._config)
        refused = refusal(found)
        if refused and not fork:
            raise ConfigError(*refused)
        if self._store.term > 1:
            stored = (self._store.groups(), self._store.steps(), values, self._store.digests())
            machine.restore(time.monotonic(), *stored)
            log.info("ledger restored", steps=machine.steps.last, term=self._store.term, changed=list(map(str, found)))
        changes: dict[str, Any] = {"config": as_tree(self._config)}
        if refused:
            forked = machine.fork(self._train.keys())
            evals = {
                version: r for version, r in values.get("evals", {}).items() if int(version) <= machine.trained_step
            }
            changes["evals"] = evals
            log.warning("run forked", step=machine.trained_step, groups_given_up=len(forked))
        changes |= self._begin_pools_again(values, started_at)
        taken = replace(machine.take_changes(), pools=self._moved_in_pools())
        self._store.commit_patiently(replace(taken, values=taken.values | changes), {})
        try:
            write_resolved(self._config)
        except OSError as error:  # it is for people who look on
            log.warning("configuration not written down (output_dir)", detail=str(error))

    def _begin_pools_again(self, values: Mapping[str, Any], started_at: float | None) -> dict[str, Any]:
        """Examples come back to the normal pool when the run is started again; what to remember of it.

        A packer that crashed draws on as if nothing had been: it is told the time of the same `actors up`. Without
        one, each start of the packer is one of the run.
        """
        pools = self._curriculum.pools
        if pools is None or (started_at is not None and values.get("pools_begun") == started_at):
            return {}
        num_examples = pools.begin_again(f"{self._config.seed} {self._store.term}")
        log.info("pools", given_back=num_examples, **{pool: pools.sizes[pool] for pool in ASIDE})
        return {"pools_begun": started_at}


def settings_of(config: RunConfig) -> Settings:
    """The protocol's part of the configuration."""
    return Settings(
        groups_per_step=config.packer.groups_per_step,
        max_steps=config.trainer.max_steps,
        group_size=config.rollout.group_size,
        sequence_len=config.packer.sequence_len,
        num_ranks=config.trainer.num_ranks,
        order=config.packer.order,
        max_async_level=config.packer.max_async_level,
        max_off_policy_steps=config.packer.max_off_policy_steps,
        surplus=surplus_groups(
            config.packer.groups_per_step,
            config.packer.oversampling_factor,
            config.packer.max_async_level,
            config.packer.max_off_policy_steps,
        ),
        max_resample_times=config.packer.max_resample_times,
        lease=config.bus.lease,
        group_timeout=config.rollout.group_timeout,
        reward_timeout=config.reward.longest_seconds,
        temperature=config.rollout.temperature,
        temperature_schedule=config.rollout.temperature_schedule,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        min_p=config.rollout.min_p,
        max_tokens=config.rollout.max_tokens,
        seed=config.seed,
        eval_every_steps=config.eval.every_steps,
        eval_at_start=config.eval.at_start,
        eval_at_end=config.eval.at_end,
        eval_completions=config.eval.completions_per_prompt,
        eval_temperature=config.eval.temperature,
        keep_steps=config.ledger.keep_steps,
    )


def facts_of(group: ScoredGroup, digest: str, rejected: str = "") -> GroupFacts:
    """What the machine judges a group by."""
    pairs = {(lineage, version) for _, lineage, version in group.segments.tolist()}
    return GroupFacts(
        ordinal=group.ordinal,
        attempt=group.attempt,
        example_key=group.example_key,
        num_completions=group.num_completions,
        oldest_version=min(version for _, version in pairs),
        policies=frozenset(Policy(lineage=a, version=b) for a, b in pairs),
        longest_sample=group.prompt_ids.size + max(group.lengths_G.tolist()),
        digest=digest,
        rejected_as=rejected,
    )
