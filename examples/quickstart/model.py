"""Start model of the quickstart: a tiny Qwen3 with a character tokenizer, after a short supervised warm-up.

The warm-up teaches the position of each letter, without confidence: half of the letters already written are replaced
by random letters, and the targets are softened by the same share. The warm-up ends when *sampled* completions reach a
reward of TARGET_REWARD. From there reinforcement learning has rewards to learn from, and room to improve.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from actors.datasets.generated import ReverseText
from actors.reward.builtin import characters_in_place
from schemas.config.data import ReverseTextConfig

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["<pad>", "<bos>", "<eos>"]
VOCABULARY = [*SPECIAL, "=", *LETTERS]
PAD, BOS, EOS = 0, 1, 2
LETTER_IDS = range(VOCABULARY.index("a"), len(VOCABULARY))
MAX_NEW_TOKENS = 12
WARMUP_LEARNING_RATE = 1e-3
WARMUP_BATCH = 32
UNCERTAINTY = 0.5
TARGET_REWARD = 0.42


def make_tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; each text starts with `<bos>`."""
    raw = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


def make_model(num_tokens: int = len(VOCABULARY), max_tokens: int = 64) -> Qwen3ForCausalLM:
    """Return a model with about 0.8 M random parameters.

    Args:
        num_tokens: size of the vocabulary.
        max_tokens: longest sequence.
    """
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=num_tokens,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=max_tokens,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def warm_up(model: Qwen3ForCausalLM, seed: int) -> tuple[int, float]:
    """Train with supervision until sampled completions reach TARGET_REWARD; return the steps and the reward."""
    # split `train` never draws held-out words; another seed than the run's gives other draws than training
    environment = ReverseText(ReverseTextConfig(), "train", seed + 1_000_003)
    indices, generator = itertools.count(), torch.Generator().manual_seed(seed)

    def words(count: int) -> list[str]:
        return [environment.example(i).columns["answer"][::-1] for i in itertools.islice(indices, count)]

    return train_until(
        TARGET_REWARD,
        model,
        WARMUP_LEARNING_RATE,
        lambda: _warm_up_loss(model, words(WARMUP_BATCH), generator),
        lambda: sampled_reward(model, words(256), generator),
    )


def train_until(
    target: float,
    model: PreTrainedModel,
    learning_rate: float,
    loss: Callable[[], torch.Tensor],
    probe: Callable[[], float],
) -> tuple[int, float]:
    """Train a model until a value of it reaches a target; return the steps and the value.

    Args:
        target: value to reach.
        model: trained as a whole, by AdamW.
        learning_rate: reached after 20 steps.
        loss: loss of the next batch.
        probe: the value, measured every few steps.

    Raises:
        RuntimeError: 3000 steps did not suffice.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
    value = 0.0
    for step in range(1, 3001):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, step / 20)
        optimizer.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % _steps_between_probes(value / target) == 0:
            value = probe()
            if value >= target:
                return step, value
    raise RuntimeError(f"the warm-up reached {value:.2f} only, not {target}")


def _steps_between_probes(share: float) -> int:
    """Return the steps until the next probe, at a share of the target. A probe costs several steps: few at first."""
    return 20 if share < 2 / 3 else 10 if share < 6 / 7 else 3


def _warm_up_loss(model: Qwen3ForCausalLM, words: list[str], generator: torch.Generator) -> torch.Tensor:
    """Return the cross entropy on reversed words, with targets softened by UNCERTAINTY."""
    inputs, prompts = _prompts(words)
    width = max(len(word) for word in words) + 1
    clean = torch.full((len(words), width), PAD)
    for b, word in enumerate(words):
        clean[b, : len(word) + 1] = torch.tensor([*(VOCABULARY.index(c) for c in reversed(word)), EOS])
    noise = torch.rand(clean.shape, generator=generator) < UNCERTAINTY
    random_letters = torch.randint(LETTER_IDS.start, LETTER_IDS.stop, clean.shape, generator=generator)
    written = torch.where(noise & _is_in(LETTER_IDS, clean), random_letters, clean)

    full, mask = torch.cat([inputs, written], 1), torch.cat([prompts, (clean != PAD).long()], 1)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=full, attention_mask=mask, position_ids=position_ids).logits[:, inputs.shape[1] - 1 : -1]
    return softened_cross_entropy(logits, clean, UNCERTAINTY, LETTER_IDS)


def softened_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, softening: float, characters: range
) -> torch.Tensor:
    """Return the mean cross entropy in nats per token; targets that are PAD do not count.

    Args:
        logits: (B, T, V).
        targets: (B, T) token ids.
        softening: share of a character's target that all characters have in equal parts.
        characters: token ids of all characters.
    """
    log_p = functional.log_softmax(logits, -1)
    hard = log_p.gather(2, targets[..., None])[..., 0]
    uniform = log_p[..., characters.start : characters.stop].mean(-1)
    softened = torch.where(_is_in(characters, targets), (1 - softening) * hard + softening * uniform, hard)
    return -(softened * (targets != PAD)).sum() / (targets != PAD).sum()


def _is_in(characters: range, ids: torch.Tensor) -> torch.Tensor:
    return (ids >= characters.start) & (ids < characters.stop)


@torch.no_grad()
def sampled_reward(model: Qwen3ForCausalLM, words: list[str], generator: torch.Generator) -> float:
    """Return the mean reward of one completion per word, sampled at temperature 1."""
    inputs, mask = _prompts(words)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=inputs, attention_mask=mask, position_ids=position_ids, use_cache=True)
    texts = [""] * len(words)
    ended = [False] * len(words)
    for _ in range(MAX_NEW_TOKENS):
        tokens = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator)
        for b, token in enumerate(tokens[:, 0].tolist()):
            ended[b] = ended[b] or token == EOS
            texts[b] += "" if ended[b] else VOCABULARY[token]
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            past_key_values=output.past_key_values,
            use_cache=True,
        )
    rewards = characters_in_place(words, texts, [word[::-1] for word in words])
    return sum(reward or 0.0 for reward in rewards) / len(rewards)


def _prompts(words: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids of the prompts, padded on the left, and their mask."""
    width = max(len(word) for word in words) + 2
    rows = [[BOS, *(VOCABULARY.index(c) for c in f"{word}=")] for word in words]
    inputs = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    return inputs, (inputs != PAD).long()


def build(folder: Path, seed: int) -> tuple[int, float]:
    """Write model and tokenizer to a folder; return the steps and the reward of the warm-up."""
    random.seed(seed)
    torch.manual_seed(seed)
    model = make_model()
    steps, reward = warm_up(model, seed)
    save(folder, model, make_tokenizer())
    return steps, reward


def save(folder: Path, *parts: Any) -> None:
    """Write a model, its tokenizer and its processors to a folder."""
    logging.disable_progress_bar()  # of a single file
    for part in parts:
        part.save_pretrained(folder)


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Make the quickstart's model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    taken, reached = build(arguments.folder, arguments.seed)
    print(f"warmed up in {taken} steps to a sampled reward of {reached:.2f}")
