"""Warnings: settings that are allowed and probably a mistake."""

from collections.abc import Iterator

from schemas import limits
from schemas.config.advantages import GaeAdvantageConfig, NormAdvantageConfig, ProcessAdvantageConfig
from schemas.config.data import ArithmeticConfig, DatasetConfig, JsonlConfig, ReverseTextConfig
from schemas.config.environments import EnvironmentBase, ReasoningGymConfig
from schemas.config.run import RunConfig
from schemas.config.sampling import SamplingParams
from schemas.config.services import is_loopback


def warnings(config: RunConfig) -> list[str]:
    """Return warnings for allowed but doubtful settings, each as `path.to.key: reason, better value`."""
    return [warning for found in (*ADVICE, config.inference.engine.warnings) for warning in found(config)]


def _arrival_drops_the_slow(config: RunConfig) -> Iterator[str]:
    packer = config.packer
    # in order `ordinal` the lag is at most max_async_level by construction, so nothing is dropped
    if packer.order == "arrival" and packer.max_off_policy_steps < 8:
        yield (
            f"packer.max_off_policy_steps: {packer.max_off_policy_steps} with packer.order arrival drops groups that "
            "took long to sample; 8 or more is usual"
        )


def _pools_of_what_never_ends(config: RunConfig) -> Iterator[str]:
    endless = all(isinstance(environment, ReverseTextConfig | ArithmeticConfig) for environment in config.environments)
    if config.packer.pools is not None and endless:
        yield "packer.pools: examples of these environments are generated and never end, so pools do nothing"


def _nothing_to_compare_with(config: RunConfig) -> Iterator[str]:
    """Warn of groups of 1 completion, if the advantage compares completions within a group and so is always 0."""
    advantage = config.reward.advantage
    discounted = isinstance(advantage, GaeAdvantageConfig) and advantage.reward_norm == "none"
    # a mean over the step, or of no group, compares with other groups: one completion per group is fine there
    over_step = isinstance(advantage, NormAdvantageConfig) and advantage.mean_level != "group"
    compares = not (discounted or over_step or isinstance(advantage, ProcessAdvantageConfig))
    if config.rollout.group_size == 1 and compares:
        yield (
            f"rollout.group_size: with 1 completion per group every advantage of reward.advantage {advantage.type} "
            "is 0; use 2 or more"
        )


def _distribution_is_not_the_trainers(config: RunConfig) -> Iterator[str]:
    """Warn of every sampling parameter but the temperature, the only one that the trainer's logprobs include."""
    for key, field in SamplingParams.model_fields.items():
        value = getattr(config.rollout, key)
        if key != "temperature" and value != field.default:
            yield (
                f"rollout.{key}: {value} samples from another distribution than the trainer computes, which biases the "
                f"importance ratio of trainer.loss; {field.default} does not"
            )


def _keys_of_the_trainer_do_nothing(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.sharding == "fsdp" and trainer.num_ranks == 1:
        yield "trainer.sharding: fsdp has no effect with trainer.num_ranks 1: one rank holds all weights"
    for key in sorted(trainer.loss.ignores):
        if getattr(trainer, key) is not None:
            yield f"trainer.{key}: does nothing with trainer.loss {trainer.loss.type}"


def _warms_up_for_ever(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    steps, unit = trainer.max_steps * trainer.rates_per_step, trainer.lr_schedule.unit
    if steps and trainer.warmup_steps >= steps:
        yield (
            f"trainer.warmup_steps: {trainer.warmup_steps} of {steps} {unit}s of the run, so the learning "
            f"rate never reaches {trainer.learning_rate:g}"
        )


def _nothing_is_weighed(config: RunConfig) -> Iterator[str]:
    if config.reward.advantage.type == "custom" or any(function.weight for function in config.reward.functions):
        return
    # rewards of an environment count too: all with weight 1, if no weights are given
    weights = [one.reward_weights for one in config.environments if isinstance(one, EnvironmentBase)]
    if not any(any(found.values()) or not found for found in weights):
        keys = "reward.functions[].weight" + (", environments[].rewards" if weights else "")
        yield f"{keys}: all are 0, so every reward is 0 and nothing is learned"


def _dropout_is_a_mismatch(config: RunConfig) -> Iterator[str]:
    if config.model.dropout:
        yield "model.dropout: with the model's dropout the trainer's logprobs differ from the engine's"
    if config.model.lora is not None and config.model.lora.dropout > 0:
        yield "model.lora.dropout: above 0 the trainer's logprobs differ from the engine's"


def _nothing_held_out(config: RunConfig) -> Iterator[str]:
    evaluated = {one.environment.label for one in config.evaluations.values()}
    # held-out rows may be an environment of their own
    if any(one.label in evaluated and not one.train for one in config.environments):
        return
    needs_file = [
        e
        for e in config.trained
        if (isinstance(e, JsonlConfig) and e.eval_path is None)
        or (isinstance(e, DatasetConfig) and "eval" not in e.sources)
    ]
    if needs_file := [e for e in needs_file if e.label in evaluated]:
        yield (
            f"environments[].eval_path: not set for {needs_file[0].label}, so nothing of it is held out for eval; set "
            "it, or eval.num_prompts: 0 for no evaluation"
        )


def _anybody_may_sample(config: RunConfig) -> Iterator[str]:
    if not (is_loopback(config.inference.host) or config.inference.api_key_env):
        yield (
            f"inference.host: {config.inference.host!r} is reachable from other machines, and anybody who connects "
            "can sample; set inference.api_key_env, and inference.tls_cert where others could listen"
        )


def _reached_by_nobody(config: RunConfig) -> Iterator[str]:
    """Warn of addresses on loopback in a run whose bus.control is open to other machines."""
    if config.control_host is None or is_loopback(config.control_host):
        return
    for key, section in (("bus", config.bus), ("inference", config.inference)):
        if is_loopback(section.host) and section.advertise_host is None:
            yield (
                f"{key}.host: {section.host!r} can't be reached from other machines, which bus.control "
                f"{config.bus.control} is for; set it to an address of each machine's network, or 0.0.0.0 and "
                f"{key}.advertise_host"
            )


def _larger_than_travels(config: RunConfig) -> Iterator[str]:
    """Warn of groups and batches above the limits of a message, should all completions be of maximum length."""
    most, size = limits.DATA_FRAME_BYTES // limits.TOKEN_BYTES, config.rollout.group_size
    most_of_batch = limits.BATCH_BYTES // limits.BATCH_TOKEN_BYTES
    group = size * min(config.rollout.max_tokens, config.packer.sequence_len)
    if group > most:
        yield (
            f"rollout.group_size: {size} completions of {config.rollout.max_tokens} tokens are up to {group} in a "
            f"group, and a message holds {most}; an attempt with more fails as too_large"
        )
    # rounded up: the share of the rank with the most samples
    completions = -(-config.packer.groups_per_step * size // config.trainer.row_groups)
    batch = completions * config.packer.sequence_len
    if batch > most_of_batch:
        yield (
            f"packer.groups_per_step: {completions} samples of up to packer.sequence_len "
            f"{config.packer.sequence_len} for each rank are up to {batch} tokens, and a batch holds {most_of_batch}; "
            "a step with more ends the run after it has been sampled. Lower packer.groups_per_step, rollout.group_size "
            "or packer.sequence_len, or use more ranks (trainer.num_ranks)"
        )


def _turns_do_not_fit(config: RunConfig) -> Iterator[str]:
    """Warn of trajectories whose turns alone, without a word of the environment, may be longer than a sample."""
    tokens, length = config.rollout.max_tokens, config.packer.sequence_len
    for one in config.environments:
        # a task of reasoning_gym has one turn, whatever the limit
        if not isinstance(one, EnvironmentBase) or isinstance(one, ReasoningGymConfig):
            continue
        if one.max_total_tokens or one.max_turns * tokens < length:
            continue
        yield (
            f"environments[].max_turns: {one.max_turns} turns of {one.label} with rollout.max_tokens {tokens} each may "
            f"be {one.max_turns * tokens} tokens, and packer.sequence_len holds {length} with the environment's "
            "messages; longer trajectories end as context_full. Set environments[].max_total_tokens, or raise "
            "packer.sequence_len"
        )


ADVICE = (
    _larger_than_travels,
    _arrival_drops_the_slow,
    _pools_of_what_never_ends,
    _nothing_to_compare_with,
    _distribution_is_not_the_trainers,
    _keys_of_the_trainer_do_nothing,
    _dropout_is_a_mismatch,
    _nothing_held_out,
    _warms_up_for_ever,
    _turns_do_not_fit,
    _nothing_is_weighed,
    _anybody_may_sample,
    _reached_by_nobody,
)
