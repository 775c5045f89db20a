"""`actors up`: runs all actors of a run on a single machine.

Locks the output_dir, starts a process per actor, restarts what exits too early (with a doubling pause, then a clear
failure) and shows progress. Exits when the run is done or has failed. The kernel kills the children if this process
dies. SIGTERM, SIGINT or SIGHUP stop the run: groups under way are finished, the trainer saves a checkpoint, the packer
stops last. The exit code is then 128 + signal, since the run is not done; the same command continues it. A second
SIGTERM or SIGINT kills everything at once.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import structlog

from actors.ops.device_plan import largest_of, plan_here
from actors.ops.ports import claimed_ports
from actors.ops.preflight import preflight
from actors.ops.previous_run import changed_data, check_ledger_is_own, done_at, newest_checkpoint, run_so_far
from actors.ops.run_length import run_length_note, with_run_length
from actors.ops.screens.result import result_on_disk
from actors.ops.screens.screen import Screen, titled
from actors.ops.up.carried_ledger import LedgerCarrier, bring_ledger, is_carried
from actors.ops.up.child import Child, how_it_ended, newest_traceback, plan, wait_for
from actors.ops.up.followers import FOLLOWERS, do_rest, end_seconds, lines_of_hub
from actors.ops.up.forked import ForkServers
from actors.ops.up.run_lock import hold_run_lock
from actors.ops.up.scaler import Scaler
from actors.ops.up.share import DONE_PATIENCE_SECONDS, TOLD_BEATS, Share, looks_done
from actors.process.descriptors import raise_limits
from actors.process.exits import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_NAME_TAKEN,
    EXIT_RUN_FAILED,
    EXIT_START_OVER,
    NODE_DRAIN,
)
from actors.process.hangup import let_go_of_terminal, stop_at_hangup
from actors.process.membership import DRAIN_SECONDS, Membership, PackerSilentError, StartOverError
from actors.process.output_dir import take
from actors.process.stop_wish import StopWish, forget_wish, wish_to_stop
from actors.telemetry.logs import bind_everywhere, configure_logs
from bus.run_folder import folders_of
from bus.topology import Addresses
from schemas.config import RunConfig, warnings
from schemas.config.resolved import write_resolved
from schemas.config.resume import differences, refusal
from schemas.errors import ConfigError, PeerRefusedError, RunFailedError
from schemas.messages import ObserverDirective, ObserverHeartbeat

log = structlog.get_logger("up")

EXIT_FAILED = 1
POLL_SECONDS = 0.1
"""Pause of the loop."""
STEADY_SECONDS = 60.0
"""Life time after which a process is not in a crash loop."""
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
"""Limits of the doubling pause before a restart."""
LONGEST_FOLLOWER_PAUSE_SECONDS = 60.0
"""Limit of this pause for callbacks and uploads, which are started again without an end."""
MAX_START_OVERS = 20
"""Most start-overs in a row without progress of the run; with their pauses about a minute and a half."""
PROGRESS = ("step", "durable", "settled", "composed", "eval_open", "dropped")
"""Progress figures: any achievement of the run changes at least one."""
NAME_TAKEN_PAUSE_SECONDS = 30.0
"""Pause before a restart if a process started by someone else has the child's name."""
END_SECONDS = 5.0
"""Time for the children to exit by themselves after the packer; a child that has not heard of the end is told then."""
STOP_STAGES = (
    (("trainer", "rollout"), ("rollout",), DRAIN_SECONDS + 5.0, 1.0),
    (("reward",), ("reward",), DRAIN_SECONDS + 5.0, 1.0),
    (("inference", "inference-pool"), ("inference", "inference-pool", "trainer"), 120.0, 60.0),
    (("packer",), ("packer",), 10.0, 10.0),
    (FOLLOWERS, FOLLOWERS, DRAIN_SECONDS + 5.0, 1.0),
)
"""Stages of a stop: kinds told to exit, kinds waited for, seconds of the wait, and seconds after a failure of the run.

Rollouts need reward actors to get rid of their groups. All need the packer. The trainer may be in a long step.
Callbacks and uploads come last, since they follow what the others have done.
"""


def supervise(config: RunConfig, fork: bool = False, share: Share | None = None) -> int:
    """Run all actors until the run is done, has failed, or is stopped. Return the exit code.

    Args:
        config: configuration of the run.
        fork: True to fork the run in the output_dir from its newest checkpoint, also with other identity keys (P23: a
            configuration with another identity is refused without `--fork`).
        share: actors of this node; None: all of the run.

    Raises:
        ConfigError: another `actors up` uses the output_dir, or the configuration can't be used.
    """
    # before anything is written
    actors = largest_of(config) if share is None else share.actors
    notes = preflight(config, actors=actors)
    output = config.output
    take(config)
    (output / "logs").mkdir(exist_ok=True)
    with hold_run_lock(output) as run_lock, (output / "logs" / "up.log").open("a", encoding="utf-8") as up_log:
        # under the lock: a run that goes on here would still change ledger and files
        if share is not None and (brought := bring_ledger(config)):
            print(brought)
        check_ledger_is_own(config)
        other_data, more_data = changed_data(config)
        config = with_run_length(config)
        refused = refusal(differences(run_so_far(config), config)) + other_data
        if refused and not fork:
            raise ConfigError(*refused)  # before config.resolved.yaml is overwritten
        if (step := done_at(config)) is not None:
            print(f"{titled(config.name)}: {output}\n{nothing_to_do(config, step)}")
            do_rest(config, (run_lock,))
            return EXIT_DONE
        with claimed_ports(config, actors):
            # of a smaller max_steps, or of a history given up
            (output / "summary.json").unlink(missing_ok=True)
            resolved = write_resolved(config)
            for warning in [*warnings(config), *notes, *more_data]:
                print(f"warning: {warning}", file=sys.stderr)
            if length := run_length_note(config):
                print(length)
            return _supervised(config, resolved, run_lock, up_log, fork, share)


def _supervised(
    config: RunConfig, resolved: Path, run_lock: int, up_log: TextIO, fork: bool, share: Share | None
) -> int:
    """Run the supervisor of this machine, under its lock; return the exit code."""
    started = time.time()
    configure_logs(config.telemetry, up_log)
    bind_everywhere(actor="up" if share is None else f"node-{share.rank}")
    raise_limits(config)
    supervisor = Supervisor(config, resolved, (run_lock,), fork, share, up_log.fileno())
    carrier = LedgerCarrier(config) if share is not None and share.has_packer and is_carried(config) else None
    try:
        return supervisor.run()
    except (RunFailedError, PeerRefusedError) as error:
        log.error("run failed", reason=str(error))
        logs = config.output / "logs"
        # a RunFailedError names the one log of the child at fault
        where = "" if isinstance(error, RunFailedError) else f"\nlogs: {logs}"
        told = newest_traceback(logs, started)
        trace = f"\n\nthe newest traceback, from {told[0]}:\n{told[1]}" if told else ""
        print(f"\nrun failed: {error}{where}{trace}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        supervisor.stop()
        if carrier is not None:
            carrier.close()
        # actors on other nodes may still read the weights, until the run is over
        if share is None or (share.has_packer and supervisor.is_over):
            clean_up(config)


def supervise_node(config: RunConfig, share: Share, fork: bool = False) -> int:
    """Run the actors of one node until the run is done, has failed, or is stopped. Return the exit code.

    The packer's node does all that `actors up` does. The others wait for its packer, and leave the run's files alone.

    Args:
        config: configuration of the run, with the addresses of this node.
        share: actors of this node.
        fork: as `supervise`.

    Raises:
        ConfigError: as `supervise`.
    """
    if not share.actors:
        print(f"node {share.rank} has no process of this run: there are more nodes than processes")
        return EXIT_DONE
    if share.has_packer:
        return supervise(config, fork, share)
    take(config)
    folder = share.folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    log_path = config.output / "logs" / share.log_name()
    log_path.parent.mkdir(exist_ok=True)
    with (
        hold_run_lock(folder) as run_lock,
        log_path.open("a", encoding="utf-8") as node_log,
        claimed_ports(config, share.actors),
    ):
        return _supervised(config, write_resolved(config, folder), run_lock, node_log, fork, share)


def nothing_to_do(config: RunConfig, step: int) -> str:
    """Return the text for a run that is done already, with the ways to continue."""
    trainer = config.trainer
    key = "trainer.max_steps" if trainer.max_epochs is None else "trainer.max_epochs"
    value = trainer.max_steps if trainer.max_epochs is None else trainer.max_epochs
    return (
        f"nothing to do: done at step {step} ({key} {value:g}). To train on, raise {key}; for a new run, set another "
        f"output_dir; to go back, actors rewind {config.output} --step N"
    )


def clean_up(config: RunConfig) -> None:
    """Remove the run's sockets and weights, which are useless after the run. Nothing else is removed."""
    Addresses(config).remove()
    for folder in folders_of(config):
        try:
            folder.clear()
        except OSError as error:
            log.warning("weights not removed", folder=str(folder.path), detail=str(error))


class Supervisor:
    """Supervisor of the processes of a run.

    Args:
        config: configuration of the run.
        config_path: path of the resolved configuration, which the children load.
        inherited: file descriptors inherited by the children.
        fork: True to pass `--fork` to the packer.
        share: actors of this node; None: all of the run.
        stderr: descriptor for what fork servers have to say; None: of this process.
    """

    def __init__(
        self,
        config: RunConfig,
        config_path: Path,
        inherited: Sequence[int] = (),
        fork: bool = False,
        share: Share | None = None,
        stderr: int | None = None,
    ) -> None:
        self._config, self._config_path, self._inherited, self._fork = config, config_path, inherited, fork
        self._share, self._drain_signal = share, signal.SIGTERM if share is None else NODE_DRAIN
        self._started_at = time.time()
        actors = largest_of(config) if share is None else share.actors
        self.children = list(plan(config, plan_here(config, actors), actors))
        self._scaler = Scaler(config, self.children, self._drain_signal)
        self._fork_servers = ForkServers(config, [child.kind for child in self.children], stderr)
        self._membership: Membership | None = None
        """Membership of a node, which outlives the run: a stop looks at the actors of other nodes."""
        self._heard, self._told_done = False, False
        """Whether a directive has come, and whether one has told the end of the run."""
        self._screen = Screen(sys.stdout, config)
        self._continues = self._packer is not None and config.ledger_path.exists()
        """True until the screen has told from which step the run continues; False from the start for a new run."""
        self._made_progress: list[Any] = []
        self._stopping, self._stopped_at = 0, 0.0
        """Signal that stops the run, and the monotonic time at which it came."""
        self._run = ""
        """Id of the run; empty until the packer has told it."""
        self._wish: StopWish | None = None
        """Wish of a callback that is being followed."""

    def run(self) -> int:
        """Run until the packer has exited, or a signal stops the run. Return the exit code.

        Raises:
            ConfigError: a child can't use its configuration.
            RunFailedError: the run can't go on, or a child fails again and again.
            PeerRefusedError: the packer refuses this process; the text is the run's failure.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        stop_at_hangup(self._on_signal)
        # as an observer: the packer neither counts nor awaits this process
        name = f"up-{os.getpid()}" if self._share is None else f"node-{self._share.rank}-{os.getpid()}"
        membership = Membership(self._config, ObserverHeartbeat, name)
        membership.start(phase="running")
        if self._share is not None:
            # a batch system sends it before the end of a job's time
            signal.signal(signal.SIGUSR1, self._on_signal)
            self._membership = membership
        try:
            while not self._stopping:
                # first: if the run has failed, this raises with the reason
                progress = self._progress(membership)
                if self._is_left_behind():
                    print("nothing to do: the run is done, and no packer has been heard")
                    return EXIT_DONE
                self._tend()
                if self.is_over:
                    wait_for([child for child in self.children if child.kind not in FOLLOWERS], END_SECONDS)
                    self._close_screen(self._progress(membership))
                    self._end_followers()
                    if self._packer is not None:
                        print("\n".join([*result_on_disk(self._config), *lines_of_hub(self._config)]))
                    return EXIT_DONE
                if wish := self._wished():
                    self._close_screen(progress)
                    return self._begin_wished_stop(wish)
                if self._packer is not None:
                    self._screen.show(progress, membership.silent_seconds)
                time.sleep(POLL_SECONDS)
            log.info("stopping", signal=signal.Signals(self._stopping).name)
            self._close_screen(self._progress(membership))
            second = "signal" if self._share is None else "SIGINT"
            print(
                f"stopping; a second {second} kills all processes at once. The same command continues the run",
                file=sys.stderr,
            )
            return EXIT_START_OVER if self._stopping == signal.SIGUSR1 else 128 + self._stopping
        finally:
            if self._membership is None:
                membership.close()

    @property
    def is_over(self) -> bool:
        """True once the run has ended, as far as this machine is concerned."""
        if self._packer is not None:
            return self._packer.finished
        done = [child.finished or (child.parked and not child.running) for child in self.children]
        # of a node whose processes are all parked no process tells the end
        return all(done) and (self._told_done or any(child.finished for child in self.children))

    def _close_screen(self, progress: dict[str, Any]) -> None:
        if self._packer is not None:
            self._screen.close(progress)

    def _is_left_behind(self) -> bool:
        """Return whether this node was started after the end of the run: its actors would wait for a packer."""
        return self._waits_for_packer() and time.time() - self._started_at > DONE_PATIENCE_SECONDS

    def _waits_for_packer(self) -> bool:
        """Return whether actors are not started yet, since the run may be done."""
        if self._packer is not None or self._heard or any(child.started for child in self.children):
            return False
        return looks_done(self._config)

    def _wished(self) -> StopWish | None:
        """Return the wish of a callback of this run that training stops."""
        wish = wish_to_stop(self._config.output) if self._config.callbacks else None
        self._wish = wish if wish is not None and wish.run == self._run else None
        return self._wish

    def _begin_wished_stop(self, wish: StopWish) -> int:
        """Begin to stop the run in order, as after a signal; return the exit code."""
        log.info("stopping", callback=wish.callback, step=wish.step)
        print(
            f"stopping: the callback {wish.callback} wishes so after step {wish.step}; a signal kills all processes at "
            "once",
            file=sys.stderr,
        )
        self._stopping, self._stopped_at = signal.SIGTERM, time.monotonic()
        return EXIT_DONE

    def _end_followers(self) -> None:
        """Wait until callbacks, uploads and trackers have all of the run, each with its limit."""
        for child in self._of(FOLLOWERS):
            seconds, started, is_said = end_seconds(self._config, child.kind), time.monotonic(), False
            while not child.finished and not self._stopping:
                waited = time.monotonic() - started
                if waited > seconds:
                    break
                if waited > END_SECONDS and not is_said:
                    print(f"waiting for {child.name}, at most {seconds:.0f} s; Ctrl-C goes on without it", flush=True)
                    is_said = True
                self._tend()
                time.sleep(POLL_SECONDS)
            if not child.finished:
                child.signal(signal.SIGKILL)
                self._screen.say(f"{child.name} has not finished, and was ended; log: {child.log}")
                child.finished = True
        # a signal ended the wait, and not the run, which is done
        self._stopping = 0

    def stop(self) -> None:
        """Let running children drain, stage by stage; kill a child that takes too long."""
        self._fork_servers.close()
        for told, awaited, seconds, seconds_when_failed in STOP_STAGES:
            for child in self._of(told):
                child.signal(self._drain_signal)
            # after the end of the run there is no work left: a child still running has not heard of the end
            limit = END_SECONDS if self.is_over else seconds if self._stopping else seconds_when_failed
            if self._wish and told == FOLLOWERS:  # as at the end of the run
                limit = max(end_seconds(self._config, child.kind) for child in self._of(FOLLOWERS))
            until = time.monotonic() + limit
            for child in wait_for(self._of(awaited), limit):
                child.signal(signal.SIGKILL)
            wait_for(self._of(awaited), END_SECONDS)
            if self._stopping:
                self._wait_for_other_nodes(awaited, until)
        if self._membership is not None:
            self._membership.close()
        for child in self.children:
            if child.process is not None and child.process.returncode is not None:
                log.info("ended", child=child.name, how=how_it_ended(child.process.returncode))
        if self._stopping and self._packer is not None:
            step = newest_checkpoint(self._config)
            saved = f"saved step {step}" if step else "no step has been saved"
            print(f"{saved}; the same command continues the run", file=sys.stderr)
            for line in lines_of_hub(self._config):
                print(line, file=sys.stderr)
        if self._wish:
            forget_wish(self._config.output)

    def _wait_for_other_nodes(self, kinds: Sequence[str], until: float) -> None:
        """Wait until no actor of these kinds drains on another node: the next stage holds what it still needs.

        Args:
            kinds: kinds of actors.
            until: monotonic time at which the wait is given up.
        """
        share, membership = self._share, self._membership
        if share is None or membership is None or share.num_nodes == 1:
            return
        # the other nodes are told at the same time; their actors' heartbeats come a moment later
        told_at = self._stopped_at + TOLD_BEATS * self._config.bus.beat_interval
        while time.monotonic() < until:
            entries = self._progress(membership).get("actors", [])
            # a silent packer is on a node that has left already
            if membership.silent_seconds > self._config.bus.lease:
                return
            if time.monotonic() > told_at and not share.draining_elsewhere(entries, kinds, self._config.bus.lease):
                return
            time.sleep(POLL_SECONDS)

    def _tend(self) -> None:
        if self._waits_for_packer():
            return
        for child in self.children:
            if child.finished or self._stopping:
                continue
            if child.process is None:
                if not child.parked and time.monotonic() >= child.start_at and self._fork_servers.is_ready(child.kind):
                    self._start(child)
            elif (code := child.process.poll()) is not None:
                self._ended(child, code)

    def _start(self, child: Child) -> None:
        # the first child has the configured port of /metrics, the others the next ones; 0: any free port
        first_port = self._config.telemetry.metrics_port
        port = first_port and first_port + self.children.index(child)
        command = [
            "run",
            child.kind,
            "--config",
            str(self._config_path),
            "--name",
            child.name,
            *([] if self._share is None else ["--of-node"]),
            "--parent",
            str(os.getpid()),
            "--started-at",
            str(self._started_at),
            *(["--fork"] if self._fork and child is self._packer else []),
            *([f"telemetry.metrics_port={port}"] if port else []),
        ]
        pid = child.start(command, self._inherited, self._fork_servers.of(child.kind))
        log.info("started", child=child.name, pid=pid, restarts=child.restarts)
        if child.ended:
            self._screen.say(f"{child.name} ended {child.ended}, started again")

    def _ended(self, child: Child, code: int) -> None:
        """Decide about a child that has exited: finished, restart, or failure of the run.

        The packer writes the summary before the end is told to any other process. So a child that exits with 0 before
        there is a summary was stopped by someone else, and is restarted.

        Raises:
            ConfigError: the child can't use its configuration.
            RunFailedError: the child says that the run can't go on, or has failed too often in a row.
        """
        lived, is_first = time.monotonic() - child.started, not child.ended
        child.process, child.ended = None, how_it_ended(code)
        log.info("ended", child=child.name, how=child.ended, lived_seconds=round(lived, 1))
        if code == 0 and (self._told_done or (self._config.output / "summary.json").exists()):
            child.finished = True
            return
        if child.parked:
            child.ended = ""  # it was given back, and its exit is no news
            return
        where = f"log: {child.log}"
        if child.kind in FOLLOWERS and not self._ends_run(child, code, is_first):
            self._follower_ended(child, code)
            return
        # these two would fail the same way again
        if code == EXIT_CONFIG:
            raise ConfigError(f"{child.name}: its configuration can't be used", *child.last_words(), where)
        if code == EXIT_RUN_FAILED:
            raise RunFailedError("\n".join([f"{child.name}: the run can't go on", *child.last_words(), where]))
        if code == EXIT_NAME_TAKEN:
            self._pause(child, NAME_TAKEN_PAUSE_SECONDS)
            why = " ".join(child.last_words())
            self._screen.say(f"{child.name}: {why}. Tried again in {NAME_TAKEN_PAUSE_SECONDS:.0f} s")
            return
        if lived > STEADY_SECONDS:
            child.restarts = 0
        if code == EXIT_START_OVER:
            self._start_over(child, lived)
            return
        child.restarts += 1
        if child.restarts > self._config.up.max_restarts:
            what = (
                f"{child.name} ended {child.restarts} times within {STEADY_SECONDS:.0f} s of its start, last "
                f"{child.ended} (up.max_restarts {self._config.up.max_restarts})"
            )
            raise RunFailedError("\n".join([what, *child.last_words(), where]))
        self._pause(child, min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** max(0, child.restarts - 1)))

    def _ends_run(self, child: Child, code: int, is_first: bool) -> bool:
        """Return whether the exit of a follower ends the run: a required callback, or a mistake at the start.

        Args:
            child: the follower.
            code: exit code.
            is_first: True for the first exit; later a mistake is of files that changed during the run.
        """
        required = child.kind == "callbacks" and any(one.required for one in self._config.callbacks)
        return (code == EXIT_RUN_FAILED and required) or (code == EXIT_CONFIG and (is_first or required))

    def _follower_ended(self, child: Child, code: int) -> None:
        """Start callbacks or uploads again, without an end: training does not depend on them."""
        lived = time.monotonic() - child.started
        child.restarts = 1 if lived > STEADY_SECONDS else child.restarts + 1
        # the exponent has a limit: with restarts for a day the power would be too large for a float
        seconds = min(LONGEST_FOLLOWER_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(child.restarts - 1, 10))
        self._pause(child, seconds)
        if code not in (EXIT_DONE, EXIT_START_OVER):
            # the first line has the reason
            why = " ".join(child.last_words()[:1])
            self._screen.say(f"{child.name} ended {child.ended}; training goes on. {why}")

    def _start_over(self, child: Child, lived: float) -> None:
        """Restart a child that has asked for it, after a pause that grows while the run makes no progress.

        Raises:
            RunFailedError: the child has asked MAX_START_OVERS times in a row without progress of the run.
        """
        # e.g. a gang that starts over after each crash of a rank: fine as long as steps come between
        if lived > STEADY_SECONDS or child.progress != self._made_progress:
            child.start_overs = 0
        child.start_overs, child.progress = child.start_overs + 1, self._made_progress
        if child.start_overs > MAX_START_OVERS:
            what = f"{child.name} started over {MAX_START_OVERS} times in a row, and the run made no progress meanwhile"
            raise RunFailedError("\n".join([what, *child.last_words(), f"log: {child.log}"]))
        self._pause(child, min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (child.start_overs - 1)))

    def _pause(self, child: Child, seconds: float) -> None:
        child.start_at = time.monotonic() + seconds
        log.info("pause", child=child.name, seconds=seconds)

    def _progress(self, membership: Membership) -> dict[str, Any]:
        with contextlib.suppress(PackerSilentError, StartOverError):
            state = membership.latest()
            if isinstance(state, ObserverDirective):
                self._heard, self._told_done = True, state.phase == "done"
                self._run = state.run
                self._say_where_it_starts(state.progress)
                if state.phase == "running":
                    for words in self._scaler.follow(state.progress.get("scale", {})):
                        self._screen.say(words)
                if state.progress:
                    self._made_progress = [state.progress.get(name) for name in PROGRESS]
                restarts = {child.name: child.restarts for child in self.children if child.restarts}
                return state.progress | {"restarts": restarts | state.progress.get("restarts", {})}
        return {}

    def _say_where_it_starts(self, progress: dict[str, Any]) -> None:
        """Print once from which checkpoint the run continues, which is known when the trainers have joined."""
        step = progress.get("checkpoint")
        if not self._continues or step is None:
            return
        self._continues = False
        text = f"continuing {titled(self._config.name)} from step {step}"
        went_back = progress.get("went_back") or {"sample_anew": False}
        if went_back["sample_anew"]:
            text += f"; {went_back['given_up']} groups of later steps are given up, and their examples sampled again"
        self._screen.say(text)

    @property
    def _packer(self) -> Child | None:
        """Packer of this machine; None on a node without it."""
        return next((child for child in self.children if child.kind == "packer"), None)

    def _of(self, kinds: Sequence[str]) -> list[Child]:
        return [child for child in self.children if child.kind in kinds]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go_of_terminal()
            if self._stopping:
                return  # kernel and shell may each send a SIGHUP, so the second is no wish for a quick end
        if self._stopping:
            # a batch system repeats its signals, and kills by itself
            if self._share is not None and number != signal.SIGINT:
                return
            os._exit(128 + number)  # the kernel kills the children
        self._stopping, self._stopped_at = number, time.monotonic()
