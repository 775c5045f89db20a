"""Start model of the quickstart with images: a tiny Qwen3-VL, after a short supervised warm-up on drawn digits.

The warm-up is that of model.py. Its softened targets teach the model to see all digits, and to name each of them wrong
with a probability of 27 %. Reinforcement learning leaves the vision tower as it is. Numbers that are held out are in
no picture of the warm-up.
"""

import random
from collections.abc import Iterable
from pathlib import Path

import torch
from digits import CELL, NUM_DIGITS, draw, numbers, write_rows
from model import BOS, EOS, PAD, SPECIAL, make_tokenizer, save, softened_cross_entropy, train_until
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

CHARACTERS = [*SPECIAL, "=", *"0123456789"]
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VOCABULARY = [*CHARACTERS, *VISION_TOKENS]
DIGIT_IDS = range(VOCABULARY.index("0"), VOCABULARY.index("9") + 1)
VISION_START, VISION_END, IMAGE, VIDEO = map(VOCABULARY.index, VISION_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
PROMPT = [VISION_START, *[IMAGE] * NUM_DIGITS, VISION_END, VOCABULARY.index("=")]
"""Tokens of a prompt: a token of an image stands for a square of a digit's size."""
LEARNING_RATE = 2e-3
BATCH = 32
SOFTENING = 0.3
"""Uncertainty of a digit. The best that the warm-up can reach is 0.73 right digits, and 0.39 right numbers."""
TARGET = 0.36


def make_tokenizer_and_processor() -> tuple[PreTrainedTokenizerFast, Qwen2VLImageProcessorPil]:
    """Return a tokenizer with one token per digit, and an image processor for patches of half a digit's size."""
    tokenizer = make_tokenizer(CHARACTERS)
    tokenizer.add_tokens(VISION_TOKENS, special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    pixels = {"shortest_edge": CELL**2, "longest_edge": 64 * CELL**2}
    return tokenizer, Qwen2VLImageProcessorPil(patch_size=CELL // 2, temporal_patch_size=2, merge_size=2, size=pixels)


def make_model() -> Qwen3VLForConditionalGeneration:
    """Return a model with about 0.6 M random parameters, half of them in its vision tower."""
    text = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": CELL // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
            tie_word_embeddings=True,
        )
    )


class WarmUp:
    """Model that reads pictures of random numbers of the training split.

    Args:
        model: model to warm up.
        processor: its image processor.
        seed: source of numbers and pictures.
    """

    def __init__(self, model: Qwen3VLForConditionalGeneration, processor: Qwen2VLImageProcessorPil, seed: int) -> None:
        self._model, self._processor, self._rng = model, processor, random.Random(seed)
        self._numbers = numbers("train")

    def loss(self) -> torch.Tensor:
        """Return the cross entropy on the next pictures, with targets softened by SOFTENING."""
        return softened_cross_entropy(*self._read(BATCH), SOFTENING, DIGIT_IDS)

    @torch.no_grad()
    def exact_match(self) -> float:
        """Return the probability that the model samples the right number, as a mean over pictures."""
        logits, targets = self._read(256)
        return logits.log_softmax(-1).gather(2, targets[..., None]).sum((1, 2)).exp().mean().item()

    def _read(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the (B, T, V) logits of the answers to some pictures, and the (B, T) tokens of the right answers."""
        drawn = self._rng.choices(self._numbers, k=count)
        pictures = self._processor([draw(number, self._rng) for number in drawn], return_tensors="pt")
        answers = token_ids(drawn)
        ids = torch.cat([torch.tensor([PROMPT] * count), answers], 1)
        logits = self._model(ids, mm_token_type_ids=(ids == IMAGE).int(), **pictures).logits
        return logits[:, len(PROMPT) - 1 : -1], answers


def token_ids(drawn: Iterable[str]) -> torch.Tensor:
    """Return the (B, T) tokens of numbers, each with its end."""
    return torch.tensor([[*map(VOCABULARY.index, number), EOS] for number in drawn])


def build(folder: Path, seed: int) -> tuple[int, float]:
    """Write model, tokenizer and image processor to a folder; return steps and exact match of the warm-up."""
    # two threads gain little on so small a model, and wait for each other on a busy machine
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, (tokenizer, processor) = make_model(), make_tokenizer_and_processor()
    # another seed than that of the data set, so that the run has pictures of its own
    pictures = WarmUp(model, processor, seed + 1_000_003)
    taken = train_until(TARGET, model, LEARNING_RATE, pictures.loss, pictures.exact_match)
    save(folder, model, tokenizer, processor)
    return taken


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Draw the data of the quickstart with images, and make its model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--digits", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_rows(arguments.digits, arguments.seed)
    steps, reached = build(arguments.folder, arguments.seed)
    print(f"warmed up in {steps} steps to an exact match of {reached:.2f}, sampled")
