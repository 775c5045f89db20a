"""The trainer actor: a rank of the gang (all trainer ranks of a run).

Consumes StepBatches, read by a thread without pause, and orders from the directive. Emits published versions, step
reports and checkpoints in its heartbeats, and sends nothing else. Waits for the gang's order, for other ranks and for
the next batch; an exit order, a drain or `bus.peer_timeout` ends each wait. Only rank 0 publishes, reports and saves.

    order wait ──run──▶ restore, meet, publish version c ──▶ step c+1 … max_steps ──▶ finish: wait until the run is done
"""

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import structlog

from actors.algorithms.run_length import checkpoint_interval
from actors.learner.checkpoints import CheckpointFolder, FolderTakenError
from actors.process.fault_points import point
from actors.process.membership import Drain, Membership, PackerSilentError, StartOverError
from actors.process.tasks import task
from actors.telemetry.logs import bind_everywhere
from actors.telemetry.metrics import Metrics
from actors.telemetry.spans import SHORT_SECONDS, span
from actors.trainer.checkpoint_saver import CheckpointSaver, Witness
from actors.trainer.figures import show_step
from actors.trainer.inbox import BatchInbox
from actors.trainer.joining import POLL_SECONDS, newest_order, take_folder, wait_for_order
from actors.trainer.reports import REPORTS, Reports
from actors.trainer.weight_broadcaster import WeightBroadcaster
from bus.counts import EdgeCounts
from bus.data import Inbox
from bus.weights import BroadcastPublisher, WeightPublisher
from schemas.config import RunConfig
from schemas.errors import PeerRefusedError, RunFailedError
from schemas.messages import (
    Directive,
    Manifest,
    PolicyVersion,
    StepBatch,
    StepReport,
    TrainerDirective,
    TrainerHeartbeat,
)

if TYPE_CHECKING:
    from actors.learner.protocol import Learner
    from actors.learner.ranks import Ranks

log = structlog.get_logger("trainer")

SAVE_POLL_SECONDS = 0.02
"""Seconds between two looks whether a save has ended."""
SAVE_RETRY_SECONDS = 5.0
"""Pause before a failed last save is tried again."""
PUBLISH_RETRY_SECONDS = 1.0
"""Pause before a failed publication is tried again."""


class TrainerActor:
    """Actor of a trainer rank: trains a policy with the other ranks, step by step.

    Args:
        config: configuration of the run.
        name: name in the run.
        metrics: destination of the `grpo_trainer_*` metrics.
        make_learner: maker of the learner from the run's configuration; called after the first heartbeat, since loading
            takes long.
        meet: connects the ranks of an incarnation; called with run, incarnation, and a function to call while waiting.
        publisher: publisher of weights; None on ranks that publish nothing.
        checkpoints: folder with the run's checkpoints.
        rank: rank of this process, from 0.
        shares_gpu: True if an engine uses the GPU too.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        make_learner: Callable[[RunConfig], "Learner"],
        meet: Callable[[str, int, Callable[[], object]], "Ranks"],
        publisher: WeightPublisher | None,
        checkpoints: CheckpointFolder,
        rank: int = 0,
        shares_gpu: bool = False,
    ) -> None:
        self._config, self._metrics, self._make_learner, self._meet = config, metrics, make_learner, meet
        self._shares_gpu, self._takes_turns = shares_gpu, config.up.colocate == "turns"
        self._publisher, self._checkpoints, self._rank = publisher, checkpoints, rank
        self.membership = Membership(config, TrainerHeartbeat, name, self._pass_update_on)
        self.name, self.liveness = name, self.membership.liveness
        self._inbox = Inbox("steps", self.membership.addresses, config.bus, name, self.membership.boot_id)
        self._batches = BatchInbox(self._inbox, config.trainer.row_group_of(rank), self._report_received)
        # P19: while the packer is silent for a lease nothing is moved; a successor may write the checkpoints already
        checkpoints.is_current = lambda: self.membership.silent_seconds < config.bus.lease
        self._drain = Drain()
        self._reports = Reports()
        self._stalled = 0.0
        """Seconds for which training stood still for the newest save."""
        self._told_to_leave = False
        """True if the newest directive orders to exit; read by threads that wait for another rank."""
        self._broadcaster: WeightBroadcaster | None = None
        if isinstance(publisher, BroadcastPublisher):
            self._broadcaster = WeightBroadcaster(
                publisher, metrics, lambda failure: self.membership.report(failed_update=failure)
            )
        self._witness, self._saver = Witness(), CheckpointSaver(checkpoints, metrics)
        self._run, self._incarnation, self._lineage = "", 0, 0

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        return [self.membership.counts, self._inbox.counts]

    def run(self, metrics_url: str = "") -> None:
        """Run until the run is done, or this rank has drained.

        Raises:
            RunFailedError: the run can't go on; the packer has been told.
            StartOverError: the gang was told to exit; also as `Membership.latest`.
            PeerRefusedError, PackerSilentError: as `Membership.latest`.
        """
        self.membership.start(
            metrics_url=metrics_url,
            rank=self._rank,
            num_ranks=self._config.trainer.num_ranks,
            address=self._inbox.address,
            incarnation=0,
            next_step=1,
            checkpoints=[],
            published=[],
            reports=[],
            received=np.zeros(0, np.int64),
            device="wanted" if self._takes_turns else "free",
        )
        self._batches.start()
        try:
            self._train()
        except RunFailedError as error:
            self.membership.report(failure=str(error))
            # two leases for the packer's refusal, the sign that the packer knows of the failure
            deadline = time.monotonic() + 2 * self._config.bus.lease
            with contextlib.suppress(PeerRefusedError):  # the packer refuses all processes of a failed run
                while time.monotonic() < deadline:
                    self.membership.wait(POLL_SECONDS)
            raise
        finally:
            if self._broadcaster is not None:
                self._broadcaster.close()
            self._saver.close()
            self._batches.close()
            if self._publisher is not None:
                self._publisher.leave()
            self.membership.close()

    def drain(self) -> None:
        """Exit after the step under way, with a checkpoint. Thread-safe."""
        self._drain.begin()

    def _report_received(self, steps: list[int]) -> None:
        """Report the steps whose batch is here: otherwise the packer would resend batches during a long step."""
        self.membership.report(urgent=False, received=np.array(steps, np.int64))

    def _pass_update_on(self, directive: Directive) -> None:
        """Pass a directive on, in the control thread: a broadcast starts at once, whatever the step under way does."""
        self._batches.follow(directive.run, directive.term)
        if isinstance(directive, TrainerDirective):
            self._told_to_leave = directive.order == "exit" or bool(directive.refusal)
            if self._broadcaster is not None:
                self._broadcaster.follow(directive.update)

    def _train(self) -> None:
        if not self._config.trainer.max_steps:
            # trainer.max_epochs: only the packer is sure to see the examples
            directive = wait_for_order(self.membership, self._drain, lambda directive: directive.max_steps > 0)
            if directive is None:
                return
            self._config = self._config.with_steps(directive.max_steps)
        if not self._wait_for_turn():
            return
        with span("load model"), task("load model and optimizer"):
            learner = self._make_learner(self._config)
        # imported here, after the first heartbeat: torch is slow to import, and would keep the gang waiting
        from actors.learner.ranks import RanksBrokenError

        start = self._join(learner)
        if start is None:
            return
        try:
            self._run_steps(learner, start)
            if self._rank == 0:
                self._save_last(learner)
            self._finish_gathers(learner)
        except RanksBrokenError as error:
            log.warning("another rank is lost", detail=str(error))
            # the packer decides whether a rank is lost, and then orders the others to exit within a lease: `_follow`
            # raises. Without an order within two leases the fault is in this process
            deadline = time.monotonic() + 2 * self._config.bus.lease
            while time.monotonic() < deadline:
                self._follow()
                self.membership.wait(POLL_SECONDS)
            raise
        while not self._drain and not self._done():
            self.membership.wait(POLL_SECONDS)
        # not after a drain: the run goes on, and engines may still read the last version
        if self._publisher and self._done():
            self._publisher.close()

    def _run_steps(self, learner: "Learner", start: int) -> None:
        """Train all steps after `start`, up to the last step or a drain."""
        ranks = self._meet(self._run, self._incarnation, self._follow)
        learner.join(ranks, self._ensure_the_gang_waits)
        if self._shares_gpu:
            with task("warm up"):
                learner.warm_up()  # before the first version: an engine on this GPU starts when it hears of one
        self._publish(learner, start)  # engines start from exactly these weights
        self._finish_gathers(learner)
        self.membership.report(published=self._published())
        self._end_turn(learner)
        for step in range(start + 1, self._config.trainer.max_steps + 1):
            started = time.monotonic()
            batch: StepBatch | None = None
            with span("wait for batch", waits=True, step=step):
                while batch is None:
                    batch = self._batches.take(step, POLL_SECONDS)
                    self._follow()
                    if self._drain:
                        return
            waited = time.monotonic() - started
            self._metrics.count("grpo_trainer_step_seconds_total", waited, phase="wait_batch")
            if self._takes_turns:
                self.membership.report(device="held")
            with span("step", step=step, ordinals=batch.ordinals.tolist()):
                self._step(learner, ranks, batch, waited)
            with span("wait for ranks", waits=True, least=SHORT_SECONDS):
                answers = ranks.exchange(b"leaving" if self._drain else b"")
            self._end_turn(learner)
            if b"leaving" in answers:
                return  # every rank leaves after the same step, so no rank waits for another that has left

    def _wait_for_turn(self) -> bool:
        """Wait until engines have given the device back, before a model is loaded there; return False if drained.

        Raises:
            StartOverError, PeerRefusedError, PackerSilentError: as `newest_order`.
        """
        if self._takes_turns:
            log.info("trainer waits for engines to give its device back (up.colocate: turns)")
            with span("wait for the turn", waits=True):
                directive = wait_for_order(self.membership, self._drain, lambda directive: directive.has_turn)
            if directive is None:
                return False
            self.membership.report(device="held")
        return True

    def _end_turn(self, learner: "Learner") -> None:
        """Give the device back until the next batch, which the packer sends once engines have rested."""
        if self._takes_turns:
            learner.release_memory()
            point("trainer.turn_ends")
            self.membership.report(device="free")

    def _finish_gathers(self, learner: "Learner") -> None:
        """End the other ranks' part in publishing and saving: with sharded weights all ranks take part until here."""
        if self._rank == 0:
            learner.release_ranks()
        else:
            learner.serve_gathers()

    def _ensure_the_gang_waits(self) -> None:
        """Check that waiting still makes sense; called by a thread while a collective operation waits for a rank.

        `_follow` can't be used, since it belongs to the main loop.

        Raises:
            StartOverError: the gang was told to exit, or this process is refused.
            PackerSilentError: no packer is there to decide.
        """
        if self._told_to_leave:
            raise StartOverError("the gang was told to exit while this rank waited for another one")
        if self.membership.silent_seconds > self._config.bus.peer_timeout:
            raise PackerSilentError("the packer has been silent while this rank waited for another one")

    def _join(self, learner: "Learner") -> int | None:
        """Wait for the gang's incarnation and restore its checkpoint.

        Returns:
            Step of the checkpoint, 0 without one. None: drained while waiting.
        """
        # only once the run is known: checkpoints of another run don't count
        directive = wait_for_order(self.membership, self._drain, lambda directive: bool(directive.run))
        if directive is None:
            return None
        self._run = directive.run
        # P19: the packer picks the newest checkpoint that all ranks see, so each rank says what it sees
        self.membership.report(checkpoints=self._checkpoints.good(directive.run), phase="running")
        may_run = lambda directive: directive.order in ("run", "finish") and directive.incarnation > 0  # noqa: E731
        with span("wait for the gang", waits=True):
            directive = wait_for_order(self.membership, self._drain, may_run)
        if directive is None:
            return None
        timeout = self._config.trainer.checkpoint.timeout
        if self._rank == 0 and not take_folder(self.membership, self._drain, self._checkpoints, directive, timeout):
            return None
        if directive.checkpoint:
            with span("restore", step=directive.checkpoint), task(f"restore step {directive.checkpoint}"):
                learner.restore(self._checkpoints.path(directive.checkpoint))
            self._witness = Witness(directive.checkpoint, self._checkpoints.witness(directive.checkpoint)["chain"])
            if self._rank == 0:
                self._reports = Reports.read(self._checkpoints.path(directive.checkpoint))
        self._incarnation, self._lineage = directive.incarnation, directive.lineage
        # before the report: the packer sends batches as soon as it hears of the incarnation, and others are dropped
        self._batches.accept(directive.run, directive.incarnation)
        self.membership.report(
            incarnation=directive.incarnation, next_step=directive.checkpoint + 1, reports=self._reports.oldest()
        )
        log.info("gang runs", incarnation=directive.incarnation, checkpoint=directive.checkpoint)
        return directive.checkpoint

    def _step(self, learner: "Learner", ranks: "Ranks", batch: StepBatch, waited: float) -> None:
        bind_everywhere(step=batch.step)
        point("trainer.batch")
        try:
            values = learner.step(batch, ranks)
        except FloatingPointError as error:
            raise RunFailedError(str(error)) from error  # not finite: a new process would compute the same
        point("trainer.updated")
        self._witness.add(batch)
        values |= {"seconds_wait_batch": waited} | self._publish(learner, batch.step)
        point("trainer.published")
        # reported before the checkpoint is started: engines need not wait for the disk
        self.membership.report(next_step=batch.step + 1, published=self._published())
        if self._rank == 0:
            # a save delays the step after it, whose report has the time
            values["seconds_checkpoint"], self._stalled = self._stalled, 0.0
            # empty if the trainer is about to leave and there was no room to publish this step
            weights = next((one.digest for one in self._published() if one.policy.version == batch.step), "")
            self._reports.add(StepReport(step=batch.step, values=values, weights=weights))
            self.membership.report(reports=self._reports.oldest())
            if batch.step % checkpoint_interval(self._config.trainer) == 0:
                self._save(learner)
        with span("wait for ranks", waits=True, least=SHORT_SECONDS):
            self._finish_gathers(learner)
        show_step(self._metrics, batch, values)

    def _publish(self, learner: "Learner", version: int) -> dict[str, float]:
        """Publish the current weights as this version. Return the seconds of gathering and of publishing.

        Retry while there is no room, since engines let go of older versions meanwhile.

        Raises:
            RunFailedError: there was no room for `weights.timeout`.
        """
        self._metrics.set("grpo_trainer_policy_version", version)
        if self._publisher is None:
            return {}
        started = time.monotonic()
        with span("gather weights"):
            weights = learner.weights()
        gathered = time.monotonic()
        policy, timeout = PolicyVersion(lineage=self._lineage, version=version), self._config.weights.timeout
        while True:
            # followed before each try: the directive tells which older versions may go
            directive = self._follow()
            self._publisher.prune(directive.keep_version if directive else 0)
            try:
                with span("publish weights", version=version):
                    self._publisher.publish(policy, weights)
                break
            except OSError as error:
                if time.monotonic() > gathered + timeout:
                    raise RunFailedError(
                        f"weights {policy} can't be published, tried for {timeout:g} s (weights.timeout): {error}. "
                        "Then start the same command again: the run goes on from its newest checkpoint"
                    ) from error
                log.error("weights not published; trying again", policy=str(policy), detail=str(error))
            if self._drain:
                break  # not lost: the last checkpoint has these weights
            with span("wait for room", waits=True):
                self.membership.wait(PUBLISH_RETRY_SECONDS)
        seconds = {"seconds_gather": gathered - started, "seconds_publish": time.monotonic() - gathered}
        self._metrics.count("grpo_trainer_step_seconds_total", sum(seconds.values()), phase="publish")
        return seconds

    def _published(self) -> list[Manifest]:
        return self._publisher.published() if self._publisher else []

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self, learner: "Learner") -> None:
        """Start to save the newest step in the background, after the save before has ended.

        Reports not recorded yet are saved too: the process that starts from the checkpoint reports them.
        """
        started = time.monotonic()
        with span("wait for the save before", waits=True, least=SHORT_SECONDS):
            while self._saver.busy:  # one save at a time: a snapshot is a copy of all weights and optimizer states
                self._follow()
                time.sleep(SAVE_POLL_SECONDS)
        with span("copy for checkpoint"):
            snapshot = learner.snapshot().with_text(REPORTS, self._reports.text)
        self._saver.begin(self._witness, self._run, snapshot)
        self._stalled = time.monotonic() - started
        self._metrics.count("grpo_trainer_step_seconds_total", self._stalled, phase="checkpoint")

    def _save_last(self, learner: "Learner") -> None:
        """Wait until the newest step is on disk. A full disk has `checkpoint.timeout` to be freed.

        Raises:
            RunFailedError: the checkpoint could not be written in this time.
        """
        timeout = self._config.trainer.checkpoint.timeout
        deadline = time.monotonic() + timeout
        while self._saver.busy or self._witness.saved_step < self._witness.step:
            if not self._saver.busy and time.monotonic() > deadline:
                raise RunFailedError(
                    f"the last checkpoint can't be written, tried for {timeout:g} s (trainer.checkpoint.timeout): "
                    f"{self._saver.problem}. Free space and start the same command again: nothing else is lost"
                )
            if not self._saver.busy:  # failed, or not started yet
                self._save(learner)
            self._follow()
            self.membership.wait(SAVE_RETRY_SECONDS if self._saver.problem else SAVE_POLL_SECONDS)

    # --- the directive -------------------------------------------------------------------------------------------

    def _follow(self) -> TrainerDirective | None:
        """Follow the newest directive and the checkpoint writer. Return the directive; None: none for trainers.

        Raises:
            StartOverError: the gang was told to exit, or another process writes the checkpoints.
        """
        try:
            saved = self._saver.collect()
        except FolderTakenError as error:
            raise StartOverError(f"this trainer was away, and its successor writes the checkpoints: {error}") from error
        if saved is not None:
            self._witness.saved(saved)
            self.membership.report(checkpoints=self._checkpoints.good(self._run))
        directive = newest_order(self.membership)
        if directive is not None and self._reports.drop_recorded(directive.recorded_step):
            self.membership.report(urgent=False, reports=self._reports.oldest())
        return directive

    def _done(self) -> bool:
        directive = self._follow()
        return directive is not None and directive.phase == "done"
