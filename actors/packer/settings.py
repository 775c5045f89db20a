"""The part of the configuration, and of a scored group, by which the ledger's machine judges."""

from actors.algorithms.lag import surplus_groups
from actors.ledger import GroupFacts, Settings
from schemas.config import RunConfig
from schemas.messages import PolicyVersion, ScoredGroup


def settings_of(config: RunConfig) -> Settings:
    """Return the protocol's part of the configuration."""
    return Settings(
        groups_per_step=config.packer.groups_per_step,
        max_steps=config.trainer.max_steps,
        group_size=config.rollout.group_size,
        sequence_len=config.packer.sequence_len,
        num_ranks=config.trainer.num_ranks,
        order=config.packer.order,
        max_async_level=config.packer.max_async_level,
        max_off_policy_steps=config.packer.max_off_policy_steps,
        surplus=surplus_groups(
            config.packer.groups_per_step,
            config.packer.oversampling_factor,
            config.packer.max_async_level,
            config.packer.max_off_policy_steps,
        ),
        max_resample_times=config.packer.max_resample_times,
        max_drop_fraction=config.packer.max_drop_fraction,
        fails_on_reward_error=config.reward.on_error == "fail",
        lease=config.bus.lease,
        group_timeout=config.rollout.group_timeout,
        reward_timeout=config.reward.longest_seconds,
        weights_timeout=config.weights.timeout,
        sampling=config.rollout.sampling,
        temperature_schedule=config.rollout.temperature_schedule,
        max_tokens=config.rollout.max_tokens,
        seed=config.seed,
        eval_every_steps=config.eval.every_steps,
        eval_at_start=config.eval.at_start,
        eval_at_end=config.eval.at_end,
        eval_completions=config.eval.completions_per_prompt,
        eval_sampling=config.eval.sampling,
        keep_steps=config.ledger.keep_steps,
        # a single checkpoint may turn out to be damaged, and a run that keeps no other accepts that
        min_checkpoints=min(2, config.trainer.checkpoint.num_resumable),
    )


def facts_of(group: ScoredGroup, digest: str, rejected: str = "") -> GroupFacts:
    """Return the facts by which the machine judges a scored group.

    Args:
        group: the scored group.
        digest: SHA-256 of the payload, hex.
        rejected: name of the filter that rejects the group; empty: none.
    """
    # of every segment: weights may have changed between two tokens
    pairs = group.policies
    return GroupFacts(
        ordinal=group.ordinal,
        attempt=group.attempt,
        example_key=group.example_key,
        num_completions=group.num_completions,
        oldest_version=min(version for _, version in pairs),
        policies=frozenset(PolicyVersion(lineage=a, version=b) for a, b in pairs),
        longest_sample=group.longest_sample,
        digest=digest,
        rejected_as=rejected,
    )
