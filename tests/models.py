"""Tiny random models on disk, as a user's model directory is: weights, configuration, tokenizer.

Weights are drawn wider than usual, so that a wrong position, mask or neighbour changes logprobs visibly.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

VOCABULARY = ["<pad>", "<bos>", "<eos>", "=", *"abcdefghijklmnopqrstuvwxyz"]
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


def config(family: str) -> PretrainedConfig:
    """Configuration of a family: head norms (qwen3), untied (llama), sliding window (mistral), soft caps (gemma2)."""
    if family == "qwen3":
        return Qwen3Config(**SMALL, tie_word_embeddings=True)
    if family == "llama":
        return LlamaConfig(**SMALL, tie_word_embeddings=False)
    if family == "mistral":
        return MistralConfig(**SMALL, sliding_window=WINDOW, tie_word_embeddings=False)
    return Gemma2Config(**SMALL, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0)


def build(folder: Path, family: str = "qwen3", seed: int = 0, eos: int = EOS) -> None:
    """Write a model directory; the same one each time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config(family)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, `<bos>` in front."""
    raw = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


def plain(folder: Path, attention: str = "sdpa") -> Any:
    """The model as transformers alone loads it, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


def reference_attention(family: str) -> str:
    """The implementation of transformers that computes all of this family's attention."""
    return "eager" if family == "gemma2" else "sdpa"  # torch's fused attention knows no soft cap


def logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of a completion's tokens by a plain forward of this one sample."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
