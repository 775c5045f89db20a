"""Page on environments: turns, ends, tools, time and worker processes."""

from grafana.panels import MATCH, Dashboard, Row, plot, rate

TRAJECTORIES = rate("grpo_rollout_trajectories_total", "run, environment")
SECONDS = rate("grpo_rollout_trajectory_seconds_total", "run, environment, place")
TURNS = rate("grpo_rollout_turns_total", "run, environment")
ENVIRONMENTS = Dashboard(
    "grpo-environments",
    "GRPO environments",
    "Turns, ends, tools, time and worker processes of environments. Empty for a run without environments with turns.",
    (
        Row(
            "Trajectories",
            (
                plot(
                    "Turns per trajectory",
                    "Mean number of the model's answers in a trajectory, by environment. Near "
                    "environments[].max_turns the limit ends most trajectories.",
                    "none",
                    (f"{TURNS} / {TRAJECTORIES}", "{{run}} {{environment}}"),
                ),
                plot(
                    "Ends by reason",
                    "Trajectories per second by the reason of their end. done: the environment has ended it. length: "
                    "the last answer was cut off at rollout.max_tokens. max_turns, max_total_tokens, context_full and "
                    "timeout: a limit of the trajectory. failed: the environment has failed (environments[].on_failure "
                    "unscorable).",
                    "cps",
                    (
                        rate("grpo_rollout_trajectories_total", "run, environment, stop"),
                        "{{run}} {{environment}} {{stop}}",
                    ),
                    stacked=True,
                ),
                plot(
                    "Share of demanded forms",
                    "Turns whose form the environment has demanded, divided by all turns. The engine's logprobs of "
                    "such turns are of a cut distribution; train_forced_turns says whether they are trained.",
                    "percentunit",
                    (
                        f"{rate('grpo_rollout_forced_turns_total', 'run, environment')} / {TURNS}",
                        "{{run}} {{environment}}",
                    ),
                ),
                plot(
                    "Share of branches",
                    "Turns that start a new sample, because their prompt does not continue the turn before, divided by "
                    "all turns. Each branch trains its history as a row of its own. See GrpoPrefixBreaks in "
                    "docs/reference/operations.md.",
                    "percentunit",
                    (f"{rate('grpo_rollout_branches_total', 'run, environment')} / {TURNS}", "{{run}} {{environment}}"),
                ),
            ),
        ),
        Row(
            "Newest step",
            (
                plot(
                    "Turns and tool calls",
                    "Mean numbers of turns and of tool calls of the newest step's trajectories.",
                    "none",
                    (f"grpo_packer_turns_mean{{{MATCH}}}", "{{run}} turns"),
                    (f"grpo_packer_tool_calls_mean{{{MATCH}}}", "{{run}} tool calls"),
                ),
                plot(
                    "Samples per trajectory",
                    "Rows trained per trajectory of the newest step; 1 without branches.",
                    "none",
                    (f"grpo_packer_samples_per_completion{{{MATCH}}}", "{{run}}"),
                ),
                plot(
                    "Failed trajectories",
                    "Share of the newest step's trajectories whose environment failed and which have no reward "
                    "(environments[].on_failure unscorable).",
                    "percentunit",
                    (f"grpo_packer_failed_fraction{{{MATCH}}}", "{{run}}"),
                ),
            ),
        ),
        Row(
            "Tools and time",
            (
                plot(
                    "Tool calls",
                    "Tool calls per second by outcome. failed: the tool raised an error, or does not exist. malformed: "
                    "the model's text is no call that can be read.",
                    "cps",
                    (
                        rate("grpo_rollout_tool_calls_total", "run, environment, outcome"),
                        "{{run}} {{environment}} {{outcome}}",
                    ),
                ),
                plot(
                    "Seconds of a trajectory",
                    "Mean seconds of a trajectory by place. model: waiting for engines. environment: waiting for the "
                    "environment; if it is the larger part, raise environments[].workers.",
                    "s",
                    (
                        f"{SECONDS} / on(run, environment) group_left() {TRAJECTORIES}",
                        "{{run}} {{environment}} {{place}}",
                    ),
                    stacked=True,
                ),
                plot(
                    "Failed attempts",
                    "Attempts at groups that failed because of an environment, per second by cause, over all "
                    "environments. See GrpoEnvironmentFailing in docs/reference/operations.md.",
                    "cps",
                    (
                        rate("grpo_rollout_failures_total", "run, reason", f'{MATCH}, reason=~"env_.*|agent_exit"'),
                        "{{run}} {{reason}}",
                    ),
                ),
            ),
        ),
        Row(
            "Agents",
            (
                plot(
                    "Calls of agents",
                    "Calls per second. repeated: asked again by the client, and answered from the record. refused: "
                    "over a budget, too long, after the end, or not served.",
                    "cps",
                    (
                        rate("grpo_rollout_session_calls_total", "run, environment, outcome"),
                        "{{run}} {{environment}} {{outcome}}",
                    ),
                ),
                plot(
                    "Open sessions",
                    "Trajectories of agents under way, over all rollouts.",
                    "none",
                    (f"sum by (run, environment) (grpo_rollout_sessions_open{{{MATCH}}})", "{{run}} {{environment}}"),
                ),
            ),
        ),
        Row(
            "Workers",
            (
                plot(
                    "Workers ready",
                    "Worker processes that have loaded their environment, over all rollouts; environments[].workers "
                    "for each rollout is the full number.",
                    "none",
                    (f"sum by (run, environment) (grpo_rollout_workers_ready{{{MATCH}}})", "{{run}} {{environment}}"),
                ),
                plot(
                    "Worker events",
                    "Events per second. restart: a worker has ended and another one starts. timeout, silent and "
                    "processes: a worker was killed, because a call took too long, because the worker gave no sign of "
                    "life, or because it had too many processes (environments[].limits).",
                    "cps",
                    (
                        rate("grpo_rollout_worker_events_total", "run, environment, event"),
                        "{{run}} {{environment}} {{event}}",
                    ),
                ),
            ),
        ),
    ),
)
