"""Keys of AReaL as data: those that are read, with their defaults, and the reasons of the others."""

import re
from collections.abc import Mapping
from typing import Any

from actors.imports.keys import Key, defaults, table
from schemas.errors import ConfigError

KEYS: dict[str, Key] = table("""
experiment_name                  str?    null
trial_name                       str?    null
seed                             int     1
async_training                   bool    true
cluster.fileroot                 str     /tmp/areal/
allocation_mode                  str?    ""
total_train_epochs               int     1
total_train_steps                int?    null
train_dataset.batch_size         int     1
train_dataset.path               str?    null
train_dataset.drop_last          bool    true
train_dataset.max_length         int?    null
valid_dataset.path               str?    null
rollout.backend                  str?    null
rollout.max_concurrent_rollouts  int?    null
rollout.consumer_batch_size      int?    null
rollout.max_head_offpolicyness   int     0
rollout.request_timeout          float   3600
rollout.request_retries          int     3
rollout.setup_timeout            float   300.0
gconfig.n_samples                int     1
gconfig.max_new_tokens           int     16384
gconfig.max_tokens               int?    32768
gconfig.min_new_tokens           int     0
gconfig.greedy                   bool    false
gconfig.temperature              float   1.0
gconfig.top_p                    float   1.0
gconfig.top_k                    int     100000000
gconfig.frequency_penalty        float   0.0
gconfig.ignore_eos               bool    false
gconfig.stop                     any?    null
eval_gconfig.n_samples           int     1
eval_gconfig.max_new_tokens      int     16384
eval_gconfig.top_p               float   1.0
eval_gconfig.top_k               int     100000000
eval_gconfig.temperature         float   1.0
eval_gconfig.greedy              bool    false
actor.path                       str     ""
actor.backend                    str?    null
actor.dtype                      str     bfloat16
actor.attn_impl                  str     flash_attention_2
actor.gradient_checkpointing     bool    false
actor.use_lora                   bool    false
actor.lora_rank                  int     32
actor.lora_alpha                 float   16
actor.target_modules             any     []
actor.mb_spec.max_tokens_per_mb  int?    null
actor.optimizer.type             str     adam
actor.optimizer.lr               float   0.001
actor.optimizer.weight_decay     float   0.01
actor.optimizer.beta1            float   0.9
actor.optimizer.beta2            float   0.999
actor.optimizer.eps              float   1.0e-8
actor.optimizer.min_lr_ratio     float   0.0
actor.optimizer.lr_scheduler_type str    constant
actor.optimizer.warmup_steps_proportion float 0.001
actor.optimizer.gradient_clipping float  1.0
actor.ppo_n_minibatches          int?    4
actor.eps_clip                   float   0.2
actor.eps_clip_higher            float?  null
actor.c_clip                     float?  null
actor.m2_threshold               float?  null
actor.use_decoupled_loss         bool    false
actor.recompute_logprob          bool    false
actor.prox_logp_method           str     recompute
actor.importance_sampling_level  str     token
actor.use_sapo_loss              bool    false
actor.sapo_tau_pos               float   1.0
actor.sapo_tau_neg               float   1.05
actor.behave_imp_weight_cap      float?  null
actor.behave_imp_weight_mode     str     token_mask
actor.rejection_sampling.level   str     token
actor.rejection_sampling.action  str     mask
actor.rejection_sampling.metric  str     ratio
actor.rejection_sampling.agg     str     mean
actor.rejection_sampling.upper   float   5.0
actor.rejection_sampling.lower   float?  null
actor.reward_bias                float   0.0
actor.reward_scaling             float   1.0
actor.reward_clip                float   20.0
actor.overlong_reward_penalty    bool    false
actor.overlong_tokens            int?    null
actor.overlong_penalty_factor    float?  null
actor.max_new_tokens             int     1024
actor.context_length             int?    null
actor.dynamic_sampling           bool    false
actor.colocated                  bool    false
actor.group_adv_norm             bool    false
actor.group_reward_norm          bool    false
actor.mask_no_eos_with_zero      bool    false
actor.discount                   float   1.0
actor.gae_lambda                 float   1.0
actor.kl_ctl                     float   0.1
actor.kl_estimator               str     k1
actor.weight_update_mode         str     xccl
vllm.max_model_len               int?    32768
vllm.gpu_memory_utilization      float   0.9
vllm.enforce_eager               bool    false
vllm.no_enable_prefix_caching    bool    true
vllm.enable_prefix_caching       bool    false
vllm.max_num_seqs                int     256
vllm.max_lora_rank               int     16
sglang.context_length            int?    32768
sglang.mem_fraction_static       float?  0.9
vllm.max_loras                   int     8
saver.freq_epochs                int?    null
saver.freq_steps                 int?    null
saver.freq_secs                  int?    null
recover.freq_epochs              int?    null
recover.freq_steps               int?    null
recover.freq_secs                int?    null
evaluator.freq_epochs            int?    null
evaluator.freq_steps             int?    null
evaluator.freq_secs              int?    null
evaluator.eval_before_train      bool    false
""")
"""Keys that are read, with the defaults of AReaL 1.0.4."""
SPELLINGS = {"actor.behav_imp_weight_cap": "actor.behave_imp_weight_cap",
             "actor.behav_imp_weight_mode": "actor.behave_imp_weight_mode",
             "checkpointer.freq_epochs": "recover.freq_epochs", "checkpointer.freq_steps": "recover.freq_steps",
             "checkpointer.freq_secs": "recover.freq_secs"}  # fmt: skip
"""Keys by how older files spell them."""
SIGNS = {
    "actor.group_adv_norm": (0, 3, 0),
    "actor.group_reward_norm": (0, 3, 0),
    "actor.behave_imp_weight_mode": (0, 5, 0),
    "actor.context_length": (0, 3, 3),
}
"""Keys that only one time has, with a release of that time."""
CHANGES: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((1, 0, 0), {"actor.behave_imp_weight_cap": 5.0}),
    (
        (0, 5, 0),
        {
            "actor.behave_imp_weight_cap": None,
            "actor.weight_update_mode": "disk",
            "rollout.setup_timeout": 120.0,
            "gconfig.max_tokens": 65536,
        },
    ),
    ((0, 3, 4), {"std_unbiased": False}),
    (
        (0, 3, 2),
        {
            "actor.adv_norm": True,
            "actor.dtype": "float16",
            "actor.gradient_checkpointing": True,
            "actor.optimizer.lr": 2e-5,
            "actor.optimizer.weight_decay": 0.05,
            "actor.optimizer.beta2": 0.95,
            "actor.optimizer.eps": 1e-5,
            "rollout.setup_timeout": 90.0,
        },
    ),
]
"""A release, and the defaults before that release."""
OLDEST, NEWEST = (0, 3, 0), (1, 0, 4)
LOSS_KEYS = (
    "eps_clip", "eps_clip_higher", "c_clip", "m2_threshold", "prox_logp_method", "sapo_tau_pos", "sapo_tau_neg",
    "importance_sampling_level", "behave_imp_weight_cap", "behave_imp_weight_mode", "rejection_sampling",
)  # fmt: skip
"""Keys that only some losses read."""
NORM_KEYS = ("mean_level", "mean_leave1out", "std_level", "std_unbiased", "eps")
"""Keys of a normalisation."""

IRRELEVANT = {
    "actor.rejection_sampling": "only the decoupled loss reads it",
    "cluster.**": "processes are started by actors up, systemd or Kubernetes",
    "tokenizer_path": "the tokenizer is the model's",
    "*.tokenizer_path": "the tokenizer is the model's",
    "*.experiment_name": "one name here",
    "*.trial_name": "one name here",
    "*.fileroot": "one folder here, output_dir",
    "perf_tracer.**": "for profiles",
    "memory_profiler.**": "for profiles",
    "scheduler.**": "processes are started by actors up",
    "*.scheduling_spec.**": "processes are started by actors up",
    "*.scheduling_spec": "processes are started by actors up",
    "*.scheduling_strategy.**": "processes are started by actors up",
    "train_dataset.**": "rows of a JSON Lines file",
    "valid_dataset.**": "rows of a JSON Lines file",
    "train_dataset": "rows of a JSON Lines file",
    "valid_dataset": "no evaluation",
    "gconfig.max_tokens": "bounded by packer.sequence_len and max_model_len",
    "gconfig.skip_special_tokens": "texts have no special tokens",
    "gconfig.stop_token_ids": "the model's own end of a turn",
    "eval_gconfig.**": "evaluations have temperature, top_p, top_k, length and number of completions",
    "rollout.queue_size": "steps bound the work in flight",
    "rollout.enable_rollout_tracing": "samples.jsonl",
    "rollout.check_trajectory_format": "groups are always checked",
    "rollout.dump_to_file": "samples.jsonl",
    "rollout.pause_grace_period": "weights.update_mode",
    "rollout.schedule_policy": "actors take an engine with a low load",
    "rollout.use_lora": "model.lora",
    "rollout.lora_name": "adapters have no names here",
    "actor.disable_dropout": "dropout is off, unless model.dropout is set",
    "actor.is_critic": "no critic",
    "actor.pad_to_maximum": "rows are packed",
    "actor.temperature": "logprobs have the temperature of sampling",
    "actor.mb_spec.**": "samples are packed by best fit",
    "actor.max_new_tokens": "only the penalty for long completions reads it",
    "actor.colocated_weight_path": "weights.directory",
    "actor.group_size": "rollout.group_size",
    "actor.peft_type": "LoRA",
    "actor.fsdp.**": "a plan of memory",
    "actor.megatron.**": "another engine",
    "actor.archon.**": "another engine",
    "actor.grad_reduce_dtype": "gradients are reduced in float32",
    "actor.optimizer_dtype": "states are float32",
    "actor.optimizer.initial_loss_scale": "for float16 only",
    "actor.optimizer.min_loss_scale": "for float16 only",
    "actor.optimizer.loss_scale_window": "for float16 only",
    "actor.optimizer.hysteresis": "for float16 only",
    "actor.log_agent_stats": "metrics.jsonl",
    "actor.log_agent_stats_keys": "metrics.jsonl",
    "actor.*.group_size": "the size of the group always",
    "ref.**": "the reference is a copy of the first weights",
    "ref": "the reference is a copy of the first weights",
    "saver.mode": "checkpoints are saved in the background",
    "recover.**": "actors up resumes by itself",
    "vllm.model": "model.path",
    "vllm.dtype": "model.dtype",
    "vllm.seed": "each completion has a seed of its own",
    "vllm.skip_tokenizer_init": "the server speaks token ids",
    "sglang.model_path": "model.path",
    "sglang.dtype": "model.dtype",
    "sglang.random_seed": "each completion has a seed of its own",
    "sglang.skip_tokenizer_init": "the server speaks token ids",
    "sglang.**": "no server of SGLang in this run",
    "vllm.**": "an argument of its servers; pass others in inference.engine.extra_args",
    "launcher.**": "processes are started by actors up",
    "launcher": "processes are started by actors up",
    "server_only": "engines alone: actors run inference",
    "gconfig.lora_name": "adapters have no names here",
    "recover.retries": "actors up resumes by itself",
}
"""Reasons of keys without influence."""
REFUSED = {
    "total_train_n_seqs": "the length of a run is a number of steps; give total_train_steps",
    "stats_logger.**": "this tracker is not built; write telemetry.trackers",
    "critic.**": "no critic is built; use the baseline of a group: actor.reward_norm, and remove critic",
    "teacher.**": "see trainer.distillation of type joint",
    "critic": "no critic is built; use the baseline of a group: actor.reward_norm, and remove critic",
    "teacher": "see trainer.distillation of type joint",
    "rollout.agent": "an agent of AReaL's own interface; write environments with turns: environments[].type python",
    "rollout.agent.**": "an agent of AReaL's own interface; write environments with turns: environments[].type python",
    "rollout.openai.**": "a proxy for agents; write environments with turns: environments[].type python",
    "gconfig.**": "requests have no such parameter here; remove it",
}
"""Reasons of keys without counterpart."""
TRACKER_KEYS = {"wandb": ("entity", "group", "tags"), "swanlab": ()}
"""Keys of AReaL's trackers that have their name here too, besides project, name and mode."""
SWITCHES = {
    "enable_offload": ("trainer and engine keep their memory", "lower gpu_memory_utilization if they share GPUs"),
    "dynamic_bs": (
        "a step has a number of groups",
        "packer.dynamic_sampling takes other groups instead",
    ),
    "actor.init_from_scratch": ("training starts from a model", "save an untrained model and name its folder"),
    "actor.enable_tree_training": ("prompts are computed once per completion", "false changes no value"),
    "actor.offload": ("the trainer keeps its memory", "false changes no value"),
    "actor.use_kernels": ("transformers' kernels are used", "false changes no value"),
    "actor.use_cispo_loss": ("another loss here", "set trainer.loss: {type: cispo, epsilon_high: CAP}"),
}
"""Switches that are off by default, with the reason to refuse them where they are on, and what to do instead."""


def release_of(text: str | None, given: Mapping[str, Any]) -> tuple[tuple[int, int, int], str]:
    """Return the release whose defaults hold, and the key that tells so, or an empty text.

    Args:
        text: what the user says, such as `0.3.2`.
        given: values of the input.

    Raises:
        ConfigError: the text is no version, or one that is not known.
    """
    if text is not None:
        found = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
        if not found:
            raise ConfigError(f"--from-version: {text!r} is no version; write one such as 1.0.4 or 0.3.2")
        number = int(found[1]), int(found[2]), int(found[3] or 0)
        if not OLDEST <= number <= NEWEST:
            raise ConfigError(f"--from-version: AReaL {text} is not known; known are 0.3.0 to 1.0.4")
        return number, ""
    if isinstance(given.get("actor.adv_norm"), bool):
        return OLDEST, "actor.adv_norm as a switch"
    for key, number in SIGNS.items():
        if key in given:
            return number, key
    if re.match(r"\w+\.d\d", str(given.get("allocation_mode"))) or given.get("actor.backend") in ("fsdp", "megatron"):
        return (0, 3, 3), "an engine without sizes, or a dot in allocation_mode,"
    return NEWEST, ""


def defaults_of(release: tuple[int, int, int]) -> dict[str, Any]:
    """Return the defaults of a release."""
    found = defaults(KEYS) | {"actor.adv_norm": None, "std_unbiased": True}
    for changed, before in CHANGES:
        if release < changed:
            found |= before
    return found
