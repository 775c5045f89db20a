"""Names of metrics as other systems have them: pure tables from the names of metrics.jsonl and evals.jsonl.

A metric is renamed only where the other system measures the same; every other metric keeps its name.
"""

from collections.abc import Mapping
from typing import Any

from schemas.config.trackers import MetricNames

TRL_NAMES = {
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "completion_tokens_mean": "completions/mean_length",
    "completion_tokens_max": "completions/max_length",
    "truncated_fraction": "completions/clipped_ratio",
    "groups_without_variance": "frac_reward_zero_std",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "entropy": "entropy",
    "kl": "kl",
    "turns_mean": "turns",
}
"""Names of TRL's GRPOTrainer by the names of metrics.jsonl."""
PRIME_RL_NAMES = {
    "reward_mean": "reward/all/mean",
    "completion_tokens_mean": "seq_len/all/mean",
    "completion_tokens_max": "seq_len/all/max",
    "truncated_fraction": "is_truncated/all/mean",
    "turns_mean": "num_turns/all/mean",
    "mismatch_kl": "mismatch_kl/all/mean",
    "mismatch_max": "mismatch_kl/all/max",
    "entropy": "entropy/all/mean",
    "learning_rate": "optim/lr",
    "grad_norm": "optim/grad_norm",
    "loss": "loss/mean",
    "lag_mean": "off_policy/mean",
    "lag_max": "off_policy/max",
    "seconds_wait_batch": "time/wait_for_batch",
    "seconds_forward_backward": "time/forward_backward",
    "seconds_publish": "time/broadcast_weights",
    "seconds_checkpoint": "time/save_ckpt",
}
"""Names of prime-rl's trainer and orchestrator by the names of metrics.jsonl."""
AREAL_NAMES = {
    "reward_mean": "ppo_actor/task_reward/avg",
    "advantage_mean": "ppo_actor/advantages/avg",
    "completion_tokens_mean": "ppo_actor/seq_len/avg",
    "completion_tokens_max": "ppo_actor/seq_len/max",
    "truncated_fraction": "ppo_actor/no_eos_ratios/avg",
    "loss": "ppo_actor/update/actor_loss/avg",
    "entropy": "ppo_actor/update/entropy/avg",
    "grad_norm": "ppo_actor/update/grad_norm",
    "learning_rate": "ppo_actor/update/lr",
    "lag_mean": "sample_staleness_theta_avg",
    "lag_max": "sample_staleness_theta_max",
}
"""Names of AReaL's statistics by the names of metrics.jsonl."""
TABLES: dict[MetricNames, dict[str, str]] = {
    "ours": {},
    "trl": TRL_NAMES,
    "prime-rl": PRIME_RL_NAMES,
    "areal": AREAL_NAMES,
}
"""Names by system."""


def renamed(values: Mapping[str, Any], names: MetricNames) -> dict[str, Any]:
    """Return the values of a step under the names of a system.

    Example: `{"reward_mean": 0.5, "reward/accuracy": 0.4}` in TRL's names is
    `{"reward": 0.5, "rewards/accuracy/mean": 0.4}`.
    """
    return {_name(name, names): value for name, value in values.items()}


def _name(name: str, names: MetricNames) -> str:
    if names == "trl" and name.startswith("reward/"):
        return f"rewards/{name.removeprefix('reward/')}/mean"
    return TABLES[names].get(name, name)


def trl_eval_name(name: str) -> str:
    """Return TRL's name of a value of an evaluation, without the prefix `eval_`."""
    if name.startswith("reward/"):
        return f"rewards/{name.removeprefix('reward/')}/mean"
    return {"mean_reward": "reward", "std_reward": "reward_std"}.get(name, name)


def renamed_evaluation(results: Mapping[str, Mapping[str, Any]], names: MetricNames) -> dict[str, Any]:
    """Return the values of an evaluation under the names of a system.

    Args:
        results: values by environment and name, as in a line of evals.jsonl.
        names: the system. TRL has the environment in the name only where there are several.
    """
    found: dict[str, Any] = {}
    for label, values in results.items():
        for name, value in values.items():
            if names == "trl":
                prefix = "eval" if len(results) == 1 else f"eval_{label}"
                found[f"{prefix}_{trl_eval_name(name)}"] = value
            else:
                found[f"eval/{label}/{name}"] = value
    return found
