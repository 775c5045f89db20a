"""Page on learning: rewards, evaluations, loss, mismatch, completions."""

from grafana.panels import MATCH, Dashboard, Row, heatmap, plot, quantile, rate

TRAINING = Dashboard(
    "grpo-training",
    "GRPO training",
    "Rewards, evaluations, loss, mismatch and completions: does the policy learn?",
    (
        Row(
            "Rewards",
            (
                plot(
                    "Reward",
                    "Mean and standard deviation of the rewards of the newest step. A reward is the weighted sum of "
                    "all functions.",
                    "none",
                    (f"grpo_packer_reward_mean{{{MATCH}}}", "{{run}} mean"),
                    (f"grpo_packer_reward_std{{{MATCH}}}", "{{run}} standard deviation"),
                ),
                plot(
                    "Reward by function",
                    "Mean value of each function over the newest step's completions, before its weight.",
                    "none",
                    (f"grpo_packer_function_reward_mean{{{MATCH}}}", "{{run}} {{function}}"),
                ),
                heatmap(
                    "Rewards of completions",
                    "Scored completions by reward. Most buckets lie between 0 and 1.",
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
                    "Share of the newest evaluation's completions that match exactly (eval.exact_match), by "
                    "environment.",
                    "percentunit",
                    (f"grpo_packer_eval_exact_match{{{MATCH}}}", "{{run}} {{environment}}"),
                ),
                plot(
                    "Mean reward",
                    "Mean reward of the newest evaluation's scorable completions, by environment.",
                    "none",
                    (f"grpo_packer_eval_mean_reward{{{MATCH}}}", "{{run}} {{environment}}"),
                ),
                plot(
                    "Evaluated version",
                    "Version of the newest evaluation; -1 before the first evaluation.",
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
                    "Loss of the newest step. With on-policy groups the loss stays near 0 and tells nothing about "
                    "progress; the reward does.",
                    "none",
                    (f"grpo_trainer_loss{{{MATCH}}}", "{{run}} {{name}}"),
                ),
                plot(
                    "Gradient norm",
                    "Gradient norm of the newest step, before clipping to trainer.max_grad_norm.",
                    "none",
                    (f"grpo_trainer_grad_norm{{{MATCH}}}", "{{run}} {{name}}"),
                ),
                plot(
                    "Learning rate",
                    "Learning rate of the newest step.",
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
                    "KL between trainer and engine on the newest step's tokens (k3, nats per token), from numerics and "
                    "lag. Above 0.05 see GrpoMismatchKl in docs/reference/operations.md.",
                    "none",
                    (f"grpo_trainer_mismatch_kl{{{MATCH}}}", "{{run}} {{name}}"),
                ),
                plot(
                    "Mismatch by age of the weights",
                    "Mean difference between the logprobs of trainer and engine, nats per token. current: tokens "
                    "sampled by the weights that the step starts from, so numerics only; above trainer.mismatch.warn "
                    "the engine probably serves another model. older: tokens sampled by older weights.",
                    "none",
                    (f"grpo_trainer_mismatch_abs{{{MATCH}}}", "{{run}} {{name}} {{weights}}"),
                ),
                plot(
                    "Masked tokens",
                    "Share of the newest step's tokens that the loss dropped, by cause.",
                    "percentunit",
                    (f"grpo_trainer_masked_fraction{{{MATCH}}}", "{{run}} {{name}} {{cause}}"),
                ),
                plot(
                    "Entropy",
                    "Entropy of the policy on the newest step's tokens, in nats. Near 0 the policy no longer explores.",
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
                    "Mean number of tokens of the newest step's completions.",
                    "none",
                    (f"grpo_packer_completion_tokens_mean{{{MATCH}}}", "{{run}}"),
                ),
                plot(
                    "Weak training signal",
                    "Share of the newest step's groups without different advantages, and share of completions cut at "
                    "rollout.max_tokens.",
                    "percentunit",
                    (f"grpo_packer_groups_without_variance{{{MATCH}}}", "{{run}} groups without variance"),
                    (f"grpo_packer_truncated_fraction{{{MATCH}}}", "{{run}} truncated"),
                ),
                plot(
                    "Filtered, masked and unscorable",
                    "Completions per second that a filter found (enforced or not), that were masked out of the loss, "
                    "or that no function scored.",
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
            "Steps, examples and checkpoints",
            (
                plot(
                    "Steps",
                    "Steps trained per second, by rank. Steps repeated after a restart count again.",
                    "cps",
                    (rate("grpo_trainer_steps_total", "run, name"), "{{run}} {{name}}"),
                ),
                plot(
                    "Examples set aside",
                    "Examples set aside by difficulty pool (packer.pools).",
                    "none",
                    (f"grpo_packer_pool_examples{{{MATCH}}}", "{{run}} {{pool}}"),
                ),
                plot(
                    "Level",
                    "Level of the examples drawn next, from 0 (environments[].curriculum).",
                    "none",
                    (f"grpo_packer_level{{{MATCH}}}", "{{run}} {{environment}}"),
                ),
                plot(
                    "Long prompts",
                    "Train examples left out so far, and prompts cut per second, since they exceed "
                    "environments[].max_prompt_tokens.",
                    "none",
                    (f"grpo_packer_long_prompts{{{MATCH}}}", "{{run}} {{environment}} left out"),
                    (rate("grpo_rollout_cut_prompts_total", "run, environment"), "{{run}} {{environment}} cut"),
                ),
                plot(
                    "Checkpoint",
                    "Median seconds from the snapshot to a checkpoint that was written and read back, in the "
                    "background.",
                    "s",
                    (quantile(0.5, "grpo_trainer_checkpoint_write_seconds", "run"), "{{run}}"),
                ),
            ),
        ),
    ),
)
