"""Defaults of TRL's configurations, read out of the released packages, and their changes from release to release."""

import re
from collections.abc import Mapping
from typing import Any

from schemas.errors import ConfigError

NEWEST = (1, 16)
OLDEST = (0, 14)

_ARGUMENTS: dict[str, Any] = {
    "output_dir": None,
    "run_name": None,
    "seed": 42,
    "data_seed": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0.0,
    "warmup_ratio": 0.0,
    "optim": "adamw_torch_fused",
    "optim_args": None,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "bf16": None,
    "fp16": False,
    "gradient_checkpointing": True,
    "torch_compile": False,
    "save_strategy": "steps",
    "save_steps": 500.0,
    "save_total_limit": None,
    "eval_strategy": "no",
    "eval_steps": None,
    "eval_on_start": False,
    "per_device_eval_batch_size": 8,
    "logging_steps": 10.0,
    "save_only_model": False,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "auto_find_batch_size": False,
    "use_cpu": False,
    "deepspeed": None,
    "fsdp": None,
    "trust_remote_code": False,
}
"""transformers' TrainingArguments with the changes that all of TRL's configurations make."""

_SAMPLING: dict[str, Any] = {
    "num_generations_eval": None,
    "max_completion_length": 512,
    "max_prompt_length": None,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "disable_dropout": False,
    "cast_lm_head_to_fp32": False,
    "shuffle_dataset": True,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1,
    "vllm_max_model_length": None,
    "vllm_enable_sleep_mode": False,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": None,
    "reward_weights": None,
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "use_transformers_continuous_batching": False,
    "use_transformers_paged": False,
    "log_completions": False,
}

_MODEL: dict[str, Any] = {
    "model_name_or_path": None,
    "model_revision": "main",
    "dtype": "float32",
    "attn_implementation": None,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
    "lora_target_parameters": None,
    "lora_modules_to_save": None,
    "lora_task_type": "CAUSAL_LM",
    "use_rslora": False,
    "use_dora": False,
    "load_in_8bit": False,
    "load_in_4bit": False,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": False,
    "bnb_4bit_quant_storage": None,
}

_SCRIPT: dict[str, Any] = {
    "dataset_name": None,
    "dataset_config": None,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "dataset_streaming": False,
    "ignore_bias_buffers": False,
    "reward_model_name_or_path": None,
    "reward_funcs": None,
    "dataset_prompt_column": "prompt",
    "system_prompt": None,
    "chat_template": None,
}

_GRPO: dict[str, Any] = _SAMPLING | {
    "num_generations": 8,
    "beta": 0.0,
    "delta": None,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "max_tool_calling_iterations": None,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
    "off_policy_mask_threshold": None,
    "use_bias_correction_kl": True,
}

GRPO_KEYS = _ARGUMENTS | _GRPO
"""Defaults of the newest GRPOConfig."""

_RLOO: dict[str, Any] = _SAMPLING | {
    "num_generations": 2,
    "beta": 0.05,
    "normalize_advantages": False,
    "reward_clip_range": None,
}

_ASYNC: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "logging_steps": 1.0,
    "num_generations": 8,
    "max_completion_length": 2048,
    "max_prompt_length": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "max_tool_calling_iterations": None,
    "fork_threshold_tokens": 1024,
    "vllm_server_base_url": "http://localhost:8000",
    "request_timeout": 600.0,
    "weight_sync_timeout": 1800.0,
    "epsilon": 0.2,
    "epsilon_high": None,
    "token_budget": None,
    "max_inflight_tasks": -1,
    "max_staleness": 4,
    "queue_maxsize": 1024,
    "weight_sync_steps": 1,
    "reward_weights": None,
    "log_completions": False,
}

NUMBERS = {
    *("data_seed", "save_total_limit", "eval_steps", "num_generations_eval", "max_prompt_length", "delta", "min_p"),
    *("generation_batch_size", "steps_per_generation", "vllm_max_model_length", "epsilon_high", "token_budget"),
    *("max_tool_calling_iterations", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    *("vllm_importance_sampling_cap", "off_policy_mask_threshold", "num_processes"),
}
"""Keys whose default is None and whose values are numbers."""

LISTS = {"reward_funcs", "reward_weights", "lora_target_modules", "lora_modules_to_save", "lora_target_parameters"}
"""Keys whose values are lists; a single value is a list of one."""

OTHER_LISTS = {"reward_clip_range"}
"""Keys whose values may be lists, but not of one."""

_CHANGES: dict[str, list[tuple[tuple[int, int], dict[str, Any]]]] = {
    "grpo": [
        ((1, 10), {"max_completion_length": 256, "use_bias_correction_kl": False}),
        ((1, 0), {"vllm_mode": "server"}),
        (
            (0, 26),
            {
                "max_prompt_length": 512,
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_max": 2.0,
            },
        ),
        ((0, 23), {"vllm_importance_sampling_correction": False}),
        ((0, 22), {"loss_type": "bnpo", "gradient_checkpointing": False}),
        ((0, 19), {"beta": 0.04, "logging_steps": 500.0, "bf16": False}),
        ((0, 18), {"temperature": 0.9, "top_k": 50, "vllm_gpu_memory_utilization": 0.9}),
        ((0, 16), {"loss_type": "grpo", "ref_model_mixup_alpha": 0.9, "ref_model_sync_steps": 64}),
        ((0, 15), {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}),
    ],
    "rloo": [
        ((1, 10), {"max_completion_length": 256}),
        ((1, 0), {"vllm_mode": "server"}),
        ((0, 26), {"max_prompt_length": 512}),
    ],
    "async": [((1, 9), {"lr_scheduler_type": "linear"}), ((1, 7), {"epsilon_high": 0.2})],
}
"""Per trainer: a release, and the defaults before that release."""

_FIRST = {"grpo": OLDEST, "rloo": (0, 22), "async": (1, 0)}
"""First release with the trainer as it is today."""


OF_FIRST_RLOO = {
    "rloo_k": "num_generations",
    "cliprange": "epsilon",
    "kl_coef": "beta",
    "exp_name": "run_name",
    "normalize_reward": "normalize_advantages",
    "num_ppo_epochs": "num_iterations",
    "num_mini_batches": "steps_per_generation",
    "total_episodes": "max_steps",
    "response_length": "max_completion_length",
}
"""Keys of the first RLOOTrainer, by which TRL 0.22 to 0.24 set the keys of today's."""
IGNORED_OF_FIRST_RLOO = (
    *("token_level_kl", "local_rollout_forward_batch_size", "num_sample_generations", "stop_token"),
    *("stop_token_id", "missing_eos_penalty"),
)
"""Keys of the first RLOOTrainer that TRL 0.22 to 0.24 take without effect."""

RETIRED: dict[str, tuple[int, int]] = {
    "vllm_device": (0, 18),
    "vllm_dtype": (0, 18),
    "vllm_max_model_len": (0, 18),
    "vllm_enable_prefix_caching": (0, 18),
    "torch_dtype": (0, 27),
    "wandb_log_unique_prompts": (0, 27),
    "max_prompt_length": (0, 28),
    "vllm_guided_decoding_regex": (0, 28),
    "use_liger_loss": (0, 28),
    **dict.fromkeys((*OF_FIRST_RLOO, *IGNORED_OF_FIRST_RLOO), (0, 25)),
}
"""Keys that TRL has removed, with the release without them."""
ADDED: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("num_iterations", "epsilon", "epsilon_high", "scale_rewards", "min_p"), (0, 16)),
    **dict.fromkeys(("top_p", "top_k", "repetition_penalty", "vllm_server_host", "vllm_server_port"), (0, 16)),
    **dict.fromkeys(("loss_type", "mask_truncated_completions", "shuffle_dataset", "use_liger_loss"), (0, 17)),
    **dict.fromkeys(("disable_dropout", "num_completions_to_print", "wandb_log_unique_prompts"), (0, 17)),
    **dict.fromkeys(("steps_per_generation", "generation_batch_size", "vllm_mode", "delta"), (0, 18)),
    **dict.fromkeys(("vllm_server_base_url", "vllm_tensor_parallel_size"), (0, 18)),
    "generation_kwargs": (0, 19),
    **dict.fromkeys(("importance_sampling_level", "top_entropy_quantile", "use_transformers_paged"), (0, 20)),
    "vllm_model_impl": (0, 21),
    **dict.fromkeys(("vllm_importance_sampling_correction", "vllm_importance_sampling_cap"), (0, 23)),
    "vllm_enable_sleep_mode": (0, 23),
    "vllm_importance_sampling_mode": (0, 26),
}
"""Keys with the release that brought them."""
OF_RECIPES = {
    *("benchmarks", "hub_model_revision", "overwrite_hub_revision", "push_to_hub_revision", "dataset_prompt_column"),
    *("wandb_entity", "wandb_run_group", "code_language", "code_eval_test_batch_size", "code_eval_scoring_mode"),
    *("parallel_code_exec_per_proc", "code_provider", "e2b_router_url", "morph_router_url", "ioi_provider"),
    *("cosine_min_value_wrong", "cosine_max_value_wrong", "cosine_min_value_correct", "cosine_max_value_correct"),
    *("cosine_max_len", "repetition_n_grams", "repetition_max_penalty"),
}
"""Keys of open-r1's recipes alone."""
RECIPES = (0, 18)
"""Release that open-r1 takes."""


def told_by(given: Mapping[str, Any], trainer: str) -> tuple[tuple[int, int], str]:
    """Return the release whose defaults a file was written for, and what tells so; an empty text if nothing does.

    Args:
        given: values by dotted key.
        trainer: `grpo`, `rloo` or `async`.
    """
    newest, sign = NEWEST, ""
    for key, without in RETIRED.items():
        before = without[0], without[1] - 1
        if key in given and before < newest:
            newest, sign = before, f"{key} was removed in TRL {without[0]}.{without[1]}"
    recipe = next((key for key in given if key in OF_RECIPES), None)
    if recipe is not None and newest > RECIPES:
        newest, sign = RECIPES, f"{recipe} is a key of open-r1's recipes, which take TRL {RECIPES[0]}.{RECIPES[1]}"
    oldest = max([_FIRST[trainer], *(since for key, since in ADDED.items() if key in given)])
    return (max(newest, oldest), sign) if sign else (NEWEST, "")


def of_today(values: Mapping[str, Any], trainer: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values by today's names, and the names in the input of keys with an older one.

    Raises:
        ConfigError: both names of a key are given.
    """
    if trainer != "rloo":
        return dict(values), {}
    found, names = dict[str, Any](), dict[str, str]()
    for key, value in values.items():
        name = OF_FIRST_RLOO.get(key, key)
        if name in found or (name != key and name in values):
            raise ConfigError(f"{key}: sets {name}, which is given too; leave one of them out")
        found[name] = value
        if name != key:
            names[name] = key
    return found, names


def release(text: str | None) -> tuple[int, int]:
    """Return a release out of a version such as `0.18.1`.

    Raises:
        ConfigError: the text is no version, or one that is not known.
    """
    if text is None:
        return NEWEST
    found = re.match(r"v?(\d+)\.(\d+)", text)
    if not found:
        raise ConfigError(f"--from-version: {text!r} is no version; write one such as 1.16 or 0.18")
    number = int(found[1]), int(found[2])
    if number < OLDEST or number > NEWEST:
        raise ConfigError(f"--from-version: TRL {text} is not known; known are 0.14 to 1.16")
    return number


def defaults(trainer: str, version: tuple[int, int]) -> dict[str, Any]:
    """Return the defaults of a trainer's configuration, of ModelConfig and of the script's arguments in a release.

    Raises:
        ConfigError: the release has no such trainer.
    """
    if version < _FIRST[trainer]:
        first = ".".join(map(str, _FIRST[trainer]))
        raise ConfigError(f"--from-version: the {trainer} trainer that is known here came with TRL {first}")
    own = {"grpo": _GRPO, "rloo": _RLOO, "async": _ASYNC}[trainer]
    found = _ARGUMENTS | _MODEL | _SCRIPT | own
    for changed, before in _CHANGES[trainer]:
        if version < changed:
            found |= before
    return found
