"""What the packer writes down of a run: a line per step, samples, evaluations, the summary, its gauges, its progress.

A step is recorded once rank 0 has reported it, in order. metrics.jsonl is the truth of what has been recorded: the
summary is a function of its lines, of the ledger's rows and of a few times, so a restarted packer writes the same one.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from actors.algorithms.lag import lag_of
from actors.ledger import GroupState, Machine, Step, Store
from actors.ledger.engines import served_version
from actors.ledger.replies import beats_by_role
from actors.telemetry.metrics import DROPS, PURPOSES, Metrics
from actors.telemetry.reporter import Reporter
from actors.telemetry.targets import Target, TargetsFile
from schemas.config import RunConfig
from schemas.messages import Beat, InferenceBeat, ScoredGroup, StepReport, TrainerBeat

log = structlog.get_logger("packer")

FIRST_AND_LAST = 5
"""Steps that `reward_first` and `reward_last` are means of."""
GAUGE_SECONDS = 0.5
EvalGroups = tuple[int, list[ScoredGroup]]


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
        self._reports: dict[int, StepReport] = {}
        self._updates: dict[str, tuple[Any, dict[str, float]]] = {}
        self._update_seconds: dict[str, list[float]] = {}
        self._counted: dict[str, float] = {}
        self._next_gauges = 0.0
        self._summarised = False
        values = store.values()
        self._values: dict[str, Any] = {
            "times": values.get("times", {"started": started_at or time.time()}),
            "tokens": values.get("tokens", {}),
            "evals": values.get("evals", {}),
            "engine_tokens": values.get("engine_tokens", {}),
        }
        self._dirty = set(self._values)
        self.metrics_target: Target = ("packer", "", "")
        """The packer's own; those of the others are in their beats."""
        self._targets = TargetsFile(config.output, config.name)
        self.lines = reporter.begin(machine.recorded_step, [int(version) for version in self._values["evals"]])

    def take_values(self) -> dict[str, Any]:
        """What shall be in the next commit."""
        taken, self._dirty = {key: self._values[key] for key in self._dirty}, set()
        return taken

    def heard(self, identity: str, beat: Beat) -> None:
        """Keep what a beat tells about work done."""
        if isinstance(beat, TrainerBeat) and beat.rank == 0:
            for report in beat.reports:
                self._reports[report.step] = report
        elif isinstance(beat, InferenceBeat):
            seen = self._values["engine_tokens"]
            self._add_tokens("generated", beat.generated_tokens - seen.get(identity, 0))
            if seen.get(identity) != beat.generated_tokens:
                seen[identity] = beat.generated_tokens
                self._dirty.add("engine_tokens")
            update = (beat.policy, beat.update_seconds)
            if beat.update_seconds and self._updates.get(identity) != update:
                self._updates[identity] = update
                self._note_update(beat.update_seconds)

    def settled(self, group: ScoredGroup) -> None:
        """Count the tokens of groups that have come through, by purpose."""
        self._add_tokens(group.purpose, int(group.token_ids.size))

    def follow(self, finished_evals: Iterable[EvalGroups]) -> None:
        """Write down what has become known since the last round."""
        for version, groups in finished_evals:
            self._record_eval(version, groups)
        times = self._values["times"]
        if self._machine.groups.num_issued["train"] and "first_ticket" not in times:
            self._stamp("first_ticket")
        while (step := self._machine.recorded_step + 1) in self._reports and step <= self._machine.trained_step:
            self._record_step(self._machine.steps.composed[step], self._reports.pop(step))
        if time.monotonic() >= self._next_gauges:
            self._next_gauges = time.monotonic() + GAUGE_SECONDS
            self._show()
        if self._machine.phase == "done" and not self._summarised:
            self._summarised = True
            self._reporter.write_summary(self.summary())

    def _record_step(self, step: Step, report: StepReport) -> None:
        groups = [self._load(ordinal) for ordinal in step.ordinals]
        now = self._stamp("last_step")
        if step.step == 1:
            self._stamp("first_step")
        values = step_values(step.step, groups) | report.values | {"time": now}
        self.lines.append(self._reporter.report_step(step.step, values))
        for group in groups[: self._config.telemetry.sample_groups_per_step]:
            self._reporter.report_samples(step.step, group)
        self._machine.note_recorded(step.step)
        self._add_tokens("trained", int(values["tokens"]))
        for group in groups:
            self._metrics.observe("grpo_packer_lag_steps", lag_of(step.step, group.oldest_version))
        self._metrics.set("grpo_packer_reward_mean", values["reward_mean"])

    def _record_eval(self, version: int, groups: list[ScoredGroup]) -> None:
        results = evaluate(groups)
        self._values["evals"][str(version)] = results
        self._dirty.add("evals")
        self._reporter.report_eval(version, results)
        for group in groups[: 3 * bool(self._config.telemetry.sample_groups_per_step)]:
            self._reporter.report_samples(version, group)
        log.info("evaluated", version=version, **{label: round(r["exact_match"], 4) for label, r in results.items()})

    def summary(self) -> dict[str, Any]:
        """summary.json (DESIGN §11)."""
        values, lines, times = self._values, self.lines, self._values["times"]
        train_seconds = times["last_step"] - times["first_ticket"]
        evals, tokens = values["evals"], values["tokens"]
        trained = tokens.get("trained", 0)
        # engines say what they generated once a second, so at the end what has come through may be ahead of them
        generated = max(tokens.get("generated", 0) - tokens.get("eval", 0), tokens.get("train", 0))
        completions = sum(line["num_completions"] for line in lines)
        between = times["last_step"] - times["first_step"]
        return {
            "steps": self._machine.trained_step,
            "reward_first": _mean(line["reward_mean"] for line in lines[:FIRST_AND_LAST]),
            "reward_last": _mean(line["reward_mean"] for line in lines[-FIRST_AND_LAST:]),
            "eval_before": evals.get("0"),
            "eval_after": evals.get(str(self._machine.settings.max_steps)),
            "wall_seconds": time.time() - times["started"],
            "train_seconds": train_seconds,
            "time_to_first_step_seconds": times["first_step"] - times["started"],
            "completions_per_second": completions / train_seconds,
            "generated_tokens": generated + tokens.get("eval", 0),
            "trained_tokens": trained,
            "goodput": trained / generated if generated else None,
            "tokens_per_second": trained / train_seconds,
            "trainer_idle_ratio": sum(line.get("seconds_wait_batch", 0.0) for line in lines[1:]) / between
            if between
            else None,
            "lag_mean": _mean(line["lag_mean"] for line in lines),
            "lag_max": max((line["lag_max"] for line in lines), default=None),
            "mismatch_kl": _mean(line["mismatch_kl"] for line in lines),
            "ledger": self._ledger("train"),
            "eval_ledger": self._ledger("eval"),
            "weight_update_seconds": self._weight_update_seconds(),
        }

    def progress(self) -> dict[str, Any]:
        """For screens: plain values, the newest known."""
        machine, last = self._machine, self.lines[-1] if self.lines else {}
        counts = machine.groups.counts("train")
        recent = self.lines[-20:]
        span = recent[-1]["time"] - recent[0]["time"] if len(recent) > 1 else 0.0
        return {
            "phase": machine.phase,
            "step": machine.trained_step,
            "max_steps": machine.settings.max_steps,
            "reward": last.get("reward_mean"),
            "loss": last.get("loss"),
            "mismatch_kl": last.get("mismatch_kl"),
            "lag": last.get("lag_max"),
            "issued": counts[GroupState.ISSUED],
            "settled": counts[GroupState.SETTLED],
            "composed": counts[GroupState.COMPOSED],
            "tokens_per_second": sum(line["tokens"] for line in recent[1:]) / span if span else None,
            "idle": sum(line.get("seconds_wait_batch", 0.0) for line in recent[1:]) / span if span else None,
            "peers": {role: len(beats) for role, beats in beats_by_role(machine).items()},
            "eval_open": len(machine.evaluations.open),
            "evals": self._values["evals"],
        }

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
        seen = self._update_seconds
        gather = [line["seconds_gather"] for line in self.lines if "seconds_gather" in line]
        publish = [line["seconds_publish"] for line in self.lines if "seconds_publish" in line]
        received = _median(seen.get("wire", []))
        written = _median(publish)
        wire = None if received is None or written is None else received + written
        return {
            "pause": _median(seen.get("pause", [])),
            "gather": _median(gather),
            "wire": wire,
            "load": _median(seen.get("load", [])),
        }

    def _show(self) -> None:
        """The packer's gauges, from the machine's own state."""
        machine, m = self._machine, self._metrics
        for purpose in PURPOSES:
            counts = machine.groups.counts(purpose)
            for state in GroupState:
                m.set("grpo_packer_groups", counts[state], purpose=purpose, state=state.value)
            self._count_up("grpo_packer_issued_total", machine.groups.num_issued[purpose], purpose=purpose)
            for reason in DROPS:
                self._count_up(
                    "grpo_packer_drops_total", machine.groups.dropped[purpose][reason], purpose=purpose, reason=reason
                )
        counters = machine.groups.counters
        self._count_up("grpo_packer_copies_dropped_total", counters["copies_dropped"])
        self._count_up("grpo_packer_reissued_total", counters["reissued"])
        self._count_up("grpo_packer_holder_deaths_total", counters["deaths"])
        m.set("grpo_packer_step", machine.trained_step)
        m.set("grpo_packer_durable_step", machine.durable_step)
        served = served_version(machine.peers.all(InferenceBeat))
        m.set("grpo_packer_served_version", -1 if served is None else served)
        held = [machine.groups.rows[o].issued_at for ordinals in machine.groups.held_by.values() for o in ordinals]
        m.set("grpo_packer_oldest_group_age_seconds", time.monotonic() - min(held) if held else 0.0)
        roles = beats_by_role(machine)
        for role in ("rollout", "reward", "trainer", "inference", "observer"):
            m.set("grpo_packer_peers", len(roles.get(role, [])), actor=role)
        peers = [(role, beat.name, beat.metrics_url) for role, beats in roles.items() for beat in beats]
        self._targets.follow([self.metrics_target, *peers])
        if self._store.path != ":memory:":
            m.set("grpo_packer_ledger_bytes", Path(self._store.path).stat().st_size)

    def _count_up(self, name: str, total: float, **labels: str) -> None:
        """Bring a counter to a total that is counted elsewhere; a restarted packer starts with the ledger's total."""
        key = name + str(labels)
        self._metrics.count(name, max(0.0, total - self._counted.get(key, 0.0)), **labels)
        self._counted[key] = total

    def _add_tokens(self, what: str, amount: int) -> None:
        if amount > 0:
            self._values["tokens"][what] = self._values["tokens"].get(what, 0) + amount
            self._dirty.add("tokens")

    def _note_update(self, seconds: dict[str, float]) -> None:
        for part, value in seconds.items():
            self._update_seconds.setdefault(part, []).append(value)

    def _stamp(self, what: str) -> float:
        now = self._values["times"][what] = time.time()
        self._dirty.add("times")
        return now


def step_values(step: int, groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """What the packer knows of a step: rewards, lengths, lag."""
    rewards = np.concatenate([group.rewards_G for group in groups])
    lengths = np.concatenate([group.lengths_G for group in groups])
    lags = [lag_of(step, group.oldest_version) for group in groups]
    scored = rewards[~np.isnan(rewards)]
    values = {
        "reward_mean": float(scored.mean()) if scored.size else math.nan,
        "reward_std": float(scored.std()) if scored.size else math.nan,
        "reward_unscorable": float(np.isnan(rewards).mean()),
        "groups_without_variance": float(np.mean([np.ptp(group.advantages_G) == 0 for group in groups])),
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
        values[f"reward/{name}"] = float(np.nanmean(scores)) if not np.isnan(scores).all() else math.nan
    return values


def evaluate(groups: Sequence[ScoredGroup]) -> dict[str, dict[str, float]]:
    """Results per environment; unscorable completions count as no match and stay out of the mean reward.

    The last function of an evaluation group is `eval.exact_match` (see `actors.reward`).
    """
    results = {}
    for label in dict.fromkeys(group.environment for group in groups):
        mine = [group for group in groups if group.environment == label]
        matches = np.concatenate([group.rewards_FG[-1] for group in mine])
        rewards = np.concatenate([group.rewards_G for group in mine])
        scored = rewards[~np.isnan(rewards)]
        results[label] = {
            "exact_match": float((matches == 1.0).mean()),
            "mean_reward": float(scored.mean()) if scored.size else 0.0,
            "num_prompts": len(mine),
        }
    return results


def _mean(values: Iterable[float]) -> float | None:
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return statistics.fmean(numbers) if numbers else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
