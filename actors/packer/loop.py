"""The packer: issues tickets, keeps the ledger, packs training steps.

Consumes heartbeats and scored groups, each read by threads of their own without pause; the main thread alone touches
machine, ledger and batches. Emits directives and batches, only after the commit of the decision behind them. Waits for
the next event, at most ROUND_SECONDS. No send blocks: a batch without room stays pending.

    take all heartbeats and groups → decide → commit → publish directives, send batches, report

After the death of a packer a successor loads the ledger (`start.py`); meanwhile all actors keep their work.
docs/internals/reliability.md has a row for each failure.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from actors.algorithms.curriculum import Curriculum
from actors.algorithms.filters import rejected_as
from actors.datasets import Dataset
from actors.datasets.prompts import Prompts
from actors.ledger import Changes, Group, GroupState, Machine, Store, Verdict, replies
from actors.ledger.backup import Backups
from actors.ledger.payload_files import Place
from actors.ledger.store import Payload
from actors.packer.batch_sender import BatchSender
from actors.packer.examples import Examples
from actors.packer.inflow import BatchesBuilt, BeatHeard, BeatsRepeated, Event, GroupArrived, Inflow, PeerLost, senders
from actors.packer.intake import Intake
from actors.packer.payloads import Payloads
from actors.packer.record import RunRecord
from actors.packer.settings import facts_of, settings_of
from actors.packer.start import StartOrder, restore
from actors.process.fault_points import point
from actors.process.liveness import Liveness
from actors.process.membership import new_boot_id
from actors.telemetry.metrics import Metrics
from actors.telemetry.reporter import Reporter
from actors.telemetry.spans import SHORT_SECONDS, record, span
from bus import codec
from bus.control import ControlServer, Repeated
from bus.counts import EdgeCounts
from bus.data import Inbox
from bus.topology import Addresses
from schemas.config import RunConfig
from schemas.errors import ProtocolError, RunFailedError
from schemas.messages import Directive, Heartbeat, ObserverDirective, ObserverHeartbeat, RunPhase, ScoredGroup

log = structlog.get_logger("packer")

ROUND_SECONDS = 0.25
"""Longest wait of a round for the next event; leases and timeouts are checked this often."""
GATHER_SECONDS_PER_PEER, GATHER_SECONDS = 2e-5, 0.05
"""Seconds for which a round waits for more events after the first, per live peer, and at most: among 1 000 peers a
heartbeat comes every millisecond, and a round for each costs more than the heartbeats."""
LINGER_SECONDS = 30.0
"""Longest stay of the packer after the end, for peers without a farewell yet."""


@dataclass(frozen=True)
class NewPayloads:
    """Payloads of the groups settled in a round, by ordinal."""

    stored: dict[int, Payload] = field(default_factory=dict)
    """Digest and frames of each group."""
    places: dict[int, Place] = field(default_factory=dict)
    """Places of the large ones, which are in files."""


class PackerActor:
    """Actor that runs the ledger's state machine: feeds heartbeats and groups in, carries its decisions out.

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
        prompts: encoder of prompts, by which long ones are left out; None: no environment leaves any out.

    Raises:
        ConfigError: the ledger belongs to a run of another identity.
    """

    membership: None = None
    """No membership: this actor is the packer that others are members of."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        train: Mapping[str, Dataset],
        evaluation: Mapping[str, Dataset],
        curriculum: Curriculum,
        store: Store,
        reporter: Reporter,
        lacks_checkpoint: Callable[[int], bool],
        started_at: float | None = None,
        fork: bool = False,
        prompts: Prompts | None = None,
    ) -> None:
        self.name, self.liveness, self.store = name, Liveness(), store
        self._config, self._metrics = config, metrics
        self.inflow = Inflow()
        self._shown: dict[str, Any] = {}
        """Values shown on screens last."""
        self._draining = False
        self._evaluating: float | None = None
        """Monotonic time at which the running evaluation was issued; None between evaluations."""
        addresses = Addresses(config)
        self._inbox = Inbox("scored", addresses, config.bus, name, new_boot_id())
        self._control = ControlServer(
            addresses.control,
            self.heard,
            bus=config.bus,
            on_lost=self._lost,
            stale_after=config.bus.lease,
            on_repeated=self._repeated,
        )
        self._intake = Intake(self._inbox, store.run, store.files, self.inflow.put)
        num_prompts = {label: one.keys.num_prompts for label, one in config.evaluations.items()}
        self._examples = Examples(train, evaluation, curriculum, num_prompts, metrics, prompts)
        self.machine = Machine(
            settings_of(config, self._examples.shares),
            store.run,
            store.term,
            self._control.listened,
            self._examples.draw,
            self._examples.of_evaluation(),
            self._inbox.address,
            self._examples.is_still_there,
        )
        self._payloads = Payloads(store, config.packer.memory_bytes)
        self.batches = BatchSender(
            config, self.machine, self._payloads, on_built=lambda: self.inflow.put(BatchesBuilt())
        )
        keep_last = config.trainer.checkpoint.num_resumable
        self._backups = Backups(Path(store.path), keep_last) if store.path != ":memory:" else None
        order = StartOrder(started_at, fork, lacks_checkpoint)
        restore(config, store, self.machine, self._examples, self._control.listened, order)
        # after the restore: the record cuts its files to the step that the machine has recorded
        self.record = RunRecord(config, store, self.machine, metrics, reporter, self._payloads.load, started_at)

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        # a copy of the values: the reporter's thread reads this while the main thread adds outboxes
        outboxes = list(self.batches.outboxes.values())
        return [self._control.counts, self._inbox.counts, *(outbox.counts for outbox in outboxes)]

    @property
    def over(self) -> bool:
        """True once the run is done or has failed."""
        return self.machine.phase in ("done", "failed")

    def run(self, metrics_url: str = "") -> None:
        """Run until the run is done and all peers have left, or this packer has drained.

        Raises:
            RunFailedError: the run can't go on.
            ProtocolError: a heartbeat contradicts the ledger.
        """
        self.store.on_wait = self._tell_waiting
        self.record.metrics_target = ("packer", self.name, metrics_url)
        self._control.start()
        self._intake.start()
        try:
            self._run_rounds()
        finally:
            self._intake.close()
            self._control.close()
            self._inbox.close()
            self.batches.close()
            if self._backups is not None:
                self._backups.close()
            # last: the lock goes with it, and a successor that waits for the lock needs the control address free
            self.store.close()

    def drain(self) -> None:
        """Stop after this round. Everything that matters is committed by then. Thread-safe."""
        self._draining = True

    # --- other threads -------------------------------------------------------------------------------------------

    # these only put events into the queue: the machine belongs to the main thread

    def heard(self, identity: bytes, heartbeat: Heartbeat) -> None:
        """Queue a heartbeat for the next round. Thread-safe."""
        self.inflow.heard(BeatHeard(identity.decode("utf-8", "replace"), heartbeat, self._control.listened))

    def _repeated(self, repeated: list[Repeated]) -> None:
        self.inflow.repeated(BeatsRepeated(repeated, self._control.listened))

    def _lost(self, identity: bytes) -> None:
        self.inflow.put(PeerLost(identity.decode("utf-8", "replace")))

    # --- the round -----------------------------------------------------------------------------------------------

    def _run_rounds(self) -> None:
        was_over = self.over
        try:
            while not self._draining:
                while not self._draining and not self.over:
                    self.run_round(ROUND_SECONDS)
                self._linger(self._config.bus.lease if was_over else 0.0)
                if self.over:  # if not, a gang has started again, from a checkpoint before the last step
                    break
        except (ProtocolError, RunFailedError) as error:
            # heartbeats are answered with the reason for two leases: no peer waits for `bus.peer_timeout`. The machine
            # takes nothing in any more, since it and the other processes disagree. Counted on the clock of leases: a
            # packer that was held up must not leave before it has read what came meanwhile
            step, max_steps = self.machine.trained_step, self.machine.settings.max_steps
            refusal = self._observer_directive("failed", step, max_steps, str(error))
            leave_at = self._control.listened + 2 * self._config.bus.lease
            while not self._draining and self._control.listened < leave_at:
                for event in self.inflow.take(ROUND_SECONDS):
                    told: dict[bytes, Directive | None] = {identity.encode(): refusal for identity in senders(event)}
                    self._control.publish(told, round_ended=False)
            raise
        if self.machine.failure:
            raise RunFailedError(self.machine.failure)

    def _linger(self, at_least: float) -> None:
        """Go on with rounds until all peers know how the run has ended and have left (P27: the packer leaves last).

        If the run was over before its start, the packer stays for a lease. Other actors are just starting then, and
        would wait for a missing packer for `bus.peer_timeout`.

        Args:
            at_least: seconds to stay even if all peers have left.
        """
        now = time.monotonic()
        stay_until, leave_at = now + at_least, now + LINGER_SECONDS
        self.run_round(0.0)
        while not self._draining and self.over and now < leave_at:
            if now >= stay_until and self.machine.everybody_left:
                return
            self.run_round(ROUND_SECONDS)
            now = time.monotonic()

    def run_round(self, wait: float) -> None:
        """Take in all events that have come, decide, commit, and tell the peers.

        Args:
            wait: longest wait for the first event, in seconds.
        """
        # read the clock before the events: heartbeats that came before this time are then surely among the events, so
        # no lease ends because of a heartbeat that is still in the queue
        listened = self._control.listened
        gather = min(GATHER_SECONDS, self.machine.peers.num_live * GATHER_SECONDS_PER_PEER)
        with span("wait for events", waits=True, least=SHORT_SECONDS):
            events = self.inflow.take(wait, gather)
        with span("round", least=SHORT_SECONDS, events=len(events)):
            self._handle(events, listened)
        self.liveness.turn()  # last: a round that hangs anywhere is no sign of life

    def _handle(self, events: list[Event], listened: float) -> None:
        """Take events in, decide, commit, and tell the peers; `listened`: the clock of leases before the events."""
        now = time.monotonic()
        with span("take in", least=SHORT_SECONDS):
            settled = self._take_in(now, events)
        point("packer.taken")
        with span("decide", least=SHORT_SECONDS):
            self.machine.decide(now, listened)
        self._note_return()
        with span("files", least=SHORT_SECONDS):
            self._follow_record()
        self._commit(settled)
        if self._backups is not None:
            self._backups.follow(self.machine.durable_step)
        point("packer.committed")
        # the summary is written before any peer hears that the run is done
        self.record.conclude()
        with span("send batches", least=SHORT_SECONDS):
            self._metrics.set("grpo_packer_pending_batches", self.batches.send(now))
        with span("publish directives", least=SHORT_SECONDS):
            told = replies.directives(self.machine, self._progress)
            self._control.publish(told, loads=replies.loads(self.machine))
        # names claimed by a second process: if the first one's connection is gone, `_lost` tells so at once
        for identity in self.machine.peers.take_contested():
            self._control.probe(identity.encode())
        point("packer.told")
        self._payloads.forget(self.machine, 4 * self._config.packer.groups_per_step)

    def _take_in(self, now: float, events: list[Event]) -> NewPayloads:
        """Give events to the machine, and heartbeats to the record too. Return the payloads for the round's commit."""
        settled = NewPayloads()
        for event in events:
            if isinstance(event, BeatHeard):
                self._take_heartbeat(now, event.identity, event.heartbeat, event.arrived)
            elif isinstance(event, BeatsRepeated):
                for one in event.repeated:
                    if self.machine.renewed(event.arrived, one.peer, one.heartbeat, one.sequence):
                        self.record.renewed(now, one.heartbeat.name)
                    else:
                        self._take_heartbeat(now, one.peer, one.message, event.arrived)
            elif isinstance(event, PeerLost):
                self.machine.lost(now, event.identity)
            elif isinstance(event, GroupArrived):
                self._take_group(event, settled)
        return settled

    def _take_heartbeat(self, now: float, identity: str, heartbeat: Heartbeat, arrived: float) -> None:
        self.machine.heard(now, identity, heartbeat, arrived)
        # False: the heartbeat was late, refused, or of another run
        if self.machine.peers.heartbeat_of(identity) is heartbeat:
            self.record.heard(identity, heartbeat)

    def _take_group(self, arrived: GroupArrived, settled: NewPayloads) -> None:
        """Give a scored group to the machine. The payload goes into the same commit as the machine's verdict."""
        message = arrived.message
        if not isinstance(message, ScoredGroup) or message.run != self.machine.run:
            log.warning("message of another run or kind", kind=message.kind, run=message.run)
            return
        facts = facts_of(message, arrived.digest, rejected_as(message.rewards_G, self._config.packer))
        verdict = self.machine.scored(facts)
        self._metrics.count(
            "grpo_packer_completion_tokens_total",
            message.num_sampled,
            purpose=message.purpose,
            verdict=verdict.value,
        )
        if verdict is Verdict.SETTLED:
            settled.stored[message.ordinal] = (arrived.digest, arrived.frames)
            if arrived.place is not None:
                settled.places[message.ordinal] = arrived.place
            self._payloads.add(message, codec.num_bytes(arrived.frames))
        if verdict in (Verdict.SETTLED, Verdict.FILTERED):
            self.record.settled(message)
            self._examples.note_difficulty(self.machine.groups.rows[message.ordinal].example, message)

    def _note_return(self) -> None:
        """Drop batches of later steps after the gang went back to an older checkpoint."""
        rewound, self.machine.rewound = self.machine.rewound, None
        if rewound is None:
            return
        # with the same groups the batches are the same too, and stay
        if rewound.sample_anew:
            self.batches.forget_built()
        self.record.rewind(rewound)
        log.warning(
            "run forked" if rewound.sample_anew else "run went back",
            step=rewound.step,
            groups_given_up=rewound.given_up,
        )

    def _follow_record(self) -> None:
        """Write what the round has finished, and tell the machine what is written."""
        finished, self.machine.finished_evals = self.machine.finished_evals, []
        self._note_evaluation(finished)
        evals = []
        for version in finished:
            rows = self.machine.groups.rows.values()
            settled = [g for g in rows if g.policy and g.policy.version == version and g.state is GroupState.SETTLED]
            # in the order of the prompts: ordinals of evaluations count downwards from -1
            settled.sort(key=lambda g: -g.ordinal)
            evals.append((version, [self._payloads.load(group.ordinal) for group in settled]))
        self.record.follow(evals)
        self.machine.note_evaluated(self.record.take_evaluated())

    def _note_evaluation(self, finished: list[int]) -> None:
        """Record the time of an evaluation, from the first round that has issued it."""
        for version in finished:
            if self._evaluating is not None:
                lane = "evaluations", str(version)
                record("evaluation", self._evaluating, time.monotonic(), lane=lane, version=version)
            self._evaluating = None
        if self.machine.evaluations.policy is not None and self._evaluating is None:
            self._evaluating = time.monotonic()

    def _commit(self, settled: NewPayloads) -> None:
        changes: Changes = self.machine.take_changes()
        changes.values.update(self.record.take_values(is_last=self._draining or self.over))
        changes.pools = self._examples.take_moved()
        # with the groups that have moved them, and the tickets drawn at them
        changes.values.update(self._examples.take_levels())
        if changes or settled.stored or self.store.unswept:
            # the curriculum's state and the tickets drawn from it in the same commit: no example is skipped or doubled
            if "num_issued" in changes.values:
                changes.values["curriculum"] = self._examples.counts
            started = time.monotonic()
            with span("commit", groups=len(settled.stored)):
                self.store.commit_patiently(changes, settled.stored, settled.places)
            self._metrics.observe("grpo_packer_commit_seconds", time.monotonic() - started)
        for group in changes.groups.values():
            if group.state is GroupState.DROPPED and group.reason == "stale":
                self._tell_stale(group)

    def _tell_stale(self, group: Group) -> None:
        step, limit = self.machine.steps.last + 1, self._config.packer.max_off_policy_steps
        log.warning(
            "group dropped as stale",
            ordinal=group.ordinal,
            environment=group.example.environment,
            detail=f"its oldest token is of version {group.oldest_version}, more than {limit} steps before step {step} "
            "(packer.max_off_policy_steps); its example is sampled again. Trajectories that take long are limited by "
            "environments[].trajectory_timeout",
        )

    # --- what screens see ----------------------------------------------------------------------------------------

    def _progress(self) -> dict[str, Any]:
        self._shown = self.record.progress()
        return self._shown

    def _tell_waiting(self, problem: str) -> None:
        """Show on screens why the ledger can't be written, while a commit waits.

        Other peers get no directive meanwhile: directives may only contain committed facts.
        """
        came = {
            event.identity
            for event in self.inflow.look()  # the round after the commit takes these events
            if isinstance(event, BeatHeard) and isinstance(event.heartbeat, ObserverHeartbeat)
        }
        progress = (self._shown or self._progress()) | {"unwritten": [problem]}
        directive = self._observer_directive(progress["phase"], progress["step"], progress["max_steps"], "", progress)
        screens = came.union(self.machine.peers.all(ObserverHeartbeat))
        self._control.publish({identity.encode(): directive for identity in screens}, round_ended=False)

    def _observer_directive(
        self, phase: RunPhase, step: int, max_steps: int, refusal: str, progress: Mapping[str, Any] | None = None
    ) -> ObserverDirective:
        return ObserverDirective(
            run=self.machine.run,
            term=self.machine.term,
            phase=phase,
            step=step,
            max_steps=max_steps,
            refusal=refusal,
            progress=dict(progress or {}),
        )
