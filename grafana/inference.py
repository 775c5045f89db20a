"""Tokens per second, queues, caches, weight updates by part."""

from grafana.panels import MATCH, MINE, Dashboard, Row, mean, plot, quantile, rate

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
                    "Sampled per second, by engine.",
                    "cps",
                    (rate("grpo_inference_generated_tokens_total", "run, name", MINE), "{{run}} {{name}}"),
                ),
                plot(
                    "Completions",
                    "Being decoded, and waiting for a slot, by engine. Many waiting: add engines. None waiting and few "
                    "running: add rollouts, or raise rollout.max_concurrent_groups.",
                    "none",
                    (f"grpo_inference_running_completions{{{MINE}}}", "{{run}} {{name}} running"),
                    (f"grpo_inference_waiting_completions{{{MINE}}}", "{{run}} {{name}} waiting"),
                ),
                plot(
                    "Busy",
                    "Share of its time in which an engine computes.",
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
                    "Mean of an update's parts. pause: decoding stood still; wire: the weights came; load: they were "
                    "put in place.",
                    "s",
                    (mean("grpo_inference_weight_update_seconds", "run, part"), "{{run}} {{part}}"),
                    stacked=True,
                ),
                plot(
                    "Slowest updates by part",
                    "95th percentile over engines.",
                    "s",
                    (quantile(0.95, "grpo_inference_weight_update_seconds", "run, part"), "{{run}} {{part}}"),
                ),
                plot(
                    "Outcomes",
                    "Updates per second by outcome, at engines and (rendezvous channel) at the trainer. Failed or "
                    "abandoned ones are tried again.",
                    "cps",
                    (rate("grpo_inference_weight_updates_total", "run, outcome"), "{{run}} engine {{outcome}}"),
                    (rate("grpo_trainer_weight_broadcasts_total", "run, outcome"), "{{run}} trainer {{outcome}}"),
                ),
                plot(
                    "Trainer's side",
                    "Seconds per second that training stands still to gather and publish, and that broadcasts are on "
                    "the wire beside it.",
                    "percentunit",
                    (
                        rate("grpo_trainer_step_seconds_total", "run", f'{MATCH}, phase="publish"'),
                        "{{run}} publish",
                    ),
                    (rate("grpo_trainer_weight_wire_seconds_total", "run"), "{{run}} broadcast"),
                ),
                plot(
                    "Version served",
                    "By engine; -1 before the first.",
                    "none",
                    (f"grpo_inference_policy_version{{{MINE}}}", "{{run}} {{name}}"),
                ),
                plot(
                    "Engines by state",
                    "Only clean ones take new work.",
                    "none",
                    (f"sum by (run, state) (grpo_packer_engines{{{MATCH}}})", "{{run}} {{state}}"),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "vLLM's own",
            (
                plot(
                    "KV cache",
                    "Share of vLLM's KV cache in use. At 1 requests are preempted: lower "
                    "rollout.max_concurrent_groups, or give it memory.",
                    "percentunit",
                    (f"vllm:kv_cache_usage_perc{{{MATCH}}}", "{{run}} {{name}}"),
                ),
                plot(
                    "Requests",
                    "In vLLM's scheduler.",
                    "none",
                    (f"vllm:num_requests_running{{{MATCH}}}", "{{run}} {{name}} running"),
                    (f"vllm:num_requests_waiting{{{MATCH}}}", "{{run}} {{name}} waiting"),
                ),
                plot(
                    "Prefix cache hits",
                    "Share of prompt tokens found in the cache; the completions of a group share their prompt.",
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
                    "Seconds from request to completions, quantiles over all rollouts.",
                    "s",
                    (quantile(0.5, "grpo_rollout_request_seconds", "run"), "{{run}} p50"),
                    (quantile(0.99, "grpo_rollout_request_seconds", "run"), "{{run}} p99"),
                ),
                plot(
                    "Tokens received",
                    "By rollouts, per second; less than sampled by what was asked for again or cancelled.",
                    "cps",
                    (rate("grpo_rollout_generated_tokens_total", "run, name", MINE), "{{run}} {{name}}"),
                ),
                plot(
                    "Late reward functions",
                    "Per second, by what came next; a group that waits for its reward keeps its rollout's slot.",
                    "cps",
                    (rate("grpo_reward_timeouts_total", "run, outcome"), "{{run}} {{outcome}}"),
                ),
            ),
        ),
    ),
)
