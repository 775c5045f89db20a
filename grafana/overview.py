"""Is it healthy, and what limits it."""

from grafana.panels import MATCH, TRAIN, Dashboard, Row, number, plot, rate

PHASES = rate("grpo_trainer_step_seconds_total", "run, phase")
LIVE = f"sum by (run, role) (grpo_packer_peers{{{MATCH}}})"

OVERVIEW = Dashboard(
    "grpo-overview",
    "GRPO overview",
    "Is it healthy, and what limits it.",
    (
        Row(
            "Health",
            (
                number("Step", "Steps trained by all ranks.", "none", f"max by (run) (grpo_packer_step{{{MATCH}}})"),
                number(
                    "Progress",
                    "Steps trained of trainer.max_steps.",
                    "percentunit",
                    f"max by (run) (grpo_packer_step{{{MATCH}}} / grpo_packer_max_steps{{{MATCH}}})",
                ),
                number(
                    "Steps per hour",
                    "Of the last 15 minutes. 0: read docs/reference/operations.md, GrpoNoStep.",
                    "none",
                    f"max by (run) (clamp_min(delta(grpo_packer_step{{{MATCH}}}[15m]), 0)) * 4",
                ),
                number(
                    "Reward",
                    "Mean reward of the newest step's completions.",
                    "none",
                    f"max by (run) (grpo_packer_reward_mean{{{MATCH}}})",
                ),
                number(
                    "Trained tokens",
                    "Completion tokens in the loss, per second, all ranks.",
                    "cps",
                    rate("grpo_trainer_tokens_total", "run"),
                ),
                number(
                    "Goodput",
                    "Trained ÷ generated tokens; GRPO cost has the rest by cause.",
                    "percentunit",
                    f"{rate('grpo_trainer_tokens_total', 'run')} / "
                    f"{rate('grpo_inference_generated_tokens_total', 'run')}",
                ),
                number(
                    "Trainer idle",
                    "Share of its time that the trainer waits for a batch. High: sampling or scoring is the limit.",
                    "percentunit",
                    rate("grpo_trainer_step_seconds_total", "run", f'{MATCH}, phase="wait_batch"', "avg"),
                    ((0.3, "yellow"), (0.6, "red")),
                ),
                number(
                    "Packer silent",
                    "Longest time for which an actor has not heard the packer.",
                    "s",
                    f"max by (run) (grpo_bus_packer_silent_seconds{{{MATCH}}})",
                    ((5, "yellow"), (30, "red")),
                ),
            ),
        ),
        Row(
            "What limits it",
            (
                plot(
                    "Trainer's time",
                    "Seconds per second by phase, summed over ranks. Much wait_batch: add engines, rollouts or reward "
                    "actors, or raise packer.max_async_level. Else training is the limit: add ranks.",
                    "percentunit",
                    (PHASES, "{{run}} {{phase}}"),
                    stacked=True,
                ),
                plot(
                    "What groups wait for",
                    "Group tasks of all rollouts, in tasks: engine_answer is sampling itself; engine_choice: no engine "
                    "serves the version; reward_choice: no reward actor takes the group.",
                    "none",
                    (rate("grpo_rollout_wait_seconds_total", "run, cause"), "{{run}} {{cause}}"),
                    stacked=True,
                ),
                plot(
                    "Groups in flight",
                    "Issued: being sampled or scored. Settled: wait for a step. Composed: wait for the trainer. The "
                    "tallest is in front of what limits the run.",
                    "none",
                    (
                        f'sum by (run, state) (grpo_packer_groups{{{TRAIN}, state=~"issued|settled|composed"}})',
                        "{{run}} {{state}}",
                    ),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Who is there",
            (
                plot(
                    "Live actors",
                    "As the packer sees them: those whose lease has not ended. A kind at 0 stops the run.",
                    "none",
                    (LIVE, "{{run}} {{role}}"),
                ),
                plot(
                    "Engines by state",
                    "Only clean ones take new work. A quarantined one takes no new weights until it is restarted.",
                    "none",
                    (f"sum by (run, state) (grpo_packer_engines{{{MATCH}}})", "{{run}} {{state}}"),
                ),
                plot(
                    "Failed attempts",
                    "Attempts at a group that failed in rollouts and reward actors, per second by reason. Three "
                    "failures drop a group as poison.",
                    "cps",
                    (rate("grpo_rollout_failures_total", "run, reason"), "{{run}} rollout {{reason}}"),
                    (rate("grpo_reward_failures_total", "run, reason"), "{{run}} reward {{reason}}"),
                ),
            ),
        ),
        Row(
            "Staying safe",
            (
                plot(
                    "Saved and trained",
                    "Steps trained, and the newest one that a good checkpoint has. The distance is what a crash of the "
                    "trainer trains again.",
                    "none",
                    (f"max by (run) (grpo_packer_step{{{MATCH}}})", "{{run}} trained"),
                    (f"max by (run) (grpo_packer_durable_step{{{MATCH}}})", "{{run}} saved"),
                ),
                plot(
                    "Writes that failed",
                    "Checkpoints and the run's own files, per second. Mostly a full disk; training goes on.",
                    "cps",
                    (
                        rate("grpo_trainer_checkpoints_total", "run", f'{MATCH}, outcome="failed"'),
                        "{{run}} checkpoint",
                    ),
                    (rate("grpo_packer_record_failures_total", "run"), "{{run}} record"),
                ),
                plot(
                    "Scraped",
                    "Whether Prometheus reaches each process that the packer names; 0 for long: "
                    "telemetry.metrics_host, or the process is gone.",
                    "none",
                    ('up{run=~"$run", actor=~"$actor", name=~"$name"}', "{{run}} {{name}}"),
                ),
            ),
        ),
    ),
)
