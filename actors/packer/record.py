"""The packer's record of a run on disk: a line per step, samples, evaluations, summary; also gauges and progress.

Steps are recorded in order, each once rank 0 has reported it and its line is written. The summary is a function of
metrics.jsonl, the ledger's rows and a few times, so a restarted packer writes the same one. Files are written by a
thread (`actors.telemetry.writer`): what a full or hanging disk does not take waits here and is tried again. Only a run
with nothing else left to do waits for its files, for RECORD_PATIENCE_SECONDS.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import structlog

from actors.algorithms.advantages import with_step_advantages
from actors.algorithms.advantages.shaping import environment_weights
from actors.algorithms.lag import lag_of
from actors.ledger import GroupState, Machine, Rewound, Store
from actors.ledger.replies import heartbeats_by_role
from actors.packer.gauges import Gauges
from actors.packer.progress import Progress, ProgressFile
from actors.packer.results import EvalResults, evaluate, step_values
from actors.packer.sample_images import SampleImages, images_of, sizes_of
from actors.packer.scaling import STORED, Scaling
from actors.packer.summary import summarise
from actors.telemetry.clock import RunClock
from actors.telemetry.engines import EngineTotals
from actors.telemetry.metrics import Metrics
from actors.telemetry.reporter import Reporter
from actors.telemetry.retrying_writer import RETRY_SECONDS, RetryingWriter
from actors.telemetry.targets import Target, TargetsFile
from actors.telemetry.totals import StepTotals
from actors.telemetry.work import Work
from schemas.config import RunConfig
from schemas.errors import RunFailedError
from schemas.messages import Heartbeat, InferenceHeartbeat, ScoredGroup, StepReport, TrainerHeartbeat

log = structlog.get_logger("packer")

GAUGE_SECONDS = 0.5
"""Seconds between two updates of the gauges."""
TARGETS_SECONDS = 2.0
"""Seconds between two looks at the addresses of all actors, for metrics_targets.json; a new or lost peer ends them."""
ENGINES_SECONDS = 5.0
"""Seconds between two commits of the engines' token counts."""
RECORD_PATIENCE_SECONDS = 300.0
"""Time for which a finished run waits for room on the disk of its files."""
STEPS_PER_ROUND = 50
"""Largest number of steps recorded in a round: after hours with a full disk, a round must still end soon."""
MAX_PENDING_SAMPLES = 100
"""Largest number of groups waiting for samples.jsonl; older ones are dropped unwritten."""
EVAL_SAMPLES = 3
"""Number of groups of each evaluation of a version written to samples.jsonl."""
BEST_EFFORT = ("samples.jsonl", "metrics_targets.json", "progress.json")
"""Files for which a run does not wait at its end."""
EvalGroups = tuple[int, list[ScoredGroup]]
"""Version, and the settled groups of its evaluation."""


class RunRecord:
    """Record of the run: collects what heartbeats and groups tell, and writes the run's files.

    Args:
        config: configuration of the run.
        store: the ledger, which also stores the record's own counts and times.
        machine: the ledger's state machine.
        metrics: destination of the `grpo_packer_*` metrics.
        reporter: writer of the run's files.
        load: function from an ordinal to the group's payload.
        started_at: wall-clock time of the `actors up` command; None without `actors up`.
    """

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        machine: Machine,
        metrics: Metrics,
        reporter: Reporter,
        load: Callable[[int], ScoredGroup],
        started_at: float | None,
    ) -> None:
        self._config, self._store, self._machine, self._metrics = config, store, machine, metrics
        self._reporter, self._load = reporter, load
        self._writer = RetryingWriter(partial(metrics.count, "grpo_packer_record_failures_total"))
        self._reports: dict[int, tuple[float, StepReport]] = {}
        """Reports of steps not recorded yet, each with the time when it was first heard."""
        self._incarnation = machine.gang.incarnation
        self._evals: deque[tuple[int, EvalResults, list[ScoredGroup]]] = deque()
        """Evaluations not written yet: version, results, groups for samples.jsonl."""
        self._samples: deque[tuple[int, ScoredGroup]] = deque(maxlen=MAX_PENDING_SAMPLES)
        """Samples not written yet: step or version, and group."""
        self._next_gauges = self._next_targets = self._take_engines_at = 0.0
        self._images = SampleImages(config.output, reporter.writer, config.telemetry.sample_images_bytes)
        self._looked_at_peers = 0
        self._engines_told = False
        """True if engines have reported tokens that are not committed yet."""
        self._stuck_since: float | None = None
        self._rewound: dict[str, Any] = {}
        """Newest return to an older checkpoint seen by this packer, for screens; empty: none."""
        self._summarised = self._reopens = False
        """True once the summary is written; true if the files must first be cut back to the committed steps."""
        values = store.values()
        tokens = values.get("tokens", {})
        self._values: dict[str, Any] = {
            "times": values.get("times", {}),
            "ran": values.get("ran", {}),
            "tokens": tokens,
            # ledgers of older versions have the engines' tokens among the others
            "generated": values.get("generated", tokens.pop("generated", 0)),
            "evals": values.get("evals", {}),
            "engine_tokens": values.get("engine_tokens", {}),
            STORED: values.get(STORED, {}),
        }
        self._dirty = set(self._values)
        """Keys of `_values` to be stored with the next commit."""
        # starts after every recorded time, even if the machine's clock was set back between two packers
        self.clock = RunClock([*self._values["times"].values(), started_at or 0.0])
        """Clock of all recorded times."""
        times, ran = self._values["times"], self._values["ran"]
        times.setdefault("started", started_at or self.clock.now())
        if not ran:  # a new run, or one of a version that did not store it
            ran.update({what: at - times["started"] for what, at in times.items()})
        # nothing ran between the last commit of the packer before and now
        self._running_since = self.clock.now() - max(ran.values()) if len(times) > 1 else times["started"]
        self._engines = EngineTotals(self._values["engine_tokens"])
        self._work = Work()
        self.metrics_target: Target = ("packer", "", "")
        """The packer's own metrics target; targets of other actors come with their heartbeats."""
        self._targets = TargetsFile(config.output, config.name, reporter.writer)
        self._progress, self._progress_file = Progress(config, machine), ProgressFile(config.output, reporter.writer)
        self._scaling = Scaling(config, self._values[STORED])
        self._open_files()
        self._evaluated = self.evaluated
        self._gauges = Gauges(config, machine, metrics, store.path)
        self._gauges.show_step(self._totals.newest)
        for version in sorted(self.evaluated):
            self._gauges.show_eval(version, self._values["evals"][str(version)])

    def _open_files(self) -> None:
        """Bring the files to the committed state: lines of steps that are not committed are removed."""
        self._totals = StepTotals(rates_from=self.clock.now())
        self._reporter.begin(self._machine.recorded_step, self.evaluated, self._totals.add)
        self._summarised = self._reopens = False

    def rewind(self, rewound: Rewound) -> None:
        """Follow the run back to an earlier step. Later lines are removed from the files once this is committed."""
        step = rewound.step
        evals = {version: r for version, r in self._values["evals"].items() if int(version) <= step}
        self._values["evals"] = evals
        self._dirty.add("evals")
        self._reports.clear()
        self._evals = deque(waiting for waiting in self._evals if waiting[0] <= step)
        self._samples = deque((waiting for waiting in self._samples if waiting[0] <= step), MAX_PENDING_SAMPLES)
        self._reopens = True  # `conclude` cuts the files after the commit: a crash before needs the old lines
        self._rewound = {"to": step, "sample_anew": rewound.sample_anew, "given_up": rewound.given_up}

    def take_values(self, *, is_last: bool = False) -> dict[str, Any]:
        """Return the values to store with the next commit.

        Every heartbeat of an engine tells its generated tokens, again after a crash. They are stored only every
        ENGINES_SECONDS and at the end, so that a heartbeat alone causes no commit.

        Args:
            is_last: True if this process stops after the commit.
        """
        now = time.monotonic()
        if self._engines_told and (is_last or now >= self._take_engines_at):
            self._engines_told, self._take_engines_at = False, now + ENGINES_SECONDS
            self._dirty |= {"generated", "engine_tokens"}
        if self._dirty or is_last:
            # the next packer goes on counting from here
            self._stamp("committed", self.clock.now())
        # emptied here and not after the commit: a commit that fails is tried again with the same values
        taken, self._dirty = {key: self._values[key] for key in self._dirty}, set()
        return taken

    def heard(self, identity: str, heartbeat: Heartbeat) -> None:
        """Record what a heartbeat tells of finished work, and its sender."""
        self._progress.heard(time.monotonic(), identity, heartbeat)
        self._work.heard(identity, heartbeat)
        if (
            isinstance(heartbeat, TrainerHeartbeat)
            and heartbeat.rank == 0
            and heartbeat.incarnation == self._machine.gang.incarnation
        ):
            for report in heartbeat.reports:
                if report.step > self._machine.recorded_step:
                    first_heard, _ = self._reports.get(report.step, (self.clock.now(), None))
                    # each heartbeat repeats the reports until they are recorded: the time of the first counts
                    self._reports[report.step] = first_heard, report
        elif isinstance(heartbeat, InferenceHeartbeat):
            num_live = len(self._machine.peers.all(InferenceHeartbeat))
            generated = self._engines.heard(identity, heartbeat, num_live)
            self._values["generated"] += generated
            self._engines_told |= generated > 0

    def renewed(self, now: float, name: str) -> None:
        """Record that an actor has said again what it had said."""
        self._progress.renewed(now, name)

    def settled(self, group: ScoredGroup) -> None:
        """Count the sampled tokens of a settled group, by purpose."""
        if num_sampled := group.num_sampled:
            self._values["tokens"][group.purpose] = self._values["tokens"].get(group.purpose, 0) + num_sampled
            self._dirty.add("tokens")

    def follow(self, finished_evals: Iterable[EvalGroups]) -> None:
        """Write what has become known since the last round, and what could not be written before.

        The next commit stores what is written. After a crash before the commit it is written again.

        Raises:
            RunFailedError: all is done but the record, and its files can't be written.
        """
        num_samples = EVAL_SAMPLES if self._config.telemetry.sample_groups_per_step else 0
        self._evals.extend(
            (version, evaluate(groups), _first_of_each(groups, num_samples)) for version, groups in finished_evals
        )
        if self._machine.groups.num_issued["train"] and "first_ticket" not in self._values["times"]:
            self._stamp("first_ticket", self.clock.now())
        gang = self._machine.gang
        if gang.incarnation != self._incarnation:
            # a new gang trains the steps after its checkpoint again, and reports them again
            self._incarnation = gang.incarnation
            self._reports = {step: heard for step, heard in self._reports.items() if step <= gang.checkpoint}
        if not self._reopens:  # else the files still have the later lines of the old history
            self._write()
        if time.monotonic() >= self._next_gauges:
            self._next_gauges = time.monotonic() + GAUGE_SECONDS
            self._show()
        self._give_up_when_stuck()

    @property
    def evaluated(self) -> list[int]:
        """Versions whose evaluation is written to evals.jsonl."""
        return [int(version) for version in self._values["evals"]]

    @property
    def reported(self) -> list[int]:
        """Steps reported by the trainer and not recorded yet."""
        return sorted(self._reports)

    def take_evaluated(self) -> list[int]:
        """Return versions evaluated since the last call. The first call returns all of them."""
        taken, self._evaluated = self._evaluated, []
        return taken

    def conclude(self) -> None:
        """Write the summary once the run is done and the last round is committed.

        Waits for room on the disk: the packer tells its peers of the end only after this.

        Raises:
            RunFailedError: there was no room for RECORD_PATIENCE_SECONDS.
        """
        if self._reopens or (self._summarised and self._machine.phase != "done"):
            self._open_files()
        if self._machine.phase != "done" or self._summarised:
            return
        while self._evals:  # the summary names the last evaluation, so evals.jsonl comes first
            self._wait_for_room()
        write = partial(self._reporter.write_summary, self.summary())
        while not self._writer.write("summary.json", write):
            self._wait_for_room()
        self._summarised = True
        self._show()

    def _write(self) -> None:
        """Write what waits, in order, as far as each file takes it now."""
        write = self._writer.write
        while self._evals and write("evals.jsonl", partial(self._record_eval, *self._evals[0])):
            self._evals.popleft()
        for _ in range(STEPS_PER_ROUND):
            step = self._machine.recorded_step + 1
            if step > self._machine.trained_step:
                break
            heard = self._reports.get(step)
            # recorded without figures rather than never: later steps wait for this one
            if heard is None and self._is_lost(step):
                heard = self.clock.now(), StepReport(step=step, values={})
            if heard is None or not write("metrics.jsonl", partial(self._record_step, *heard)):
                break
        while self._samples and write("samples.jsonl", partial(self._record_samples, *self._samples[0])):
            self._samples.popleft()

    def _record_samples(self, step: int, group: ScoredGroup) -> None:
        images = images_of(group)
        sizes = sizes_of(images)
        # in front of the line: a line that is there is not written again
        left_out = self._images.keep({digest: images[digest] for digest in sizes})
        self._reporter.report_samples(step, group, sizes)
        self._metrics.count("grpo_packer_sample_images_left_out_total", left_out)

    def _is_lost(self, step: int) -> bool:
        """Return whether the report of a trained step is lost for good, so that the step is recorded without.

        This happens if packer and trainer crash together after the step's checkpoint: a gang reports only steps after
        the checkpoint it has started from. A heartbeat carries the oldest reports only, so the report may still come
        while all reports in the heartbeat are of earlier steps.
        """
        gang = self._machine.gang
        heartbeat = self._machine.peers.heartbeat_of(gang.members.get(0, ""))
        if (
            not isinstance(heartbeat, TrainerHeartbeat)
            or heartbeat.incarnation != gang.incarnation
            or step > gang.checkpoint
        ):
            return False
        return not heartbeat.reports or heartbeat.reports[-1].step >= step

    def _record_step(self, heard_at: float, report: StepReport) -> None:
        step = self._machine.steps.composed[report.step]
        weights = environment_weights(self._config.environments)
        payloads = [self._load(ordinal) for ordinal in step.ordinals]
        groups = with_step_advantages(payloads, self._config.reward, weights)
        # both have advantage_mean and advantage_std: the trainer's win, since only it knows rewards with a reference KL
        values = step_values(step.step, groups) | report.values | self._work.since_step | {"time": heard_at}
        self._totals.add(self._reporter.report_step(step.step, values, report.weights))
        self._work.end_step()
        self._gauges.show_step(values)
        if self._reports.pop(step.step, None) is None:
            log.warning("step recorded without the trainer's figures: they were lost with its process", step=step.step)
        self._stamp("last_step", heard_at)
        if step.step == 1:  # the summary's idle ratio counts from here, without the start of all processes
            self._stamp("first_step", heard_at)
        self._samples.extend((step.step, group) for group in groups[: self._config.telemetry.sample_groups_per_step])
        self._machine.note_recorded(step.step)
        for group in groups:
            self._metrics.observe("grpo_packer_lag_steps", lag_of(step.step, group.oldest_version))

    def _record_eval(self, version: int, results: EvalResults, samples: list[ScoredGroup]) -> None:
        self._reporter.report_eval(version, results)
        self._values["evals"][str(version)] = results
        self._evaluated.append(version)
        self._dirty.add("evals")
        self._gauges.show_eval(version, results)
        self._samples.extend((version, group) for group in samples)
        log.info(
            "evaluated",
            version=version,
            **{label: r["exact_match"] and round(r["exact_match"], 4) for label, r in results.items()},
        )

    def _wait_for_room(self) -> None:
        self._give_up_when_stuck()
        time.sleep(RETRY_SECONDS)
        self._write()

    def _give_up_when_stuck(self) -> None:
        """End a run that waits for nothing but files that can't be written. A restart goes on from here.

        Raises:
            RunFailedError: RECORD_PATIENCE_SECONDS are over; the text names the files.
        """
        machine = self._machine
        problems = [text for name, text in sorted(self._writer.problems.items()) if name not in BEST_EFFORT]
        over = machine.durable_step >= machine.settings.max_steps and machine.evaluations.next_version() is None
        if not (problems and over):
            self._stuck_since = None
            return
        now = time.monotonic()
        self._stuck_since = now if self._stuck_since is None else self._stuck_since
        if now - self._stuck_since >= RECORD_PATIENCE_SECONDS:
            raise RunFailedError(
                f"training is done, but its record can't be written, tried for {RECORD_PATIENCE_SECONDS:g} s: "
                f"{'; '.join(problems)}. Free space and start the same command again: it writes what is missing"
            )

    def summary(self) -> dict[str, Any]:
        """Return the values of summary.json."""
        seconds = self.clock.now() - self._running_since
        return summarise(self._values, self._totals, self._engines, self._machine, self._store, seconds)

    def progress(self) -> dict[str, Any]:
        """Return the newest values for screens, all plain."""
        machine, totals, newest = self._machine, self._totals, self._totals.newest
        counts = machine.groups.counts("train")
        return {
            "phase": machine.phase,
            "step": machine.trained_step,
            "max_steps": machine.settings.max_steps,
            "reward": newest.get("reward_mean"),
            "entropy": newest.get("entropy"),
            "grad_norm": newest.get("grad_norm"),
            "mismatch_kl": newest.get("mismatch_kl"),
            "lag": newest.get("lag_max"),
            "steps_without_variance": totals.newest_in_a_row("groups_without_variance", 1.0),
            "steps_without_gradient": totals.newest_in_a_row("grad_norm", 0.0),
            "seconds_per_step": totals.seconds_per_step,
            "evals": self._first_and_last_eval(),
            "issued": counts[GroupState.ISSUED],
            "settled": counts[GroupState.SETTLED],
            "composed": counts[GroupState.COMPOSED],
            "tokens_per_second": totals.per_second("tokens"),
            "idle": totals.per_second("seconds_wait_batch"),  # seconds waited per second: a share
            "peers": {role: len(heartbeats) for role, heartbeats in heartbeats_by_role(machine).items()},
            "missing": missing_actors(machine),
            "eval_open": len(machine.evaluations.open),
            "dropped": {reason: n for reason, n in machine.groups.dropped["train"].items() if n},
            "failed_attempts": machine.groups.num_failed_attempts,
            "num_issued": machine.groups.num_issued["train"],
            "last_failure": machine.groups.last_failure,
            "failure": machine.failure,
            "unwritten": sorted(self._writer.problems.values()),
            "checkpoint": machine.gang.checkpoint if machine.gang.members else None,
            "went_back": self._rewound,
            "packer": self.metrics_target[1],
            "seconds": self.clock.now() - self._running_since,
            "scale": self._scaling.values,
        } | self._progress.values(time.monotonic())

    def _first_and_last_eval(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """Return exact match and mean reward by evaluation, by version: of each evaluation the first and the newest."""
        evals = self._values["evals"]
        versions: dict[str, list[int]] = {}
        for version in sorted(map(int, evals)):
            for label in evals[str(version)]:
                versions.setdefault(label, []).append(version)
        shown: dict[str, dict[str, dict[str, float | None]]] = {}
        for label, found in versions.items():
            for version in {found[0], found[-1]}:
                values = evals[str(version)][label]
                picked = {name: values.get(name) for name in ("exact_match", "mean_reward")}
                shown.setdefault(str(version), {})[label] = picked
        return {version: shown[version] for version in sorted(shown, key=int)}

    def _show(self) -> None:
        """Update the gauges, progress.json and metrics_targets.json."""
        machine, now = self._machine, time.monotonic()
        self._progress.sample(now)
        if self._scaling.look(now, machine, self._progress):
            self._values[STORED] = self._scaling.wanted
            self._dirty.add(STORED)
        if self._progress_file.is_due(now, machine.phase):
            self._writer.write("progress.json", lambda: self._progress_file.write(now, self.progress()))
        self._gauges.show_run()
        self._gauges.show_scale(self._scaling.wanted)
        if self._summarised or now >= self._next_targets or machine.peers.num_live != self._looked_at_peers:
            self._next_targets, self._looked_at_peers = now + TARGETS_SECONDS, machine.peers.num_live
            self._writer.write("metrics_targets.json", partial(self._targets.follow, self._metrics_targets()))

    def _metrics_targets(self) -> list[Target]:
        """Return what Prometheus is to read; nothing of a done run, so that no alert reports its processes as down."""
        if self._summarised:
            return []
        roles = heartbeats_by_role(self._machine).items()
        return [self.metrics_target, *((role, one.name, one.metrics_url) for role, found in roles for one in found)]

    def _stamp(self, what: str, at: float) -> None:
        """Store a time, and how long the run had run by then: without the time in which no packer was there."""
        self._values["times"][what], self._values["ran"][what] = at, at - self._running_since
        self._dirty |= {"times", "ran"}


def _first_of_each(groups: Iterable[ScoredGroup], number: int) -> list[ScoredGroup]:
    """Return the first groups of each evaluation."""
    taken: Counter[str] = Counter()
    found = []
    for group in groups:
        taken[group.environment] += 1
        found += [group] * (taken[group.environment] <= number)
    return found


def missing_actors(machine: Machine) -> list[str]:
    """Return the actors without which nothing goes on: missing ranks by name, other actors by kind if there is none."""
    roles = heartbeats_by_role(machine)
    ranks = {heartbeat.rank for heartbeat in roles.get("trainer", []) if isinstance(heartbeat, TrainerHeartbeat)}
    missing = [f"trainer-{rank}" for rank in range(machine.settings.num_ranks) if rank not in ranks]
    return missing + [kind for kind in ("rollout", "reward", "inference") if not roles.get(kind)]
