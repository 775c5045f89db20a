"""Loss, KL, masks, rewards, evaluations: whether it learns."""

from grafana.panels import MATCH, Dashboard, Row, heatmap, plot, quantile, rate

TRAINING = Dashboard(
    "grpo-training",
    "GRPO training",
    "Loss, KL, masks, rewards, evaluations: whether it learns.",
    (
        Row(
            "Rewards",
            (
                plot(
                    "Reward",
                    "Mean and standard deviation over the newest step's completions, weighted sum of all functions.",
                    "none",
                    (f"grpo_packer_reward_mean{{{MATCH}}}", "{{run}} mean"),
                    (f"grpo_packer_reward_std{{{MATCH}}}", "{{run}} standard deviation"),
                ),
                plot(
                    "Reward by function",
                    "Mean of each function over the newest step's completions, before its weight.",
                    "none",
                    (f"grpo_packer_function_reward_mean{{{MATCH}}}", "{{run}} {{function}}"),
                ),
                heatmap(
                    "Rewards of completions",
                    "Completions scored, by reward; the buckets are those of 0 to 1.",
                    "none",
                    "grpo_reward_value",
                ),
            ),
        ),
        Row(
            "Evaluations",
            (
                plot(
                    "Exact match",
                    "Share of the evaluation's completions, by environment (eval.exact_match).",
                    "percentunit",
                    (f"grpo_packer_eval_exact_match{{{MATCH}}}", "{{run}} {{environment}}"),
                ),
                plot(
                    "Mean reward",
                    "Of the evaluation's completions that could be scored, by environment.",
                    "none",
                    (f"grpo_packer_eval_mean_reward{{{MATCH}}}", "{{run}} {{environment}}"),
                ),
                plot(
                    "Evaluated version",
                    "Version of the newest evaluation, -1 before the first.",
                    "none",
                    (f"grpo_packer_eval_version{{{MATCH}}}", "{{run}}"),
                ),
            ),
        ),
        Row(
            "Loss and gradient",
            (
                plot(
                    "Loss",
                    "Of the newest step. With on-policy groups it is near 0 whatever happens; look at the reward.",
                    "none",
                    (f"grpo_trainer_loss{{{MATCH}}}", "{{run}} {{name}}"),
                ),
                plot(
                    "Gradient norm",
                    "Of the newest step, before clipping to trainer.max_grad_norm.",
                    "none",
                    (f"grpo_trainer_grad_norm{{{MATCH}}}", "{{run}} {{name}}"),
                ),
                plot(
                    "Learning rate",
                    "Of the newest step.",
                    "sci",
                    (f"grpo_trainer_learning_rate{{{MATCH}}}", "{{run}} {{name}}"),
                ),
            ),
        ),
        Row(
            "Trainer and engine",
            (
                plot(
                    "Mismatch KL",
                    "KL of trainer and engine on the newest step's tokens (k3, nats per token): numerics and lag. "
                    "Above 0.05 read docs/reference/operations.md, GrpoMismatchKl.",
                    "none",
                    (f"grpo_trainer_mismatch_kl{{{MATCH}}}", "{{run}} {{name}}"),
                ),
                plot(
                    "Mismatch by age of the weights",
                    "Mean difference of trainer's and engine's logprobs, nats per token. On current weights it is "
                    "numerics alone; above trainer.mismatch.warn the engine serves another model.",
                    "none",
                    (f"grpo_trainer_mismatch_abs{{{MATCH}}}", "{{run}} {{name}} {{weights}}"),
                ),
                plot(
                    "Masked tokens",
                    "Share of the step's tokens that the loss dropped, by cause.",
                    "percentunit",
                    (f"grpo_trainer_masked_fraction{{{MATCH}}}", "{{run}} {{name}} {{cause}}"),
                ),
                plot(
                    "Entropy",
                    "Of the policy on the newest step's tokens, nats. Falling to 0: it has stopped to explore.",
                    "none",
                    (f"grpo_trainer_entropy{{{MATCH}}}", "{{run}} {{name}}"),
                ),
            ),
        ),
        Row(
            "Completions",
            (
                plot(
                    "Length",
                    "Mean tokens of the newest step's completions.",
                    "none",
                    (f"grpo_packer_completion_tokens_mean{{{MATCH}}}", "{{run}}"),
                ),
                plot(
                    "Little to learn from",
                    "Shares: groups whose advantages are all alike; completions cut at rollout.max_tokens.",
                    "percentunit",
                    (f"grpo_packer_groups_without_variance{{{MATCH}}}", "{{run}} groups without variance"),
                    (f"grpo_packer_truncated_fraction{{{MATCH}}}", "{{run}} truncated"),
                ),
                plot(
                    "Filtered, masked, unscorable",
                    "Completions per second: found by a filter (enforced or not), masked out of the loss, scored by no "
                    "function.",
                    "cps",
                    (rate("grpo_reward_filtered_completions_total", "run, filter"), "{{run}} {{filter}}"),
                    (rate("grpo_reward_masked_completions_total", "run"), "{{run}} masked"),
                    (
                        rate("grpo_reward_unscorable_completions_total", "run, purpose"),
                        "{{run}} unscorable {{purpose}}",
                    ),
                ),
            ),
        ),
        Row(
            "Steps, examples, checkpoints",
            (
                plot(
                    "Steps",
                    "Trained per second by rank, those trained again after a restart among them.",
                    "cps",
                    (rate("grpo_trainer_steps_total", "run, name"), "{{run}} {{name}}"),
                ),
                plot(
                    "Examples set aside",
                    "By difficulty pool (packer.pools).",
                    "none",
                    (f"grpo_packer_pool_examples{{{MATCH}}}", "{{run}} {{pool}}"),
                ),
                plot(
                    "Checkpoint",
                    "Seconds from snapshot to a checkpoint that has been read back, in the background; median.",
                    "s",
                    (quantile(0.5, "grpo_trainer_checkpoint_write_seconds", "run"), "{{run}}"),
                ),
            ),
        ),
    ),
)
