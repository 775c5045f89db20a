"""Page on engines: tokens per second, queues, caches, weight updates by part."""

from grafana.panels import MATCH, MINE, WINDOW, Dashboard, Row, mean, plot, quantile, rate

INFERENCE = Dashboard(
    "grpo-inference",
    "GRPO inference",
    "Tokens per second, queues, caches, weight updates by part.",
    (
        Row(
            "Sampling",
            (
                plot(
                    "Tokens",
                    "Tokens sampled per second, by engine.",
                    "cps",
                    (rate("grpo_inference_generated_tokens_total", "run, name", MINE), "{{run}} {{name}}"),
                ),
                plot(
                    "Completions",
                    "Completions in decoding, and completions that wait for a slot, by engine. If many wait, add "
                    "engines. If none wait and few run, add rollouts or raise rollout.max_concurrent_groups.",
                    "none",
                    (f"grpo_inference_running_completions{{{MINE}}}", "{{run}} {{name}} running"),
                    (f"grpo_inference_waiting_completions{{{MINE}}}", "{{run}} {{name}} waiting"),
                ),
                plot(
                    "Busy time",
                    "Share of time in which an engine computes.",
                    "percentunit",
                    (rate("grpo_inference_busy_seconds_total", "run, name", MINE), "{{run}} {{name}}"),
                ),
            ),
        ),
        Row(
            "Weight updates",
            (
                plot(
                    "Seconds by part",
                    "Mean seconds of an update's parts. pause: decoding stood still. wire: the weights arrived. load: "
                    "the engine put the weights in place.",
                    "s",
                    (mean("grpo_inference_weight_update_seconds", "run, part"), "{{run}} {{part}}"),
                    stacked=True,
                ),
                plot(
                    "Slowest updates by part",
                    "95th percentile of the seconds of each part, over all engines.",
                    "s",
                    (quantile(0.95, "grpo_inference_weight_update_seconds", "run, part"), "{{run}} {{part}}"),
                ),
                plot(
                    "Update outcomes",
                    "Updates per second by outcome, at engines and, with weights.channel rendezvous, at the trainer. "
                    "Failed and abandoned updates are repeated.",
                    "cps",
                    (rate("grpo_inference_weight_updates_total", "run, outcome"), "{{run}} engine {{outcome}}"),
                    (rate("grpo_trainer_weight_broadcasts_total", "run, outcome"), "{{run}} trainer {{outcome}}"),
                ),
                plot(
                    "Trainer time for updates",
                    "Seconds per second. publish: training stands still to gather and publish weights. broadcast: "
                    "weights are on the wire while training continues.",
                    "percentunit",
                    (
                        rate("grpo_trainer_step_seconds_total", "run", f'{MATCH}, phase="publish"'),
                        "{{run}} publish",
                    ),
                    (rate("grpo_trainer_weight_wire_seconds_total", "run"), "{{run}} broadcast"),
                ),
                plot(
                    "Version served",
                    "Version served, by engine; -1 before the first version.",
                    "none",
                    (f"grpo_inference_policy_version{{{MINE}}}", "{{run}} {{name}}"),
                ),
                plot(
                    "Engines by state",
                    "Engines by state. Only clean engines take new work.",
                    "none",
                    (f"sum by (run, state) (grpo_packer_engines{{{MATCH}}})", "{{run}} {{state}}"),
                    stacked=True,
                ),
                plot(
                    "Turns on shared devices",
                    "Share of time in which trainer or engines hold the devices, with up.colocate: turns. handover: "
                    "memory is being given back. If engines hold them longest, sampling is what limits the run.",
                    "percentunit",
                    (
                        f"sum by (run, holder) (avg_over_time(grpo_packer_turn{{{MATCH}}}[{WINDOW}]))",
                        "{{run}} {{holder}}",
                    ),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "vLLM server",
            (
                plot(
                    "KV cache",
                    "Share of vLLM's KV cache in use. At 1 vLLM preempts requests: lower "
                    "rollout.max_concurrent_groups, or give the server more memory.",
                    "percentunit",
                    (f"vllm:kv_cache_usage_perc{{{MATCH}}}", "{{run}} {{name}}"),
                ),
                plot(
                    "Requests",
                    "Requests in vLLM's scheduler.",
                    "none",
                    (f"vllm:num_requests_running{{{MATCH}}}", "{{run}} {{name}} running"),
                    (f"vllm:num_requests_waiting{{{MATCH}}}", "{{run}} {{name}} waiting"),
                ),
                plot(
                    "Prefix cache hits",
                    "Share of prompt tokens found in vLLM's prefix cache. The completions of a group share their "
                    "prompt.",
                    "percentunit",
                    (
                        " / ".join(rate(f"vllm:prefix_cache_{what}_total", "run") for what in ("hits", "queries")),
                        "{{run}}",
                    ),
                ),
            ),
        ),
        Row(
            "Requests of rollouts",
            (
                plot(
                    "Time of a group",
                    "Seconds from the request to the completions of a group, median and 99th percentile over all "
                    "rollouts.",
                    "s",
                    (quantile(0.5, "grpo_rollout_request_seconds", "run"), "{{run}} p50"),
                    (quantile(0.99, "grpo_rollout_request_seconds", "run"), "{{run}} p99"),
                ),
                plot(
                    "Tokens received",
                    "Tokens received per second, by rollout. Engines sample more: repeated and cancelled requests.",
                    "cps",
                    (rate("grpo_rollout_generated_tokens_total", "run, name", MINE), "{{run}} {{name}}"),
                ),
                plot(
                    "Late reward functions",
                    "Late calls of reward functions per second, by outcome: called again (retried), or counted as "
                    "reward.on_timeout says.",
                    "cps",
                    (rate("grpo_reward_timeouts_total", "run, outcome"), "{{run}} {{outcome}}"),
                ),
            ),
        ),
    ),
)
