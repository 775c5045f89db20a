"""Agents that talk to the model over HTTP, by the standard library alone."""

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def chat(base_url: str, api_key: str, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    """The answer to a chat."""
    data = json.dumps({"model": "any", "messages": messages, "temperature": 0.1} | body).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def two_calls(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ask twice, the second time with the first answer as history. Not async: it runs in a thread."""
    messages = [{"role": "user", "content": f"Example {data['index']}."}]
    message = chat(base_url, api_key, messages)["choices"][0]["message"]
    chat(base_url, api_key, [*messages, message, {"role": "user", "content": "And then?"}])
    return 1.0 if message["content"].count("a") else 0.5


class PerCall:
    """AReaL's form: returns a reward for each answer, by its id."""

    async def run(self, data: dict[str, Any], **extra: Any) -> dict[str, float]:
        """Three calls that have nothing to do with each other."""
        rewards = {}
        for number in range(3):
            prompt = [{"role": "user", "content": f"Part {number} of {data['index']}."}]
            rewards[chat(extra["base_url"], extra["api_key"], prompt)["id"]] = float(number)
        return rewards


class PerCallOfGroup(PerCall):
    """Has a score of the whole group besides."""

    @staticmethod
    def score_group(environments: "list[PerCallOfGroup]") -> list[float]:
        """Return each one's place."""
        return [float(place) for place, _ in enumerate(environments)]


class DiesOnce:
    """Ends its process between two calls, once."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        """Ask, die, and at the second attempt ask on."""
        messages = [{"role": "user", "content": "Hello."}]
        chat(base_url, api_key, messages)
        if not (self._folder / "died").exists():
            (self._folder / "died").write_text(str(time.time()))
            os._exit(9)
        chat(base_url, api_key, messages)
        return 1.0


def demands(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ask for JSON, and nothing else."""
    chat(base_url, api_key, [{"role": "user", "content": "Hello."}], response_format={"type": "json_object"})
    return 1.0


def never_asks(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Return a reward without a call."""
    return 1.0


def fails(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Raise after a call."""
    chat(base_url, api_key, [{"role": "user", "content": "Hello."}])
    raise LookupError("no such page")


def no_agent(example: Any, policy: Any) -> float:
    """Is not called."""
    return 1.0
