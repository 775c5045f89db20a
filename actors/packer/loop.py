"""The packer: issues tickets, keeps the ledger, packs training steps.

Three threads: the control server's answers beats, the inbox's reads scored groups, both without pause. The main thread
alone touches machine, ledger and batches. It waits for the next event, at most ROUND_SECONDS, and iterates:

    take all beats and groups → decide → commit → publish States, send batches, report

Nothing leaves the process before the commit of the decision. No send blocks: a batch without room stays pending.
"""

import hashlib
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from actors.algorithms.batches import batches_of_step
from actors.algorithms.curriculum import Curriculum
from actors.algorithms.filters import rejected_as
from actors.algorithms.lag import surplus_groups
from actors.algorithms.pools import ASIDE
from actors.datasets import Environment
from actors.datasets.identity import data_changes, identities
from actors.ledger import Changes, ExampleRef, GroupFacts, GroupState, Machine, Settings, Step, Store, Verdict, replies
from actors.ledger.backup import Backups
from actors.packer.record import RunRecord
from actors.process.fault_points import point
from actors.process.liveness import Liveness
from actors.process.membership import new_boot_id
from actors.telemetry.metrics import Metrics
from actors.telemetry.reporter import Reporter
from bus import codec, threads
from bus.control import ControlServer
from bus.counts import EdgeCounts
from bus.data import Inbox, Outbox
from bus.topology import Addresses
from schemas.config import RunConfig
from schemas.config.resolved import write_resolved
from schemas.config.resume import as_tree, differences, refusal
from schemas.errors import ConfigError, ProtocolError, RunFailedError
from schemas.messages import (
    Beat,
    Message,
    ObserverBeat,
    ObserverState,
    Policy,
    ScoredGroup,
    StepBatch,
    TrainerBeat,
    drop_fields,
)

log = structlog.get_logger("packer")

ROUND_SECONDS = 0.25
"""Longest wait of a round for the next event; leases and timeouts are checked this often."""
LINGER_SECONDS = 30.0
"""Longest stay of the packer after the end, for peers without a farewell yet."""
ADDRESS_LOG_SECONDS = 5.0
"""Shortest time between two log lines about unusable addresses."""


@dataclass
class _Inflow:
    """Queue from the other threads to the round: pairs ("beat", ...), ("lost", ...) or ("group", ...)."""

    events: "queue.SimpleQueue[tuple[str, Any]]" = field(default_factory=queue.SimpleQueue)

    def take(self, timeout: float) -> list[tuple[str, Any]]:
        """Return all events in the queue; wait up to `timeout` seconds for the first."""
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
    """Actor that runs the ledger's state machine: feeds beats and groups in, carries its decisions out.

    Args:
        config: configuration of the run.
        name: name in the run.
        metrics: destination of the `grpo_packer_*` metrics.
        train, evaluation: data sets by label.
        curriculum: draws the next train example; its state is saved with each commit that issues a ticket.
        store: the ledger.
        reporter: writer of the run's files.
        lacks_checkpoint: function of a step; returns True if this process finds no good checkpoint of the step.
        started_at: wall-clock time of the `actors up` command, for summary.json; None without `actors up`.
        fork: True to fork the run from the newest checkpoint, also with other identity keys (P23: a configuration with
            another identity is refused without `--fork`).

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
        lacks_checkpoint: Callable[[int], bool],
        started_at: float | None = None,
        fork: bool = False,
    ) -> None:
        self.name = name
        self._config, self._metrics, self.store = config, metrics, store
        self._train, self._evaluation = train, evaluation
        self._labels, self._curriculum = list(train), curriculum
        self._lacks_checkpoint = lacks_checkpoint
        self._inflow = _Inflow()
        self._shown: dict[str, Any] = {}
        """Values shown on screens last."""
        self._draining = self._reading = False
        self.liveness = Liveness()
        self.membership = None  # States come from here: this actor is no member of the run, but its packer
        addresses = Addresses(config)
        self._inbox = Inbox("scored", addresses, config.bus, name, new_boot_id())
        self._control = ControlServer(
            addresses.control, self._heard, bus=config.bus, on_lost=self._lost, stale_after=config.bus.lease
        )
        self._outboxes: dict[str, Outbox] = {}
        """Sockets to trainer ranks, by identity."""
        self._next_address_log = 0.0
        self._sent: dict[tuple[str, int], float] = {}
        """Time at which a rank (by identity) was last sent the batch of a step."""
        self._payloads: dict[int, ScoredGroup] = {}
        """Groups in memory, by ordinal; a cache of the ledger's payloads."""
        self._built: dict[tuple[int, int], list[StepBatch]] = {}
        """Batches of all ranks, by (step, incarnation)."""
        self.machine = Machine(
            settings_of(config),
            store.run,
            store.term,
            self._control.listened,
            self._draw_example,
            self._eval_examples(),
            self._inbox.address,
            self._is_still_there,
        )
        keep_last = config.trainer.checkpoint.keep_last
        self._backups = Backups(Path(store.path), keep_last) if store.path != ":memory:" else None
        self._restore(fork, started_at)
        self.record = RunRecord(config, store, self.machine, metrics, reporter, self._payload, started_at)

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        return [self._control.counts, self._inbox.counts, *(outbox.counts for outbox in list(self._outboxes.values()))]

    def run(self, metrics_url: str = "") -> None:
        """Run until the run is done and all peers have left, or this packer has drained.

        Raises:
            RunFailedError: the run can't go on.
            ProtocolError: a beat contradicts the ledger.
        """
        self._reading = True
        self.store.on_wait = self._tell_waiting
        self.record.metrics_target = ("packer", self.name, metrics_url)
        self._control.start()
        reader = threads.start("scored", self._read)
        try:
            self._rounds()
        finally:
            self._reading = False  # ends the reader's loop, which looks every 0.2 s
            reader.join(2.0)
            self._control.close()
            self._inbox.close()
            for outbox in self._outboxes.values():
                outbox.close()
            if self._backups is not None:
                self._backups.close()
            self.store.close()

    def drain(self) -> None:
        """Stop after this round. Everything that matters is committed by then. Thread-safe."""
        self._draining = True

    # --- other threads -------------------------------------------------------------------------------------------

    # these only put events into the queue: the machine belongs to the main thread

    def _heard(self, identity: bytes, beat: Beat) -> None:
        self._inflow.events.put(("beat", (identity.decode("utf-8", "replace"), beat, self._control.listened)))

    def _lost(self, identity: bytes) -> None:
        self._inflow.events.put(("lost", identity.decode("utf-8", "replace")))

    def _read(self) -> None:
        while self._reading:
            threads.pass_by("packer.inbox")
            message = self._inbox.receive(0.2)
            if message is not None and message.run != self.machine.run:
                self._inbox.drop(message, "foreign_run")
            elif message is not None:
                self._inflow.events.put(("group", message))

    # --- the round -----------------------------------------------------------------------------------------------

    def _rounds(self) -> None:
        was_over = self._over
        try:
            while not self._draining:
                while not self._draining and not self._over:
                    self._round(ROUND_SECONDS)
                self._see_off(self._config.bus.lease if was_over else 0.0)
                if self._over:  # if not, a gang has started again, from a checkpoint before the last step
                    break
        except (ProtocolError, RunFailedError) as error:
            self._refuse_everybody(str(error))
            raise
        if self.machine.failure:
            raise RunFailedError(self.machine.failure)

    @property
    def _over(self) -> bool:
        return self.machine.phase in ("done", "failed")

    def _see_off(self, at_least: float) -> None:
        """Go on with rounds until all peers know how the run has ended and have left (P27: the packer leaves last).

        If the run was over before its start, the packer stays for a lease. Other actors are just starting then, and
        would wait for a missing packer for `bus.peer_timeout`.

        Args:
            at_least: seconds to stay even if all peers have left.
        """
        now = time.monotonic()
        stay_until, leave_at = now + at_least, now + LINGER_SECONDS
        self._round(0.0)
        while not self._draining and self._over and now < leave_at:
            if now >= stay_until and self.machine.everybody_left:
                return
            self._round(ROUND_SECONDS)
            now = time.monotonic()

    def _refuse_everybody(self, reason: str) -> None:
        """Answer beats with the reason of the packer's end for two leases: no peer shall wait for `bus.peer_timeout`.

        The machine is not used any more, since it and the other processes disagree.
        """
        refusal = ObserverState(
            run=self.machine.run,
            term=self.machine.term,
            phase="failed",
            step=self.machine.trained_step,
            max_steps=self.machine.settings.max_steps,
            refusal=reason,
            progress={},
        )
        leave_at = time.monotonic() + 2 * self._config.bus.lease
        while not self._draining and time.monotonic() < leave_at:
            for kind, event in self._inflow.take(ROUND_SECONDS):
                if kind == "beat":
                    self._control.publish({event[0].encode(): refusal}, round_ended=False)

    def _round(self, wait: float) -> None:
        # read the clock before the events: beats that came before this time are then surely among the events, so no
        # lease ends because of a beat that is still in the queue
        listened = self._control.listened
        events = self._inflow.take(wait)
        now = time.monotonic()
        settled: dict[int, tuple[str, list[bytes]]] = {}
        for kind, event in events:
            if kind == "beat":
                identity, beat, arrived = event
                self.machine.heard(now, identity, beat, arrived)
                counts = self.machine.peers.beat_of(identity) is beat  # False: late, refused, or of another run
                if counts:
                    self.record.heard(identity, beat)
            elif kind == "lost":
                self.machine.lost(now, event)
            else:
                self._take(event, settled)
        point("packer.taken")
        self.machine.decide(now, listened)
        self._note_return()
        self.record.follow([self._eval_groups(version) for version in self._take_finished_evals()])
        self.machine.note_evaluated(self.record.take_evaluated())
        self._commit(settled)
        if self._backups is not None:
            self._backups.follow(self.machine.durable_step)
        point("packer.committed")
        self.record.conclude()
        self._send_batches(now)
        self._control.publish(replies.states(self.machine, self._progress))
        # names claimed by a second process: if the first one's connection is gone, `_lost` tells so at once
        for identity in self.machine.peers.take_contested():
            self._control.probe(identity.encode())
        point("packer.told")
        self._forget_trained()
        self.liveness.turn()  # last: a round that hangs anywhere is no sign of life

    def _progress(self) -> dict[str, Any]:
        self._shown = self.record.progress()
        return self._shown

    def _tell_waiting(self, problem: str) -> None:
        """Show on screens why the ledger can't be written, while a commit waits.

        Other peers get no State meanwhile: States may only contain committed facts.
        """
        # look at the events without taking them: the round after the commit handles them
        waiting = self._inflow.take(0.0)
        for event in waiting:
            self._inflow.events.put(event)
        came = {event[0] for kind, event in waiting if kind == "beat" and isinstance(event[1], ObserverBeat)}
        progress = (self._shown or self._progress()) | {"unwritten": [problem]}
        state = ObserverState(
            run=self.machine.run,
            term=self.machine.term,
            phase=progress["phase"],
            step=progress["step"],
            max_steps=progress["max_steps"],
            refusal="",
            progress=progress,
        )
        screens = came.union(self.machine.peers.all(ObserverBeat))
        self._control.publish({identity.encode(): state for identity in screens}, round_ended=False)

    def _note_return(self) -> None:
        """Drop batches of later steps after the gang went back to an older checkpoint."""
        went_back, self.machine.went_back = self.machine.went_back, None
        if went_back is None:
            return
        # with the same groups the batches are the same too, and stay
        if went_back.sample_anew:
            self._built.clear()
        self.record.go_back(went_back)
        log.warning(
            "run forked" if went_back.sample_anew else "run went back",
            step=went_back.step,
            groups_given_up=went_back.given_up,
        )

    def _take(self, message: Message, settled: dict[int, tuple[str, list[bytes]]]) -> None:
        """Give a scored group to the machine. The payload goes into the same commit as the machine's verdict."""
        if not isinstance(message, ScoredGroup) or message.run != self.machine.run:
            log.warning("message of another run or kind", kind=message.kind, run=message.run)
            return
        frames = [bytes(frame) for frame in codec.encode(message)]
        digest = hashlib.sha256(b"".join(frames)).hexdigest()
        facts = facts_of(message, digest, rejected_as(message.rewards_G, self._config.packer))
        verdict = self.machine.scored(facts)
        self._metrics.count(
            "grpo_packer_completion_tokens_total",
            message.token_ids.size,
            purpose=message.purpose,
            verdict=verdict.value,
        )
        if verdict is Verdict.SETTLED:
            settled[message.ordinal] = (digest, frames)  # stored as received: the digest is of these bytes
            self._payloads[message.ordinal] = message
        if verdict in (Verdict.SETTLED, Verdict.FILTERED):
            self.record.settled(message)
            self._note_difficulty(message)

    def _note_difficulty(self, group: ScoredGroup) -> None:
        """Record how difficult an example is, by the group's mean reward; part of the verdict's commit."""
        scores = group.rewards_G[~np.isnan(group.rewards_G)]
        if self._curriculum.pools is not None and group.purpose == "train" and scores.size:
            example = self.machine.groups.rows[group.ordinal].example
            self._curriculum.pools.note(self._labels.index(example.environment), example.index, float(scores.mean()))

    def _commit(self, settled: dict[int, tuple[str, list[bytes]]]) -> None:
        changes: Changes = self.machine.take_changes()
        changes.values.update(self.record.take_values(is_last=self._draining or self._over))
        changes.pools = self._moved_in_pools()
        if changes or settled or self.store.unswept:
            # the curriculum's state and the tickets drawn from it in the same commit: no example is skipped or doubled
            if "num_issued" in changes.values:
                changes.values["curriculum"] = list(self._curriculum.counts)
            started = time.monotonic()
            self.store.commit_patiently(changes, settled)
            self._metrics.observe("grpo_packer_commit_seconds", time.monotonic() - started)

    def _moved_in_pools(self) -> dict[str, str]:
        pools = self._curriculum.pools
        if pools is None:
            return {}
        for pool in ASIDE:
            self._metrics.set("grpo_packer_pool_examples", pools.sizes[pool], pool=pool)
        return pools.take_changes()

    def _send_batches(self, now: float) -> None:
        """Offer each rank its batches. A batch without room in the socket is offered again in the next round."""
        wanted, pending = self.machine.batches_wanted(), 0
        still = {(identity, step.step) for identity, _, step in wanted}
        self._sent = {key: at for key, at in self._sent.items() if key in still}
        for identity, beat, step in wanted:
            sent = self._sent.get((identity, step.step))
            # sent and not confirmed: it may have got lost, so it is sent again later
            if sent is not None and now - sent < self._config.bus.resend_after:
                continue
            outbox = self._outbox(identity, beat)
            if outbox is not None and outbox.try_send(self._batch(step, beat.rank)):
                self._sent[identity, step.step] = now
                point("packer.between_ranks")
            else:
                pending += 1
        self._metrics.set("grpo_packer_pending_batches", pending)

    def _outbox(self, identity: str, beat: TrainerBeat) -> Outbox | None:
        """Return the socket to a trainer rank; None if the address can't be used.

        A bad address is the rank's fault, so the error is logged and the packer goes on.
        """
        if identity not in self._outboxes:
            for gone in [i for i in self._outboxes if i not in self.machine.gang.members.values()]:
                self._outboxes.pop(gone).close()
            try:
                self._outboxes[identity] = Outbox("steps", beat.address, self._config.bus, "packer")
            except ConfigError as error:
                if time.monotonic() >= self._next_address_log:
                    self._next_address_log = time.monotonic() + ADDRESS_LOG_SECONDS
                    log.warning("trainer gets no batches", peer=identity, detail=str(error))
        return self._outboxes.get(identity)

    def _batch(self, step: Step, rank: int) -> StepBatch:
        """Return the batch of a rank (P18: batches are a pure function of payloads, ordinals, ranks and settings)."""
        key = (step.step, self.machine.gang.incarnation)
        if key not in self._built:
            # a rank may still ask for the step before; older batches are built again if ever needed
            self._built = {k: v for k, v in self._built.items() if k[0] >= step.step - 1 and k[1] == key[1]}
            payloads = [self._payload(ordinal) for ordinal in step.ordinals]
            self._built[key] = batches_of_step(
                payloads,
                self._config,
                run=self.machine.run,
                term=self.machine.term,
                incarnation=self.machine.gang.incarnation,
                step=step.step,
                **drop_fields(step.dropped),
                digests=list(step.digests),
            )
        return self._built[key][rank]

    def _payload(self, ordinal: int) -> ScoredGroup:
        if ordinal not in self._payloads:
            message = codec.decode(self.store.payloads([ordinal])[0])
            if not isinstance(message, ScoredGroup):
                raise ProtocolError(f"the ledger's payload of ordinal {ordinal} is a {message.kind}")
            self._payloads[ordinal] = message
        return self._payloads[ordinal]

    def _forget_trained(self) -> None:
        """Drop payloads of trained groups from memory, once there are many. The ledger has all payloads."""
        if len(self._payloads) <= 4 * self._config.packer.groups_per_step:
            return
        rows = self.machine.groups.rows
        for ordinal in list(self._payloads):
            row = rows.get(ordinal)
            # ordinals below 0 are those of evaluations
            if ordinal < 0 or row is None or (row.step or self.machine.trained_step + 1) <= self.machine.trained_step:
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

    def _is_still_there(self, example: ExampleRef) -> bool:
        """Return whether an example drawn earlier is still in the data, unchanged."""
        environment = self._train.get(example.environment)
        if environment is None or (environment.num_examples or example.index + 1) <= example.index:
            return False
        return environment.example(example.index).key(example.environment) == example.key

    def _eval_examples(self) -> list[ExampleRef]:
        asked = self._config.eval.num_prompts
        examples = []
        for label, environment in self._evaluation.items():
            # num_examples is None for a generated data set, which has no end
            size = asked if environment.num_examples is None else min(asked, environment.num_examples)
            examples += [ExampleRef(label, index, environment.example(index).key(label)) for index in range(size)]
        return examples

    def _take_finished_evals(self) -> list[int]:
        finished, self.machine.finished_evals = self.machine.finished_evals, []
        return finished

    def _eval_groups(self, version: int) -> tuple[int, list[ScoredGroup]]:
        rows = self.machine.groups.rows.values()
        settled = [g for g in rows if g.policy and g.policy.version == version and g.state is GroupState.SETTLED]
        return version, [self._payload(group.ordinal) for group in sorted(settled, key=lambda g: -g.ordinal)]

    def _restore(self, fork: bool, started_at: float | None) -> None:
        """Load the ledger, if this configuration may continue the run.

        Raises:
            ConfigError: identity keys or the data differ, and `fork` is not set.
        """
        values, machine = self.store.values(), self.machine
        found = differences(values.get("config", {}), self._config)
        other_data, more_data = data_changes(values.get("data", {}), self._train)
        refused = refusal(found) + other_data  # a fork may change anything
        if refused and not fork:
            raise ConfigError(*refused)
        for text in more_data:
            log.warning("data has changed", detail=text)
        # in term 1 the ledger is new
        if self.store.term > 1:
            stored = (self.store.groups(), self.store.steps(), values, self.store.settled_digests())
            machine.restore(time.monotonic(), *stored, self._control.listened)
            log.info("ledger restored", steps=machine.steps.last, term=self.store.term, changed=list(map(str, found)))
        changes: dict[str, Any] = {"config": as_tree(self._config), "data": identities(self._train)}
        if fork:
            changes |= self._begin_fork(bool(refused), started_at, values.get("forked_at"))
        elif machine.phase == "done" and self._lacks_checkpoint(machine.durable_step):
            log.warning("the last checkpoint is gone or damaged; going back to the newest good one")
            machine.go_back(sample_anew=False)
        changes |= self._begin_pools_again(values, started_at)
        taken = replace(machine.take_changes(), pools=self._moved_in_pools())
        self.store.commit_patiently(replace(taken, values=taken.values | changes), {})
        try:
            write_resolved(self._config)
        except OSError as error:  # the file is for people only; the run goes on without it
            log.warning("configuration not written down (output_dir)", detail=str(error))

    def _begin_fork(self, is_needed: bool, started_at: float | None, forked_at: float | None) -> dict[str, Any]:
        """Fork, once for each `actors up --fork`. Return values to store with the ledger.

        A packer restarted by `actors up` gets `--fork` again and must not give up work a second time. So the time of
        the `actors up` command is stored and compared. Without this time (systemd, Kubernetes) a packer forks only if
        the configuration has another identity; the next start then finds the new identity stored.
        """
        if self.store.term == 1:  # a new run has nothing to give up, but has once this packer is restarted
            return {"forked_at": started_at}
        if not is_needed and started_at is None:
            log.warning("not forked: no identity key differs, and this may be a restart; use actors rewind")
        elif is_needed or started_at != forked_at:
            self.machine.go_back()
            return {"forked_at": started_at}
        return {}

    def _begin_pools_again(self, values: Mapping[str, Any], started_at: float | None) -> dict[str, Any]:
        """Move examples back to the normal difficulty pool when the run is started again. Return values to store.

        A restart after a crash changes nothing: the time of the `actors up` command is the same. Without this time
        each start of the packer counts as a start of the run.
        """
        pools = self._curriculum.pools
        if pools is None or (started_at is not None and values.get("pools_begun") == started_at):
            return {}
        num_examples = pools.begin_again(f"{self._config.seed} {self.store.term}")
        log.info("pools", given_back=num_examples, **{pool: pools.sizes[pool] for pool in ASIDE})
        return {"pools_begun": started_at}


def settings_of(config: RunConfig) -> Settings:
    """Return the protocol's part of the configuration."""
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
        max_drop_fraction=config.packer.max_drop_fraction,
        fails_on_reward_error=config.reward.on_error == "fail",
        lease=config.bus.lease,
        group_timeout=config.rollout.group_timeout,
        reward_timeout=config.reward.longest_seconds,
        weights_timeout=config.weights.timeout,
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
    """Return the facts by which the machine judges a scored group.

    Args:
        group: the scored group.
        digest: SHA-256 of the payload, hex.
        rejected: name of the filter that rejects the group; empty: none.
    """
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
