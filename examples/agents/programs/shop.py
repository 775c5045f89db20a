"""A shop with two tools, for the agents of this folder: what a thing costs, and how many pieces are left."""

import json
import re
from typing import Any

INSTRUCTIONS = "You work in a shop. Look it up with a tool, and answer with the number."
PARAMETERS = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": about, "parameters": PARAMETERS}}
    for name, about in {"price": "Price of a thing.", "stock": "Number of pieces that are left."}.items()
]
"""Both tools as OpenAI's chat API takes them, for agents without a framework."""


class Shop:
    """The shop of one row of tasks.jsonl; all things but the row's are unknown.

    Args:
        data: row with `prompt` (messages, of which the last one asks), `item`, `price`, `stock` and `answer`.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data
        self.question: str = data["prompt"][-1]["content"]

    def price(self, item: str) -> str:
        """Price of a thing.

        Args:
            item: name of the thing
        """
        return self._known(item, "price")

    def stock(self, item: str) -> str:
        """Number of pieces that are left.

        Args:
            item: name of the thing
        """
        return self._known(item, "stock")

    def called(self, function: dict[str, str]) -> str:
        """Return the result of a call: `name`, and `arguments` as JSON; the text of the error if it can't be made."""
        try:
            look_up = {"price": self.price, "stock": self.stock}[function["name"]]
            return look_up(**json.loads(function["arguments"]))
        except (KeyError, TypeError, ValueError) as error:
            return f"error: {error!r}"

    def reward(self, answer: object) -> float:
        """Return 1 if the last number of an answer is right, else 0."""
        numbers = re.findall(r"\d+", str(answer))
        return float(bool(numbers) and numbers[-1] == self._data["answer"])

    def _known(self, item: str, column: str) -> str:
        return str(self._data[column]) if item == self._data["item"] else "unknown"
