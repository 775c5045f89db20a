"""The part of the configuration, and of a scored group, by which the ledger's machine judges."""

from collections.abc import Mapping

from actors.algorithms.fair_shares import allowance_of
from actors.algorithms.lag import surplus_groups
from actors.ledger import EvalRule, GroupFacts, Settings
from schemas.config import RunConfig
from schemas.config.data import EvalConfig
from schemas.messages import PolicyVersion, ScoredGroup


def settings_of(config: RunConfig, shares: Mapping[str, float] | None = None) -> Settings:
    """Return the protocol's part of the configuration.

    Args:
        config: configuration of the run.
        shares: share of each environment in the training examples. None: a single environment.
    """
    packer = config.packer
    limits = (packer.groups_per_step, packer.max_async_level, packer.max_off_policy_steps)
    surplus = surplus_groups(limits[0], packer.oversampling_factor, *limits[1:])
    # order ordinal takes groups as issued, so that each step waits for its slowest group in any case
    is_shared = packer.order == "arrival" and shares is not None and len(shares) > 1
    return Settings(
        groups_per_step=config.packer.groups_per_step,
        max_steps=config.trainer.max_steps,
        group_size=config.rollout.group_size,
        sequence_len=config.packer.sequence_len,
        num_ranks=config.trainer.num_ranks,
        order=config.packer.order,
        max_async_level=config.packer.max_async_level,
        max_off_policy_steps=config.packer.max_off_policy_steps,
        strict_async_level=config.packer.strict_async_level,
        surplus=surplus,
        shares=shares if is_shared and shares is not None else {},
        allowance=allowance_of(*limits, surplus) if is_shared else 0,
        max_concurrent_groups=config.rollout.max_concurrent_groups,
        max_resample_times=config.packer.max_resample_times,
        max_drop_fraction=config.packer.max_drop_fraction,
        fails_on_reward_error=config.reward.on_error == "fail",
        lease=config.bus.lease,
        group_timeout=config.rollout.group_timeout,
        reward_timeout=config.reward.longest_seconds,
        weights_timeout=config.weights.timeout,
        turns=config.up.colocate == "turns",
        sampling=config.rollout.sampling,
        temperature_schedule=config.rollout.temperature_schedule,
        max_tokens=config.rollout.max_tokens,
        stop=tuple(config.rollout.stop),
        ignore_eos=config.rollout.ignore_eos,
        seed=config.seed,
        evaluation=_rule_of(config.eval),
        eval_rules={label: _rule_of(one.keys) for label, one in config.evaluations.items()},
        keep_steps=config.ledger.keep_steps,
        # a single checkpoint may turn out to be damaged, and a run that keeps no other accepts that
        min_checkpoints=min(2, config.trainer.checkpoint.num_resumable),
    )


def _rule_of(keys: EvalConfig) -> EvalRule:
    return EvalRule(
        every_steps=keys.every_steps,
        at_start=keys.at_start,
        at_end=keys.at_end,
        completions=keys.completions_per_prompt,
        sampling=keys.sampling,
        max_tokens=keys.max_tokens,
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
