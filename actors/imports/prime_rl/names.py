"""Names of prime-rl's keys: those of August 2026, how older ones are called there, and defaults of each time."""

from collections.abc import Mapping
from typing import Any

from actors.imports.keys import Key, known, pattern, table
from schemas.errors import ConfigError

ERAS = ("2025-11", "2026-02", "2026-03", "2026-05", "2026-08")
"""Times from which on other names and defaults hold."""
COMMITS = {"5e9548d4": "2026-02", "559b4477": "2026-08", "head": "2026-08", "main": "2026-08", "latest": "2026-08"}
"""Other words for a time."""

KEYS = table("""
max_steps                                        int?     null
max_async_level                                  int      1
seq_len                                          int?     null
output_dir                                       str      outputs
run.name                                         str?     null
run.dir                                          str?     null
model.name                                       str      Qwen/Qwen3-0.6B
log.level                                        str?     null
ckpt.interval                                    int?     null
ckpt.keep_last                                   int?     null
ckpt.keep_interval                               int?     null
weight_broadcast.type                            str?     null
deployment.type                                  str      single_node
deployment.gpus_per_node                         int      8
deployment.num_train_gpus                        int      1
deployment.num_infer_gpus                        int      1
deployment.num_train_nodes                       int?     null
deployment.num_infer_nodes                       int?     null
deployment.num_infer_replicas                    int      1
deployment.nodes_per_fsdp_group                  int?     null
trainer_gpu_ids                                  list?    null
inference_gpu_ids                                list?    null
trainer.max_steps                                int?     null
trainer.max_async_level                          int      1
trainer.log.level                                str?     null
trainer.output_dir                               str      outputs
trainer.ckpt.interval                            int?     null
trainer.ckpt.keep_last                           int?     null
trainer.ckpt.keep_interval                       int?     null
trainer.weight_broadcast.type                    str?     null
trainer.metrics_server.port                      int      8000
trainer.model.name                               str      Qwen/Qwen3-0.6B
trainer.model.trust_remote_code                  bool     false
trainer.model.seq_len                            int      2048
trainer.model.attn                               str      auto
trainer.model.ac                                 any?     {}
trainer.model.ac.mode                            str      full
trainer.model.ac.freq                            int      1
trainer.model.ac_offloading                      any?     null
trainer.model.compile                            any?     {}
trainer.model.compile.fullgraph                  bool     false
trainer.model.optimization_dtype                 str      float32
trainer.model.ep_comm_backend                    str      torch
trainer.model.lora                               any?     null
trainer.model.lora.rank                          int      16
trainer.model.lora.alpha                         float    32.0
trainer.model.lora.dropout                       float    0.0
trainer.model.lora.target_modules                list  [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
trainer.model.lora.modules_to_save               list     []
trainer.optim.type                               str      adamw
trainer.optim.lr                                 float    1.0e-6
trainer.optim.weight_decay                       float    0.01
trainer.optim.max_norm                           float?   1.0
trainer.optim.betas1                             float    0.9
trainer.optim.betas2                             float    0.999
trainer.optim.mu                                 float    0.95
trainer.scheduler.type                           str      constant
trainer.scheduler.warmup_steps                   int      10
trainer.scheduler.decay_steps                    int      10
trainer.scheduler.min_lr                         float    0.0
trainer.loss.type                                str      default
trainer.loss.dppo_mask_low                       float    0.2
trainer.loss.dppo_mask_high                      float    0.2
trainer.loss.adv_tau                             float    1.0
trainer.loss.kl_tau                              float    0.001
trainer.loss.teacher_tau                         float    0.0
trainer.loss.ipo_threshold                       float    0.1
trainer.loss.ipo_mask_low                        float    0.2
trainer.loss.ipo_mask_high                       float    0.2
trainer.loss.ratio_type                          str      token
trainer.loss.token_mask_low                      float    0.125
trainer.loss.token_mask_high                     float    8.0
trainer.loss.geo_mask_low                        float    0.1
trainer.loss.geo_mask_high                       float    10.0
trainer.loss.sequence_mask_low                   float    0.0
trainer.loss.sequence_mask_high                  float    100.0
trainer.loss.sequence_clip_high                  float    10.0
orchestrator.max_steps                           int?     null
orchestrator.max_async_level                     int      1
orchestrator.max_off_policy_steps                int      8
orchestrator.strict_async_level                  bool     false
orchestrator.oversampling_factor                 float?   null
orchestrator.seq_len                             int      2048
orchestrator.output_dir                          str      outputs
orchestrator.batch_size                          int?     128
orchestrator.token_batch_size                    int?     null
orchestrator.group_size                          int      1
orchestrator.concurrency.max_inflight            int?     1024
orchestrator.max_inflight_rollouts               int?     null
orchestrator.max_concurrent                      int?     null
orchestrator.seed                                int?     42
orchestrator.log.level                           str?     null
orchestrator.model.name                          str      Qwen/Qwen3-0.6B
orchestrator.model.lora.rank                     int?     null
orchestrator.model.lora.alpha                    float?   null
orchestrator.weight_broadcast.type               str?     null
orchestrator.train.filter_zero_advantages        bool     true
orchestrator.train.sampling.temperature          float?   1.0
orchestrator.train.sampling.top_p                float    1.0
orchestrator.train.sampling.top_k                int?     null
orchestrator.train.sampling.max_completion_tokens int?    null
orchestrator.train.sampling.repetition_penalty   float    1.0
orchestrator.train.sampling.min_tokens           int      0
orchestrator.train.sampling.seed                 int?     null
orchestrator.train.sampling.extra_body           map      {}
orchestrator.train.sampling.temp_scheduler.type  str      linear
orchestrator.train.sampling.temp_scheduler.start_temperature float? null
orchestrator.train.sampling.temp_scheduler.end_temperature float? null
orchestrator.train.sampling.temp_scheduler.total_steps int? null
orchestrator.train.source.*.name                 str?     null
orchestrator.train.source.*.ratio                float?   1.0
orchestrator.train.source.*.group_size           int      1
orchestrator.train.source.*.id                   str      reverse-text
orchestrator.train.source.*.args                 map      {}
orchestrator.algo.type                           str      grpo
orchestrator.algo.length_penalty                 any?     null
orchestrator.algo.length_weighted_baseline       bool     false
orchestrator.algo.loss_aggregation               str      token
orchestrator.algo.teacher                        any?     null
orchestrator.advantage                           any?     {}
orchestrator.advantage.type                      str      default
orchestrator.advantage.length_weighted_mean      bool     false
orchestrator.advantage.import_path               str      ""
orchestrator.advantage.kwargs                    map      {}
orchestrator.buffer.easy_threshold               float?   null
orchestrator.buffer.hard_threshold               float?   null
orchestrator.buffer.easy_fraction                float    0.0
orchestrator.buffer.hard_fraction                float    0.0
orchestrator.buffer.hash_keys                    list     [task, prompt]
orchestrator.buffer.online_difficulty_filtering  bool     false
orchestrator.buffer.env_ratios                   list?    null
orchestrator.buffer.seed                         int?     null
orchestrator.filters                             list     [{type: gibberish}, {type: repetition}]
orchestrator.pre_batch_filters                   list     []
orchestrator.post_batch_filters                  list     []
orchestrator.verification.enabled                bool     true
orchestrator.teacher_model.model.name            str?     null
orchestrator.eval.interval                       int      100
orchestrator.eval.num_examples                   int      -1
orchestrator.eval.group_size                     int      1
orchestrator.eval.eval_base_model                bool     true
orchestrator.eval.skip_first_step                bool     false
orchestrator.eval.source.*.id                    str      reverse-text
orchestrator.eval.source.*.name                  str?     null
orchestrator.eval.source.*.args                  map      {}
orchestrator.eval.source.*.interval              int      100
orchestrator.eval.source.*.num_examples          int?     -1
orchestrator.eval.source.*.group_size            int?     1
orchestrator.train.source.*.env.**               any      null
orchestrator.train.source.*.sampling.**          any      null
orchestrator.train.source.*.algo.**              any      null
orchestrator.train.source.*.curriculum.**        any      null
orchestrator.eval.source.*.env.**                any      null
orchestrator.eval.source.*.sampling.**           any      null
orchestrator.eval.sampling.temperature           float?   null
inference.server.port                            int      8000
inference.server.host                            str?     null
inference.log.level                              str?     null
inference.vllm.model                             str      Qwen/Qwen3-0.6B
inference.vllm.dtype                             str      auto
inference.vllm.trust_remote_code                 bool     false
inference.vllm.max_model_len                     int?     null
inference.vllm.tensor_parallel_size              int      1
inference.vllm.data_parallel_size                int      1
inference.vllm.enforce_eager                     bool     false
inference.vllm.gpu_memory_utilization            float    0.9
inference.vllm.max_loras                         int      8
inference.vllm.max_lora_rank                     int?     null
inference.vllm.enable_prefix_caching             bool?    null
inference.vllm.quantization                      str?     null
inference.vllm.reasoning_parser                  str?     auto
inference.vllm.tool_call_parser                  str?     auto
inference.vllm.*                                 any      null
""")
"""Keys that are read, with the defaults of August 2026."""

CHANGED: dict[str, dict[str, Any]] = {
    # one mask of tokens and one of sequences, and a ratio of sequences of e^10 at most; the policy that samples is
    # exactly max_async_level steps old
    "2025-11": {
        "trainer.loss.kl_tau": 0.0, "trainer.model.ac": None, "trainer.model.compile": None,
        "trainer.model.attn": "flash_attention_2", "orchestrator.train.filter_zero_advantages": False,
        "trainer.loss.geo_mask_low": 0.0, "trainer.loss.geo_mask_high": 1e9, "trainer.loss.sequence_mask_high": 1e9,
        "trainer.loss.sequence_clip_high": 22026.0, "orchestrator.strict_async_level": True,
    },
    "2026-02": {
        "trainer.loss.kl_tau": 0.0, "trainer.model.ac": None, "trainer.model.compile": None,
        "trainer.model.attn": "flash_attention_2", "orchestrator.train.filter_zero_advantages": False,
    },
    "2026-03": {
        "trainer.model.ac": None, "trainer.model.compile": None, "trainer.model.attn": "flash_attention_2",
        "orchestrator.train.filter_zero_advantages": False,
    },
    "2026-05": {
        "trainer.model.ac": None, "trainer.model.compile": None, "trainer.model.attn": "flash_attention_2",
    },
    "2026-08": {},
}  # fmt: skip
"""Defaults of each time, where they differ from those of August 2026."""

FLAT_VLLM = (
    "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules", "enable_prefix_caching",
    "gpu_memory_utilization", "quantization", "api_server_count", "data_parallel_size_local", "data_parallel_rpc_port",
    "seed", "enable_expert_parallel", "enable_eplb", "enable_dbo", "enable_return_routed_experts", "all2all_backend",
    "calculate_kv_scales",
)  # fmt: skip
"""Keys of vLLM that stood in [inference] itself."""

RENAMED = (
    ("clean_output_dir", "clean", "2026-05"),
    *(
        (f"{section}{old}", f"{section}{new}", "2025-11")
        for section in ("", "trainer.", "orchestrator.")
        for old, new in (
            ("outputs_dir", "output_dir"),
            ("ckpt.keep", "ckpt.keep_last"),
            ("monitor.wandb.**", "monitors.wandb.{}"),
            ("monitor.wandb", "monitors.wandb"),
        )
    ),
    ("trainer.loss.mask_ratio_high", "trainer.loss.token_mask_high", "2025-11"),
    ("trainer.loss.mask_ratio_low", "trainer.loss.token_mask_low", "2025-11"),
    ("trainer.loss.sequence_mask_ratio_low", "trainer.loss.sequence_mask_low", "2025-11"),
    ("trainer.loss.sequence_mask_ratio_high", "trainer.loss.sequence_mask_high", "2025-11"),
    ("trainer.loss.ref_tau", "trainer.loss.teacher_tau", "2025-11"),
    ("orchestrator.env_mix.probabilities", "orchestrator.buffer.env_ratios", "2025-11"),
    ("orchestrator.buffer.oversampling_factor", "orchestrator.oversampling_factor", "2025-11"),
    ("wandb.**", "monitors.wandb.{}", "2026-05"),
    ("wandb", "monitors.wandb", "2026-05"),
    ("ckpt.resume_step", "resume.step", "2026-05"),
    ("trainer.wandb.**", "trainer.monitors.wandb.{}", "2026-05"),
    ("orchestrator.wandb.**", "orchestrator.monitors.wandb.{}", "2026-05"),
    ("orchestrator.client.**", "orchestrator.model.client.{}", "2026-05"),
    ("trainer.model.experimental.lora.**", "trainer.model.lora.{}", "2025-11"),
    ("orchestrator.environment.**", "orchestrator.train.source.0.{}", "2025-11"),
    ("async_level", "max_async_level", "2025-11"),
    ("trainer.async_level", "trainer.max_async_level", "2025-11"),
    ("orchestrator.async_level", "orchestrator.max_async_level", "2025-11"),
    ("orchestrator.env.*.**", "orchestrator.train.source.{}.{}", "2026-02"),
    ("orchestrator.train.env.*.**", "orchestrator.train.source.{}.{}", "2026-05"),
    ("orchestrator.eval.env.*.**", "orchestrator.eval.source.{}.{}", "2026-05"),
    ("orchestrator.sampling.**", "orchestrator.train.sampling.{}", "2026-02"),
    ("orchestrator.train.sampling.max_tokens", "orchestrator.train.sampling.max_completion_tokens", "2026-05"),
    ("orchestrator.rollouts_per_example", "orchestrator.group_size", "2026-02"),
    ("orchestrator.train.group_size", "orchestrator.group_size", "2026-08"),
    ("orchestrator.train.algo.**", "orchestrator.algo.{}", "2026-08"),
    ("orchestrator.eval.rollouts_per_example", "orchestrator.eval.group_size", "2026-02"),
    ("orchestrator.train.source.*.rollouts_per_example", "orchestrator.train.source.{}.group_size", "2026-02"),
    ("orchestrator.eval.source.*.rollouts_per_example", "orchestrator.eval.source.{}.group_size", "2026-02"),
    *(
        (f"orchestrator.{split}.source.*.{old}", f"orchestrator.{split}.source.{{}}.{new}", "2026-05")
        for split in ("train", "eval")
        for old, new in (
            ("taskset.**", "env.taskset.{}"),
            ("harness.runtime.**", "env.agent.runtime.{}"),
            ("harness.**", "env.agent.harness.{}"),
            ("max_turns", "env.agent.max_turns"),
            ("max_output_tokens", "env.agent.max_output_tokens"),
            ("legacy.id", "id"),
            ("legacy.args", "args"),
        )
    ),
    ("orchestrator.max_inflight_episodes", "orchestrator.concurrency.max_inflight", "2026-08"),
    ("inference.model.name", "inference.vllm.model", "2026-05"),
    ("inference.model.**", "inference.vllm.{}", "2026-05"),
    ("inference.parallel.tp", "inference.vllm.tensor_parallel_size", "2026-05"),
    ("inference.parallel.dp", "inference.vllm.data_parallel_size", "2026-05"),
    ("inference.vllm_extra.**", "inference.vllm.{}", "2026-05"),
    *((f"inference.{name}", f"inference.vllm.{name}", "2026-05") for name in FLAT_VLLM),
)
"""Older names: pattern, name of August 2026, and the newest time in which the older name is usual."""

MARKS = {
    "2025-11": ("orchestrator.buffer.type", "orchestrator.buffer.min_reward", "orchestrator.buffer.max_reward",
                "orchestrator.advantage.std_norm", "orchestrator.advantage.leave_one_out",
                "orchestrator.advantage_type", "orchestrator.zero_truncated_completions",
                "orchestrator.mask_env_responses", "orchestrator.length_bonus", "orchestrator.lora_name",
                "orchestrator.micro_batch_size", "trainer.weight_broadcast.adapter_only", "trainer.recompute_logprobs",
                "trainer.loss.epsilon_low", "trainer.loss.epsilon_high", "trainer.loss.clip_ratio"),
    "2026-02": ("trainer.loss.ratio_type", "trainer.loss.token_mask_*", "trainer.loss.geo_mask_*", "trainer_gpu_ids",
                "trainer.loss.sequence_*", "inference_gpu_ids", "orchestrator.buffer.*", "orchestrator.max_async_level",
                "max_async_level", "trainer.max_async_level", "orchestrator.verification.*"),
    "2026-03": ("trainer.loss.ipo_mask_*", "orchestrator.filters"),
    "2026-05": ("orchestrator.pre_batch_filters", "orchestrator.post_batch_filters", "orchestrator.oversampling_factor",
                "orchestrator.max_inflight_rollouts"),
}  # fmt: skip
"""Keys that exist up to a time, apart from renamed ones."""


SINCE = {
    "2026-02": ("seq_len", "trainer.loss.geo_mask_*", "trainer.loss.token_mask_*", "trainer.loss.sequence_clip_high",
                "trainer.loss.adv_tau", "orchestrator.buffer.env_ratios", "orchestrator.buffer.hash_keys",
                "orchestrator.teacher_model.*", "ckpt.keep_last", "ckpt.keep_interval", "trainer.ckpt.keep_last",
                "orchestrator.eval.skip_eval_on_resume"),
    "2026-03": ("trainer.loss.ipo_mask_*", "orchestrator.verification.*"),
    "2026-05": ("orchestrator.train.env.*", "orchestrator.train.sampling.*", "orchestrator.pre_batch_filters",
                "orchestrator.post_batch_filters", "orchestrator.pre_batch_filters.*",
                "orchestrator.post_batch_filters.*", "orchestrator.sampling.max_completion_tokens",
                "orchestrator.advantage.length_shaping", "orchestrator.training_mode", "trainer.loss.dppo_mask_*"),
}  # fmt: skip
"""Keys, as they stand in a file, that a time brought: with them older names do not tell an earlier one."""


NEW = (
    "orchestrator.train.source.*.**", "orchestrator.eval.source.*.**", "orchestrator.concurrency.**",
    "orchestrator.algo.**",
    "inference.vllm.**", "run.**", "monitors.**", "orchestrator.train.filter_zero_advantages",
    "trainer.loss.ipo_threshold",
)  # fmt: skip
"""Keys that only August 2026 has: next to them older names are understood, but do not tell the time."""


def today(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Return the values by the names of August 2026, the names in the input, and the keys that tell the time.

    Where a file has both names of a key, the newer one counts and the older one keeps its name.
    """
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    times: dict[str, str] = {}
    is_new = False
    for key, value in given.items():
        name, newest = key, ""
        for old, new, time in RENAMED:
            if (match := _glob(old, name)) is not None:
                name, newest = new.format(*match), min(newest or time, time)
        if name in given and name != key:
            name = key
        values[name] = value
        if name != key:
            names[name] = key
        if newest and newest != ERAS[-1]:
            times[key] = newest
        if any(_glob(new, key) is not None for new in NEW):
            is_new = True
        for time, marks in MARKS.items():
            if any(_glob(mark.replace("_*", "_?"), name) is not None for mark in marks):
                times[key] = min(times.get(key, time), time)
    earliest = _earliest(given)
    times = {key: max(time, earliest) for key, time in times.items()}
    return values, names, {} if is_new else times


def _earliest(given: Mapping[str, Any]) -> str:
    """Return the time before which a file with these keys can't be."""
    found = [ERAS[0]]
    for time, marks in SINCE.items():
        starts = tuple(mark.removesuffix("*") for mark in marks if mark.endswith("*"))
        if any(key in marks or (starts and key.startswith(starts)) for key in given):
            found.append(time)
    return max(found)


def _glob(old: str, key: str) -> tuple[str, ...] | None:
    """Return the parts of a key that the stars of a pattern stand for, or None; `_?` is any end of the last part."""
    if old.endswith("_?"):
        return () if key.startswith(old.removesuffix("?")) else None
    match = pattern(old).fullmatch(key)
    return match.groups() if match else None


def era_of(version: str | None, times: Mapping[str, str]) -> tuple[str, str]:
    """Return the time whose defaults hold, and the reason.

    Args:
        version: value of `--from-version`: a date, or one of the known commits.
        times: keys of the input that name a time.

    Raises:
        ConfigError: the version is no date and no known commit.
    """
    if version is not None:
        word = COMMITS.get(version.lower()[:8], version)
        if word[:4].isdigit() and word[4:5] == "-":
            return max((era for era in ERAS if era <= word[:7]), default=ERAS[0]), "--from-version"
        raise ConfigError(f"--from-version: {version!r} is no date such as {', '.join(ERAS)}")
    if not times:
        return ERAS[-1], ""
    key, era = min(times.items(), key=lambda item: item[1])
    return era, key


def defaults_of(era: str) -> dict[str, Any]:
    """Return the defaults of a time."""
    return {name: key.default for name, key in KEYS.items()} | CHANGED[era]


def table_key(key: str) -> Key | None:
    """Return the row of a key, or None."""
    name = known(key, KEYS)
    return KEYS[name] if name is not None else None
