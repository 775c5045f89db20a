"""What is allowed and probably not meant."""

from collections.abc import Iterator

from schemas.config.advantages import GaeAdvantageConfig, ProcessAdvantageConfig
from schemas.config.data import ArithmeticConfig, JsonlConfig, ReverseTextConfig
from schemas.config.engines import VllmEngineConfig
from schemas.config.run import RunConfig
from schemas.config.services import is_loopback


def warnings(config: RunConfig) -> list[str]:
    """What is allowed and probably not meant, in the form of an error."""
    return [warning for found in ADVICE for warning in found(config)]


def _arrival_drops_the_slow(config: RunConfig) -> Iterator[str]:
    packer = config.packer
    if packer.order == "arrival" and packer.max_off_policy_steps < 8:
        yield (
            f"packer.max_off_policy_steps: {packer.max_off_policy_steps} with packer.order arrival drops groups that "
            "were long in the making; 8 or more is usual"
        )


def _pools_of_what_never_ends(config: RunConfig) -> Iterator[str]:
    endless = all(isinstance(environment, ReverseTextConfig | ArithmeticConfig) for environment in config.environments)
    if config.packer.pools is not None and endless:
        yield "packer.pools: examples of these environments are generated and never end, so none is set aside"


def _nothing_to_compare_with(config: RunConfig) -> Iterator[str]:
    """Process supervision compares steps, and the discounted reward nothing unless it is told to."""
    advantage = config.reward.advantage
    discounted = isinstance(advantage, GaeAdvantageConfig) and advantage.reward_norm == "none"
    compares = not (discounted or isinstance(advantage, ProcessAdvantageConfig))
    if config.rollout.group_size == 1 and compares:
        yield (
            f"rollout.group_size: with 1 completion per group every advantage of reward.advantage {advantage.type} "
            "is 0; use 2 or more"
        )


def _distribution_is_cut(config: RunConfig) -> Iterator[str]:
    for key, exact in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = getattr(config.rollout, key)
        if value != exact:
            yield (
                f"rollout.{key}: {value} cuts the distribution that logprobs are taken of, so the importance ratio of "
                f"trainer.loss is biased; {exact} is exact"
            )


def _nothing_to_share_out(config: RunConfig) -> Iterator[str]:
    if config.trainer.sharding == "fsdp" and config.trainer.num_ranks == 1:
        yield "trainer.sharding: fsdp with trainer.num_ranks 1 has nothing to share out"


def _ignored_by_the_loss(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    for key in sorted(trainer.loss.ignores):
        if getattr(trainer, key) is not None:
            yield f"trainer.{key}: does nothing with trainer.loss {trainer.loss.type}"


def _engine_serves_another_base(config: RunConfig) -> Iterator[str]:
    engine, quantization = config.inference.engine, config.model.quantization
    if quantization is not None and isinstance(engine, VllmEngineConfig) and engine.quantization is None:
        yield (
            "inference.engine.quantization: vLLM serves the base model as it is, and adapters are trained on it as "
            f"model.quantization {quantization.type} has it; set bitsandbytes, or the two differ"
        )


def _dropout_is_a_mismatch(config: RunConfig) -> Iterator[str]:
    if config.model.lora is not None and config.model.lora.dropout > 0:
        yield "model.lora.dropout: above 0 the trainer's logprobs differ from the engine's"


def _nothing_held_out(config: RunConfig) -> Iterator[str]:
    needs_file = [e for e in config.environments if isinstance(e, JsonlConfig) and e.eval_path is None]
    if config.eval.num_prompts and needs_file:
        yield f"environments[].eval_path: not set for {needs_file[0].label}, so nothing of it is held out for eval"


def _anybody_may_sample(config: RunConfig) -> Iterator[str]:
    if not (is_loopback(config.inference.host) or config.inference.api_key_env):
        yield (
            f"inference.host: {config.inference.host!r} is reachable from other machines, and whoever reaches it can "
            "sample; set inference.api_key_env, and inference.tls_cert where others could listen"
        )


def _reached_by_nobody(config: RunConfig) -> Iterator[str]:
    """Addresses on loopback in a run that has been opened to other machines."""
    if config.control_host is None or is_loopback(config.control_host):
        return
    for key, section in (("bus", config.bus), ("inference", config.inference)):
        if is_loopback(section.host) and section.advertise_host is None:
            yield (
                f"{key}.host: {section.host!r} can't be reached from other machines, which bus.control "
                f"{config.bus.control} is for; set it to an address of each machine's network, or 0.0.0.0 and "
                f"{key}.advertise_host"
            )


ADVICE = (
    _arrival_drops_the_slow,
    _pools_of_what_never_ends,
    _nothing_to_compare_with,
    _distribution_is_cut,
    _nothing_to_share_out,
    _ignored_by_the_loss,
    _engine_serves_another_base,
    _dropout_is_a_mismatch,
    _nothing_held_out,
    _anybody_may_sample,
    _reached_by_nobody,
)
