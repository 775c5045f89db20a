"""What sections must agree on: each rule tells what is wrong, in words that name the key to change."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from schemas.config.actors import EmbeddedEngineConfig
from schemas.config.engines import VllmEngineConfig
from schemas.config.services import is_loopback
from schemas.config.sglang import SglangEngineConfig

if TYPE_CHECKING:
    from schemas.config.run import RunConfig


def problems_of(config: "RunConfig") -> list[str]:
    """What is wrong between sections that are each right by themselves."""
    return [problem for rule in RULES for problem in rule(config)]


def _shards_hold_what_they_can(config: "RunConfig") -> Iterator[str]:
    trainer = config.trainer
    if trainer.sharding == "none":
        return
    if trainer.optimizer.type == "adamw_8bit":
        yield "trainer.sharding: fsdp can't spread the blocks of trainer.optimizer adamw_8bit; use adamw"
    if config.model.quantization is not None:
        yield "trainer.sharding: fsdp can't spread the blocks of model.quantization; remove one of them"
    if trainer.sft is not None:
        yield "trainer.sharding: fsdp needs as many rows on each rank, which trainer.sft does not have"


def _lag_rules_agree(config: "RunConfig") -> Iterator[str]:
    level, limit = config.packer.max_async_level, config.packer.max_off_policy_steps
    if limit < level:
        yield f"packer.max_off_policy_steps: {limit} is below packer.max_async_level {level}; all groups would be stale"


def _samples_fit(config: "RunConfig") -> Iterator[str]:
    tokens, engine = config.rollout.max_tokens, config.inference.engine
    rows = {"packer.sequence_len": config.packer.sequence_len}
    if isinstance(engine, EmbeddedEngineConfig):
        rows["inference.engine.max_sequence_len"] = engine.max_sequence_len
        if config.rollout.group_size > engine.max_sequences:
            yield (
                f"rollout.group_size: {config.rollout.group_size} exceeds "
                f"inference.engine.max_sequences {engine.max_sequences}"
            )
    if isinstance(engine, VllmEngineConfig) and engine.max_model_len is not None:
        rows["inference.engine.max_model_len"] = engine.max_model_len
    for key, length in rows.items():
        if tokens >= length:
            yield f"rollout.max_tokens: {tokens} leaves no room for a prompt in {key} {length}"


def _every_engine_has_a_server(config: "RunConfig") -> Iterator[str]:
    engine, actors = config.inference.engine, config.up.inference
    if config.inference.pool is not None or not isinstance(engine, VllmEngineConfig | SglangEngineConfig):
        return
    attached = isinstance(engine, SglangEngineConfig) or engine.urls
    if attached and len(engine.urls) != actors:
        yield f"inference.engine.urls: {len(engine.urls)} servers for up.inference {actors}; one for each is needed"


def _pool_is_of_servers(config: "RunConfig") -> Iterator[str]:
    engine = config.inference.engine
    if config.inference.pool is None:
        return
    if not isinstance(engine, VllmEngineConfig | SglangEngineConfig):
        yield f"inference.pool: engine {engine.type} runs in its actor; take inference.engine.type vllm or sglang"
        return
    if engine.urls:
        yield "inference.engine.urls: inference.pool names the servers; set one of both"
    if config.inference.port:
        yield f"inference.port: {config.inference.port} with inference.pool, whose actors take any free one"


def _broadcasts_are_taken(config: "RunConfig") -> Iterator[str]:
    if isinstance(config.inference.engine, SglangEngineConfig) and config.weights.channel == "rendezvous":
        yield "weights.channel: rendezvous; engine sglang reads files, set weights.channel to filesystem"


def _adapters_fit(config: "RunConfig") -> Iterator[str]:
    engine, lora = config.inference.engine, config.model.lora
    if isinstance(engine, VllmEngineConfig) and lora is not None and (engine.max_lora_rank or lora.rank) < lora.rank:
        yield f"inference.engine.max_lora_rank: {engine.max_lora_rank} is below model.lora.rank {lora.rank}"


def _noise_where_it_is_made(config: "RunConfig") -> Iterator[str]:
    engine = config.inference.engine
    if config.inference.noise is None or isinstance(engine, EmbeddedEngineConfig):
        return
    if not isinstance(engine, VllmEngineConfig):
        yield (
            f"inference.noise: engine {engine.type} has none; remove it, or take inference.engine.type embedded or vllm"
        )
    elif config.model.lora is not None and (engine.urls or config.inference.pool is not None):
        servers = "inference.engine.urls" if engine.urls else "inference.pool"
        yield f"inference.noise: with model.lora the server must be started by its actor; remove it, or {servers}"
    elif config.model.lora is not None and any(word.startswith("--worker-ext") for word in engine.extra_args):
        yield "inference.engine.extra_args: with model.lora inference.noise needs --worker-extension-cls for itself"


def _environment_names_differ(config: "RunConfig") -> Iterator[str]:
    labels = [environment.label for environment in config.environments]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield f"environments: two are called {label!r}; set environments[].name"


def _weights_set_for_all_or_none(config: "RunConfig") -> Iterator[str]:
    given = [environment.weight is not None for environment in config.environments]
    if any(given) and not all(given):
        yield "environments[].weight: set it for all environments or for none"


def _plaintext_stays_on_loopback(config: "RunConfig") -> Iterator[str]:
    bus, control_host = config.bus, config.control_host
    if control_host is None or bus.keys or bus.allow_plaintext:
        return
    hosts = {"bus.control": control_host, "bus.host": bus.host, "bus.advertise_host": bus.advertise_host}
    for key, host in hosts.items():
        if host and not is_loopback(host):
            yield (
                f"{key}: {host!r} is reachable from other machines and the bus is not encrypted; set bus.keys "
                "(`actors keys new DIR` makes some), stay on 127.0.0.1, or set bus.allow_plaintext: true on a network "
                "that only you can reach"
            )


def _minibatches_have_completions(config: "RunConfig") -> Iterator[str]:
    parts, completions = config.trainer.num_minibatches, config.packer.groups_per_step * config.rollout.group_size
    sft = config.trainer.sft
    if parts > completions:
        yield (
            f"trainer.num_minibatches: {parts}, but a step has {completions} completions, packer.groups_per_step "
            f"{config.packer.groups_per_step} × rollout.group_size {config.rollout.group_size}"
        )
    if sft is not None and sft.batch_size < parts:
        yield (
            f"trainer.sft.batch_size: {sft.batch_size} examples can't be shared out to trainer.num_minibatches {parts}"
        )


def _teacher_for_a_loss_that_reads_it(config: "RunConfig") -> Iterator[str]:
    """`custom` may read one or not."""
    loss, teacher = config.trainer.loss, config.trainer.teacher
    tau = getattr(loss, "teacher_tau", 0.0)
    reads = loss.type == "ref_kl" or tau > 0
    if reads and teacher is None:
        key = f"trainer.loss.teacher_tau: {tau:g}" if tau else f"trainer.loss: {loss.type}"
        yield f"{key} needs a teacher; set trainer.teacher.path"
    if teacher is not None and not reads and loss.type != "custom":
        yield f"trainer.teacher: trainer.loss {loss.type} does not read it; set type ref_kl there, or teacher_tau > 0"


RULES = (
    _shards_hold_what_they_can,
    _lag_rules_agree,
    _samples_fit,
    _every_engine_has_a_server,
    _pool_is_of_servers,
    _broadcasts_are_taken,
    _adapters_fit,
    _noise_where_it_is_made,
    _environment_names_differ,
    _weights_set_for_all_or_none,
    _plaintext_stays_on_loopback,
    _minibatches_have_completions,
    _teacher_for_a_loss_that_reads_it,
)
