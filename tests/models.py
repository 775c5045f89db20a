"""Tiny random models on disk, as a user's model directory is: weights, configuration, tokenizer.

Weights are drawn wider than usual, so that a wrong position, mask or neighbour changes logprobs visibly.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
)

from tests.images import write_processor

VOCABULARY = ["<pad>", "<bos>", "<eos>", "=", *"abcdefghijklmnopqrstuvwxyz"]
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
"""Tokens behind the vocabulary, in families that see images."""
VISION_START, VISION_END, IMAGE, VIDEO = range(len(VOCABULARY), len(VOCABULARY) + len(VISION_TOKENS))
BOS, EOS = 1, 2
NEVER = 10_000
"""An end of sequence that is in no vocabulary, for completions that shall reach max_tokens."""
WINDOW = 5

SMALL: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": SMALL["hidden_size"],
    "initializer_range": 0.2,
}
"""A tower of three layers, for patches of 4 × 4 pixels; a token of an image stands for 8 × 8."""
WITHOUT_HEAD_DIM = {name: value for name, value in SMALL.items() if name != "head_dim"}
FURTHER: dict[str, dict[str, Any]] = {
    "gemma3_text": SMALL | {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "granite": WITHOUT_HEAD_DIM | {"residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "exaone4": WITHOUT_HEAD_DIM,
    "cohere": WITHOUT_HEAD_DIM,
    "qwen2_moe": WITHOUT_HEAD_DIM
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "ernie4_5_moe": WITHOUT_HEAD_DIM
    | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1},
    "deepseek_v3": WITHOUT_HEAD_DIM
    | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Families with other layers: norms behind layers, multipliers, parallel branches, shared and dense experts."""
SEEING = ("qwen3_vl", "qwen2_5_vl")
"""Families that see images."""


def seeing_config(family: str) -> PretrainedConfig:
    """Configuration of a family that sees images: features at several layers (qwen3_vl), windows (qwen2_5_vl)."""
    text = SMALL | {"vocab_size": len(VOCABULARY) + len(VISION_TOKENS), "tie_word_embeddings": True}
    tokens = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": True,
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    if family == "qwen3_vl":
        vision = VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        text |= {"rope_parameters": rope | {"mrope_interleaved": True}}
        return Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    vision = VISION | {"window_size": 16, "fullatt_block_indexes": [1]}
    del text["head_dim"]
    return Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision, **tokens)


def config(family: str) -> PretrainedConfig:
    """Configuration of a family: head norms (qwen3), untied (llama), biases (biased_llama), windows (mistral, gemma2).

       gemma2 has soft caps.
    qwen3_moe has four experts in each layer, and mixtral too, under other names in files.
    """
    if family in SEEING:
        return seeing_config(family)
    if family in FURTHER:
        return AutoConfig.for_model(family, **FURTHER[family], tie_word_embeddings=False)
    if family == "qwen3":
        return Qwen3Config(**SMALL, tie_word_embeddings=True)
    if family == "llama":
        return LlamaConfig(**SMALL, tie_word_embeddings=False)
    if family == "biased_llama":
        return LlamaConfig(**SMALL, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
        return Qwen3MoeConfig(**SMALL, **experts, tie_word_embeddings=False)
    if family == "mixtral":
        return MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)
    if family == "mistral":
        return MistralConfig(**SMALL, sliding_window=WINDOW, tie_word_embeddings=False)
    return Gemma2Config(**SMALL, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0)


def build(folder: Path, family: str = "qwen3", seed: int = 0, eos: int = EOS) -> None:
    """Write a model directory; the same one each time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto_class(family).from_config(config(family))
        model.save_pretrained(folder)
    tokenizer(VISION_TOKENS if family in SEEING else []).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    if family in SEEING:
        write_processor(folder)


def auto_class(family: str) -> Any:
    """Class of transformers that loads models of a family."""
    return AutoModelForImageTextToText if family in SEEING else AutoModelForCausalLM


def tokenizer(further: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per character, `<bos>` in front; further special tokens behind."""
    raw = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    raw.add_special_tokens(list(further))
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


def plain(folder: Path, attention: str = "sdpa") -> Any:
    """The model as transformers alone loads it, in float32."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    loaded = auto_class(family).from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return loaded.eval()


def reference_attention(family: str) -> str:
    """The implementation of transformers that computes all of this family's attention."""
    return "eager" if family == "gemma2" else "sdpa"  # torch's fused attention knows no soft cap


def logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of a completion's tokens by a plain forward of this one sample."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
