"""Edges, queues, lag, drops: where groups are, and what becomes of them."""

from grafana.panels import MATCH, MINE, Dashboard, Row, heatmap, plot, quantile, rate

DATA_PLANE = Dashboard(
    "grpo-data-plane",
    "GRPO data plane",
    "Edges, queues, lag, drops: where groups are, and what becomes of them.",
    (
        Row(
            "Edges",
            (
                plot(
                    "Messages",
                    "Per second, by edge, at the processes chosen; both ends of an edge count what they see.",
                    "cps",
                    (rate("grpo_bus_messages_total", "run, actor, edge", MINE), "{{run}} {{actor}} {{edge}}"),
                ),
                plot(
                    "Bytes",
                    "Per second, likewise.",
                    "Bps",
                    (rate("grpo_bus_bytes_total", "run, actor, edge", MINE), "{{run}} {{actor}} {{edge}}"),
                ),
                plot(
                    "Refused",
                    "Frames that were no message, and connections that were not let in, per second by reason. Not 0: "
                    "another build, other keys, or a stranger (docs/reference/security.md).",
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
                    "Tickets being sampled, and groups kept until the packer releases them. At "
                    "rollout.max_concurrent_groups: rollouts are full.",
                    "none",
                    (f"grpo_rollout_held_groups{{{MINE}}}", "{{run}} {{name}}"),
                ),
                plot(
                    "Held by reward actors",
                    "queued: read and not yet scored; held: all that the packer has not released. A growing queue: "
                    "scoring is the limit.",
                    "none",
                    (f"grpo_reward_queue_groups{{{MINE}}}", "{{run}} {{name}} queued"),
                    (f"grpo_reward_held_groups{{{MINE}}}", "{{run}} {{name}} held"),
                ),
                plot(
                    "At the packer",
                    "Batches that find no room in a trainer rank's queue, and the age of the attempt at the oldest "
                    "ordinal in flight, in seconds. With order ordinal a step waits for the slowest group.",
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
                    "Groups by lag (steps between the oldest token's version and the step that takes it).",
                    "none",
                    "grpo_packer_lag_steps",
                ),
                plot(
                    "Lag and budget",
                    "Largest lag in the newest step, and packer.max_async_level. Above it with order ordinal: a fault; "
                    "with arrival: slow groups.",
                    "none",
                    (f"grpo_packer_lag_max{{{MATCH}}}", "{{run}} largest"),
                    (f"grpo_packer_lag_budget_steps{{{MATCH}}}", "{{run}} budget"),
                ),
                plot(
                    "Versions",
                    "Newest version published by the trainer, newest one served, and what each engine serves. A "
                    "growing distance: weights do not arrive.",
                    "none",
                    (f"max by (run) (grpo_trainer_policy_version{{{MATCH}}})", "{{run}} published"),
                    (f"grpo_packer_served_version{{{MATCH}}}", "{{run}} served"),
                    (f"grpo_inference_policy_version{{{MATCH}}}", "{{run}} {{name}}"),
                ),
            ),
        ),
        Row(
            "What becomes of groups",
            (
                plot(
                    "Issued and settled",
                    "Ordinals issued, groups sampled and groups scored, per second; all alike when nothing is lost.",
                    "cps",
                    (rate("grpo_packer_issued_total", "run, purpose"), "{{run}} issued {{purpose}}"),
                    (rate("grpo_rollout_groups_total", "run, purpose"), "{{run}} sampled {{purpose}}"),
                    (rate("grpo_reward_groups_total", "run, purpose"), "{{run}} scored {{purpose}}"),
                ),
                plot(
                    "Dropped",
                    "Ordinals dropped for good, per second by reason. zero_variance, too_easy, too_hard are filters at "
                    "work; poison and stale are trouble.",
                    "cps",
                    (rate("grpo_packer_drops_total", "run, purpose, reason"), "{{run}} {{purpose}} {{reason}}"),
                ),
                plot(
                    "Done again",
                    "Per second: attempts beyond the first, tickets of holders that died, copies of settled groups, "
                    "groups taken though a filter rejects them.",
                    "cps",
                    (rate("grpo_packer_reissued_total", "run"), "{{run}} reissued"),
                    (rate("grpo_packer_holder_deaths_total", "run"), "{{run}} holder died"),
                    (rate("grpo_packer_copies_dropped_total", "run"), "{{run}} copy"),
                    (rate("grpo_packer_resampled_in_vain_total", "run"), "{{run}} resampled in vain"),
                ),
            ),
        ),
        Row(
            "Time of a group, and the ledger",
            (
                plot(
                    "Sampling and scoring",
                    "Seconds of one group, median and 99th percentile over all processes.",
                    "s",
                    (quantile(0.5, "grpo_rollout_request_seconds", "run"), "{{run}} sampled p50"),
                    (quantile(0.99, "grpo_rollout_request_seconds", "run"), "{{run}} sampled p99"),
                    (quantile(0.5, "grpo_reward_score_seconds", "run"), "{{run}} scored p50"),
                    (quantile(0.99, "grpo_reward_score_seconds", "run"), "{{run}} scored p99"),
                ),
                plot(
                    "Ledger commit",
                    "Seconds of one commit, median and 99th percentile. Nothing leaves the packer before its commit.",
                    "s",
                    (quantile(0.5, "grpo_packer_commit_seconds", "run"), "{{run}} p50"),
                    (quantile(0.99, "grpo_packer_commit_seconds", "run"), "{{run}} p99"),
                ),
                plot(
                    "Ledger size",
                    "Of its file. It swings with checkpoints, and does not grow from day to day.",
                    "bytes",
                    (f"grpo_packer_ledger_bytes{{{MATCH}}}", "{{run}}"),
                ),
            ),
        ),
    ),
)
