"""Keys of prime-rl that only files of 2025 have."""

from typing import Any

from actors.imports.job import Import
from actors.imports.prime_rl.files import Tree
from schemas.errors import ConfigError

BUFFER, ADVANTAGE, LOSS = "orchestrator.buffer", "orchestrator.advantage", "trainer.loss"
IRRELEVANT = {
    "trainer.weights": "checkpoints are in Hugging Face's format",
    "trainer.weights.**": "checkpoints are in Hugging Face's format",
    "trainer.log_recomputed_logprob_error": "mismatch_kl is always measured",
    "trainer.profile_path": "for profiles",
    "monitor.**": "metrics.jsonl is always written",
    "*.monitor.**": "metrics.jsonl is always written",
    "orchestrator.env_mix.strategy": "environments are drawn by their weights",
    "orchestrator.env_mix.stopping_strategy": "environments start again when their rows end",
    "orchestrator.env_mix.seed": "the run has one seed here",
    "orchestrator.eval.save.**": "samples.jsonl",
    "orchestrator.eval.save": "samples.jsonl",
    "orchestrator.client.host": "the actors start the servers themselves",
    "orchestrator.client.port": "the actors start the servers themselves",
    f"{BUFFER}.from_scratch": "a run starts with no pools, and resumes with its own",
}
"""Reasons of keys without influence."""


def with_evaluations(tree: Tree) -> Tree:
    """Return the tree with the lists of evaluations of summer 2025 as a list of environments.

    Raises:
        ConfigError: a list has another length than that of the environments, as prime-rl requires.
    """
    orchestrator = tree.get("orchestrator")
    section = orchestrator.get("eval") if isinstance(orchestrator, dict) else None
    ids = section.get("environment_ids") if isinstance(section, dict) else None
    if not (isinstance(orchestrator, dict) and isinstance(section, dict) and isinstance(ids, list)):
        return tree
    rest = {key: value for key, value in section.items() if key not in ("environment_ids", "environment_args")}
    arguments = section.get("environment_args", {})
    environments: list[dict[str, Any]] = [{"id": one} for one in ids]
    for name in ("num_examples", "rollouts_per_example"):
        numbers = rest.get(name)
        if not isinstance(numbers, list):
            continue
        del rest[name]
        if numbers and len(numbers) != len(ids):
            raise ConfigError(f"orchestrator.eval.{name}: {numbers} must have a number for each of {ids}")
        for environment, number in zip(environments, numbers, strict=False):
            environment[name] = number
    for environment in environments:
        if isinstance(arguments, dict) and environment["id"] in arguments:
            environment["args"] = arguments[environment["id"]]
    return tree | {"orchestrator": orchestrator | {"eval": rest | ({"env": environments} if ids else {})}}


def convert_clipped_loss(job: Import) -> bool:
    """Write the losses of summer 2025, and return whether there is one."""
    kind = job.given.get(f"{LOSS}.type")
    if kind not in ("clip", "ratio"):
        return False
    if kind == "ratio":
        job.refuse(f"{LOSS}.type", "a ratio that is bounded alone is not built", "set trainer.loss, for example dapo")
        job.sweep({}, {f"{LOSS}.**": "part of the loss ratio"})
        job.ask("trainer.loss", "the loss; prime-rl's bounds the ratio by clip_ratio")
        return True
    low, high = (job.given.get(f"{LOSS}.epsilon_{side}", 0.2) for side in ("low", "high"))
    text = "min(r, clip_ratio) and its clip, over the tokens of the step: dapo with two sides"
    job.convert(f"{LOSS}.type", {"trainer.loss.type": "dapo"}, text)
    job.convert(f"{LOSS}.epsilon_low", {"trainer.loss.epsilon": low}, f"1 − {low:g}")
    job.convert(f"{LOSS}.epsilon_high", {"trainer.loss.epsilon_high": high}, f"1 + {high:g}")
    bound = job.given.get(f"{LOSS}.clip_ratio", 4.0)
    job.convert(f"{LOSS}.clip_ratio", {"trainer.loss.delta": bound}, f"the ratio is at most {bound:g}")
    old = "step_start" if job.given.get("trainer.recompute_logprobs") else "inference"
    job.convert("trainer.recompute_logprobs", {"trainer.loss.old_logprobs": old}, f"old of {old}")
    return True


def convert_advantage(job: Import) -> None:
    """Write the switches of the advantage of autumn 2025, and its name of summer."""
    key = "orchestrator.advantage_type"
    if job.given.get(key) == "drgrpo":
        job.settle(key, "reward minus the mean of its group, as here")
    else:
        job.refuse(key, "no such advantage here", "set reward.advantage")
    if job.given.get(f"{ADVANTAGE}.leave_one_out") is True:
        job.convert(
            f"{ADVANTAGE}.leave_one_out", {"reward.advantage.type": "rloo"}, "the mean of the other completions"
        )
    for name, instead in (
        ("leave_one_out", ""),
        ("std_norm", "set reward.advantage: {type: zscore}"),
        ("neg_clipped", "clip in the reward function"),
    ):
        if not job.is_reported(f"{ADVANTAGE}.{name}"):
            job.refuse_unless(f"{ADVANTAGE}.{name}", (False, None), "not built in this form", instead)


def convert_rest(job: Import) -> None:
    """Write buffers, masks and rewards of 2025."""
    kind = job.given.get(f"{BUFFER}.type")
    if kind == "online-difficulty":
        low, high = job.given.get(f"{BUFFER}.min_reward", 0.01), job.given.get(f"{BUFFER}.max_reward", 0.99)
        keys = [f"{BUFFER}.{name}" for name in ("type", "min_reward", "max_reward")]
        targets = {"packer.online_difficulty_filtering": True, "packer.max_resample_times": 1000}
        if (low, high) == (0.01, 0.99):
            job.convert(keys, targets, "groups of mean reward below 0.01 or above 0.99: here of 0 or 1")
        else:
            job.convert(keys[:1], targets, "groups of mean reward 0 or 1 are dropped")
            for key in keys[1:]:
                job.refuse(key, "groups of mean reward 0 and 1 alone are dropped here")
    elif kind == "difficulty-pool":
        reason = "pools with a share of each batch are not built"
        for name in ("type", "easy_border", "hard_border", "easy_fraction", "hard_fraction", "difficulty_field"):
            if not job.is_reported(f"{BUFFER}.{name}"):
                job.refuse(f"{BUFFER}.{name}", reason, "packer.pools sets easy and hard examples aside")
    job.settle(f"{BUFFER}.type", "examples in a random order")
    skip = f"{BUFFER}.skip_verification"
    job.refuse_unless(skip, (False, None), "rewards of 0 train nothing", "leave it out")
    for key, harmless, reason, instead in (
        ("orchestrator.zero_truncated_completions", False, "no key for it", "return 0 in the reward function"),
        ("orchestrator.mask_env_responses", True, "tokens of the environment are never trained here", ""),
        ("orchestrator.length_bonus", (0, 0.0, None), "no such reward", "add it to the reward function"),
        ("orchestrator.advantage.length_shaping", (False, None), "no such penalty", "see the function length_penalty"),
    ):
        job.refuse_unless(key, harmless, reason, instead)
    job.settle("trainer.recompute_logprobs", "the loss has the engine's logprobs")
    job.sweep(IRRELEVANT, {})
