"""Defaults of `swift rlhf --rlhf_type grpo`, read out of the released packages, and their changes."""

import re
from collections.abc import Mapping
from typing import Any

from schemas.errors import ConfigError

NEWEST = (4, 6)
OLDEST = (3, 2)

DEFAULTS: dict[str, Any] = {
    "rlhf_type": "dpo",
    "model": None,
    "model_revision": None,
    "torch_dtype": None,
    "attn_impl": None,
    "use_hf": False,
    "dataset": None,
    "val_dataset": None,
    "split_dataset_ratio": 0.0,
    "columns": None,
    "streaming": False,
    "dataset_shuffle": True,
    "system": None,
    "max_length": None,
    "truncation_strategy": "left",
    "enable_thinking": None,
    "tuner_type": "lora",
    "lora_rank": 8,
    "lora_alpha": 32.0,
    "lora_dropout": 0.05,
    "target_modules": None,
    "target_regex": None,
    "use_rslora": False,
    "use_dora": False,
    "freeze_parameters_ratio": 0.0,
    "freeze_vit": True,
    "freeze_aligner": True,
    "quant_method": None,
    "quant_bits": None,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "output_dir": None,
    "run_name": None,
    "seed": 42,
    "data_seed": 42,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": None,
    "num_train_epochs": 3.0,
    "max_epochs": None,
    "max_steps": -1,
    "learning_rate": None,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.0,
    "warmup_ratio": 0.0,
    "optim": "adamw_torch_fused",
    "optimizer": None,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": True,
    "torch_compile": False,
    "save_strategy": "steps",
    "save_steps": 500.0,
    "save_total_limit": None,
    "eval_strategy": None,
    "eval_steps": None,
    "eval_on_start": False,
    "logging_steps": 5.0,
    "bf16": None,
    "fp16": None,
    "deepspeed": None,
    "fsdp": None,
    "sequence_parallel_size": 1,
    "num_generations": 8,
    "num_generations_eval": None,
    "max_completion_length": 512,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "num_iterations": 1,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "stop_words": None,
    "reward_funcs": None,
    "reward_weights": None,
    "reward_model": None,
    "reward_model_plugin": None,
    "external_plugins": None,
    "cosine_min_len_value_wrong": -0.5,
    "cosine_max_len_value_wrong": 0.0,
    "cosine_min_len_value_correct": 1.0,
    "cosine_max_len_value_correct": 0.5,
    "cosine_max_len": None,
    "repetition_n_grams": 3,
    "repetition_max_penalty": -1.0,
    "soft_max_length": None,
    "soft_cache_length": None,
    "beta": 0.04,
    "kl_in_reward": None,
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "top_entropy_quantile": 1.0,
    "advantage_estimator": "grpo",
    "scale_rewards": None,
    "dynamic_sample": False,
    "max_resample_times": 3,
    "overlong_filter": False,
    "rollout_importance_sampling_mode": None,
    "rollout_importance_sampling_threshold": 2.0,
    "off_policy_sequence_mask_delta": None,
    "chord_sft_dataset": None,
    "chord_sft_per_device_train_batch_size": None,
    "chord_enable_phi_function": False,
    "chord_mu_warmup_steps": None,
    "chord_mu_decay_steps": None,
    "chord_mu_peak": None,
    "chord_mu_valley": None,
    "use_vllm": False,
    "vllm_mode": None,
    "vllm_gpu_memory_utilization": 0.9,
    "vllm_tensor_parallel_size": 1,
    "vllm_data_parallel_size": 1,
    "vllm_pipeline_parallel_size": 1,
    "vllm_max_model_len": None,
    "vllm_enforce_eager": False,
    "vllm_max_lora_rank": 16,
    "vllm_enable_prefix_caching": True,
    "vllm_max_num_seqs": None,
    "vllm_quantization": None,
    "vllm_server_base_url": None,
    "vllm_server_host": None,
    "async_generate": False,
    "sleep_level": 0,
    "offload_model": False,
    "offload_optimizer": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "multi_turn_scheduler": None,
    "gym_env": None,
    "use_gym_env": None,
    "max_turns": None,
    "padding_free": False,
    "packing": False,
    "use_liger_kernel": False,
    "log_completions": False,
    "teacher_model": None,
    "advantage_reweight": None,
    "sdar_loss_coef": 0.0,
}

NUMBERS = {
    *("max_length", "quant_bits", "gradient_accumulation_steps", "max_epochs", "learning_rate", "save_total_limit"),
    *("eval_steps", "num_generations_eval", "generation_batch_size", "steps_per_generation", "soft_max_length"),
    *("soft_cache_length", "cosine_max_len", "epsilon_high", "delta", "off_policy_sequence_mask_delta", "max_turns"),
    *("chord_sft_per_device_train_batch_size", "chord_mu_warmup_steps", "chord_mu_decay_steps", "chord_mu_peak"),
    *("chord_mu_valley", "vllm_max_model_len", "vllm_max_num_seqs", "response_length", "max_new_tokens"),
}
"""Keys whose default is None and whose values are numbers."""

LISTS = {
    *("dataset", "val_dataset", "reward_funcs", "reward_weights", "reward_model", "external_plugins", "stop_words"),
    *("target_modules", "modules_to_save", "chord_sft_dataset", "reward_model_plugin"),
}
"""Keys whose values are lists; a single value is a list of one."""

_CHANGES: list[tuple[tuple[int, int], dict[str, Any]]] = [
    # 4.0.0 too; 4.0.4 has the later values
    ((4, 0), {"top_p": 0.9, "top_k": 50}),
    ((3, 11), {"vllm_mode": "colocate"}),
    ((3, 6), {"split_dataset_ratio": 0.01}),
]
"""A release, and the defaults before that release."""

ONE_ACCUMULATED = (3, 7)
"""Release since which GRPO accumulates one micro-batch by default; before, 16 completions a step."""


SIGNS = (
    ("vllm_device", (3, 4)),
    ("num_infer_workers", (3, 4)),
    ("use_lmdeploy", (3, 4)),
    ("lmdeploy_device", (3, 4)),
    ("tensor_parallel_size", (3, 5)),
)
"""Keys that later releases do not read, with the last release that did."""
WITHOUT_MODE = (3, 10)
"""Last release that needs no vllm_mode with use_vllm."""
OF_THREE = ("train_type", (3, 12))
"""Word of releases 3.x, which 4.0 still takes and 4.1 no more."""
OF_FOUR = re.compile(
    r"(fipo|rlsd|sdar|real|teacher_kl|decision)_\w+|advantage_reweight|preserve_thinking|(use_)?gym_env"
)
"""Keys that came after 4.0."""
ONE_ACCUMULATED_ASLEEP = (3, 3)
"""Last release that accumulates one micro-batch alone where vLLM sleeps."""


def release_of(text: str | None, given: Mapping[str, Any]) -> tuple[tuple[int, int], str]:
    """Return the release whose defaults hold, and what tells so; an empty text if the user does or nothing.

    Args:
        text: what the user says, or None.
        given: values of the input, as they stand there.

    Raises:
        ConfigError: the text is no version, or one that is not known.
    """
    if text is not None:
        return release(text), ""
    for key, number in SIGNS:
        if key in given:
            return number, key
    if str(given.get("use_vllm")).lower() == "true" and "vllm_mode" not in given:
        return WITHOUT_MODE, "use_vllm without vllm_mode"
    if OF_THREE[0] in given and not any(OF_FOUR.fullmatch(key) for key in given):
        return OF_THREE[1], OF_THREE[0]
    return NEWEST, ""


def release(text: str | None) -> tuple[int, int]:
    """Return a release out of a version such as `3.5.1`.

    Raises:
        ConfigError: the text is no version, or one that is not known.
    """
    if text is None:
        return NEWEST
    found = re.match(r"v?(\d+)\.(\d+)", text)
    if not found:
        raise ConfigError(f"--from-version: {text!r} is no version; write one such as 4.6 or 3.5")
    number = int(found[1]), int(found[2])
    if number < OLDEST or number > NEWEST:
        raise ConfigError(f"--from-version: ms-swift {text} is not known; known are 3.2 to 4.6")
    return number


def defaults(version: tuple[int, int]) -> dict[str, Any]:
    """Return the defaults of a release."""
    found = dict(DEFAULTS)
    for changed, before in _CHANGES:
        if version < changed:
            found |= before
    return found
