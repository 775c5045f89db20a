"""Table of all metrics of all actors; docs/reference/metrics.md is generated from it.

Units are base units. Counters end in `_total` and start at 0. All label values are listed here, so that rates are right
from the first scrape on. Labels have few values: never a step or an ordinal.
"""

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from bus.counts import DROP_REASONS, REFUSALS, EdgeCounts
from schemas.messages import EngineState, EnvironmentFailure, StopCondition

Actor = Literal["rollout", "reward", "packer", "trainer", "inference", "callbacks", "uploader", "tracker"]
ACTORS: tuple[Actor, ...] = get_args(Actor)

# upper limits of histogram buckets; FAST and SLOW in seconds, e.g. for commits and for requests to engines
# two buckets per power of ten: factors of about 3
FAST_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SLOW_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
# one for each lag up to the default of packer.max_off_policy_steps
LAG_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
# 0.99 parts completions with the full reward of 1 from the nearly perfect ones
REWARD_BUCKETS = (-1.0, -0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0, 2.0)
# label values: each tuple has all values used by the code, so that every series exists from the start
PURPOSES = ("train", "eval")
ATTEMPT_FAILURES = (
    *("timeout", "engine", "environment", "prompt_too_long", "too_large", "internal"),
    *get_args(EnvironmentFailure),
)
CALL_OUTCOMES = ("answered", "repeated", "refused")
"""Outcomes of agents' calls to their sessions."""
WORKER_EVENTS = ("restart", "timeout", "silent", "processes")
SCORE_FAILURES = ("reward_raised", "reward_timeout", "reward_invalid", "reward_lost", "too_large", "internal")
COMPLETION_FILTERS = ("gibberish", "repetition", "truncated")
DROPS = ("poison", "stale", "eval_void", "forked", "zero_variance", "too_easy", "too_hard")
POOLS = ("easy", "hard")
VERDICTS = ("settled", "filtered", "copy", "failed")
TURN_HOLDERS = ("trainer", "engines", "handover")
ENGINE_STATES: tuple[EngineState, ...] = get_args(EngineState)
STEP_GAUGES = (
    "reward_mean",
    "reward_std",
    "groups_without_variance",
    "completion_tokens_mean",
    "truncated_fraction",
    "lag_max",
)
"""Columns of metrics.jsonl that the packer shows as gauges, for the newest recorded step."""
TRAJECTORY_GAUGES = ("turns_mean", "tool_calls_mean", "samples_per_completion", "failed_fraction")
"""Columns of the steps that have trajectories, shown likewise; NaN for the other steps."""
CALLBACK_EVENTS = (
    *("on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end", "on_log", "on_epoch_end"),
    *("on_evaluate", "on_save", "on_train_end"),
)
GROUP_STATES = ("issued", "settled", "composed", "trained", "durable", "dropped")


@dataclass(frozen=True)
class Spec:
    """Definition of a metric. `labels` are pairs of a name and all its values; no values: known only at run time."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def actor(self) -> str:
        """Actor that exports the metric, taken from the name."""
        return self.name.split("_")[1]


def _labels(**values: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple(values.items())


SPECS = (
    Spec(
        "grpo_rollout_groups_total", "counter", "Groups sampled and sent to a reward actor.", _labels(purpose=PURPOSES)
    ),
    Spec(
        "grpo_rollout_failures_total",
        "counter",
        "Attempts at a group that failed here.",
        _labels(reason=ATTEMPT_FAILURES),
    ),
    Spec("grpo_rollout_generated_tokens_total", "counter", "Completion tokens received from engines."),
    Spec("grpo_rollout_held_groups", "gauge", "Tickets being sampled and groups kept until the packer releases them."),
    Spec(
        "grpo_rollout_wait_seconds_total",
        "counter",
        "Time of group tasks by cause of waiting.",
        _labels(cause=("engine_choice", "engine_answer", "reward_choice")),
    ),
    Spec(
        "grpo_rollout_trajectories_total",
        "counter",
        "Trajectories played with an environment, by the reason of their end.",
        _labels(environment=(), stop=get_args(StopCondition)),
    ),
    Spec(
        "grpo_rollout_cut_prompts_total",
        "counter",
        "Prompts cut to environments[].max_prompt_tokens.",
        _labels(environment=()),
    ),
    Spec("grpo_rollout_turns_total", "counter", "Turns of the model in environments.", _labels(environment=())),
    Spec(
        "grpo_rollout_branches_total",
        "counter",
        "Turns whose prompt does not continue the turn before, because the history was edited.",
        _labels(environment=()),
    ),
    Spec(
        "grpo_rollout_forced_turns_total",
        "counter",
        "Turns whose form the environment has demanded; their logprobs are of a cut distribution.",
        _labels(environment=()),
    ),
    Spec(
        "grpo_rollout_tool_calls_total",
        "counter",
        "Tool calls of the model: answered, failed in the environment, or malformed.",
        _labels(environment=(), outcome=("answered", "failed", "malformed")),
    ),
    Spec(
        "grpo_rollout_trajectory_seconds_total",
        "counter",
        "Time of trajectories by place: waiting for the model or for the environment.",
        _labels(environment=(), place=("model", "environment")),
    ),
    Spec(
        "grpo_rollout_worker_events_total",
        "counter",
        "Ends of environment workers: restarts, and kills at a time limit, in silence, or for too many processes.",
        _labels(environment=(), event=WORKER_EVENTS),
    ),
    Spec(
        "grpo_rollout_session_calls_total",
        "counter",
        "Calls of agents: answered, repeated (answered from the record), or refused.",
        _labels(environment=(), outcome=CALL_OUTCOMES),
    ),
    Spec("grpo_rollout_sessions_open", "gauge", "Trajectories of agents under way.", _labels(environment=())),
    Spec("grpo_rollout_workers_ready", "gauge", "Environment workers that have loaded.", _labels(environment=())),
    Spec(
        "grpo_rollout_request_seconds", "histogram", "Time from request to completions of one group.", (), SLOW_BUCKETS
    ),
    Spec("grpo_reward_groups_total", "counter", "Groups scored.", _labels(purpose=PURPOSES)),
    Spec("grpo_reward_failures_total", "counter", "Groups that could not be scored.", _labels(reason=SCORE_FAILURES)),
    Spec(
        "grpo_reward_unscorable_completions_total",
        "counter",
        "Completions for which every reward function returned None.",
        _labels(purpose=PURPOSES),
    ),
    Spec(
        "grpo_reward_filtered_completions_total",
        "counter",
        "Train completions found by a filter, enforced or not; truncated ones always, others when configured.",
        _labels(filter=COMPLETION_FILTERS),
    ),
    Spec(
        "grpo_reward_masked_completions_total",
        "counter",
        "Train completions masked out of the loss by filters that are enforced.",
    ),
    Spec(
        "grpo_reward_timeouts_total",
        "counter",
        "Times that functions of a group were late, by what came next: called again, counted as None or 0, or failure.",
        _labels(outcome=("retried", "none", "zero", "fail")),
    ),
    Spec("grpo_reward_held_groups", "gauge", "Groups read or scored and not yet released by the packer."),
    Spec("grpo_reward_queue_groups", "gauge", "Groups read and not yet scored."),
    Spec("grpo_reward_score_seconds", "histogram", "Time to score one group.", (), SLOW_BUCKETS),
    Spec("grpo_reward_value", "histogram", "Rewards of train completions, weighted sum.", (), REWARD_BUCKETS),
    Spec(
        "grpo_packer_groups",
        "gauge",
        "Groups of the run by state.",
        _labels(purpose=PURPOSES, state=GROUP_STATES),
    ),
    Spec("grpo_packer_issued_total", "counter", "Ordinals issued.", _labels(purpose=PURPOSES)),
    Spec("grpo_packer_drops_total", "counter", "Ordinals dropped for good.", _labels(purpose=PURPOSES, reason=DROPS)),
    Spec(
        "grpo_packer_resampled_in_vain_total",
        "counter",
        "Groups taken though a filter rejects them, after packer.max_resample_times others in their place.",
    ),
    Spec(
        "grpo_packer_long_prompts",
        "gauge",
        "Train examples left out so far, since their prompts exceed environments[].max_prompt_tokens.",
        _labels(environment=()),
    ),
    Spec(
        "grpo_packer_level",
        "gauge",
        "Level of the examples drawn next (environments[].curriculum); 0 in an environment without levels.",
        _labels(environment=()),
    ),
    Spec("grpo_packer_pool_examples", "gauge", "Examples set aside, by difficulty pool.", _labels(pool=POOLS)),
    Spec("grpo_packer_copies_dropped_total", "counter", "Scored groups of ordinals that were settled already."),
    Spec("grpo_packer_reissued_total", "counter", "Attempts beyond an ordinal's first."),
    Spec("grpo_packer_holder_deaths_total", "counter", "Tickets whose holder died or lost its lease."),
    Spec(
        "grpo_packer_completion_tokens_total",
        "counter",
        "Completion tokens of scored groups, by what became of them; failed: judged unfit, so the attempt has failed.",
        _labels(purpose=PURPOSES, verdict=VERDICTS),
    ),
    Spec("grpo_packer_lag_steps", "histogram", "Lag of groups in the steps that took them.", (), LAG_BUCKETS),
    Spec("grpo_packer_lag_budget_steps", "gauge", "packer.max_async_level: the lag that admission allows."),
    Spec("grpo_packer_step", "gauge", "Steps trained by all ranks in the live lineage."),
    Spec("grpo_packer_max_steps", "gauge", "trainer.max_steps: where the run ends."),
    Spec("grpo_packer_durable_step", "gauge", "Newest step with a good checkpoint on all ranks."),
    Spec(
        "grpo_packer_oldest_group_age_seconds", "gauge", "Age of the current attempt at the oldest ordinal in flight."
    ),
    Spec("grpo_packer_reward_mean", "gauge", "Mean reward of the newest step's completions."),
    Spec("grpo_packer_reward_std", "gauge", "Standard deviation of the rewards of the newest step's completions."),
    Spec("grpo_packer_groups_without_variance", "gauge", "Share of the newest step's groups that teach nothing."),
    Spec("grpo_packer_completion_tokens_mean", "gauge", "Mean length of the newest step's completions."),
    Spec("grpo_packer_truncated_fraction", "gauge", "Share of the newest step's completions cut at max_tokens."),
    Spec("grpo_packer_lag_max", "gauge", "Largest lag of the newest step's groups, in steps."),
    Spec("grpo_packer_turns_mean", "gauge", "Mean number of turns of the newest step's trajectories; NaN: none."),
    Spec(
        "grpo_packer_tool_calls_mean",
        "gauge",
        "Mean number of tool calls of the newest step's trajectories; NaN: none.",
    ),
    Spec(
        "grpo_packer_samples_per_completion",
        "gauge",
        "Rows trained per trajectory of the newest step, 1 without branches; NaN: none.",
    ),
    Spec(
        "grpo_packer_failed_fraction",
        "gauge",
        "Share of the newest step's trajectories whose environment failed; NaN: none.",
    ),
    Spec(
        "grpo_packer_function_reward_mean",
        "gauge",
        "Mean of one reward function over the newest step's completions, before its weight.",
        _labels(function=()),  # no values: names of the user's functions are known only at run time
    ),
    Spec("grpo_packer_eval_version", "gauge", "Version of the newest evaluation; -1: none yet."),
    Spec(
        "grpo_packer_eval_exact_match",
        "gauge",
        "Share of the newest evaluation's completions that match exactly; NaN: not measured.",
        _labels(environment=()),
    ),
    Spec(
        "grpo_packer_eval_mean_reward",
        "gauge",
        "Mean reward of the newest evaluation's completions; NaN: none could be scored.",
        _labels(environment=()),
    ),
    Spec(
        "grpo_packer_peers",
        "gauge",
        "Live peers.",
        _labels(role=("rollout", "reward", "trainer", "inference", "observer")),
    ),
    Spec(
        "grpo_packer_scale_wanted",
        "gauge",
        "Processes that a role should have by what limits the run (scale); NaN: the role keeps its number.",
        _labels(role=("inference", "reward", "rollout")),
    ),
    Spec(
        "grpo_packer_engines",
        "gauge",
        "Live engines by state; quarantined: takes no new weights until it is restarted.",
        _labels(state=ENGINE_STATES),
    ),
    Spec(
        "grpo_packer_turn",
        "gauge",
        "1 for the holder of the turn on shared devices (up.colocate: turns); handover: memory is being given back.",
        _labels(holder=TURN_HOLDERS),
    ),
    Spec("grpo_packer_served_version", "gauge", "Newest version of an engine that takes new work; -1: none."),
    Spec("grpo_packer_commit_seconds", "histogram", "Time of one ledger commit.", (), FAST_BUCKETS),
    Spec("grpo_packer_ledger_bytes", "gauge", "Size of the ledger's file, and of its files of large payloads."),
    Spec("grpo_packer_pending_batches", "gauge", "Batches that wait for room in a trainer rank's queue."),
    Spec(
        "grpo_packer_record_failures_total",
        "counter",
        "Writes to the run's files that failed, as on a full disk; each is tried again about every second.",
    ),
    Spec(
        "grpo_packer_sample_images_left_out_total",
        "counter",
        "Images of samples not kept, since those kept fill telemetry.sample_images_bytes.",
    ),
    Spec("grpo_trainer_steps_total", "counter", "Steps trained."),
    Spec("grpo_trainer_tokens_total", "counter", "Loss-mask tokens trained."),
    Spec(
        "grpo_trainer_step_seconds_total",
        "counter",
        "Time by phase of the loop.",
        _labels(phase=("wait_batch", "forward_backward", "optimizer", "publish", "checkpoint")),
    ),
    Spec(
        "grpo_trainer_weight_broadcasts_total",
        "counter",
        "Updates of the rendezvous channel; abandoned ones are repeated.",
        _labels(outcome=("sent", "abandoned")),
    ),
    Spec("grpo_trainer_weight_wire_seconds_total", "counter", "Time of the updates that were sent."),
    Spec(
        "grpo_trainer_checkpoints_total",
        "counter",
        "Checkpoints by outcome; a failed one is tried again at the next interval.",
        _labels(outcome=("saved", "failed")),
    ),
    Spec(
        "grpo_trainer_checkpoint_write_seconds",
        "histogram",
        "Seconds from snapshot to a checkpoint that has been read back, in the background.",
        buckets=SLOW_BUCKETS,
    ),
    Spec("grpo_trainer_policy_version", "gauge", "Version of the newest published policy."),
    Spec("grpo_trainer_loss", "gauge", "Loss of the newest step."),
    Spec("grpo_trainer_grad_norm", "gauge", "Gradient norm of the newest step before clipping."),
    Spec("grpo_trainer_learning_rate", "gauge", "Learning rate of the newest step."),
    Spec("grpo_trainer_mismatch_kl", "gauge", "KL of trainer and engine on the newest step's tokens (k3, nats)."),
    Spec(
        "grpo_trainer_mismatch_abs",
        "gauge",
        "Mean difference of trainer's and engine's logprobs on the newest step's tokens (nats), by the weights that "
        "sampled them: those that the step starts from, or older ones.",
        _labels(weights=("current", "older")),
    ),
    Spec("grpo_trainer_entropy", "gauge", "Entropy of the policy on the newest step's tokens (nats)."),
    Spec(
        "grpo_trainer_masked_fraction",
        "gauge",
        "Share of loss-mask tokens that the loss dropped, by cause.",
        _labels(cause=("any", "low", "high", "geo", "sequence")),
    ),
    Spec("grpo_inference_policy_version", "gauge", "Version served; -1: none yet."),
    Spec("grpo_inference_generated_tokens_total", "counter", "Tokens sampled."),
    Spec("grpo_inference_running_completions", "gauge", "Completions being decoded."),
    Spec("grpo_inference_waiting_completions", "gauge", "Completions that wait for a slot."),
    Spec("grpo_inference_busy_seconds_total", "counter", "Time in which the engine computed."),
    Spec(
        "grpo_inference_weight_updates_total",
        "counter",
        "Weight updates.",
        _labels(outcome=("loaded", "failed", "abandoned")),
    ),
    Spec(
        "grpo_inference_weight_update_seconds",
        "histogram",
        "Parts of a weight update.",
        _labels(part=("pause", "wire", "load")),
        FAST_BUCKETS,
    ),
    Spec(
        "grpo_callbacks_failures_total",
        "counter",
        "Exceptions of callbacks of the user, by event.",
        _labels(event=CALLBACK_EVENTS),
    ),
    Spec("grpo_callbacks_told_step", "gauge", "Newest step whose events have been told to callbacks."),
    Spec("grpo_callbacks_behind_steps", "gauge", "Steps trained whose events have not been told to callbacks."),
    Spec(
        "grpo_uploader_pushes_total",
        "counter",
        "Attempts to push a checkpoint to the hub; refused: the hub does not take it, missed: the checkpoint was "
        "removed before.",
        _labels(outcome=("pushed", "failed", "refused", "missed")),
    ),
    Spec("grpo_uploader_pushed_step", "gauge", "Newest step whose checkpoint is on the hub; 0: none yet."),
    Spec("grpo_uploader_pending_checkpoints", "gauge", "Checkpoints that are to be pushed."),
    Spec("grpo_tracker_failures_total", "counter", "Failures of the tracker; each is followed by another attempt."),
    Spec("grpo_tracker_sent_step", "gauge", "Newest step sent to the tracker."),
    Spec("grpo_tracker_behind_steps", "gauge", "Steps recorded that the tracker has not been sent."),
)
BUS_SPECS = (
    Spec("grpo_bus_messages_total", "counter", "Messages over an edge, at this end.", _labels(edge=())),
    Spec("grpo_bus_bytes_total", "counter", "Bytes over an edge, at this end.", _labels(edge=())),
    Spec(
        "grpo_bus_dropped_frames_total",
        "counter",
        "Frames that were no valid message, or a message of another run or an older term.",
        _labels(edge=(), reason=DROP_REASONS),
    ),
    Spec("grpo_bus_packer_silent_seconds", "gauge", "Time since the packer was last heard."),
    Spec(
        "grpo_bus_refused_connections_total",
        "counter",
        "Connections refused by this actor.",
        _labels(reason=tuple(REFUSALS)),
    ),
)
PROCESS_SPECS = (
    Spec("process_cpu_seconds_total", "counter", "CPU time of the actor's process; on Linux."),
    Spec("process_resident_memory_bytes", "gauge", "Memory of the actor's process; on Linux."),
    Spec("process_open_fds", "gauge", "Open file descriptors of the actor's process; on Linux."),
    Spec("process_start_time_seconds", "gauge", "Unix time of the start of the actor's process; on Linux."),
)
"""Metrics of prometheus-client itself, as far as dashboards use them; named alike in every Prometheus client."""
ALL_SPECS = (*SPECS, *BUS_SPECS, *PROCESS_SPECS)


class Metrics:
    """Metrics of an actor, in a registry of their own. All label values are present from the start.

    Args:
        actor: kind of the actor; selects the metrics by their names.
    """

    def __init__(self, actor: Actor) -> None:
        self.registry = CollectorRegistry()
        # the collector reads /proc, so has values on Linux only
        ProcessCollector(registry=self.registry)
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for spec in SPECS:
            # series of the other actors would stand at 0 here for good
            if spec.actor != actor:
                continue
            names = [name for name, _ in spec.labels]
            metric: Counter | Gauge | Histogram
            if spec.kind == "counter":
                metric = self._counters[spec.name] = Counter(spec.name, spec.help, names, registry=self.registry)
            elif spec.kind == "gauge":
                metric = self._gauges[spec.name] = Gauge(spec.name, spec.help, names, registry=self.registry)
            else:
                metric = Histogram(spec.name, spec.help, names, buckets=spec.buckets, registry=self.registry)
                self._histograms[spec.name] = metric
            # makes every series at once, with 0: a series that appears later would look like a jump to Prometheus
            for values in product(*(values for _, values in spec.labels)) if names else ():
                metric.labels(*values)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add `amount` to a counter."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram."""
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(value)

    def watch_bus(
        self, edges: Callable[[], Iterable[EdgeCounts]], silent_seconds: Callable[[], float] | None = None
    ) -> None:
        """Export the counts of the bus, read at each scrape.

        Args:
            edges: returns the counts of all sockets.
            silent_seconds: returns the seconds since the packer was heard; None for the packer itself.
        """
        self.registry.register(_BusCollector(edges))
        if silent_seconds is not None:
            spec = BUS_SPECS[3]  # grpo_bus_packer_silent_seconds, the only gauge among them
            Gauge(spec.name, spec.help, registry=self.registry).set_function(silent_seconds)


class _BusCollector(Collector):
    def __init__(self, edges: Callable[[], Iterable[EdgeCounts]]) -> None:
        self._edges = edges

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the counts, summed by edge: a rollout has a socket per reward actor, but only one edge for groups."""
        # made again for each scrape, since sockets come and go
        families = [
            CounterMetricFamily(s.name, s.help, labels=[n for n, _ in s.labels])
            for s in BUS_SPECS
            if s.kind == "counter"
        ]
        refused: Counts[str] = Counts()
        totals: dict[str, EdgeCounts] = {}
        for counts in self._edges():
            total = totals.setdefault(counts.edge, EdgeCounts(counts.edge))
            total.num_messages += counts.num_messages
            total.num_bytes += counts.num_bytes
            total.dropped.update(counts.dropped)
            refused.update(counts.refused)
        for edge, total in totals.items():
            # families are in the order of the counters in BUS_SPECS
            families[0].add_metric([edge], total.num_messages)
            families[1].add_metric([edge], total.num_bytes)
            for reason in DROP_REASONS:
                families[2].add_metric([edge, reason], total.dropped[reason])
        for reason in REFUSALS:
            families[3].add_metric([reason], refused[reason])
        yield from families


def document() -> str:
    """Return the text of docs/reference/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Made from `actors/telemetry/metrics.py` (`make docs`). Base units; counters start at 0.",
        "",
        "| Name | Kind | Labels | Tells |",
        "|---|---|---|---|",
    ]
    for spec in ALL_SPECS:
        labels = "; ".join(f"{name}: {', '.join(values)}" if values else name for name, values in spec.labels)
        lines.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(lines) + "\n"
