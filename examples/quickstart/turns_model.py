"""Start models of the quickstart with turns: a tiny Qwen3, warmed up on conversations of imperfect players.

A player plays the real environment and knows the best choice, but makes a share of its choices wrong on purpose. The
model learns both: how a good player plays, and to play so only half of the time. Reinforcement learning has to find
out which half earns the reward. Held-out questions are in no conversation.
"""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from calculator import Calculator
from find_number import FindNumber
from model import PAD, make_model, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from actors.environments.worker.tools import described

Conversation = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]
"""Messages, and the tools that the model may call."""

ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
SPECIAL = ["<pad>", "<bos>", "<|end|>", *ROLES]
WRITTEN = ["<tool_call>", "</tool_call>"]
"""Tokens that the model writes as parts of a text, as Qwen's models do."""
END, ASSISTANT = SPECIAL.index("<|end|>"), SPECIAL.index("<|assistant|>")
NUM_TOKENS = 400
MAX_TOKENS = 128
BATCH = 32
LEARNING_RATE = 2e-3
FIRST_INDEX = 10**9
"""First example of the warm-up: far behind those of the run."""


def play_find_number(rng: random.Random, index: int, errors: float) -> Conversation:
    """Guess the middle of the range that is left; in a share of the games count up from the lowest number instead."""
    game = FindNumber()
    messages = [{"role": "user", "content": game.reset(index, "train")}]
    counts_up = rng.random() < errors
    for _ in range(7):
        guess = str(game.low if counts_up else (game.low + game.high) // 2)
        answer, _, is_done = game.step(guess)
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": answer}]
        if is_done:
            break
    return messages[:-1], None


def play_calculator(rng: random.Random, index: int, errors: float) -> Conversation:
    """Call the right tool and repeat its result; at two choices (a call, the tool) a share is wrong."""
    task = Calculator()
    question = task.reset(index, "train")
    tools = [described(task.add), described(task.multiply)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    if rng.random() < errors:
        return [*messages, {"role": "assistant", "content": str(rng.randint(1, 36))}], tools
    a, sign, b = question[:3]
    tool = task.add if (sign == "+") == (rng.random() >= errors) else task.multiply
    call = {"type": "function", "function": {"name": tool.__name__, "arguments": {"a": a, "b": b}}}
    result = str(tool(a, b))
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": tool.__name__, "content": result},
        {"role": "assistant", "content": result},
    ]
    return messages, tools


class Task(NamedTuple):
    """Warm-up of a task."""

    play: Callable[[random.Random, int, float], Conversation]
    errors: float
    """Share of wrong choices at the end of the warm-up."""
    num_steps: int


TASKS = {
    "find_number": Task(play_find_number, errors=0.8, num_steps=200),
    "calculator": Task(play_calculator, errors=0.33, num_steps=360),
}


def make_tokenizer(conversations: list[Conversation]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and of frequent pieces of these conversations; frequent numbers are a token each."""
    digits = pre_tokenizers.Digits(individual_digits=False)
    pieces = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return _with_template(train_tokenizer(pieces, map(_rendered, conversations), NUM_TOKENS))


def train_tokenizer(pieces: pre_tokenizers.PreTokenizer, texts: Iterable[str], num_tokens: int) -> Tokenizer:
    """Return a tokenizer of bytes and of frequent parts of these pieces of texts, with the tokens of conversations."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pieces, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens - len(WRITTEN),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    raw.add_tokens(WRITTEN)
    return raw


def _with_template(raw: Tokenizer) -> PreTrainedTokenizerFast:
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<|end|>", chat_template=template
    )


def _rendered(conversation: Conversation, tokenizer: PreTrainedTokenizerFast | None = None) -> str:
    messages, tools = conversation
    tokenizer = tokenizer or _with_template(Tokenizer(models.BPE()))
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))


def warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, play: Callable[[float], Conversation], task: Task
) -> float:
    """Train on what players say, one conversation per row; return the last loss in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=task.num_steps, pct_start=0.1)
    loss = torch.zeros(())
    for step in range(task.num_steps):
        # rules are learned from careful players, in fewer steps; what to improve, from the others
        errors = task.errors / 3 if step < 0.6 * task.num_steps else task.errors
        rows = [tokenizer.encode(_rendered(play(errors), tokenizer), add_special_tokens=False) for _ in range(BATCH)]
        width = max(len(row) for row in rows)
        ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
        # padding stands behind a row, where no token of the row sees it
        log_p = functional.log_softmax(model(input_ids=ids[:, :-1]).logits, -1)
        mask = _said_by_the_player(ids)[:, 1:]
        loss = -log_p.gather(2, ids[:, 1:, None])[..., 0][mask].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


def _said_by_the_player(ids: torch.Tensor) -> torch.Tensor:
    """Return a mask of the tokens behind each `<|assistant|>`, up to the end of its message."""
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for b, row in enumerate(ids.tolist()):
        is_inside = False
        for t, token in enumerate(row):
            mask[b, t] = is_inside
            is_inside = token == ASSISTANT or (is_inside and token != END)
    return mask


def build(folder: Path, task: str, seed: int) -> float:
    """Write model and tokenizer to a folder; return the loss at the end of the warm-up."""
    # two threads gain little on so small a model, and wait for each other on a busy machine
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    play, errors, _ = TASKS[task]
    # numbers that no run and no other seed draws from
    indices = iter(range(FIRST_INDEX * (1 + seed), FIRST_INDEX * (2 + seed)))
    tokenizer = make_tokenizer([play(rng, next(indices), errors) for _ in range(500)])
    model = make_model(len(tokenizer), MAX_TOKENS)
    loss = warm_up(model, tokenizer, lambda errors: play(rng, next(indices), errors), TASKS[task])
    save(folder, model, tokenizer)
    return loss


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Make a model of the quickstart with turns.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    reached = build(arguments.folder, arguments.task, arguments.seed)
    print(f"warmed up to a loss of {reached:.2f} nats per token")
