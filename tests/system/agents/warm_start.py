"""A tiny model that calls the shop's tools badly: warmed up on conversations of the real frameworks with a poor player.

Each framework plays a question of each kind with a player who calls the right tool, calls the other one, or answers
without a call. The model imitates the players, on other things and numbers than those of the run: it learns how each
framework wants a call and an answer written, and to choose well in less than half of the conversations. Reinforcement
learning has to find out which choice earns the reward.
"""

import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from actors.rollout.model_chat import chat_of
from actors.trajectories.chat import Chat
from schemas.config.model import ModelConfig
from tests.system.agents.scripted import EXAMPLES, Engines, config_of, player
from tests.system.environments.scripted import call

sys.path.insert(0, str(EXAMPLES.parent / "quickstart"))
from turns_model import END, PAD, make_model, train_tokenizer  # modules of the example

AGENTS = {"with_openai_agents": "run.yaml", "with_smolagents": "run.yaml", "command": "command.yaml"}
CHOICES = ("right", "wrong", "none")
"""Choice of a player: the right tool, the other tool, or an answer without a tool."""
ITEMS = ("basket", "bench", "candle", "carpet", "chair", "clock", "lamp", "mirror", "shelf", "sofa", "table", "vase")
NUMBERS = range(10, 40)
QUESTIONS = {"price": "What does the {} cost?", "stock": "How many pieces of the {} are left?"}
"""Questions of the example by the tool that has the answer."""
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages if message.role != "system" -%}
<|{{ message.role }}|>{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
"""Chat template without the system's text and without the schemas of tools, which are the same in all rows."""
NUM_TOKENS, MAX_TOKENS = 600, 512
BATCH, NUM_STEPS = 32, 200
LEARNING_RATE = 2e-3
EMBEDDING_SCALE = 4.0
"""Factor of the random embeddings. Things and numbers differ from the start then, and are copied after 80 steps; with
the model's own scale of 0.02 copying takes 160 steps or more, by the seed."""
ERRORS, CAREFUL = 0.33, 1 / 3
"""Share of wrong decisions at the end of the warm-up, to call at all and which tool, and the part of it before."""

Turn = tuple[str, str]
"""All that the model sees, and what it says."""
Row = list[Turn]
"""Turns of which each sees all earlier ones: a row of a batch."""
Conversations = dict[tuple[str, str], list[list[Row]]]
"""Conversations by tool of the question and choice of the player: one for each way in which a framework writes."""


def rows(split: str, number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of the shop; no thing has the same price and stock in both splits, `train` and `eval`."""
    rng, found = random.Random(f"{split} {seed}"), []
    for index in range(number):
        tool = ("price", "stock")[index % 2]
        item, price, stock = drawn(rng, split)
        answer = str(price if tool == "price" else stock)
        question = QUESTIONS[tool].format(item)
        found.append({"question": question, "item": item, "price": price, "stock": stock, "answer": answer})
    return found


def drawn(rng: random.Random, split: str) -> tuple[str, int, int]:
    """A thing, its price and its stock; every fifth of all such triples is held out."""
    while True:
        item, price, stock = rng.choice(ITEMS), rng.choice(NUMBERS), rng.choice(NUMBERS)
        is_held_out = (ITEMS.index(item) + price + stock) % 5 == 0
        if price != stock and is_held_out == (split == "eval"):
            return item, price, stock


class Player:
    """Writes the next text of a conversation, and remembers the conversation.

    Args:
        choice: one of CHOICES.
    """

    def __init__(self, choice: str) -> None:
        self._choice = choice
        self.turns: list[Turn] = []

    def __call__(self, prompt: str) -> str:
        """Say something."""
        text = self._text(prompt)
        if (prompt, text) not in self.turns:
            self.turns.append((prompt, text))
        return text

    def _text(self, prompt: str) -> str:
        # smolagents ends with a tool of its own
        is_smolagents = "New task:" in prompt
        results = re.findall(r"(?:<\|tool\|>|Observation:\n)(\d+)", prompt)
        if not results and self._choice != "none":
            *_, (costs, left) = re.findall(r"does the (\w+) cost|of the (\w+) are left", prompt)
            is_price = bool(costs) == (self._choice == "right")
            return _on_a_line(call("price" if is_price else "stock", item=costs or left))
        answer = results[-1] if results else str(NUMBERS[0])
        return _on_a_line(call("final_answer", answer=answer)) if is_smolagents else answer


def _on_a_line(text: str) -> str:
    return text.replace("\n", "")


async def recorded(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Conversations:
    """What the frameworks ask and players answer, in the words of the frameworks."""
    chat = chat_in(folder / "untrained", tokenizer)
    path = folder / "recorded.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows("train", 2)))
    found: Conversations = {key: [] for key in product(QUESTIONS, CHOICES)}
    for name, file in AGENTS.items():
        config = config_of(folder, file, f"environments.0.rows={path}", *path_of(name))
        engines = Engines(Player("right"), chat)
        async with player(config, engines, chat) as play:
            for (tool, choice), conversations in found.items():
                engines.script = said = Player(choice)
                await play(list(QUESTIONS).index(tool))
                conversation = joined(said.turns)
                # frameworks that write the same count once
                conversations += [conversation] if conversation not in conversations else []
    return found


def path_of(name: str) -> list[str]:
    """Override that chooses a framework in run.yaml."""
    return [f"environments.0.path=programs/{name}.py:run"] if AGENTS[name] == "run.yaml" else []


def joined(turns: list[Turn]) -> list[Row]:
    """Turns as rows: a turn that sees all of the turn before stands in the same row."""
    found: list[Row] = []
    for prompt, text in turns:
        before = "".join(map("".join, found[-1])) if found else ""
        if before and prompt.startswith(before):
            found[-1].append((prompt.removeprefix(before), text))
        else:
            found.append([(prompt, text)])
    return found


def varied(conversation: list[Row], rng: random.Random) -> list[Row]:
    """The same conversation about another thing, with another number: the shop of another day."""
    item, number, _ = drawn(rng, "train")
    pattern = re.compile(rf"\b(?:{'|'.join(ITEMS)})\b|(?<![\w.])\d\d(?![\w.])")

    def other(text: str) -> str:
        return pattern.sub(lambda found: str(number) if found[0].isdigit() else item, text)

    return [[(other(prompt), other(text)) for prompt, text in row] for row in conversation]


def tokenizer_of(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of these texts; things, tools and numbers are a token each wherever they stand."""
    words = "|".join([*ITEMS, *QUESTIONS, r"\d+"])
    pieces = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw = train_tokenizer(pieces, texts, NUM_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<|end|>", chat_template=TEMPLATE
    )


def chat_in(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Chat:
    """The language of a model with this tokenizer, which is saved in a folder with a model that is not trained."""
    tokenizer.save_pretrained(folder)
    make_model(len(tokenizer), MAX_TOKENS).save_pretrained(folder)
    return chat_of(ModelConfig(path=str(folder)), {})


def batches(conversations: Conversations, rng: random.Random, num_steps: int) -> Iterator[list[Row]]:
    """Rows of each step of the warm-up."""
    for step in range(num_steps):
        # writing is learned from careful players, in fewer steps; what to improve, from the others
        errors = ERRORS * CAREFUL if step < 0.6 * num_steps else ERRORS
        chosen: list[Row] = []
        for _ in range(BATCH):
            choice = "none" if rng.random() < errors else "wrong" if rng.random() < errors else "right"
            known = conversations[rng.choice(list(QUESTIONS)), choice]
            chosen += varied(rng.choice(known), rng)
        yield chosen


def encoded(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of rows, with padding behind, and a mask of what the player has said."""
    pieces = [
        [(text, is_said) for turn in row for text, is_said in zip(turn, (False, True), strict=True)] for row in rows
    ]
    tokens = [
        [(token, is_said) for text, is_said in row for token in tokenizer.encode(text, add_special_tokens=False)]
        for row in pieces
    ]
    width = max(map(len, tokens)) + 1
    ids, said = torch.full((len(rows), width), PAD), torch.zeros((len(rows), width), dtype=torch.bool)
    for b, row in enumerate(tokens):
        ids[b, : len(row) + 1] = torch.tensor([*(token for token, _ in row), END])
        said[b, : len(row)] = torch.tensor([is_said for _, is_said in row])
    # the end of a text is said too: the token behind it, which stands in the next turn's prompt, or last in the row
    said[:, 1:] |= said[:, :-1].clone()
    return ids, said


def warm_up(model: Any, tokenizer: PreTrainedTokenizerFast, rows: Iterable[list[Row]], num_steps: int) -> float:
    """Train on what players say; return the last loss in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps, pct_start=0.1)
    loss = torch.zeros(())
    for chosen in rows:
        ids, mask = encoded(tokenizer, chosen)
        # padding stands behind a row, where no token of the row sees it
        log_p = functional.log_softmax(model(input_ids=ids[:, :-1]).logits, -1)
        loss = -log_p.gather(2, ids[:, 1:, None])[..., 0][mask[:, 1:]].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


async def make_warm_model(folder: Path, seed: int = 0) -> Path:
    """Write a warmed-up model to a folder, and return the folder."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    conversations = await recorded(folder, tokenizer_of([]))
    texts = ("".join(map("".join, row)) for chosen in batches(conversations, rng, 20) for row in chosen)
    tokenizer = tokenizer_of(texts)
    model = make_model(len(tokenizer), MAX_TOKENS)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(EMBEDDING_SCALE)
    # two threads gain little on so small a model, and wait for each other on a busy machine
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loss = warm_up(model, tokenizer, batches(conversations, rng, NUM_STEPS), NUM_STEPS)
    finally:
        torch.set_num_threads(threads)
    print(f"warmed up to {loss:.2f} nats per token")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"
