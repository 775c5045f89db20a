"""ms-swift: `swift rlhf --rlhf_type grpo` in shell scripts, and YAML of its arguments. Scripts are read, never run."""

from pathlib import Path
from typing import Any

from actors.imports.hub import best_metric, uploads
from actors.imports.huggingface import checkpoints, optimizer, run_name, schedule
from actors.imports.job import Import, Options
from actors.imports.ms_swift import rewards, settings, versions
from actors.imports.ms_swift.callbacks import callbacks
from actors.imports.ms_swift.inputs import ENVIRONMENT, gather
from actors.imports.trackers import NAMES_BY_KIND, report_to
from schemas.errors import ConfigError

_IRRELEVANT = {
    "a run logs every step in metrics.jsonl": (
        *("logging_steps", "logging_first_step", "logging_strategy", "log_completions", "log_entropy"),
        *("log_rollout_offpolicy_metrics", "wandb_log_unique_prompts", "log_level", "disable_tqdm"),
    ),
    "memory and speed of the origin's own loop": (
        *("dataloader_num_workers", "dataset_num_proc", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *(
            "dataloader_prefetch_factor",
            "load_from_cache_file",
            "lazy_tokenize",
            "streaming",
            "padding_free",
            "packing",
        ),
        *("use_liger_kernel", "ds3_gather_for_generation", "move_model_batches", "gc_collect_after_offload", "tf32"),
        *("ddp_timeout", "ddp_backend", "ddp_find_unused_parameters", "gradient_checkpointing_kwargs", "device_map"),
        *("max_memory", "padding_side", "template_backend", "remove_unused_columns", "dataloader_drop_last"),
        *("enable_flattened_weight_sync", "use_logits_to_keep", "torch_empty_cache_steps", "group_by_length"),
        *("vit_gradient_checkpointing", "tuner_backend", "check_model", "model_kwargs", "max_model_len", "data_seed"),
        *("dataset_shuffle", "train_dataloader_shuffle", "val_dataset_shuffle", "shuffle_buffer_size", "strict"),
        *("completion_length_limit_scope", "offload_teacher_model", "vllm_server_pass_dataset", "use_gym_env"),
    ),
    "a run resumes by itself; `actors rewind` goes back": (
        *("resume_from_checkpoint", "resume_only_model", "ignore_data_skip", "save_safetensors", "load_args"),
        *("safe_serialization", "max_shard_size", "create_checkpoint_symlink", "overwrite_output_dir"),
    ),
    "belongs to the origin's way of naming": (
        *("add_version", "model_type", "task_type", "rlhf_type", "model_name", "model_author", "custom_register_path"),
        *(
            "custom_dataset_info",
            "config",
            "use_ray",
            "agent_template",
        ),
        *(
            "ignore_args_error",
            "download_mode",
            "local_repo_path",
            "eval_metric",
            "response_prefix",
        ),
        *("do_train", "do_eval", "predict_with_generate"),
    ),
}
_SWITCHES: dict[str, tuple[Any, str, str]] = {
    "load_best_model_at_end": (False, "the last model is the result", "choose among checkpoints/"),
    "save_only_model": (False, "checkpoints hold the optimizer too", ""),
    "optimizer": (
        None,
        "no optimizer of ms-swift's own table here; the run has that of optim",
        "set trainer.optimizer",
    ),
    "preserve_thinking": (None, "a key of ms-swift's own templates", "set environments[].chat_template_kwargs"),
    "template": (None, "the model's own chat template applies", "set model.chat_template"),
    "use_chat_template": ((None, True, "true"), "prompts pass the model's chat template", ""),
    "interleave_prob": (None, "rows come from one file", "mix them in the file"),
    "adapters": ((None, []), "a run starts with new adapters", "merge them into the model first"),
    "router_aux_loss_coef": ((0, 0.0, "0", "0.0"), "no auxiliary loss for experts", ""),
    "neftune_noise_alpha": (None, "no noise on embeddings", ""),
    "max_turns": (None, "prompts of a file have one turn", "write an environment: environments[].type python"),
}

_FOLLOWERS = (
    *("push_to_hub", "hub_strategy", "hub_token", "hub_model_id", "hub_private_repo", "metric_for_best_model"),
    *("greater_is_better", "callbacks", "early_stop_interval", "report_to", "swanlab_mode"),
    *(key for keys in NAMES_BY_KIND.values() for key in keys),
)
"""Keys of uploads, callbacks and trackers."""


def read(files: list[Path], arguments: list[str], options: Options) -> Import:
    """Return the finished import of an ms-swift configuration.

    Raises:
        ConfigError: a file can't be read, or ms-swift itself refuses the values.
    """
    inputs = gather(files, arguments, options.version)
    version = inputs.version
    job = Import(inputs.given, versions.defaults(version), f"ms-swift {version[0]}.{version[1]}", options, inputs.names)
    for note in inputs.notes:
        job.note(note)
    job.defaults["learning_rate"] = 1e-5 if job.value("tuner_type") == "full" else 1e-4
    _run(job)
    settings.model(job)
    world = settings.world_of(job, inputs)
    rows = rewards.rows_of(job, inputs)
    # transformers before let the steps count
    if version >= (4, 0) and job.value("warmup_ratio") and job.value("warmup_steps"):
        raise ConfigError("warmup_ratio: ms-swift refuses it together with warmup_steps; leave one of them out")
    pace = settings.batches(job, version, world, rows)
    settings.sampling(job)
    settings.objective(job, pace)
    schedule(job, pace)
    optimizer(job)
    checkpoints(job, pace)
    has_evaluation = settings.evaluations(job, pace, world)
    settings.engine(job, version, world)
    rewards.data(job, inputs, has_evaluation)
    rewards.rewards(job, inputs)
    rewards.mixed_in(job, world, pace.updates)
    settings.spread(job, inputs, world)
    callbacks(job)
    uploads(job, "" if job.value("use_hf") else "the origin pushes to ModelScope (use_hf is not set)")
    best_metric(job)
    _trackers(job)
    _close(job)
    return job


def _run(job: Import) -> None:
    job.rename("seed", "seed")
    if job.is_set("output_dir"):
        job.rename("output_dir", "output_dir")
    elif isinstance(job.value("model"), str):
        job.run.set("output_dir", f"output/{Path(job.value('model')).name}", "default of ms-swift, without the version")
    job.settle("output_dir", "empty")
    run_name(job)


def _trackers(job: Import) -> None:
    report_to(job, "trl")
    asked = job.given.get("report_to")
    if job.given.get("swanlab_mode") == "local" and isinstance(asked, list) and "swanlab" in asked:
        job.convert("swanlab_mode", {f"telemetry.trackers.{asked.index('swanlab')}.mode": "offline"}, "local: offline")


def _close(job: Import) -> None:
    """Report the keys that change nothing here, and finish."""
    for key, (harmless, reason, instead) in _SWITCHES.items():
        if key in job.given and not job.is_reported(key):
            job.refuse_unless(key, harmless, reason, instead)
    for reason, keys in _IRRELEVANT.items():
        for key in keys:
            job.settle(key, reason)
    for key in [key for key in job.given if not job.is_reported(key)]:
        if key.startswith("env.") or key in ENVIRONMENT:
            job.settle(key, "an environment variable of the origin's process")
        elif key.startswith(("swanlab_", "wandb_")):
            job.settle(key, "name of an experiment of another tool")
        elif key.startswith(("fipo_", "real_")):
            job.refuse(key, "belongs to a loss that is not built", "remove it with loss_type")
        elif key.startswith(("lmdeploy_", "use_lmdeploy", "num_infer_workers", "vllm_device")):
            job.settle(key, "a retired engine of the origin")
    known = [*job.defaults, *(key for keys in _IRRELEVANT.values() for key in keys), *_SWITCHES, *_FOLLOWERS]
    job.finish(known)
