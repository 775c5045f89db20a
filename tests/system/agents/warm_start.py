"""A tiny model that calls the shop's tools badly: warmed up on conversations of the real frameworks with a poor player.

The player takes the right tool in four of ten conversations, the other one in three or four, and answers without a tool
else; with a result it answers well. So the model knows how calls are written, in each framework's own words, and
reinforcement learning has to find out which tool to call.
"""

import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from actors.rollout.model_chat import chat_of
from actors.trajectories.chat import Chat
from schemas.config.model import ModelConfig
from tests.system.agents.scripted import EXAMPLES, Engines, config_of, player
from tests.system.environments.scripted import call

QUICKSTART = EXAMPLES.parent / "quickstart"
sys.path.insert(0, str(QUICKSTART))
from turns_model import PAD, SPECIAL, WRITTEN, make_model  # noqa: E402  # modules of the example

ITEMS = sorted(set(re.findall(r'"item": "(\w+)"', (EXAMPLES / "tasks.jsonl").read_text())))
AGENTS = {"with_openai_agents": "run.yaml", "with_smolagents": "run.yaml", "command": "command.yaml"}
NUM_TOKENS, MAX_TOKENS = 700, 320
BATCH = 32

Turn = tuple[str, str]
"""All that the model sees, and what it says."""


class PoorPlayer:
    """Writes the next text of a conversation, with mistakes on purpose."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.turns: list[Turn] = []

    def __call__(self, prompt: str) -> str:
        """Say something, and remember it."""
        text = self._text(prompt)
        self.turns.append((prompt, text))
        return text

    def _text(self, prompt: str) -> str:
        is_smolagents = "final_answer" in prompt
        results = re.findall(r"(?:<\|tool\|>|Observation:\n)(\d+)", prompt)
        if results:
            return call("final_answer", answer=results[-1]) if is_smolagents else results[-1]
        *_, (costs, left) = re.findall(r"does the (\w+) cost|of the (\w+) are left", prompt)
        right, wrong = ("price", "stock") if costs else ("stock", "price")
        draw = self._rng.random()
        if draw < 0.75:
            return call(right if draw < 0.4 else wrong, item=costs or left)
        number = str(self._rng.randint(10, 99))
        return call("final_answer", answer=number) if is_smolagents else number


def tokenizer_of(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and of the frequent pieces of these texts."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS - len(WRITTEN),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    raw.add_tokens(WRITTEN)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|end|>",
        chat_template=(QUICKSTART / "chat_template.jinja").read_text(encoding="utf-8"),
    )


def chat_in(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Chat:
    """The language of a model with this tokenizer, which is saved in a folder with a model that is not trained."""
    tokenizer.save_pretrained(folder)
    make_model(len(tokenizer), MAX_TOKENS).save_pretrained(folder)
    return chat_of(ModelConfig(path=str(folder)), {})


async def conversations(folder: Path, rng: random.Random) -> list[Turn]:
    """What the frameworks ask and a poor player answers, in the words of the frameworks."""
    chat = chat_in(folder / "bytes", tokenizer_of([]))
    turns: list[Turn] = []
    for name, file in AGENTS.items():
        path = [f"environments.0.path=programs/{name}.py:run"] if file == "run.yaml" else []
        said = PoorPlayer(rng)
        async with player(config_of(folder, file, *path), Engines(said, chat), chat) as play:
            for index in range(16):
                await play(index)
        turns += said.turns
    return turns


def varied(turn: Turn, rng: random.Random) -> Turn:
    """The same turn with another thing, and another number: the shop of another day."""
    item, numbers = rng.choice(ITEMS), {}
    pattern = re.compile(rf"\b(?:{'|'.join(ITEMS)})\b|(?<![\w.])\d\d(?![\w.])")

    def other(match: re.Match[str]) -> str:
        if match[0].isdigit():
            return str(numbers.setdefault(match[0], rng.randint(10, 99)))
        return item

    prompt, text = turn
    return pattern.sub(other, prompt), pattern.sub(other, text)


def warm_up(
    model: Any, tokenizer: PreTrainedTokenizerFast, turns: list[Turn], num_steps: int, rng: random.Random
) -> float:
    """Train on what the player said, one turn per row; return the last loss in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=num_steps, pct_start=0.1)
    loss = torch.zeros(())
    for _ in range(num_steps):
        chosen = [varied(rng.choice(turns), rng) for _ in range(BATCH)]
        pairs = [
            [tokenizer.encode(text, add_special_tokens=False) for text in (prompt, f"{said}<|end|>")]
            for prompt, said in chosen
        ]
        width = max(len(prompt) + len(said) for prompt, said in pairs)
        ids = torch.tensor([[*prompt, *said, *[PAD] * (width - len(prompt) - len(said))] for prompt, said in pairs])
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, said) in enumerate(pairs):
            mask[row, len(prompt) : len(prompt) + len(said)] = True
        log_p = functional.log_softmax(model(input_ids=ids[:, :-1]).logits, -1)
        loss = -log_p.gather(2, ids[:, 1:, None])[..., 0][mask[:, 1:]].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


async def make_warm_model(folder: Path, seed: int = 0, num_steps: int = 300) -> Path:
    """Write a warmed-up model to a folder, and return the folder."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    turns = await conversations(folder, rng)
    tokenizer = tokenizer_of(text for turn in turns for text in ["".join(varied(turn, rng)) for _ in range(20)])
    model = make_model(len(tokenizer), MAX_TOKENS)
    loss = warm_up(model, tokenizer, turns, num_steps, rng)
    print(f"warmed up to {loss:.2f} nats per token")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"
