"""Import of Surogate: the three files of `surogate grpo`, told apart by their keys, and that of `surogate grpo-native`.

Surogate's orchestrator and inference have the keys of prime-rl in February 2026, so these conversions are shared.
"""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.imports.files import map_of
from actors.imports.job import Import, Options
from actors.imports.keys import Key, check_types, coerced, flat, table
from actors.imports.prime_rl import sampling, serving, training
from actors.imports.prime_rl.names import KEYS as SHARED_KEYS
from actors.imports.prime_rl.names import defaults_of, today
from actors.imports.surogate import native
from actors.imports.surogate.judge import convert_judge
from actors.imports.trackers import tracker_section
from schemas.errors import ConfigError

WHOLE = frozenset({"args", "extra_body", "kwargs", "rope_scaling"})
"""Maps that are one value."""
VERSIONS = ("2026-02", "2026-03", "2026-08")
"""Times of known defaults. Up to 2026-03 the loss masks ratios; 2026-02 has weight_decay 0.1 and lora_dropout 0.05."""

TRAIN_KEYS = table("""
run_name                         str?    null
output_dir                       str     output
torch_dtype                      str?    null
save_steps                       int     50
save_total_limit                 int?    5
max_steps                        int     -1
learning_rate                    float   2.0e-4
lr_scheduler_type                str     linear
final_lr_fraction                float   0.0
warmup_steps                     int     0
warmup_ratio                     float   0.0
cooldown_steps                   int     0
wsd_decay_steps_fraction         float   0.1
optimizer                        str     adamw_8bit
adamw_beta1                      float   0.9
adamw_beta2                      float   0.999
adamw_epsilon                    float   1.0e-8
weight_decay                     float   0.0
max_grad_norm                    float   1.0
recompute                        any     true
lora                             bool    true
lora_rank                        int     16
lora_alpha                       float   32
lora_dropout                     float   0.0
lora_target_modules              any?    null
qlora_bnb                        bool    false
qlora_bnb_double_quant           bool    true
qlora_bnb_block_size             int     64
recipe                           str     bf16
gpus                             int     1
zero_level                       int     1
shard_weights                    bool    false
shard_gradients                  bool    false
loss.ipo_mask_low                float   0.2
loss.ipo_mask_high               float   0.2
loss.ratio_clip                  float?  7.389056
loss.adv_tau                     float   1.0
loss.kl_tau                      float   0.001
loss.teacher_tau                 float   0.0
loss.opd_tau                     float   0.0
loss.opd_beta                    float   1.0
loss.replay_tau                  float   0.0
loss.ratio_type                  str     token
loss.token_mask_low              float   0.125
loss.token_mask_high             float   8.0
loss.geo_mask_low                float   0.1
loss.geo_mask_high               float   10.0
loss.sequence_mask_low           float   0.0
loss.sequence_mask_high          float   100.0
loss.sequence_clip_high          float   10.0
noise_scheduler.enabled          bool    false
noise_scheduler.sigma_start      float   0.05
noise_scheduler.sigma_end        float   0.0005
noise_scheduler.num_stages       int     10
weight_broadcast_type            str     filesystem
""")
"""Keys of train.yaml that are read here, with the defaults of August 2026."""
LEGACY_LOSS = ("ratio_type", "token_mask_low", "token_mask_high", "geo_mask_low", "geo_mask_high", "sequence_mask_low",
               "sequence_mask_high", "sequence_clip_high")  # fmt: skip
"""Keys of the loss up to March 2026."""

TRAIN_MARKS = {
    "lora_rank",
    "recipe",
    "gpus",
    "loss",
    "learning_rate",
    "per_device_train_batch_size",
    "optimizer",
    "save_steps",
    "lora_alpha",
    "lr_scheduler_type",
    "zero_level",
    "noise_scheduler",
} | native.MARKS
INFER_MARKS = {"max_model_len", "tp", "dp", "gpu_memory_utilization", "enable_lora", "max_lora_rank", "enforce_eager",
               "max_loras", "kv_cache_dtype", "port"}  # fmt: skip
ORCH_MARKS = {"env", "batch_size", "rollouts_per_example", "sampling", "buffer", "eval", "advantage", "client",
              "filters", "max_off_policy_steps", "oversampling_factor"}  # fmt: skip

# names by which the conversions of prime-rl know the keys of train.yaml, infer.yaml and orch.yaml
_KNOWN_AS = {
    "train.model": "trainer.model.name",
    "train.sequence_len": "trainer.model.seq_len",
    "train.max_async_level": "trainer.max_async_level",
    "infer.model": "inference.vllm.model",
    "infer.tp": "inference.vllm.tensor_parallel_size",
    "infer.dp": "inference.vllm.data_parallel_size",
    "infer.host": "inference.server.host",
    "infer.port": "inference.server.port",
    "orch.sequence_len": "orchestrator.seq_len",
    "orch.seq_len": "orch.seq_len",
    "orch.model": "orchestrator.model",
}

OF_ENGINE = (
    *("dtype", "host", "port", "model", "max_model_len", "tensor_parallel_size", "data_parallel_size", "enforce_eager"),
    *("gpu_memory_utilization", "max_lora_rank", "max_loras", "max_cpu_loras", "reasoning_parser", "tool_call_parser"),
    *("enable_prefix_caching", "max_num_seqs", "kv_cache_dtype", "attention_backend", "rope_scaling", "quantization"),
    *("api_server_count", "seed", "enable_expert_parallel", "all2all_backend", "enable_eplb", "enable_lora"),
    *("enable_auto_tool_choice", "trust_remote_code", "weight_broadcast_type", "data_parallel_size_local"),
    *("data_parallel_rpc_port", "lora_target_modules", "enable_dbo", "enable_return_routed_experts", "chat_template"),
)
"""Keys of infer.yaml that are arguments of vLLM, or that are read here, by vLLM's names."""
OF_OWN_ENGINE = (
    *("gpu_layers", "host_moe_layers", "expert_slots", "host_expert_bank", "cpu_moe_share", "cpu_moe_prefill_share"),
    *("cpu_moe_min_tokens", "decode_cache_bytes", "decode_memory_bytes", "decode_prefill_chunk"),
    "decode_prefix_entries",
)
"""Keys of infer.yaml of Surogate's own engine, a plan of memory."""
UNREAD_SAMPLING = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "n", "stop")
"""Keys of orch.sampling that Surogate does not read, without a word."""

IRRELEVANT = {
    "orch.seq_len": "Surogate reads sequence_len; seq_len has no effect there",
    "train.checkpoint_dir": "checkpoints are in output_dir",
    "train.resume_from_checkpoint": "actors up resumes by itself",
    "train.num_epochs": "the orchestrator's max_steps decides",
    "train.per_device_train_batch_size": "rows are filled to packer.sequence_len tokens",
    "train.gradient_accumulation_steps": "rows are filled to packer.sequence_len tokens",
    "train.lora_dtype": "adapters are float32",
    "train.transport_type": "processes talk over ZeroMQ here",
    "train.pad_to_multiple_of": "a detail of packing",
    "train.doc_masking": "samples of a row never see each other",
    "train.logging_steps": "metrics.jsonl has every step",
    "train.eval_steps": "of supervised training; orch.eval counts",
    "train.datasets": "of supervised training",
    "train.datasets.**": "of supervised training",
    "train.validation_datasets": "of supervised training",
    "train.validation_datasets.**": "of supervised training",
    "train.validation_split_ratio": "of supervised training",
    "train.offload_*": "a plan of memory",
    **{f"train.{name}": "a plan of memory of its engine" for name in (
        "offload_optimizer", "offload_master", "offload_quants", "offload_grads", "offload_residual", "cpu_training",
        "persistent_quants", "use_cuda_graphs", "lmhead_chunks", "attn_bwd_chunks", "memcpy_all_gather",
        "memcpy_send_recv", "use_zero_copy", "gradient_dtype", "master_dtype", "debug_memory_breakdown",
        "use_all_to_all_reduce", "write_combined", "init_projections_to_zero", "model_dtype", "attention",
        "trust_remote_code", "dataloader_num_workers", "sample_packing", "padding_free")},
    "train.loss": "an empty section",
    "train.noise_scheduler": "an empty section",
    "orchestrator.learning_rate": "of several runs at once",
    "orchestrator.weight_broadcast.**": "weights.channel",
    "orchestrator.client.**": "the actors start the servers themselves",
    "orchestrator.model.client.**": "the actors start the servers themselves",
    "orchestrator.model.lora_adapter": "adapters have no names here",
    "orchestrator.model.lora_rank": "one key here, train.lora_rank",
    "orchestrator.model.lora_alpha": "one key here, train.lora_alpha",
    "orchestrator.ckpt.**": "one checkpoint for all here, that of the trainer",
    "orchestrator.log.**": "telemetry.log_level",
    "orchestrator.log_level": "telemetry.log_level",
    "orchestrator.dump_metrics": "metrics.jsonl",
    "orchestrator.num_train_workers": "trainer.num_ranks",
    "orchestrator.output_dir": "one folder for all here, output_dir",
    "orchestrator.use_token_client": "tokens are exact here in any case",
    "orchestrator.rollout_transport.**": "processes talk over ZeroMQ here",
}  # fmt: skip
"""Reasons of keys without influence."""

REFUSED = {
    "train.report_to": "of the trackers only wandb is built; write telemetry.trackers",
    "train.report_to.**": "of the trackers only wandb is built; write telemetry.trackers",
    "train.wandb_*": "report_to does not name wandb; write telemetry.trackers",
    "train.aim_*": "this tracker is not built; write telemetry.trackers",
    "train.train_router": "routers are trained with all weights only; set lora: false",
    "train.router_aux_loss_coef": "no loss of routers; leave it out",
    "train.router_z_loss_coef": "no loss of routers; leave it out",
    "train.reward.prompts": 'rows stand in a file; write each as {"prompt": …} into a JSON Lines file, and --data FILE',
    "train.reward.prompts.**": "rows stand in a file; write each into a JSON Lines file, and --data FILE",
    "train.adapter_path": "adapters start anew; merge them into the model first",
    "train.merge_adapter": "adapters stay adapters; merge them after the run",
    "train.qlora_fp4": "only nf4 is built; set qlora_bnb: true",
    "train.qlora_fp8": "only nf4 is built; set qlora_bnb: true",
    "train.ep_size": "ranks are data-parallel, or share the weights out; use more ranks",
    "train.sequence_chunks": "a sample is computed as a whole; shorten sequence_len",
    "train.long_context": "a sample is computed as a whole; shorten sequence_len",
    "train.parallelism.**": "ranks are data-parallel, or share the weights out; use more ranks",
    "train.distributed.**": "no launcher is built; start actors run trainer on each machine",
    "train.single_sample_bins": "rows hold several samples here; they never see each other",
    "train.turn_diagnostics": "no figures by turn; read samples.jsonl",
    "train.distillation.**": "of supervised training; use loss.teacher_tau",
    "train.early_stop": "a run has its number of steps; end it with Ctrl-C",
    "train.auto_lr_reduction": "the rate follows its schedule; leave it out",
    "train.fp8_*": "nothing trains in 8 bits; bfloat16 is used",
    "train.fp4_*": "nothing trains in 4 bits; bfloat16 is used",
    "orchestrator.replay.**": "no replay of frozen samples; leave it out",
    "orchestrator.ruler.**": "no such part of relative_judge; see its arguments in the page on rewards",
    "orchestrator.rollout_depth.**": "no control of depth; set max_turns of the environment",
    "orchestrator.report_to": "one process per tracker for all here; write telemetry.trackers",
    "orchestrator.report_to.**": "one process per tracker for all here; write telemetry.trackers",
    "orchestrator.val.**": "no rewards of further rollouts; evaluate with eval",
    "orchestrator.buffer.*": "not built in packer.pools; leave it out",
    "orchestrator.train.source.*.skip_first": "all rows are used; leave them out of the environment",
}
"""Reasons of keys without counterpart."""


def read(files: Sequence[Path], arguments: Sequence[str], options: Options) -> Import:
    """Return the finished import of one to three files.

    Raises:
        ConfigError: a file can't be read, two files are of one kind, or Surogate itself refuses the values.
    """
    if arguments:
        raise ConfigError(f"{arguments[0]}: surogate grpo takes files only")
    given: dict[str, Any] = {}
    notes: list[str] = []
    for file in files:
        content = map_of(file, notes)
        kind = kind_of(content, file)
        if any(key.startswith(f"{kind}.") for key in given):
            raise ConfigError(f"{file}: is a second {kind}.yaml by its keys")
        given |= flat({kind: content}, WHOLE)
    values, names = _known_names(given)
    era = _era(options.version, given)
    keys = _table()
    values = coerced(values, keys)
    check_types(values, keys, names)
    _check_variables(values, names)
    if values.get("orchestrator.token_batch_size") is not None and "orchestrator.batch_size" not in values:
        raise ConfigError("orch.batch_size: is 128 by default, and Surogate refuses both; write batch_size: null")
    defaults = defaults_of("2026-02") | {name: key.default for name, key in keys.items() if name.startswith("train.")}
    defaults |= {"trainer.model.seq_len": 1024, "orchestrator.concurrency.max_inflight": None}
    defaults |= {"orchestrator.ruler.enabled": False, "orchestrator.ruler.mode": "replace"}
    defaults |= {"orchestrator.ruler.weight": 1.0, "orchestrator.ruler.judge_model": None}
    defaults |= {"orchestrator.ruler.judge.base_url": None}
    is_native = native.is_native(given)
    defaults |= native.DEFAULTS if is_native else {}
    if era == "2026-02":
        defaults |= {"train.weight_decay": 0.1, "train.lora_dropout": 0.05}
    job = Import(values, defaults, f"Surogate {era}", options, names)
    for note in notes:
        job.note(note)
    _convert(job, era, is_native)
    return job


def _check_variables(values: dict[str, Any], names: dict[str, str]) -> None:
    """Refuse values with variables of the environment, which is not read here.

    Raises:
        ConfigError: all such values.
    """
    found = {key: re.search(r"\$\{([^}]+)\}", value) for key, value in values.items() if isinstance(value, str)}
    problems = [
        f"{names.get(key, key)}: needs the environment variable {match[1]}, not read here; write its value here"
        for key, match in found.items()
        if match is not None
    ]
    if problems:
        raise ConfigError(*problems)


def kind_of(content: dict[str, Any], file: Path) -> str:
    """Return train, infer or orch, by the keys that only one of them has.

    Raises:
        ConfigError: the keys don't tell.
    """
    marks = {"train": TRAIN_MARKS, "infer": INFER_MARKS, "orch": ORCH_MARKS}
    counts = {kind: len(names & content.keys()) for kind, names in marks.items()}
    best = max(counts, key=lambda kind: counts[kind])
    if counts[best] == 0 or list(counts.values()).count(counts[best]) > 1:
        named = [kind for kind in marks if file.stem.startswith(kind)]
        if not named:
            raise ConfigError(f"{file}: has no keys that tell train.yaml, infer.yaml and orch.yaml apart")
        return named[0]
    return best


def _known_names(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values by the names of the shared conversions, and their names in the input, `train.`, `orch.`."""
    by_place: dict[str, Any] = {}
    origin: dict[str, str] = {}
    is_native = native.is_native(given)
    for key, value in given.items():
        head, _, rest = key.partition(".")
        place = {"infer": "inference.vllm", "orch": "orchestrator"}.get(head, head)
        name = (native.name_of(key) if is_native else None) or _KNOWN_AS.get(key, f"{place}.{rest}")
        by_place[name] = value
        origin[name] = key
    values, older, _ = today(by_place)
    return values, {name: origin[older.get(name, name)] for name in values}


def _table() -> dict[str, Key]:
    return SHARED_KEYS | {f"train.{name}": key for name, key in TRAIN_KEYS.items()}


def _era(version: str | None, given: dict[str, Any]) -> str:
    if version is not None:
        if version[:4].isdigit() and version[4:5] == "-":
            return max((era for era in VERSIONS if era <= version[:7]), default=VERSIONS[0])
        raise ConfigError(f"--from-version: {version!r} is no date such as {', '.join(VERSIONS)}")
    return "2026-03" if any(f"train.loss.{name}" in given for name in LEGACY_LOSS) else VERSIONS[-1]


def _convert(job: Import, era: str, is_native: bool) -> None:
    """Report each key once, section by section."""
    sources = sampling.sources_of(job, "train")
    job.rename("train.output_dir", "output_dir")
    if job.given.get("train.run_name"):
        job.rename("train.run_name", "name", sampling.label_of(job.given["train.run_name"]))
    job.settle("train.run_name", "empty")
    serving.convert_seed(job, "2026-02")
    _convert_model(job)
    steps = _convert_steps(job)
    if is_native:
        native.convert_data(job)
    if job.run.get("environments.0.type") is not None:
        sources = []
    elif sources or job.options.data:
        sampling.convert_environments(job, sources, "2026-02")
    else:
        job.ask("environments", "the environments; no file has env")
    _convert_paths(job, sources)
    if is_native:
        native.convert_batches(job)
    else:
        sampling.convert_batches(job, sources)
    convert_judge(job, len(sources))
    sampling.convert_lengths(job, sources, "2026-02")
    for name in UNREAD_SAMPLING if not is_native else ():
        key = f"{sampling.SAMPLING}.{name}"
        job.settle(key, "Surogate does not read it; sampling.extra_body would carry it")
        job.given = {one: value for one, value in job.given.items() if one != key}
    sampling.convert_sampling(job, sources)
    _convert_loss(job, era)
    sampling.convert_advantages(job, sources)
    sampling.convert_filters(job, "2026-02")
    sampling.convert_lag(job, has_level=True)
    sampling.convert_pools(job)
    _convert_optimizer(job, steps)
    _convert_checkpoints(job)
    _convert_machines(job)
    _convert_server(job)
    serving.convert_engine(job)
    sampling.convert_evaluation(job, sources, "2026-02")
    if is_native:
        native.convert_rest(job)
    job.refuse_unless("orchestrator.verification.enabled", True, "rewards of 0 train nothing", "leave it out")
    job.refuse_unless("orchestrator.buffer.skip_verification", False, "rewards of 0 train nothing", "leave it out")
    for name, off in (("opd_tau", 0.0), ("replay_tau", 0.0)):
        job.refuse_unless(f"train.loss.{name}", off, "weights of single tokens have no source in a run")
    job.settle("train.loss.opd_beta", "without effect where opd_tau is 0")
    if job.given.get("train.report_to") in ("wandb", ["wandb"]):
        named = {"wandb_project": "project", "wandb_name": "name"}
        tracker_section(job, "wandb", "train.report_to", {}, "ours")
        for key, target in named.items():
            if job.given.get(f"train.{key}"):
                job.rename(f"train.{key}", f"telemetry.trackers.0.{target}")
    job.sweep(IRRELEVANT, REFUSED)
    job.sweep(serving.IRRELEVANT, serving.REFUSED)
    job.finish([job.name(name) for name in _table()])


def _convert_server(job: Import) -> None:
    """Report the keys of infer.yaml that are none of vLLM's arguments."""
    for key in job.keys_below("inference.vllm"):
        name = key.split(".")[2]
        if name in OF_OWN_ENGINE:
            job.settle(key, "a plan of memory of its engine")
        elif name not in OF_ENGINE:
            close = difflib.get_close_matches(name, [*OF_ENGINE, *OF_OWN_ENGINE], n=1, cutoff=0.8)
            hint = f"did you mean infer.{close[0]}?" if close else "remove it"
            job.refuse(key, "Surogate does not read such a key", hint)
    job.settle("inference.vllm.weight_broadcast_type", "weights.channel, as train.yaml says")
    if job.given.get("inference.vllm.trust_remote_code"):
        job.rename("inference.vllm.trust_remote_code", "model.trust_remote_code")
    job.settle("inference.vllm.trust_remote_code", "false, as here")
    key = "inference.vllm.enable_auto_tool_choice"
    if not job.given.get(key):
        job.settle(key, "false: calls of tools are read out of texts")
        job.settle("inference.vllm.tool_call_parser", "without enable_auto_tool_choice: none")


def _convert_steps(job: Import) -> int | None:
    """Write the number of steps: of the orchestrator, or of the trainer unless it is −1."""
    train = job.given.get("train.max_steps")
    if train is not None and train > 0:
        job.given["trainer.max_steps"] = job.given.pop("train.max_steps")
        job.names["trainer.max_steps"] = job.names.pop("train.max_steps")
    else:
        job.settle("train.max_steps", "−1: until the orchestrator stops")
    return training.finite_steps(job)


def _convert_model(job: Import) -> None:
    names = ("trainer.model.name", "orchestrator.model.name", "inference.vllm.model")
    if not any(job.given.get(name) for name in names):
        job.ask("model.path", "the model; no file has the key model")
    else:
        training.rename_shared(job, names, "model.path")
    job.run.set("model.dtype", "bfloat16", "recipe bf16")
    recipe = str(job.value("train.recipe")).replace("_", "-")
    if recipe == "bf16":
        job.convert("train.recipe", {"model.dtype": "bfloat16"}, "bf16")
    else:
        job.refuse("train.recipe", "nothing trains in 8 or 4 bits", "bfloat16 is used")
    dtype = "train.torch_dtype"
    if job.given.get(dtype) in ("bfloat16", "float32"):
        job.rename(dtype, "model.dtype")
    elif job.given.get(dtype) is None:
        job.settle(dtype, "empty: bfloat16")
    else:
        job.refuse(dtype, "bfloat16 or float32 here", "bfloat16 is used")
    recompute = job.value("train.recompute")
    is_on = recompute not in (False, None, "none", "false", 0)
    if recompute == is_on:
        job.rename("train.recompute", "model.gradient_checkpointing")
    else:
        job.convert("train.recompute", {"model.gradient_checkpointing": is_on}, f"{recompute}: {is_on}".lower())
    _convert_lora(job)


def _convert_lora(job: Import) -> None:
    parts = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "qlora_bnb", "qlora_bnb_double_quant",
             "qlora_bnb_block_size")  # fmt: skip
    if not job.value("train.lora"):
        job.convert("train.lora", {"model.lora": None}, "all weights are trained")
        for part in parts:
            job.settle(f"train.{part}", "no adapters")
        return
    for part in ("rank", "alpha", "dropout"):
        job.rename(f"train.lora_{part}", f"model.lora.{part}")
    key = "train.lora_target_modules"
    modules = job.value(key)
    if modules in (None, "all", "all-linear", ["all"], ["all-linear"]):
        job.convert(key, {"model.lora.target_modules": "all-linear"}, "all linear layers")
    elif isinstance(modules, list) and all(isinstance(module, str) for module in modules):
        job.rename(key, "model.lora.target_modules")
    else:
        raise ConfigError(f"{key}: must be a list of names, got {modules!r}")
    job.convert("train.lora", {f"model.lora.{part}": job.run.get(f"model.lora.{part}") for part in ("rank", "alpha")},
                "a section here")  # fmt: skip
    if job.value("train.qlora_bnb"):
        if job.value("train.qlora_bnb_block_size") != 64:
            job.refuse("train.qlora_bnb_block_size", "blocks of 64 weights only", "64 is used")
        job.convert("train.qlora_bnb", {"model.quantization.type": "nf4"}, "nf4")
        job.rename("train.qlora_bnb_double_quant", "model.quantization.double_quant")
        job.settle("train.qlora_bnb_block_size", "64, as here")
    for part in parts[4:]:
        job.settle(f"train.{part}", "switched off")


def _convert_paths(job: Import, sources: list[str]) -> None:
    """Write the folders of environments that are not installed."""
    for number, source in enumerate(sources):
        target = f"environments.{number}.options"
        path, options = job.given.get(f"{source}.path"), job.run.get(target)
        if path and isinstance(options, dict):
            job.convert(f"{source}.path", {target: options | {"path": path}}, "a folder with the environment's module")
        job.settle(f"{source}.path", "empty")


def _convert_loss(job: Import, era: str) -> None:
    given = {key.removeprefix("train.loss.") for key in job.keys_below("train.loss")}
    is_legacy = bool(given & set(LEGACY_LOSS)) or (era < "2026-08" and not given & {"ipo_mask_low", "ipo_mask_high"})
    if is_legacy:
        names: tuple[str, ...] = LEGACY_LOSS
        job.run.set("trainer.loss.type", "surogate", "Surogate's loss up to March 2026")
        if "kl_tau" not in given:
            job.defaults["train.loss.kl_tau"] = 0.0
    else:
        names = ("ipo_mask_low", "ipo_mask_high", "ratio_clip")
        job.run.set("trainer.loss.type", "ipo", "Surogate's loss")
    for name in (*names, "adv_tau", "kl_tau", "teacher_tau"):
        job.rename(f"train.loss.{name}", f"trainer.loss.{name}")
    if job.value("train.loss.teacher_tau"):
        key = "orchestrator.teacher_model.model.name"
        if job.given.get(key):
            job.rename(key, "trainer.teacher.path")
        else:
            job.ask("trainer.teacher.path", "the teacher's model; teacher_tau reads it")


def _convert_optimizer(job: Import, steps: int | None) -> None:
    job.rename("train.learning_rate", "trainer.learning_rate")
    kind = job.value("train.optimizer")
    if kind in ("adamw", "adamw_8bit"):
        job.rename("train.optimizer", "trainer.optimizer.type")
    else:
        job.refuse("train.optimizer", f"{kind} is not built", "adamw is used")
        job.run.set("trainer.optimizer.type", "adamw", f"in the place of {kind}")
    for theirs, ours in (("adamw_beta1", "beta1"), ("adamw_beta2", "beta2"), ("adamw_epsilon", "eps"),
                         ("weight_decay", "weight_decay")):  # fmt: skip
        job.rename(f"train.{theirs}", f"trainer.optimizer.{ours}")
    norm = job.value("train.max_grad_norm")
    if norm > 0:
        job.rename("train.max_grad_norm", "trainer.max_grad_norm")
    else:
        job.convert("train.max_grad_norm", {"trainer.max_grad_norm": None}, "0: no maximum")
    schedule, fraction = job.value("train.lr_scheduler_type"), "train.final_lr_fraction"
    share = "train.wsd_decay_steps_fraction"
    if schedule in ("constant", "linear", "cosine"):
        job.rename("train.lr_scheduler_type", "trainer.lr_scheduler")
    elif schedule == "wsd" and job.value(share) > 0:
        text = "wsd: constant up to the decay at the end"
        job.convert("train.lr_scheduler_type", {"trainer.lr_scheduler": "warmup_stable_decay"}, text)
        if steps is None:
            job.rename(share, "trainer.lr_schedule.decay_ratio")
        else:
            decay = max(1, int(job.value(share) * steps))
            text = f"⌊{job.value(share):g} · {steps}⌋, at least 1"
            job.convert(share, {"trainer.lr_schedule.decay_steps": decay}, text)
        job.run.set("trainer.lr_schedule.decay_type", "1-sqrt", "as in Surogate")
    else:
        job.refuse("train.lr_scheduler_type", f"{schedule} is not built", "the rate stays constant")
        job.run.set("trainer.lr_scheduler", "constant", f"in the place of {schedule}")
    job.settle(share, "only with wsd")
    if schedule in ("linear", "cosine", "wsd"):
        job.rename(fraction, "trainer.min_lr_ratio")
    job.settle(fraction, "without effect on a constant rate")
    job.refuse_unless("train.cooldown_steps", (0,), "no cooldown is built")
    warmup, ratio = job.value("train.warmup_steps"), job.value("train.warmup_ratio")
    if schedule != "constant" or warmup or ratio:
        job.run.set("trainer.lr_schedule.first", 0, "Surogate counts steps from 0")
    if warmup > 0 or ratio == 0:
        job.rename("train.warmup_steps", "trainer.warmup_steps")
        job.settle("train.warmup_ratio", "warmup_steps counts" if warmup else "0: none")
    elif steps is None:
        job.ask("trainer.warmup_steps", f"{ratio:g} · max_steps; max_steps is not known")
        job.settle("train.warmup_ratio", "max_steps is not known")
    else:
        text = f"⌊{ratio:g} · {steps}⌋ = {int(ratio * steps)}"
        job.convert(["train.warmup_ratio", "train.warmup_steps"], {"trainer.warmup_steps": int(ratio * steps)}, text)


def _convert_checkpoints(job: Import) -> None:
    every, keep = job.value("train.save_steps"), job.value("train.save_total_limit")
    if every > 0:
        job.rename("train.save_steps", "trainer.checkpoint.interval")
    else:
        job.convert("train.save_steps", {"trainer.checkpoint.interval_share": 1.0}, "at the end only")
    if keep:
        job.rename("train.save_total_limit", "trainer.checkpoint.keep_last")
    elif every > 0:
        job.convert("train.save_total_limit", {"trainer.checkpoint.keep_last": None}, "all are kept")
    job.settle("train.save_total_limit", "only the last step is saved")


def _convert_machines(job: Import) -> None:
    """Write ranks, sharding, channel of weights, noise and shared GPUs."""
    job.rename("train.gpus", "trainer.num_ranks")
    level = job.value("train.zero_level")
    is_full = level >= 3 or (job.value("train.shard_weights") and job.value("train.shard_gradients"))
    ranks = job.value("train.gpus")
    blocked = job.run.get("model.quantization.type")
    sharding = "fsdp" if is_full and ranks > 1 and not blocked else "none"
    text = f"level {level}, {ranks} GPUs: {sharding}"
    if is_full and ranks > 1 and blocked:
        text += ", since quantised weights can't be shared out"
    keys = ["train.zero_level", "train.shard_weights", "train.shard_gradients"]
    job.convert(keys, {"trainer.sharding": sharding}, text)
    kind = job.value("train.weight_broadcast_type")
    if kind == "filesystem":
        job.rename("train.weight_broadcast_type", "weights.channel")
    elif kind == "nccl":
        job.rename("train.weight_broadcast_type", "weights.channel", "rendezvous", "through host memory")
    elif kind == "colocate":
        key = "train.weight_broadcast_type"
        is_quantised = job.value("train.qlora_bnb") or job.run.get("model.quantization.type")
        if ranks == 1 and job.value("train.lora") and not is_quantised:
            job.convert(key, {"up.share_base": True}, "colocate: one copy of the base for trainer and vLLM")
        else:
            words = "a base is shared under adapters without quantisation on one GPU"
            job.refuse(key, words, "each has its own; filesystem is used")
    else:
        raise ConfigError(f"train.weight_broadcast_type: {kind!r} is none of filesystem, nccl, colocate")
    job.run.set("up.colocate", True, "trainer and vLLM may share GPUs, as in surogate grpo")
    noise = "train.noise_scheduler"
    if job.value(f"{noise}.enabled"):
        for name in ("sigma_start", "sigma_end", "num_stages"):
            job.rename(f"{noise}.{name}", f"inference.noise.{name}")
        job.convert(f"{noise}.enabled", {"inference.noise.num_stages": job.value(f"{noise}.num_stages")}, "a section")
    for key in job.keys_below(noise):
        job.settle(key, "switched off")
    for name in ("tensor", "data"):
        job.rename(f"inference.vllm.{name}_parallel_size", f"inference.engine.{name}_parallel_size")
