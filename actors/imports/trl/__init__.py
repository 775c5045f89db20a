"""TRL: YAML of its command line, recipes of open-r1, accelerate's files, and scripts, which are read and never run."""

from dataclasses import replace
from pathlib import Path

from actors.imports.hub import best_metric, uploads
from actors.imports.huggingface import checkpoints, optimizer, run_name, schedule
from actors.imports.job import Import, Options
from actors.imports.trackers import NAMES_BY_KIND, report_to
from actors.imports.trl import batches, rewards, settings, versions
from actors.imports.trl.callbacks import callbacks
from actors.imports.trl.inputs import Inputs, gather
from schemas.config.load import MISSING

IRRELEVANT = {
    "a run logs every step in metrics.jsonl": (
        *("logging_steps", "logging_strategy", "logging_first_step", "log_level", "log_level_replica"),
        *("log_on_each_node", "logging_nan_inf_filter", "log_completions", "num_completions_to_print", "disable_tqdm"),
        *("log_unique_prompts", "wandb_log_unique_prompts", "log_multimodal", "include_num_input_tokens_seen"),
        *("include_tokens_per_second", "skip_memory_metrics", "log_completions_hub_repo", "debug"),
    ),
    "a run resumes by itself; `actors rewind` goes back": (
        *("resume_from_checkpoint", "overwrite_output_dir", "restore_callback_states_from_checkpoint"),
        *("ignore_data_skip", "save_on_each_node", "save_safetensors", "enable_jit_checkpoint"),
    ),
    "memory and speed of the origin's own loop": (
        *("ds3_gather_for_generation", "pad_to_multiple_of", "torch_empty_cache_steps", "tf32", "use_liger_kernel"),
        *("use_liger_loss", "liger_kernel_config", "dataloader_num_workers", "dataloader_pin_memory", "use_cache"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_drop_last", "data_seed"),
        *("dataloader_in_order", "cache_implementation", "use_transformers_paged", "group_by_length"),
        *("use_transformers_continuous_batching", "torch_compile_backend", "torch_compile_mode", "local_rank"),
        *("ddp_timeout", "ddp_backend", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
        *("ddp_static_graph", "average_tokens_across_devices", "bf16_full_eval", "fp16_full_eval", "gradient_state"),
        *("eval_accumulation_steps", "eval_do_concat_batches", "eval_delay", "prediction_loss_only"),
        *("accelerator_config", "fsdp_config", "remove_unused_columns", "label_names", "ignore_bias_buffers"),
        *(
            "do_train",
            "do_predict",
            "dataset_streaming",
            "dataset_num_proc",
            "length_column_name",
            "max_sequence_length",
        ),
        *("train_sampling_strategy", "transformers_continuous_batching_config", "batch_eval_metrics"),
        *("gradient_checkpointing_use_reentrant", "use_reentrant", "optim_target_modules", "split_batches"),
    ),
    "name of an experiment of another tool": (
        *("trackio_bucket_id", "trackio_static_space_id", "hub_model_revision", "benchmarks", "num_benchmarks"),
        *("overwrite_hub_revision", "push_to_hub_revision", "model_type"),
    ),
}
"""Keys without influence here, by the reason."""
SWITCHES = {
    "load_best_model_at_end": (False, "the last model is the result", "choose among checkpoints/"),
    "save_only_model": (False, "checkpoints hold the optimizer too", "copy the model alone"),
    "shuffle_dataset": (True, "rows are always shuffled here", "write generated order into the data"),
    "router_aux_loss_coef": ((0, 0.0, None), "no auxiliary loss for experts", "set it to 0"),
    "neftune_noise_alpha": ((None, 0), "no noise on embeddings", "remove it"),
    "label_smoothing_factor": ((0, 0.0), "no label smoothing", "remove it"),
    "full_determinism": (False, "another key here", "set trainer.deterministic"),
    "optim_args": ((None, ""), "no further arguments of optimizers", "remove it"),
    "parallelism_config": (None, "its batch sizes are not converted", "set trainer.context_parallel in the run"),
    "auto_find_batch_size": (False, "TRL refuses it too", "remove it"),
    "dataset_mixture": (None, "rows come from a file", "export the mixture to JSON Lines"),
}
"""Keys with their values that change nothing, the reason to refuse others, and the way to do without."""
FOLLOWERS = (
    *("push_to_hub", "hub_strategy", "hub_token", "hub_model_id", "hub_private_repo", "hub_revision"),
    *("hub_always_push", "metric_for_best_model", "greater_is_better", "callbacks", "report_to"),
    *(key for keys in NAMES_BY_KIND.values() for key in keys),
)
"""Keys of uploads, callbacks and trackers."""


def read(files: list[Path], arguments: list[str], options: Options) -> Import:
    """Return the finished import of a TRL configuration.

    Raises:
        ConfigError: a file can't be read, or TRL itself refuses the values.
    """
    version = versions.release(options.version)
    inputs = gather(files, arguments, version)
    if options.version is None:
        version, sign = versions.told_by(inputs.given | dict.fromkeys(inputs.names.values()), inputs.trainer)
        if sign:
            # values have the types of that time
            inputs = gather(files, arguments, version)
            inputs.notes.append(
                f"{sign}, so the defaults of TRL {version[0]}.{version[1]} hold; --from-version says others"
            )
            options = replace(options, version=f"{version[0]}.{version[1]}")
    return translate(inputs, options)


def translate(inputs: Inputs, options: Options) -> Import:
    """Return the finished import of what files, or a Python program, say.

    Raises:
        ConfigError: TRL itself refuses the values.
    """
    version = versions.release(options.version)
    defaults = versions.defaults(inputs.trainer, version)
    job = Import(inputs.given, defaults, f"TRL {version[0]}.{version[1]}", options, inputs.names)
    for note in inputs.notes:
        job.note(note)
    _run(job)
    name = settings.model(job, inputs)
    settings.adapters(job, inputs, name)
    world = batches.world_of(job)
    pace = batches.batches(job, inputs.trainer, version, world)
    settings.sampling(job, version)
    settings.objective(job, inputs.trainer, version, pace)
    schedule(job, pace)
    optimizer(job)
    checkpoints(job, pace)
    has_data = inputs.script is None or any(key in job.given for key in ("eval_dataset", "dataset_test_split"))
    has_evaluation = batches.evaluations(job, pace, world, has_data)
    settings.engine(job, inputs.trainer, version, world)
    settings.spread(job, world)
    rewards.data(job, inputs, has_evaluation)
    rewards.rewards(job, inputs)
    callbacks(job, inputs)
    uploads(job)
    best_metric(job)
    report_to(job, "trl")
    _close(job, inputs, world)
    return job


def _run(job: Import) -> None:
    run_name(job)
    job.rename("seed", "seed")
    if job.is_set("output_dir"):
        job.rename("output_dir", "output_dir")
    job.settle("output_dir", "empty")


def _others(job: Import, inputs: Inputs) -> None:
    """Report keys by their first part: of the launcher, of the environment, of the script."""
    for key in [key for key in job.given if not job.is_reported(key)]:
        start = key.partition(".")[0]
        if start == "env":
            job.settle(key, "an environment variable of the origin's process")
        elif start == "accelerate":
            job.settle(key, "belongs to the launcher; `actors up` starts the processes")
        elif start in ("gradient_checkpointing_kwargs", "accelerator_config", "fsdp_config", "deepspeed") or key in (
            "model_init_kwargs.device_map",
            "model_init_kwargs.use_cache",
            "model_init_kwargs.low_cpu_mem_usage",
        ):
            job.settle(key, "memory and speed of the origin's own loop")
        elif key == "model_init_kwargs.quantization_config" and job.value("load_in_4bit"):
            job.settle(key, "load_in_4bit decides")
        elif start == "model_init_kwargs" and job.given[key] is None:
            job.settle(key, "empty")
        elif start == "model_init_kwargs":
            job.refuse(key, "the model is loaded without this argument")
        elif key in ("config", "config_file", "accelerate_config", "num_processes"):
            job.settle(key, "names a file or the processes of the launcher")
        elif key in versions.OF_RECIPES:
            job.refuse(key, "an argument of open-r1's own rewards", "write it into reward.functions[].kwargs")
        elif key in inputs.own_options:
            job.settle(key, "an option of the script; what it decides is reported under the trainer's key")


def _close(job: Import, inputs: Inputs, world: int | None) -> None:
    """Report the keys that change nothing here, and finish."""
    if job.given.get("disable_dropout") is False:
        job.convert("disable_dropout", {"model.dropout": True}, "false: dropout of the model's own config")
    job.settle("disable_dropout", "no dropout here")
    for key, (harmless, reason, instead) in SWITCHES.items():
        if not job.is_reported(key):
            job.refuse_unless(key, harmless, reason, instead)
    for reason, keys in IRRELEVANT.items():
        for key in keys:
            job.settle(key, reason)
    _others(job, inputs)
    if world is None and "generation_batch_size" in job.given:
        for target in ("trainer.checkpoint.interval", "eval.every_steps"):
            value = job.run.get(target)
            if value and not str(value).startswith(MISSING):
                job.ask(target, "follows from the updates per generation; --world N")
    for key in versions.IGNORED_OF_FIRST_RLOO if inputs.trainer == "rloo" else ():
        job.settle(key, "TRL 0.22 to 0.24 take it without effect; no later release has it")
    known = [
        *job.defaults,
        "num_processes",
        "chat_template",
        "chat_template_path",
        *(key for keys in IRRELEVANT.values() for key in keys),
        *SWITCHES,
        *FOLLOWERS,
    ]
    job.finish(known)
