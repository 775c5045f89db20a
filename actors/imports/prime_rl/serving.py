"""Inference of prime-rl, and the keys of a whole run: names, folders, logs, and all that has no counterpart."""

import json
import re
from typing import Any

from actors.imports.job import Import
from actors.imports.trackers import tracker_section
from schemas.config.vllm_engine import SET_BY_US

VLLM = "inference.vllm"
LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "warning": "warning", "error": "error"}
"""Levels of log lines."""

IRRELEVANT = {
    "trainer": "an empty section",
    "orchestrator": "an empty section",
    "inference": "engines are always started here",
    "inference.vllm": "an empty section",
    "inference.server": "an empty section",
    "orchestrator.train.sampling": "an empty section",
    "orchestrator.train": "an empty section",
    "orchestrator.buffer": "an empty section",
    "trainer.optim": "an empty section",
    "trainer.scheduler": "an empty section",
    "deployment": "an empty section",
    "log": "an empty section",
    "clean": "actors up resumes the run in output_dir, or starts one",
    "dry_run": "actors check",
    "dashboard": "actors view",
    "resume": "actors up resumes by itself",
    "resume.**": "actors up resumes by itself; actors rewind --step goes back",
    "run.**": "metadata",
    "ckpt.output_dir": "checkpoints are in output_dir",
    "ckpt.**": "checkpoints are always complete here",
    "trainer.ckpt": "checkpoints as [ckpt] says",
    "trainer.ckpt.**": "checkpoints are always complete here, and [ckpt] counts",
    "orchestrator.ckpt": "one checkpoint for all here",
    "orchestrator.ckpt.**": "one checkpoint for all here, that of the trainer",
    "monitors.file": "metrics.jsonl is always written",
    "monitors.file.**": "metrics.jsonl is always written",
    "*.monitors.file.**": "metrics.jsonl is always written",
    "monitors.prime.**": "a platform of prime-rl",
    "*.monitors.prime.**": "a platform of prime-rl",
    "*.prime_monitor": "a platform of prime-rl",
    "*.prime_monitor.**": "a platform of prime-rl",
    "orchestrator.micro_batch_size": "rows are filled to packer.sequence_len tokens",
    "orchestrator.lora_name": "adapters have no names here",
    "prime_monitor.**": "a platform of prime-rl",
    "env_server_base_port": "ports are free ones",
    "log.**": "log lines are text or JSON by themselves",
    "*.log.**": "log lines are text or JSON by themselves",
    "weight_broadcast.**": "addresses are chosen by the processes",
    "*.weight_broadcast": "one key here, weights.channel",
    "*.weight_broadcast.**": "addresses are chosen by the processes",
    "weight_broadcast": "an empty section",
    "rollout_transport.**": "processes talk over ZeroMQ here",
    "*.rollout_transport.**": "processes talk over ZeroMQ here",
    "*.output_dir": "one folder for all here, output_dir",
    "*.heartbeat": "supervision is the bus's own",
    "*.heartbeat.**": "supervision is the bus's own",
    "trainer.model.impl": "another implementation of the same model",
    "trainer.model.ac_offloading": "where activations wait changes no number",
    "trainer.model.ac_offloading.**": "where activations wait changes no number",
    "trainer.model.optim_cpu_offload": "where the optimizer's state lies changes no number; expect more GPU memory",
    "trainer.model.fsdp_cpu_offload": "where weights lie changes no number; expect more GPU memory",
    "trainer.model.full_offload": "where weights lie changes no number; expect more GPU memory",
    "trainer.model.reshard_after_forward": "a plan of memory",
    "trainer.model.dp_replicate": "a layout of shards; the ranks train the same step",
    "trainer.model.fused_lm_head_token_chunk_size": "a plan of memory",
    "trainer.model.fused_lm_head_chunk_size": "a plan of memory",
    "trainer.model.reduce_dtype": "gradients are reduced in float32",
    "trainer.model.moe_*": "a kernel",
    "trainer.model.moe_use_grouped_mm": "a kernel",
    "trainer.model.load_using_meta": "a way of loading",
    "trainer.model.ep_comm_backend": "transport of expert parallelism",
    "trainer.model.deepep_num_sms": "transport of expert parallelism",
    "trainer.model.deepep_token_chunk_size": "transport of expert parallelism",
    "trainer.model.cp_style": "both styles compute the same attention",
    "trainer.model.debug.**": "for tests",
    "trainer.matmul_precision": "a setting of float32 products; the computation is in bfloat16",
    "trainer.gc": "garbage collection",
    "trainer.gc.**": "garbage collection",
    "trainer.dist_timeout_seconds": "bus.peer_timeout and trainer.gang_timeout",
    "trainer.trace_path": "for profiles",
    "trainer.memory_profiler_path": "for profiles",
    "trainer.broadcast_at_step_zero": "engines always start with the run's weights",
    "trainer.max_concurrent_runs": "one run",
    "trainer.enable_token_export": "samples.jsonl",
    "trainer.metrics_server": "an empty section: /metrics is always served",
    "trainer.metrics_server.**": "/metrics is always served",
    "trainer.tokenizer.name": "the tokenizer is the model's",
    "tokenizer.name": "the tokenizer is the model's",
    "*.tokenizer.trust_remote_code": "model.trust_remote_code",
    "tokenizer.trust_remote_code": "model.trust_remote_code",
    "orchestrator.tokenizer.name": "the tokenizer is the model's",
    "orchestrator.use_token_client": "tokens are exact here in any case",
    "orchestrator.trajectory_strategy": "turns are joined where their tokens are",
    "orchestrator.num_train_workers": "trainer.num_ranks",
    "orchestrator.pad_to_multiple_of": "a detail of packing",
    "orchestrator.pool_size": "threads of its tokenizer",
    "orchestrator.collect_inference_metrics": "/metrics is always served",
    "orchestrator.inference_metrics_roles": "/metrics is always served",
    "orchestrator.constant_trainer_batch_size": "a step always has its number of groups here",
    "orchestrator.concurrency.initial_inflight": "the number in flight is fixed here",
    "orchestrator.concurrency.min_inflight": "the number in flight is fixed here",
    "orchestrator.optim.**": "of several runs at once",
    "orchestrator.model.client.**": "the actors start the servers themselves",
    "orchestrator.model.lora.name": "adapters have no names",
    "orchestrator.model.lora": "model.lora",
    "orchestrator.train.max_retries": "a failed group is sampled again here",
    "orchestrator.eval.max_retries": "a failed group is sampled again here",
    "orchestrator.*.source.*.serve.**": "workers of the environment: environments[].workers",
    "orchestrator.*.source.*.pool.**": "workers of the environment: environments[].workers",
    "orchestrator.*.source.*.num_workers": "workers of the environment: environments[].workers",
    "orchestrator.*.source.*.max_retries": "a failed group is sampled again here",
    "orchestrator.*.source.*.extra_env_kwargs.**": "set by the launcher",
    "orchestrator.*.source.*.timeout": "environments[].trajectory_timeout",
    "orchestrator.*.source.*.timeout.**": "environments[].trajectory_timeout",
    "orchestrator.eval.skip_eval_on_resume": "a resumed run does not evaluate again",
    "orchestrator.eval.retrigger_on_resume": "a resumed run does not evaluate again",
    "orchestrator.eval.cancel_inflight_rollouts_on_eval": "evaluation overlaps with training here",
    "orchestrator.verification": "an empty section",
    "orchestrator.env_install_prerelease": "packages are installed by the user",
    "inference.output_dir": "a folder of its logs",
    "inference.server.host": "servers are found through the packer",
    "inference.vllm.host": "servers are found through the packer",
    "inference.api_server_count": "one front end per engine",
    "inference.enable_fp32_lm_head": "switched off",
    "inference.use_deep_gemm": "a kernel",
    "inference.weight_broadcast.**": "weights.channel",
    "inference.deployment.gpus_per_node": "as deployment",
    "inference.deployment.type": "as deployment",
    "inference.router.**": "engines are chosen by the rollout actors",
    "inference.router": "engines are chosen by the rollout actors",
    "experimental.**": "an empty section in prime-rl",
    "*.experimental.**": "an empty section in prime-rl",
}
"""Reasons of keys without influence."""

REFUSED = {
    "slurm": "no launcher is built; start actors up, or actors run on each machine",
    "slurm.**": "no launcher is built; start actors up, or actors run on each machine",
    "*.slurm.**": "no launcher is built; start actors up, or actors run on each machine",
    "env_vars.**": "variables of processes are the shell's; export them",
    "*.env_vars.**": "variables of processes are the shell's; export them",
    "model.vlm": "vision models are not built; take a model of text",
    "model.vlm.**": "vision models are not built; take a model of text",
    "*.model.vlm.**": "vision models are not built; take a model of text",
    "*.tokenizer.chat_template": "one chat template here; set model.chat_template",
    "orchestrator.renderer": "prompts are rendered by a chat template here; compare those in samples.jsonl",
    "orchestrator.renderer.**": "prompts are rendered by a chat template here; compare those in samples.jsonl",
    "orchestrator.tasks_per_minute": "no limit of requests in time; lower rollout.max_concurrent_groups",
    "orchestrator.val.**": "no loss on held-out rollouts; evaluate with [orchestrator.eval]",
    "orchestrator.teacher_model.**": "the trainer loads the teacher; set trainer.teacher.path",
    "orchestrator.teacher.**": "the trainer loads the teacher; set trainer.teacher.path",
    "orchestrator.training_mode": "an older word; write orchestrator.algo.type",
    "orchestrator.bench": "a benchmark; leave it out",
    "bench": "a benchmark; leave it out",
    "*.bench.**": "a benchmark; leave it out",
    "trainer.data.**": "random data are for tests; leave it out",
    "trainer.model.fp8": "nothing trains in 8 bits; bfloat16 is used",
    "trainer.model.quantization": "nothing trains in 8 bits; bfloat16 is used",
    "trainer.model.quantization.**": "nothing trains in 8 bits; bfloat16 is used",
    "trainer.model.index_cache.**": "sparse attention is not built; attention is exact",
    "trainer.model.freeze_moe_router": "all weights are trained, or adapters; use model.lora",
    "trainer.model.lora": "no such value of adapters; write a table with rank and alpha",
    "deployment.nodes_per_fsdp_group": "weights are shared out over all ranks; leave it out",
    "deployment.orchestrator_on_inference": "the packer runs where it is started; start it there",
    "inference.deployment.**": "a server has one role here; leave it out",
    "inference.kv_cache_offload.**": "pass vLLM's arguments in inference.engine.extra_args",
    "inference.use_pd_kv_transfer": "a server has one role here; leave it out",
    "orchestrator.train.source.*.min_abs_advantage": "only advantages of 0 are left out here; leave it out",
    "orchestrator.train.source.*.select.**": "all rows of the environment are used; select them in its arguments",
    "orchestrator.eval.source.*.select.**": "all rows of the environment are used; select them in its arguments",
    "orchestrator.train.source.*.address": "the actors start the workers of an environment themselves; leave it out",
    "orchestrator.eval.source.*.address": "the actors start the workers of an environment themselves; leave it out",
    "orchestrator.train.source.*.sampling.**": "all environments are sampled alike; use [orchestrator.train.sampling]",
    "orchestrator.train.source.*.algo.**": "all environments have one algorithm here; write it in [orchestrator.algo]",
    "orchestrator.algo.length_penalty.**": "another penalty here; add the function length_penalty to reward.functions",
    "orchestrator.algo.**": "not built here; remove it, or compute the advantage with reward.advantage of type custom",
    "orchestrator.mask_truncated_completions": "write reward.mask_truncated_completions",
}
"""Reasons of keys without counterpart."""

ENGINE_KEYS = ("max_model_len", "enforce_eager", "gpu_memory_utilization", "enable_prefix_caching", "quantization")


def convert_engine(job: Import) -> None:
    """Write the keys of vLLM."""
    job.run.set("inference.engine.type", "vllm", f"{job.system}'s engine")
    if not job.has("inference"):
        job.note(f"no [inference]: {job.system} expects servers that run already; here an engine is started")
    for name in ENGINE_KEYS:
        key = f"{VLLM}.{name}"
        if job.given.get(key) is not None:
            job.rename(key, f"inference.engine.{name}")
        job.settle(key, "empty")
    for name in ("reasoning_parser", "tool_call_parser"):
        key = f"{VLLM}.{name}"
        if job.is_reported(key):
            continue
        if job.given.get(key) in (None, "auto"):
            job.settle(key, "vLLM's parsers serve requests of your own only")
        else:
            job.rename(key, f"inference.engine.{name}")
    _convert_adapters(job)
    if job.has("inference.server.port"):
        job.rename("inference.server.port", "inference.port", text="of the actor's server, vLLM's own is behind it")
    if job.given.get(f"{VLLM}.dtype") == "bfloat16":
        job.settle(f"{VLLM}.dtype", "engine and trainer have model.dtype")
    else:
        job.refuse_unless(f"{VLLM}.dtype", "auto", "engine and trainer have one precision, model.dtype")
    _convert_arguments(job)


PLAIN = {
    "seed": 0, "enable_expert_parallel": False, "enable_eplb": False, "enable_dbo": False,
    "enable_return_routed_experts": False, "calculate_kv_scales": False,
}  # fmt: skip
"""vLLM's own defaults of further arguments."""
OURS = (
    "api_server_count", "data_parallel_size_local", "data_parallel_rpc_port", "max_cpu_loras", "port", "host",
    "lora_target_modules", "enable_lora",
)  # fmt: skip
"""Arguments that the engine here sets by itself."""


def _convert_arguments(job: Import) -> None:
    """Write all other keys of vLLM as arguments of `vllm serve`."""
    words: list[str] = []
    for key in job.keys_below(VLLM):
        name, _, rest = key.removeprefix(f"{VLLM}.").partition(".")
        if job.is_reported(key):
            continue
        replays = name == "enable_return_routed_experts" and job.given.get("trainer.enable_router_replay") is True
        if name in OURS or replays:
            job.settle(key, "set by the engine here")
        elif job.given[key] is None or (name in PLAIN and job.given[key] == PLAIN[name]):
            job.settle(key, "vLLM's default")
        elif f"--{name}".replace("_", "-").startswith(SET_BY_US) or not re.fullmatch(r"\w+", name):
            job.refuse(key, "the engine here sets this argument", "leave it out")
        else:
            value = job.section(f"{VLLM}.{name}") if rest else job.given[key]
            argument = _argument(name, value)
            # the keys of a map are one argument together
            words += argument if argument[0] not in words else []
            job.convert(key, {"inference.engine.extra_args": words}, " ".join(argument))


def _convert_adapters(job: Import) -> None:
    has_lora = job.run.get("model.lora.rank") is not None
    rank, count = f"{VLLM}.max_lora_rank", f"{VLLM}.max_loras"
    if not has_lora:
        job.settle(rank, "no adapters")
        job.settle(count, "no adapters")
    else:
        # prime-rl replaces the value by the trainer's rank
        if job.system != "prime-rl" and (job.given.get(rank) or 0) >= job.run.get("model.lora.rank"):
            job.rename(rank, "inference.engine.max_lora_rank")
        job.settle(rank, "the engine here takes the rank of model.lora")
        job.rename(count, "inference.engine.max_loras") if (job.given.get(count) or 2) >= 2 else job.convert(
            count, {"inference.engine.max_loras": 2}, "2, the least here: the old and the new version"
        )


def _argument(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [_flag(name if value else f"no-{name}")]
    text = value if isinstance(value, str) else json.dumps(value)
    return [_flag(name), text]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def convert_names(job: Import) -> None:
    """Write name, folder, seed, log level and port of metrics."""
    name = job.given.get("run.name")
    folder = job.given.get("run.dir") or name
    if name:
        label = re.sub(r"[^A-Za-z0-9_.-]", "-", name)
        job.rename("run.name", "name") if label == name else job.convert("run.name", {"name": label}, f"{label}")
    # files of trainer and orchestrator have the folder that both share in 2025
    shared = [key for key in ("output_dir", "trainer.output_dir", "orchestrator.output_dir") if job.given.get(key)]
    parent = job.given[shared[0]] if shared else job.value("output_dir")
    if folder:
        job.convert(["output_dir", "run.dir"], {"output_dir": f"{parent}/{folder}"}, f"{parent} / {folder}")
    else:
        job.rename(shared[0] if shared else "output_dir", "output_dir")
    keys = ("log.level", "trainer.log.level", "orchestrator.log.level", "inference.log.level")
    given = [key for key in keys if job.given.get(key)]
    level = LEVELS.get(str(job.given[given[0]]).lower()) if given else None
    if level:
        job.rename(given[0], "telemetry.log_level") if level == job.given[given[0]] else job.convert(
            given[0], {"telemetry.log_level": level}, level
        )
    elif given:
        job.refuse(given[0], "no such level", "debug, info, warning or error")
    for key in keys:
        if not job.is_reported(key):
            job.settle(key, "one level here, telemetry.log_level")
    if job.has("trainer.metrics_server.port"):
        job.rename("trainer.metrics_server.port", "telemetry.metrics_port")


def convert_template(job: Import) -> None:
    """Write the chat template, which is a text or the name of a file."""
    keys = ("tokenizer.chat_template", "orchestrator.tokenizer.chat_template", "trainer.tokenizer.chat_template")
    given = [key for key in keys if job.given.get(key)]
    if given:
        value = str(job.given[given[0]])
        job.rename(given[0], "model.chat_template" if "{" in value else "model.chat_template.file")
    for key in keys:
        if given and job.given.get(key) in (None, job.given[given[0]]):
            job.settle(key, "one chat template here, model.chat_template")
        elif not given:
            job.settle(key, "empty: the model's own")


def convert_seed(job: Import, era: str) -> None:
    """Write the seed of the orchestrator, which versions up to May 2026 have."""
    if job.given.get("orchestrator.seed") is not None:
        job.rename("orchestrator.seed", "seed")
    elif not job.has("orchestrator.seed") and era < "2026-05":
        job.run.set("seed", 42, f"default of {job.report.origin}")
    else:
        job.settle("orchestrator.seed", "empty")


def convert_trackers(job: Import) -> None:
    """Write W&B, which has one run here: the values of the common section, else of trainer or orchestrator."""
    paths = ("monitors.wandb", "trainer.monitors.wandb", "orchestrator.monitors.wandb")
    given = {path: [key for key in job.given if key == path or key.startswith(f"{path}.")] for path in paths}
    on = [path for path in paths if given[path] and job.given.get(path, True) not in (None, False)]
    if on:
        names = {name: name for name in ("project", "name", "entity", "group", "tags")}
        tracker_section(job, "wandb", on[0], names, "prime-rl")
        if job.given.get(f"{on[0]}.offline") is True:
            job.run.set("telemetry.trackers.0.mode", "offline", "offline: true")
    for path in paths:
        for key in given[path]:
            job.settle(key, "one run of W&B for all here")


def sweep(job: Import) -> None:
    """Report keys without influence and keys without counterpart."""
    for key, harmless in (("trainer.model.cp", 1), ("trainer.model.tp", 1), ("trainer.model.ep", 1),
                          ("trainer.model.ep", "auto"), ("trainer.enable_router_replay", False),
                          ("trainer.model.fp8", False), ("trainer.model.freeze_moe_router", False),
                          ("orchestrator.bench", False), ("bench", False), ("orchestrator.tasks_per_minute", None),
                          ("orchestrator.mask_truncated_completions", False)):  # fmt: skip
        if key in job.given and job.given[key] == harmless and not job.is_reported(key):
            job.settle(key, "switched off")
    if job.given.get("orchestrator.mask_truncated_completions") is True:
        job.rename("orchestrator.mask_truncated_completions", "reward.mask_truncated_completions")
    key = "orchestrator.verification.enabled"
    job.refuse_unless(key, True, "rewards of 0 train nothing")
    job.sweep(IRRELEVANT, REFUSED)
