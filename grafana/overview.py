"""Page on health and bottleneck of a run."""

from grafana.panels import MATCH, TRAIN, Dashboard, Row, number, plot, rate

PHASES = rate("grpo_trainer_step_seconds_total", "run, phase")
LIVE = f"sum by (run, role) (grpo_packer_peers{{{MATCH}}})"

OVERVIEW = Dashboard(
    "grpo-overview",
    "GRPO overview",
    "Health of the run, and the part that limits its speed.",
    (
        Row(
            "Health",
            (
                number("Step", "Steps trained by all ranks.", "none", f"max by (run) (grpo_packer_step{{{MATCH}}})"),
                number(
                    "Progress",
                    "Share of trainer.max_steps that is trained.",
                    "percentunit",
                    f"max by (run) (grpo_packer_step{{{MATCH}}} / grpo_packer_max_steps{{{MATCH}}})",
                ),
                number(
                    "Steps per hour",
                    "Rate over the last 15 minutes. At 0 see GrpoNoStep in docs/reference/operations.md.",
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
                    "Completion tokens in the loss per second, summed over ranks.",
                    "cps",
                    rate("grpo_trainer_tokens_total", "run"),
                ),
                number(
                    "Goodput",
                    "Trained ÷ generated tokens. The page GRPO cost splits the remaining tokens by cause.",
                    "percentunit",
                    f"{rate('grpo_trainer_tokens_total', 'run')} / "
                    f"{rate('grpo_inference_generated_tokens_total', 'run')}",
                ),
                number(
                    "Trainer idle",
                    "Share of time in which the trainer waits for a batch. A high share: sampling or scoring limits "
                    "the run.",
                    "percentunit",
                    rate("grpo_trainer_step_seconds_total", "run", f'{MATCH}, phase="wait_batch"', "avg"),
                    ((0.3, "yellow"), (0.6, "red")),
                ),
                number(
                    "Packer silent",
                    "Longest time since an actor last heard from the packer.",
                    "s",
                    f"max by (run) (grpo_bus_packer_silent_seconds{{{MATCH}}})",
                    ((5, "yellow"), (30, "red")),
                ),
            ),
        ),
        Row(
            "Bottleneck",
            (
                plot(
                    "Trainer time by phase",
                    "Seconds per second, summed over ranks. If wait_batch is large, add engines, rollouts or reward "
                    "actors, or raise packer.max_async_level. Otherwise training limits the run: add ranks.",
                    "percentunit",
                    (PHASES, "{{run}} {{phase}}"),
                    stacked=True,
                ),
                plot(
                    "Waiting time of groups",
                    "Number of group tasks of all rollouts that wait, by cause. engine_answer: an engine samples. "
                    "engine_choice: no engine serves the version. reward_choice: no reward actor accepts the group.",
                    "none",
                    (rate("grpo_rollout_wait_seconds_total", "run, cause"), "{{run}} {{cause}}"),
                    stacked=True,
                ),
                plot(
                    "Groups in flight",
                    "Groups by state. issued: sampled or scored now. settled: waiting for a step. composed: waiting "
                    "for the trainer. The bottleneck is the stage at which most groups wait.",
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
            "Actors",
            (
                plot(
                    "Live actors",
                    "Actors whose lease at the packer has not ended, and how many scale wants. The run stops without "
                    "any actor of a kind.",
                    "none",
                    (LIVE, "{{run}} {{role}}"),
                    (f"max by (run, role) (grpo_packer_scale_wanted{{{MATCH}}})", "{{run}} {{role}} wanted"),
                ),
                plot(
                    "Engines by state",
                    "Only clean engines take new work. A quarantined engine takes no new weights until its restart.",
                    "none",
                    (f"sum by (run, state) (grpo_packer_engines{{{MATCH}}})", "{{run}} {{state}}"),
                ),
                plot(
                    "Failed attempts",
                    "Failed attempts at groups per second, in rollouts and reward actors, by reason. Three failures "
                    "drop a group as poison.",
                    "cps",
                    (rate("grpo_rollout_failures_total", "run, reason"), "{{run}} rollout {{reason}}"),
                    (rate("grpo_reward_failures_total", "run, reason"), "{{run}} reward {{reason}}"),
                ),
            ),
        ),
        Row(
            "Checkpoints and files",
            (
                plot(
                    "Trained and saved steps",
                    "Newest trained step, and newest step with a good checkpoint. After a crash the trainer repeats "
                    "the steps in between.",
                    "none",
                    (f"max by (run) (grpo_packer_step{{{MATCH}}})", "{{run}} trained"),
                    (f"max by (run) (grpo_packer_durable_step{{{MATCH}}})", "{{run}} saved"),
                ),
                plot(
                    "Failed writes",
                    "Failed writes of checkpoints and of the run's own files, per second. The usual cause is a full "
                    "disk. Training continues.",
                    "cps",
                    (
                        rate("grpo_trainer_checkpoints_total", "run", f'{MATCH}, outcome="failed"'),
                        "{{run}} checkpoint",
                    ),
                    (rate("grpo_packer_record_failures_total", "run"), "{{run}} record"),
                ),
                plot(
                    "Images of samples left out",
                    "Images of samples that are not kept for pages and reports, since those kept fill "
                    "telemetry.sample_images_bytes, per second.",
                    "cps",
                    (rate("grpo_packer_sample_images_left_out_total", "run"), "{{run}}"),
                ),
                plot(
                    "Uploads to the hub",
                    "Newest step on the hub, and checkpoints that are to be pushed. Training waits for no upload; with "
                    "failures see GrpoUploadsFailing in docs/reference/operations.md.",
                    "none",
                    (f"max by (run) (grpo_uploader_pushed_step{{{MATCH}}})", "{{run}} pushed step"),
                    (f"max by (run) (grpo_uploader_pending_checkpoints{{{MATCH}}})", "{{run}} to be pushed"),
                    (rate("grpo_uploader_pushes_total", "run, outcome"), "{{run}} {{outcome}} per second"),
                ),
                plot(
                    "Callbacks",
                    "Newest step told to callbacks, steps behind, and exceptions per second by event. A callback that "
                    "hangs or raises delays no step of training.",
                    "none",
                    (f"max by (run) (grpo_callbacks_told_step{{{MATCH}}})", "{{run}} told step"),
                    (f"max by (run) (grpo_callbacks_behind_steps{{{MATCH}}})", "{{run}} behind"),
                    (rate("grpo_callbacks_failures_total", "run, event"), "{{run}} {{event}} raises"),
                ),
                plot(
                    "Trackers",
                    "Newest step sent to each tracker, steps behind, and failures per second. A tracker that is away "
                    "delays no step of training, and gets what it has missed.",
                    "none",
                    (f"max by (run, name) (grpo_tracker_sent_step{{{MATCH}}})", "{{run}} {{name}} sent step"),
                    (f"max by (run, name) (grpo_tracker_behind_steps{{{MATCH}}})", "{{run}} {{name}} behind"),
                    (rate("grpo_tracker_failures_total", "run, name"), "{{run}} {{name}} fails"),
                ),
                plot(
                    "Scrape targets",
                    "1 if Prometheus reaches the process, else 0, for each process that the packer lists. At 0 the "
                    "process is gone, or telemetry.metrics_host is an address that Prometheus can't reach.",
                    "none",
                    ('up{run=~"$run", actor=~"$actor", name=~"$name"}', "{{run}} {{name}}"),
                ),
            ),
        ),
    ),
)
