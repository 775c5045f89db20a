"""Rules between sections of the configuration. Each rule yields error texts that name the key to change."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from schemas.config.engines import types_with
from schemas.config.environments import AgentConfig, EnvironmentBase
from schemas.config.secrets import found_in
from schemas.config.services import is_loopback, is_wildcard, without_brackets

if TYPE_CHECKING:
    from schemas.config.run import RunConfig


FROM_REWARDS = ("mean", "zscore", "batch_std", "norm", "rloo", "reinforce_pp")
"""Types of advantage that the trainer can compute after it has added a reference KL to the rewards."""


def problems_of(config: "RunConfig") -> list[str]:
    """Return the errors of all rules, for sections that are valid by themselves; empty if there are none."""
    return [problem for rule in (*RULES, config.inference.engine.problems) for problem in rule(config)]


def _run_has_a_length(config: "RunConfig") -> Iterator[str]:
    if not (config.trainer.max_steps or config.trainer.max_epochs):
        yield "trainer.max_steps: is required, or trainer.max_epochs in its place"
    if config.trainer.checkpoint.interval_epochs is not None and config.trainer.max_epochs is None:
        yield "trainer.checkpoint.interval_epochs: needs trainer.max_epochs; set that in place of trainer.max_steps"


def _shards_hold_what_they_can(config: "RunConfig") -> Iterator[str]:
    trainer = config.trainer
    if trainer.sharding == "none":
        return
    if config.model.quantization is not None:
        yield "trainer.sharding: fsdp can't spread the blocks of model.quantization; remove one of them"
    if trainer.sft is not None:
        # a rank with fewer rows would leave the others waiting in a collective
        yield (
            "trainer.sharding: fsdp needs the same number of rows on each rank, and trainer.sft does not give it; set "
            "trainer.sharding: none, or remove trainer.sft"
        )


def _rows_can_be_divided(config: "RunConfig") -> Iterator[str]:
    trainer = config.trainer
    ways = {"context_parallel": trainer.context_parallel, "tensor_parallel": trainer.tensor_parallel}
    for key, size in ways.items():
        if trainer.num_ranks % size:
            yield (
                f"trainer.{key}: {size} ranks for each row do not divide trainer.num_ranks {trainer.num_ranks}; set a "
                "divisor of it"
            )
        if size > 1 and trainer.teacher_server is not None:
            # each rank would ask for the same row, and might get other bits
            yield f"trainer.{key}: not with trainer.teacher_server; remove one of the two"
    if min(ways.values()) > 1:
        yield "trainer.tensor_parallel: not with trainer.context_parallel; set one of the two to 1"


def _weights_can_be_divided(config: "RunConfig") -> Iterator[str]:
    """Check the ways to divide the computation of weights."""
    trainer, model = config.trainer, config.model
    if trainer.num_ranks % trainer.expert_parallel:
        yield (
            f"trainer.expert_parallel: {trainer.expert_parallel} ranks do not divide trainer.num_ranks "
            f"{trainer.num_ranks}; set a divisor of it"
        )
    for key, size in {"tensor": trainer.tensor_parallel, "expert": trainer.expert_parallel}.items():
        if size > 1 and trainer.sharding != "fsdp":
            yield f"trainer.{key}_parallel: needs trainer.sharding: fsdp"
        if size > 1 and model.compile:
            yield f"trainer.{key}_parallel: not with model.compile; set model.compile: false"
    # ranks that compute the same tokens would draw other masks
    if trainer.tensor_parallel > 1 and (model.dropout or (model.lora is not None and model.lora.dropout > 0)):
        yield "trainer.tensor_parallel: not with dropout; set model.dropout: false and model.lora.dropout: 0"


def _engines_take_turns(config: "RunConfig") -> Iterator[str]:
    engine = config.inference.engine
    if config.up.colocate == "turns" and (config.inference.attached or not engine.gives_memory_back):
        yield (
            "up.colocate: turns needs engine vllm or embedded, started by this run, since other engines do not give "
            "their memory back; set up.colocate: true"
        )


def _base_can_be_shared(config: "RunConfig") -> Iterator[str]:
    if not config.up.share_base:
        return
    engine, model, trainer = config.inference.engine, config.model, config.trainer
    if model.lora is None or model.quantization is not None:
        yield "up.share_base: needs model.lora, without model.quantization: any other base changes, or is in blocks"
    if trainer.num_ranks > 1:
        yield "up.share_base: needs trainer.num_ranks 1, the rank whose memory engines map"
    if config.inference.attached or not engine.maps_base:
        yield (
            "up.share_base: needs engine vllm or embedded, started by this run, with tensor_parallel_size and "
            "data_parallel_size 1, without inference.engine.quantization, and without --load-format in extra_args: the "
            "server has the trainer's weights as they are"
        )
    if config.up.colocate == "turns":
        yield "up.share_base: not with up.colocate: turns, in which weights leave the device"


def _experts_are_told(config: "RunConfig") -> Iterator[str]:
    if not config.trainer.router_replay:
        return
    if not config.inference.engine.tells_experts:
        yield (
            "trainer.router_replay: needs engine vllm with enable_prefix_caching, without servers of others (urls), or "
            "embedded: other engines do not tell which experts they chose"
        )
    if config.model.compile:
        yield "trainer.router_replay: not with model.compile; set model.compile: false"


def _secrets_are_elsewhere(config: "RunConfig") -> Iterator[str]:
    for path in found_in(config.model_dump()):
        yield (
            f"{path}: looks like a secret, and the configuration is written to config.resolved.yaml and the ledger and "
            "shown in the list of processes; put the value into an environment variable of the actor and let your code "
            "read the variable (a key such as api_key_env may name it)"
        )


def _trackers_have_a_place_each(config: "RunConfig") -> Iterator[str]:
    """Refuse two trackers that find the run of the other by its id: each value would be there twice."""
    trackers = config.telemetry.trackers
    # these keys tell people of a run, and not where it is
    places = [one.model_dump(exclude={"name", "group", "tags", "mode"}) for one in trackers]
    for index, place in enumerate(places):
        first = places.index(place)
        if first < index:
            others = " or ".join(key for key in place if key != "type")
            yield (
                f"telemetry.trackers.{index}: sends to the same place as telemetry.trackers.{first}; set another "
                f"{others}, or remove one of the two"
            )


def _token_of_the_hub_is_elsewhere(config: "RunConfig") -> Iterator[str]:
    """Refuse a token in the place of its variable. In capitals, since hf_abc would be a variable's name as well."""
    name = config.push_to_hub.token_env if config.push_to_hub else ""
    if name and not (name.isascii() and name.isidentifier() and name == name.upper()):
        # the value is not repeated, since it may be the token
        yield (
            "push_to_hub.token_env: must be the name of an environment variable, in capitals; a token never stands in "
            "the configuration"
        )


def _lag_rules_agree(config: "RunConfig") -> Iterator[str]:
    level, limit = config.packer.max_async_level, config.packer.max_off_policy_steps
    if limit < level:
        yield f"packer.max_off_policy_steps: {limit} is below packer.max_async_level {level}; all groups would be stale"
    if not config.packer.strict_async_level:
        return
    if config.packer.oversampling_factor > 1:
        yield (
            "packer.strict_async_level: with packer.oversampling_factor groups of one version train in several steps; "
            "remove one of the two"
        )
    if config.packer.order == "arrival" and len(config.trained) > 1:
        yield (
            "packer.strict_async_level: with packer.order arrival and several environments a slow group trains in a "
            "later step; set order: ordinal"
        )
    if config.weights.keep < level + 2:
        yield (
            f"weights.keep: {config.weights.keep} with packer.strict_async_level; engines serve a version up to "
            f"{level + 1} steps old, so set at least {level + 2}"
        )


def _leases_outlast_a_lost_heartbeat(config: "RunConfig") -> Iterator[str]:
    bus = config.bus
    # with less than two heartbeats in a lease, one lost heartbeat would end a living peer's work
    if bus.lease < 2 * bus.beat_interval:
        yield (
            f"bus.lease: {bus.lease:g} s is less than twice bus.beat_interval {bus.beat_interval:g} s; a peer would "
            "count as gone when one of its heartbeats is lost"
        )


def _samples_fit(config: "RunConfig") -> Iterator[str]:
    tokens = config.rollout.max_tokens
    limits = {"packer.sequence_len": config.packer.sequence_len} | config.inference.engine.max_tokens_per_sequence()
    for key, length in limits.items():
        # a prompt has one token at least
        if tokens >= length:
            yield f"rollout.max_tokens: {tokens} leaves no room for a prompt in {key} {length}"
        sources = {f"eval.sources.{i}": one.max_tokens for i, one in enumerate(config.eval.sources)}
        for section, most in ({"eval": config.eval.max_tokens} | sources).items():
            if most is not None and most >= length:
                yield f"{section}.max_tokens: {most} leaves no room for a prompt in {key} {length}"


def _prompts_leave_room(config: "RunConfig") -> Iterator[str]:
    tokens = config.rollout.max_tokens
    for one in config.environments:
        limits = {"packer.sequence_len": config.packer.sequence_len} | config.inference.engine.max_tokens_per_sequence()
        key, length = min(limits.items(), key=lambda limit: limit[1])
        if one.max_prompt_tokens is not None and one.max_prompt_tokens + tokens > length:
            yield (
                f"environments[].max_prompt_tokens: {one.max_prompt_tokens} of {one.label} and rollout.max_tokens "
                f"{tokens} exceed {key} {length}"
            )


def _completions_may_end(config: "RunConfig") -> Iterator[str]:
    rollout, reward = config.rollout, config.reward
    if rollout.min_tokens > rollout.max_tokens:
        yield f"rollout.min_tokens: {rollout.min_tokens} exceeds rollout.max_tokens {rollout.max_tokens}"
    masks = [key for key in ("mask_truncated_completions", "mask_no_eos_with_zero") if getattr(reward, key)]
    if rollout.ignore_eos and not rollout.stop and masks:
        yield (
            f"rollout.ignore_eos: every completion is cut off at rollout.max_tokens, and reward.{masks[0]} leaves "
            "nothing of such completions to learn from; remove one of the two, or set rollout.stop"
        )


def _every_engine_has_a_server(config: "RunConfig") -> Iterator[str]:
    """Require a server per actor, from the list of the engine or from a pool, never from both."""
    engine, actors = config.inference.engine, config.up.inference
    num_servers = len(engine.server_urls)
    if config.inference.pool is None:
        # inference-N takes url N, so that a restarted actor comes back to its server
        if engine.attached and num_servers != actors:
            yield f"inference.engine.urls: {num_servers} servers for up.inference {actors}; one for each is needed"
        return
    if not engine.has_server:
        yield (
            f"inference.pool: engine {engine.type} runs in its actor and has no server; set inference.engine.type to "
            f"{types_with('has_server')}, or remove inference.pool"
        )
        return
    if engine.server_urls:
        yield "inference.engine.urls: inference.pool names the servers; set only one of the two"
    if config.inference.port:
        yield f"inference.port: {config.inference.port} with inference.pool, where each actor takes a free port; set 0"


def _engine_does_what_is_asked(config: "RunConfig") -> Iterator[str]:
    """Require an engine that takes weights by the channel of the run, and can add noise if noise is set."""
    engine, channel = config.inference.engine, config.weights.channel
    if channel not in engine.channels:
        others = " or ".join(sorted(engine.channels))
        yield (
            f"weights.channel: {channel}, but engine {engine.type} takes weights by {others} alone; set "
            f"weights.channel: {others}"
        )
    if channel == "device" and config.inference.attached:
        yield (
            "weights.channel: device needs engines that this run starts, since an existing server may be on another "
            "device than its inference actor; set weights.channel: rendezvous"
        )
    if config.inference.noise is not None and not engine.supports_noise:
        yield (
            f"inference.noise: engine {engine.type} can't add noise; remove inference.noise, or set "
            f"inference.engine.type to {types_with('supports_noise')}"
        )


def _engine_takes_the_adapter(config: "RunConfig") -> Iterator[str]:
    lora, engine = config.model.lora, config.inference.engine
    if lora is None:
        return
    for key in lora.beyond_plain:
        if not engine.takes_any_adapter:
            yield (
                f"model.lora.{key}: engine {engine.type} takes plain LoRA adapters only; remove model.lora.{key}, or "
                f"set inference.engine.type to {types_with('takes_any_adapter')}"
            )
        if config.trainer.sharding != "none":
            yield f"model.lora.{key}: not with trainer.sharding fsdp; remove one of the two"


def _vision_is_trained_where_it_can_be(config: "RunConfig") -> Iterator[str]:
    engine = config.inference.engine
    for key in config.model.trained_vision:
        if not engine.takes_trained_vision:
            # a server recognises an image by its digest, under each version of the weights
            yield (
                f"model.{key}: engine {engine.type} keeps the features of an image across versions, or takes no "
                f"adapters on vision layers; remove model.{key}, or set inference.engine.type to "
                f"{types_with('takes_trained_vision')}"
            )
        if config.trainer.sharding != "none":
            yield (
                f"model.{key}: trainer.sharding fsdp keeps vision tower and projector whole and frozen on each rank; "
                f"remove model.{key}, or set trainer.sharding: none"
            )


def _environments_go_together(config: "RunConfig") -> Iterator[str]:
    """Require different labels, and weights for all environments or for none."""
    # labels are names of metrics, and part of the identity of an example in the ledger
    labels = [environment.label for environment in config.environments]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield f"environments: two are called {label!r}; set environments[].name"
    if not config.trained:
        yield "environments[].train: is false for all; there is nothing to train on"
    given = [environment.weight is not None for environment in config.trained]
    # a weight is relative; against the sizes of files, the default, it would mean nothing
    if any(given) and not all(given):
        yield "environments[].weight: set it for all environments or for none"


def _addresses_are_safe_and_reachable(config: "RunConfig") -> Iterator[str]:
    """Refuse plaintext beyond loopback, and wildcards as addresses told to peers."""
    bus, control_host = config.bus, config.control_host
    if control_host is None:
        return
    if not (bus.keys or bus.allow_plaintext):
        hosts = {"bus.control": control_host, "bus.host": bus.host, "bus.advertise_host": bus.advertise_host}
        for key, host in hosts.items():
            if host and not is_loopback(host):
                yield (
                    f"{key}: {host!r} is reachable from other machines and the bus is not encrypted; set bus.keys "
                    "(`actors keys new DIR` makes some), stay on 127.0.0.1, or set bus.allow_plaintext: true on a "
                    "network that only you can reach"
                )
        return
    # a socket can bind to 0.0.0.0 and ::, but no peer can connect to them
    if is_wildcard(control_host):
        yield (
            f"bus.control: {control_host!r} is no address that actors can connect to; write the packer's "
            "address, or a name that resolves to it"
        )
    for key, section in (("bus", bus), ("inference", config.inference)):
        if is_wildcard(section.advertise_host if section.advertise_host is not None else section.host):
            yield (
                f"{key}.host: {section.host!r} is no address that others can connect to; set {key}.advertise_host to "
                f"the one under which they reach this machine, or {key}.host to it"
            )


def _hosts_of_environments_are_safe(config: "RunConfig") -> Iterator[str]:
    if config.bus.keys or config.bus.allow_plaintext:
        return
    for one in config.environments:
        for address in one.hosts if isinstance(one, EnvironmentBase) else ():
            if not is_loopback(without_brackets(address.removeprefix("tcp://").rpartition(":")[0])):
                yield (
                    f"environments[].hosts: {address} of {one.label} is another machine and the bus is not encrypted; "
                    "set bus.keys (`actors keys new DIR` makes some), or bus.allow_plaintext: true on a network that "
                    "only you can reach"
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
    """Require a teacher for losses that read its logprobs, and refuse one that nothing reads.

    A loss of type `custom` may do either.
    """
    loss, teacher = config.trainer.loss, config.trainer.teacher
    tau = getattr(loss, "teacher_tau", 0.0)
    distillation = config.trainer.distillation
    by_environment = [one.label for one in config.environments if one.ref_kl_weight > 0]
    reads = loss.type == "ref_kl" or tau > 0 or distillation is not None or bool(by_environment)
    if reads and teacher is None:
        # the last of these that holds is named: the most specific key
        key = f"trainer.loss.teacher_tau: {tau:g}" if tau else f"trainer.loss: {loss.type}"
        key = f"trainer.distillation: {distillation.type}" if distillation is not None else key
        key = f"environments[].ref_kl_weight: that of {by_environment[0]}" if by_environment else key
        yield f"{key} needs a teacher; set trainer.teacher.path"
    if teacher is not None and not reads and loss.type != "custom":
        yield (
            f"trainer.teacher: trainer.loss {loss.type} does not read it; set type ref_kl there, or teacher_tau > 0, "
            "or trainer.distillation"
        )


def _teacher_server_has_the_temperature(config: "RunConfig") -> Iterator[str]:
    if config.trainer.teacher_server is None:
        return
    if config.trainer.teacher is None:
        yield "trainer.teacher_server: needs trainer.teacher.path, whose tokenizer is compared with that of the policy"
    if config.rollout.temperature != 1.0 or config.rollout.temperature_schedule is not None:
        yield (
            "trainer.teacher_server: a server's logprobs are of temperature 1; set rollout.temperature: 1.0 without "
            "temperature_schedule, or remove trainer.teacher_server, and the trainer loads the teacher"
        )


def _zero_advantages_are_for_nothing(config: "RunConfig") -> Iterator[str]:
    """Refuse filter_zero_advantages where tokens with advantage 0 have a loss, or are not known at packing."""
    if not config.packer.filter_zero_advantages:
        return
    reference, loss = config.trainer.reference, config.trainer.loss
    tau = getattr(loss, "teacher_tau", 0.0)
    if loss.type == "ref_kl":
        yield "packer.filter_zero_advantages: trainer.loss ref_kl reads no advantage; remove one of the two"
    if config.trainer.distillation is not None:
        yield "packer.filter_zero_advantages: drops tokens that trainer.distillation is for; remove one of the two"
    if any(one.ref_kl_weight > 0 for one in config.environments):
        yield "packer.filter_zero_advantages: drops tokens that environments[].ref_kl_weight is for; remove one of them"
    if tau:
        yield f"packer.filter_zero_advantages: drops tokens that trainer.loss.teacher_tau {tau:g} is for; set it to 0"
    if reference is not None and reference.place != "loss":
        yield (
            f"packer.filter_zero_advantages: trainer.reference.place {reference.place} changes advantages after the "
            "step is packed; set place: loss, or remove one of the two"
        )
    # the mean of the normalisation moves zeros away from 0
    if config.reward.adv_norm is not None:
        yield "packer.filter_zero_advantages: reward.adv_norm leaves no advantage at 0; remove one of the two"


def _weights_of_losses_that_know_them(config: "RunConfig") -> Iterator[str]:
    weighted = [one.label for one in config.environments if (one.rl_weight, one.ref_kl_weight) != (1.0, 0.0)]
    if weighted and config.trainer.loss.type == "custom":
        yield (
            f"environments[].rl_weight: {weighted[0]} has weights, which do nothing with trainer.loss custom; remove "
            "rl_weight and ref_kl_weight"
        )
    if config.trained and not any(one.rl_weight or one.ref_kl_weight for one in config.trained):
        yield "environments[].rl_weight: with 0 for all of them, and no ref_kl_weight, nothing is trained"


def _rewards_with_kl_make_advantages(config: "RunConfig") -> Iterator[str]:
    reference, reward = config.trainer.reference, config.reward
    if reference is None or reference.place != "group_reward":
        return
    if reward.advantage.type not in FROM_REWARDS:
        yield (
            f"trainer.reference.place: group_reward makes advantages of rewards alone; reward.advantage is "
            f"{reward.advantage.type}, it must be one of {', '.join(FROM_REWARDS)}"
        )
    # the trainer has no finish reasons (decision 0025)
    if reward.mask_no_eos_with_zero:
        yield "reward.mask_no_eos_with_zero: not with trainer.reference.place group_reward; remove one of the two"


def _reference_that_moves_has_weights(config: "RunConfig") -> Iterator[str]:
    reference = config.trainer.reference
    if reference is not None and reference.sync is not None and config.model.lora is not None:
        yield (
            "trainer.reference.sync: with model.lora the reference is the base model, which has no weights of its own "
            "to move; remove one of the two"
        )


def _sources_have_environments(config: "RunConfig") -> Iterator[str]:
    """Require sources of evaluations to name an environment, and results to have different names."""
    labels = [one.label for one in config.environments]
    taken = set(labels)
    replaced: set[str] = set()
    for number, source in enumerate(config.eval.sources):
        key = f"eval.sources.{number}"
        if source.environment not in labels:
            yield f"{key}.environment: there is no {source.environment!r} in environments, only {', '.join(labels)}"
        elif not source.name and source.environment in replaced:
            yield f"{key}.name: {source.environment} has another source without a name; give this one a name"
        elif source.name in taken:
            yield f"{key}.name: {source.name!r} is the name of an environment or of another source; set another one"
        (taken if source.name else replaced).add(source.name or source.environment)


def _something_is_rewarded(config: "RunConfig") -> Iterator[str]:
    without = [one.label for one in config.trained if not isinstance(one, EnvironmentBase)]
    if without and not config.reward.functions:
        yield f"reward.functions: is empty, and {without[0]} has no rewards of its own; name a function"


def _trajectories_end_before_their_group(config: "RunConfig") -> Iterator[str]:
    for one in config.environments:
        timeout = one.trajectory_timeout if isinstance(one, EnvironmentBase) else None
        if timeout is not None and timeout >= config.rollout.group_timeout:
            yield (
                f"environments[].trajectory_timeout: {timeout:g} s of {one.label} are not below rollout.group_timeout "
                f"{config.rollout.group_timeout:g}; raise the latter"
            )


def _services_have_a_key(config: "RunConfig") -> Iterator[str]:
    keys = config.rollout.sessions
    external = [one.label for one in config.environments if isinstance(one, AgentConfig) and one.external]
    if external and not keys.admin_key_env and not is_loopback(keys.host):
        yield (
            f"rollout.sessions.admin_key_env: is empty, and {keys.host} is no loopback address, so anybody could take "
            f"the trajectories of {external[0]}; name an environment variable with a key"
        )


def _levels_move_alone(config: "RunConfig") -> Iterator[str]:
    moving = [one for one in config.environments if getattr(one, "curriculum", None) is not None]
    if not moving:
        return
    if config.packer.pools is not None:
        yield (
            f"environments[].curriculum: {moving[0].label} has examples of one level at a time, and packer.pools could "
            "set all of them aside; remove one of the two"
        )
    if config.trainer.max_epochs is not None:
        yield (
            f"environments[].curriculum: how often {moving[0].label} passes through its examples depends on the model; "
            "set trainer.max_steps in place of trainer.max_epochs"
        )


def _scaled_roles_may_change(config: "RunConfig") -> Iterator[str]:
    if config.scale.inference is not None and config.inference.attached:
        key = "inference.pool" if config.inference.pool is not None else "inference.engine.urls"
        yield f"scale.inference: {key} has one actor for each server, whose number is not ours; remove scale.inference"
    if config.scale.reward is not None and not config.up.reward:
        yield "scale.reward: with up.reward 0 reward actors are started elsewhere; remove scale.reward"


RULES = (
    _sources_have_environments,
    _run_has_a_length,
    _hosts_of_environments_are_safe,
    _something_is_rewarded,
    _trajectories_end_before_their_group,
    _services_have_a_key,
    _levels_move_alone,
    _secrets_are_elsewhere,
    _token_of_the_hub_is_elsewhere,
    _trackers_have_a_place_each,
    _shards_hold_what_they_can,
    _rows_can_be_divided,
    _weights_can_be_divided,
    _engines_take_turns,
    _base_can_be_shared,
    _experts_are_told,
    _lag_rules_agree,
    _leases_outlast_a_lost_heartbeat,
    _samples_fit,
    _prompts_leave_room,
    _completions_may_end,
    _every_engine_has_a_server,
    _scaled_roles_may_change,
    _engine_does_what_is_asked,
    _engine_takes_the_adapter,
    _vision_is_trained_where_it_can_be,
    _environments_go_together,
    _addresses_are_safe_and_reachable,
    _minibatches_have_completions,
    _teacher_for_a_loss_that_reads_it,
    _teacher_server_has_the_temperature,
    _zero_advantages_are_for_nothing,
    _reference_that_moves_has_weights,
    _rewards_with_kl_make_advantages,
    _weights_of_losses_that_know_them,
)
