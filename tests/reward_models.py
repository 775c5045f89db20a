"""Tiny random reward models on disk: sequence classifiers with the tokenizer of `tests.models`."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from tests.models import SMALL, tokenizer

TEMPLATE = "{% for m in messages %}<bos>{{ m['role'][0] }}={{ m['content'] }}<eos>{% endfor %}"


def build_reward_model(folder: Path, num_labels: int = 1, template: str = TEMPLATE) -> None:
    """Write a model directory; the same one each time."""
    settings = {key: value for key, value in SMALL.items() if key != "head_dim"}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Qwen2ForSequenceClassification(Qwen2Config(**settings, num_labels=num_labels)).save_pretrained(folder)
    made = tokenizer()
    made.chat_template = template or None
    made.save_pretrained(folder)


def direct_logit(folder: Path, text: str, limit: int = SMALL["max_position_embeddings"]) -> float:
    """The logit of one text, without batch and padding, as transformers alone computes it."""
    made: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"][-limit:]
    with torch.inference_mode():
        return float(made(torch.tensor([ids])).logits[0, 0])
