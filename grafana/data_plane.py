"""Page on edges, queues, lag and drops: places and outcomes of groups."""

from grafana.panels import MATCH, MINE, Dashboard, Row, heatmap, plot, quantile, rate

DATA_PLANE = Dashboard(
    "grpo-data-plane",
    "GRPO data plane",
    "Edges, queues, lag and drops: places and outcomes of groups.",
    (
        Row(
            "Edges",
            (
                plot(
                    "Messages",
                    "Messages per second by edge, at the chosen processes. Both ends of an edge count.",
                    "cps",
                    (rate("grpo_bus_messages_total", "run, actor, edge", MINE), "{{run}} {{actor}} {{edge}}"),
                ),
                plot(
                    "Bytes",
                    "Bytes per second by edge, at the chosen processes. Both ends of an edge count.",
                    "Bps",
                    (rate("grpo_bus_bytes_total", "run, actor, edge", MINE), "{{run}} {{actor}} {{edge}}"),
                ),
                plot(
                    "Refused frames and connections",
                    "Invalid frames and refused connections per second, by reason. Causes: another build, other keys, "
                    "or an unknown process (docs/reference/security.md).",
                    "cps",
                    (rate("grpo_bus_dropped_frames_total", "run, actor, reason", MINE), "{{run}} {{actor}} {{reason}}"),
                    (
                        rate("grpo_bus_refused_connections_total", "run, actor, reason", MINE),
                        "{{run}} {{actor}} {{reason}}",
                    ),
                ),
            ),
        ),
        Row(
            "Queues",
            (
                plot(
                    "Held by rollouts",
                    "Tickets in sampling, at most rollout.max_concurrent_groups per rollout, and sampled groups that "
                    "the packer has not released.",
                    "none",
                    (f"grpo_rollout_held_groups{{{MINE}}}", "{{run}} {{name}}"),
                ),
                plot(
                    "Held by reward actors",
                    "queued: groups that wait for scoring. held: all groups that the packer has not released. A "
                    "growing queue: scoring limits the run.",
                    "none",
                    (f"grpo_reward_queue_groups{{{MINE}}}", "{{run}} {{name}} queued"),
                    (f"grpo_reward_held_groups{{{MINE}}}", "{{run}} {{name}} held"),
                ),
                plot(
                    "Waiting at the packer",
                    "pending batches: batches without room in a trainer rank's queue. oldest group: age in seconds of "
                    "the attempt at the oldest ordinal in flight; with packer.order ordinal a step waits for this "
                    "group.",
                    "none",
                    (f"grpo_packer_pending_batches{{{MATCH}}}", "{{run}} pending batches"),
                    (f"grpo_packer_oldest_group_age_seconds{{{MATCH}}}", "{{run}} oldest group, seconds"),
                ),
            ),
        ),
        Row(
            "Lag",
            (
                heatmap(
                    "Lag of trained groups",
                    "Groups per lag: versions between the oldest token of the group and the weights that its step "
                    "starts from.",
                    "none",
                    "grpo_packer_lag_steps",
                ),
                plot(
                    "Lag and budget",
                    "Largest lag in the newest step, and the budget packer.max_async_level. A lag above the budget is "
                    "a bug with packer.order ordinal, and a slow group with packer.order arrival.",
                    "none",
                    (f"grpo_packer_lag_max{{{MATCH}}}", "{{run}} largest"),
                    (f"grpo_packer_lag_budget_steps{{{MATCH}}}", "{{run}} budget"),
                ),
                plot(
                    "Versions",
                    "Newest version published by the trainer, newest version served, and the version of each engine. "
                    "If the distance grows, weights do not arrive.",
                    "none",
                    (f"max by (run) (grpo_trainer_policy_version{{{MATCH}}})", "{{run}} published"),
                    (f"grpo_packer_served_version{{{MATCH}}}", "{{run}} served"),
                    (f"grpo_inference_policy_version{{{MATCH}}}", "{{run}} {{name}}"),
                ),
            ),
        ),
        Row(
            "Outcomes of groups",
            (
                plot(
                    "Issued and settled",
                    "Ordinals issued, groups sampled and groups scored, per second. The three rates are equal if "
                    "nothing is lost.",
                    "cps",
                    (rate("grpo_packer_issued_total", "run, purpose"), "{{run}} issued {{purpose}}"),
                    (rate("grpo_rollout_groups_total", "run, purpose"), "{{run}} sampled {{purpose}}"),
                    (rate("grpo_reward_groups_total", "run, purpose"), "{{run}} scored {{purpose}}"),
                ),
                plot(
                    "Dropped groups",
                    "Ordinals dropped for good, per second by reason. Filters cause zero_variance, too_easy and "
                    "too_hard; poison and stale are problems.",
                    "cps",
                    (rate("grpo_packer_drops_total", "run, purpose, reason"), "{{run}} {{purpose}} {{reason}}"),
                ),
                plot(
                    "Repeated work",
                    "Events per second. reissued: attempts after the first. holder died: tickets whose holder died or "
                    "lost its lease. copy: scored groups of settled ordinals. resampled in vain: groups that were "
                    "trained although a filter rejects them.",
                    "cps",
                    (rate("grpo_packer_reissued_total", "run"), "{{run}} reissued"),
                    (rate("grpo_packer_holder_deaths_total", "run"), "{{run}} holder died"),
                    (rate("grpo_packer_copies_dropped_total", "run"), "{{run}} copy"),
                    (rate("grpo_packer_resampled_in_vain_total", "run"), "{{run}} resampled in vain"),
                ),
            ),
        ),
        Row(
            "Group times and ledger",
            (
                plot(
                    "Sampling and scoring",
                    "Seconds per group, median and 99th percentile over all processes.",
                    "s",
                    (quantile(0.5, "grpo_rollout_request_seconds", "run"), "{{run}} sampled p50"),
                    (quantile(0.99, "grpo_rollout_request_seconds", "run"), "{{run}} sampled p99"),
                    (quantile(0.5, "grpo_reward_score_seconds", "run"), "{{run}} scored p50"),
                    (quantile(0.99, "grpo_reward_score_seconds", "run"), "{{run}} scored p99"),
                ),
                plot(
                    "Ledger commit",
                    "Seconds per commit, median and 99th percentile. The packer sends no message before its commit.",
                    "s",
                    (quantile(0.5, "grpo_packer_commit_seconds", "run"), "{{run}} p50"),
                    (quantile(0.99, "grpo_packer_commit_seconds", "run"), "{{run}} p99"),
                ),
                plot(
                    "Ledger size",
                    "Size of the ledger's file. The size varies between checkpoints, and does not grow from day to "
                    "day.",
                    "bytes",
                    (f"grpo_packer_ledger_bytes{{{MATCH}}}", "{{run}}"),
                ),
            ),
        ),
    ),
)
