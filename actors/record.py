"""What the packer writes down of a run: a line per step, samples, evaluations, the summary, its gauges, its progress.

A step is recorded once rank 0 has reported it, in order. metrics.jsonl is the truth of what has been recorded: the
summary is a function of its lines, of the ledger's rows and of a few times, so a restarted packer writes the same one.

A file that can't be written holds nothing up: what is to be written waits here and is tried again, a step counts as
recorded when its line is there, and only a run that has nothing else left to do waits for its files, and not for ever.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import structlog

from actors.algorithms.advantages import with_step_advantages
from actors.algorithms.lag import lag_of
from actors.gauges import REWARD_COLUMN, Gauges
from actors.ledger import GroupState, Machine, Store
from actors.ledger.replies import beats_by_role
from actors.progress import Progress, ProgressFile
from actors.telemetry.attempts import RETRY_SECONDS, Attempts
from actors.telemetry.engines import EngineTotals
from actors.telemetry.metrics import Metrics
from actors.telemetry.reporter import Reporter, writing
from actors.telemetry.targets import Target, TargetsFile
from actors.telemetry.totals import StepTotals
from schemas.config import RunConfig
from schemas.errors import RunFailedError
from schemas.messages import Beat, InferenceBeat, ScoredGroup, StepReport, TrainerBeat

log = structlog.get_logger("packer")

GAUGE_SECONDS = 0.5
RECORD_PATIENCE_SECONDS = 300.0
"""How long a run that is over but for its files waits for room on their disk."""
STEPS_PER_ROUND = 50
"""After a disk was full for hours the round must still come round."""
MAX_PENDING_SAMPLES = 100
"""Groups of text that wait for room in memory; the newest ones do, older ones are never written."""
EVAL_SAMPLES = 3
"""Groups of an evaluation that go into samples.jsonl."""
BEST_EFFORT = ("samples.jsonl", "metrics_targets.json", "progress.json")
"""Files that no run waits for at its end."""
EvalGroups = tuple[int, list[ScoredGroup]]
EvalResults = dict[str, dict[str, float | None]]


class RunRecord:
    """The run as it is told.

    Args:
        load: a group's payload by ordinal.
        started_at: wall-clock time of the command.
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
        self._attempts = Attempts(partial(metrics.count, "grpo_packer_record_failures_total"))
        self._reports: dict[int, tuple[float, StepReport]] = {}
        """Of steps that are not recorded, with the time each was first heard."""
        self._incarnation = machine.gang.incarnation
        self._evals: deque[tuple[int, EvalResults, list[ScoredGroup]]] = deque()
        self._samples: deque[tuple[int, ScoredGroup]] = deque(maxlen=MAX_PENDING_SAMPLES)
        self._next_gauges = 0.0
        self._stuck_since: float | None = None
        self._summarised = False
        values = store.values()
        self._values: dict[str, Any] = {
            "times": values.get("times", {"started": started_at or time.time()}),
            "tokens": values.get("tokens", {}),
            "evals": values.get("evals", {}),
            "engine_tokens": values.get("engine_tokens", {}),
        }
        self._dirty = set(self._values)
        self._engines = EngineTotals(self._values["engine_tokens"])
        self.metrics_target: Target = ("packer", "", "")
        """The packer's own; those of the others are in their beats."""
        self._targets = TargetsFile(config.output, config.name)
        self._progress, self._progress_file = Progress(config, machine), ProgressFile(config.output)
        self._totals = StepTotals()
        self._evaluated = self.evaluated
        reporter.begin(machine.recorded_step, self.evaluated, self._totals.add)
        self._gauges = Gauges(config, machine, metrics, store.path)
        self._gauges.show_step(self._totals.newest)
        for version in sorted(self.evaluated):
            self._gauges.show_eval(version, self._values["evals"][str(version)])

    def take_values(self) -> dict[str, Any]:
        """What shall be in the next commit."""
        taken, self._dirty = {key: self._values[key] for key in self._dirty}, set()
        return taken

    def heard(self, identity: str, beat: Beat) -> None:
        """Keep what a beat tells about work done, and who sent it."""
        self._progress.heard(time.monotonic(), identity, beat)
        if isinstance(beat, TrainerBeat) and beat.rank == 0:
            for report in beat.reports:
                if report.step > self._machine.recorded_step:
                    first_heard, _ = self._reports.get(report.step, (time.time(), None))
                    self._reports[report.step] = first_heard, report
        elif isinstance(beat, InferenceBeat):
            num_live = len(self._machine.peers.all(InferenceBeat))
            generated = self._engines.heard(identity, beat, num_live)
            self._add_tokens("generated", generated)
            if generated:
                self._dirty.add("engine_tokens")

    def settled(self, group: ScoredGroup) -> None:
        """Count the tokens of groups that have come through, by purpose."""
        self._add_tokens(group.purpose, int(group.token_ids.size))

    def follow(self, finished_evals: Iterable[EvalGroups]) -> None:
        """Write down what has become known since the last round, and what could not be written then.

        What is written down is in the next commit; a crash before it has it written again.

        Raises:
            RunFailedError: all is done but the record, and it can't be written.
        """
        num_samples = EVAL_SAMPLES if self._config.telemetry.sample_groups_per_step else 0
        self._evals.extend((version, evaluate(groups), groups[:num_samples]) for version, groups in finished_evals)
        if self._machine.groups.num_issued["train"] and "first_ticket" not in self._values["times"]:
            self._stamp("first_ticket", time.time())
        self._forget_dead_history()
        self._write()
        if time.monotonic() >= self._next_gauges:
            self._next_gauges = time.monotonic() + GAUGE_SECONDS
            self._show()
        self._give_up_when_stuck()

    @property
    def evaluated(self) -> list[int]:
        """Versions whose evaluation is written down."""
        return [int(version) for version in self._values["evals"]]

    def take_evaluated(self) -> list[int]:
        """Those of them that have come since the last call; at first, all."""
        taken, self._evaluated = self._evaluated, []
        return taken

    def conclude(self) -> None:
        """Once the run is done and its last round committed: write the summary, after all that it tells of.

        The packer tells its peers of the end after this, and leaves with them, so this waits for room on the disk.

        Raises:
            RunFailedError: there was none.
        """
        if self._machine.phase != "done" or self._summarised:
            return
        while self._evals:
            self._wait_for_room()
        write = partial(self._reporter.write_summary, self.summary())
        while not self._attempts.write("summary.json", write):
            self._wait_for_room()
        self._summarised = True
        self._show()

    def _forget_dead_history(self) -> None:
        """A gang that starts again trains the steps after its checkpoint again, and its reports of them count."""
        gang = self._machine.gang
        if gang.incarnation != self._incarnation:
            self._incarnation = gang.incarnation
            self._reports = {step: heard for step, heard in self._reports.items() if step <= gang.checkpoint}

    def _write(self) -> None:
        """What waits to be written, as far as its file takes it now."""
        write = self._attempts.write
        while self._evals and write("evals.jsonl", partial(self._record_eval, *self._evals[0])):
            self._evals.popleft()
        for _ in range(STEPS_PER_ROUND):
            heard = self._next_report()
            if heard is None or not write("metrics.jsonl", partial(self._record_step, *heard)):
                break
        while self._samples and write("samples.jsonl", partial(self._reporter.report_samples, *self._samples[0])):
            self._samples.popleft()

    def _next_report(self) -> tuple[float, StepReport] | None:
        """The report of the step that is to be recorded next, with the time it was heard; None: it is still to come."""
        step = self._machine.recorded_step + 1
        if step > self._machine.trained_step:
            return None
        if step not in self._reports and self._is_lost(step):
            return time.time(), StepReport(step=step, values={})
        return self._reports.get(step)

    def _is_lost(self, step: int) -> bool:
        """Whether nobody knows the report of a trained step any more, so that it is recorded without.

        It died with both packer and trainer while the step was in a checkpoint already: a gang reports the steps after
        the checkpoint that it went on from.
        """
        gang = self._machine.gang
        beat = self._machine.peers.beat_of(gang.members.get(0, ""))
        return isinstance(beat, TrainerBeat) and beat.incarnation == gang.incarnation and step <= gang.checkpoint

    def _record_step(self, heard_at: float, report: StepReport) -> None:
        step = self._machine.steps.composed[report.step]
        groups = with_step_advantages([self._load(ordinal) for ordinal in step.ordinals], self._config.reward)
        values = step_values(step.step, groups) | report.values | {"time": heard_at}
        self._totals.add(self._reporter.report_step(step.step, values, report.weights))
        self._gauges.show_step(values)
        if self._reports.pop(step.step, None) is None:
            log.warning("step recorded without the trainer's figures: they died with it", step=step.step)
        self._stamp("last_step", heard_at)
        if step.step == 1:
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
        """End a run whose files can't be written and that waits for nothing else; starting it again goes on here.

        Raises:
            RunFailedError: names the files.
        """
        machine = self._machine
        problems = [text for name, text in sorted(self._attempts.problems.items()) if name not in BEST_EFFORT]
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
        """summary.json (DESIGN §11); its medians are of what is recent (`actors.telemetry.totals`)."""
        values, totals, times = self._values, self._totals, self._values["times"]
        train_seconds = times["last_step"] - times["first_ticket"]
        evals, tokens = values["evals"], values["tokens"]
        trained = int(totals["tokens"].sum)
        # engines say what they generated once a second, so at the end what has come through may be ahead of them
        generated = max(tokens.get("generated", 0) - tokens.get("eval", 0), tokens.get("train", 0))
        between = times["last_step"] - times["first_step"]
        return {
            "steps": self._machine.trained_step,
            "reward_first": totals.reward_first,
            "reward_last": totals.reward_last,
            "eval_before": evals.get("0"),
            "eval_after": evals.get(str(self._machine.settings.max_steps)),
            "wall_seconds": time.time() - times["started"],
            "train_seconds": train_seconds,
            "time_to_first_step_seconds": times["first_step"] - times["started"],
            "completions_per_second": totals["num_completions"].sum / train_seconds,
            "generated_tokens": generated + tokens.get("eval", 0),
            "trained_tokens": trained,
            "goodput": trained / generated if generated else None,
            "tokens_per_second": trained / train_seconds,
            "trainer_idle_ratio": totals.idle.sum / between if between else None,
            "lag_mean": totals["lag_mean"].mean,
            "lag_max": totals["lag_max"].maximum,
            "mismatch_kl": totals["mismatch_kl"].mean,
            "ledger": self._ledger("train"),
            "eval_ledger": self._ledger("eval"),
            "weight_update_seconds": self._weight_update_seconds(),
        }

    def progress(self) -> dict[str, Any]:
        """For screens: plain values, the newest known."""
        machine, totals, newest = self._machine, self._totals, self._totals.newest
        counts = machine.groups.counts("train")
        return {
            "phase": machine.phase,
            "step": machine.trained_step,
            "max_steps": machine.settings.max_steps,
            "reward": newest.get("reward_mean"),
            "loss": newest.get("loss"),
            "mismatch_kl": newest.get("mismatch_kl"),
            "lag": newest.get("lag_max"),
            "issued": counts[GroupState.ISSUED],
            "settled": counts[GroupState.SETTLED],
            "composed": counts[GroupState.COMPOSED],
            "tokens_per_second": totals.per_second("tokens"),
            "idle": totals.per_second("seconds_wait_batch"),
            "peers": {role: len(beats) for role, beats in beats_by_role(machine).items()},
            "missing": missing_actors(machine),
            "eval_open": len(machine.evaluations.open),
            "dropped": {reason: n for reason, n in machine.groups.dropped["train"].items() if n},
            "failed_attempts": machine.groups.num_failed_attempts,
            "last_failure": machine.groups.last_failure,
            "failure": machine.failure,
            "unwritten": sorted(self._attempts.problems.values()),
            "packer": self.metrics_target[1],
            "seconds": time.time() - self._values["times"]["started"],
        } | self._progress.values(time.monotonic())

    def _ledger(self, purpose: str) -> dict[str, Any]:
        """Each term counted by the database from its own rows (DESIGN §3). An evaluated group counts as trained."""
        finished = ("trained", "durable") if purpose == "train" else ("settled",)
        rows = {(state, reason): n for (p, state, reason), n in self._store.counts().items() if p == purpose}
        counters = self._machine.groups.counters
        return {
            "issued": self._machine.groups.num_issued[purpose],
            "trained": sum(n for (state, _), n in rows.items() if state in finished),
            "in_flight": sum(n for (state, _), n in rows.items() if state not in (*finished, "dropped")),
            "dropped": {reason: n for (state, reason), n in rows.items() if state == "dropped"},
            "copies_dropped": counters["copies_dropped"],
            "reissued": counters["reissued"],
            "trained_twice": self._store.trained_twice(),
        }

    def _weight_update_seconds(self) -> dict[str, float | None]:
        received = self._engines.recent_median("wire")
        written = self._totals["seconds_publish"].recent_median
        return {
            "pause": self._engines.recent_median("pause"),
            "gather": self._totals["seconds_gather"].recent_median,
            "wire": None if received is None or written is None else received + written,
            "load": self._engines.recent_median("load"),
        }

    def _show(self) -> None:
        """Gauges, progress.json and metrics_targets.json."""
        machine, now = self._machine, time.monotonic()
        self._progress.sample(now)
        if self._progress_file.is_due(now, machine.phase):
            self._attempts.write("progress.json", lambda: self._progress_file.write(now, self.progress()))
        self._gauges.show_run()
        roles = beats_by_role(machine).items()
        peers = [(role, beat.name, beat.metrics_url) for role, beats in roles for beat in beats]
        # nobody is missed when a run is done: without targets no alert says that they are down
        targets = [] if self._summarised else [self.metrics_target, *peers]
        self._attempts.write("metrics_targets.json", partial(self._show_targets, targets))

    def _show_targets(self, targets: list[Target]) -> None:
        with writing(self._config.output / "metrics_targets.json"):
            self._targets.follow(targets)

    def _add_tokens(self, what: str, amount: int) -> None:
        if amount > 0:
            self._values["tokens"][what] = self._values["tokens"].get(what, 0) + amount
            self._dirty.add("tokens")

    def _stamp(self, what: str, at: float) -> None:
        self._values["times"][what] = at
        self._dirty.add("times")


def step_values(step: int, groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """What the packer knows of a step: rewards, advantages (per token where they are), lengths, lag."""
    rewards = np.concatenate([group.rewards_G for group in groups])
    lengths = np.concatenate([group.lengths_G for group in groups])
    advantages = np.concatenate([group.advantages for group in groups]).astype(np.float64)
    lags = [lag_of(step, group.oldest_version) for group in groups]
    scored = rewards[~np.isnan(rewards)]
    values = {
        "reward_mean": float(scored.mean()) if scored.size else math.nan,
        "reward_std": float(scored.std()) if scored.size else math.nan,
        "reward_unscorable": float(np.isnan(rewards).mean()),
        "groups_without_variance": float(np.mean([np.ptp(group.advantages) == 0 for group in groups])),
        "advantage_mean": float(advantages.mean()),
        "advantage_std": float(advantages.std()),
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated_fraction": float(
            np.mean([reason == "length" for group in groups for reason in group.finish_reasons])
        ),
        "lag_mean": float(np.mean(lags)),
        "lag_max": float(max(lags)),
        "num_completions": float(rewards.size),
    }
    for f, name in enumerate(groups[0].reward_names):
        scores = np.concatenate([group.rewards_FG[f] for group in groups])
        values[REWARD_COLUMN + name] = float(np.nanmean(scores)) if not np.isnan(scores).all() else math.nan
    return values


def evaluate(groups: Sequence[ScoredGroup]) -> EvalResults:
    """Results per environment; unscorable completions count as no match and stay out of the mean reward.

    The last function of an evaluation group is `eval.exact_match` (see `actors.reward`). A value is None where no
    completion could be scored: 0 would be a score.
    """
    results: EvalResults = {}
    for label in dict.fromkeys(group.environment for group in groups):
        mine = [group for group in groups if group.environment == label]
        matches = np.concatenate([group.rewards_FG[-1] for group in mine])
        rewards = np.concatenate([group.rewards_G for group in mine])
        scored = rewards[~np.isnan(rewards)]
        results[label] = {
            "exact_match": None if np.isnan(matches).all() else float((matches == 1.0).mean()),
            "mean_reward": float(scored.mean()) if scored.size else None,
            "num_prompts": len(mine),
        }
    return results


def missing_actors(machine: Machine) -> list[str]:
    """Without whom nothing goes on: ranks of the gang by name, other actors by kind, where there is none."""
    roles = beats_by_role(machine)
    ranks = {beat.rank for beat in roles.get("trainer", []) if isinstance(beat, TrainerBeat)}
    missing = [f"trainer-{rank}" for rank in range(machine.settings.num_ranks) if rank not in ranks]
    return missing + [kind for kind in ("rollout", "reward", "inference") if not roles.get(kind)]
