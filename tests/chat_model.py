"""A tiny random chat model on disk: tokens are bytes, the chat template is that of Qwen 2.5, with tools.

Heads are as wide as the kernels of vLLM need.
"""

import json
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.actors.trajectories.families import FAMILIES, tokenizer_of


def build_chat_model(folder: Path, family: str = "qwen2_5") -> None:
    """Write a model directory; the same one each time. It ends a turn about every eighth token, and likes digits."""
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in FAMILIES[family].ends]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        eos_token_id=ends[0],
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    wanted = dict.fromkeys((tokenizer.convert_tokens_to_ids(digit) for digit in "0123"), 3.0) | {ends[0]: 3.7}
    with torch.no_grad():
        # the same first component for all inputs, by which the head gives chosen tokens a logit of their own
        model.model.embed_tokens.weight[:, 0] = 1.0
        scale = model.model.norm(model.model.embed_tokens.weight[:1])[0, 0]
        for token, logit in wanted.items():
            model.lm_head.weight[token, 0] = logit / scale
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
