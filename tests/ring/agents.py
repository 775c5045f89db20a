"""Agents that talk to the model over HTTP, by the standard library alone."""

import base64
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
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


def looks(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Show drawn images in two calls, other ones for each answer; each letter before `m` earns."""
    # the worker looks for modules next to this file
    from worlds import picture  # type: ignore[import-not-found]

    def shown(words: str, *images: bytes) -> dict[str, Any]:
        urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return {"role": "user", "content": [*parts, {"type": "text", "text": words}]}

    messages = [shown("go", picture(16, 24, data["index"]))]
    first = chat(base_url, api_key, messages)["choices"][0]["message"]
    drawn = picture(8 * (1 + len(first["content"]) % 3), 16, sum(map(ord, first["content"])))
    messages += [first, shown("on", drawn, picture(16, 24, data["index"]))]
    last: str = chat(base_url, api_key, messages)["choices"][0]["message"]["content"]
    return sum(letter < "m" for letter in last) / max(1, len(last))


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


class Staged:
    """Agent with two calls that stops at a place, once, where the file `armed` in its folder names it.

    The file is then called `hit`, and has the agent's process id. The agent goes on with the file `go`, or later.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        """Stop before the first call, in it, between the calls, or after the last one."""
        messages = [{"role": "user", "content": f"Example {data['index']}."}]
        self._reach("before")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(chat, base_url, api_key, messages)
            time.sleep(0.03)
            self._reach("in")
            message = asked.result()["choices"][0]["message"]
        self._reach("between")
        chat(base_url, api_key, [*messages, message, {"role": "user", "content": "And then?"}])
        self._reach("after")
        return 1.0

    def _reach(self, place: str) -> None:
        armed, hit = self._folder / "armed", self._folder / "hit"
        try:
            if armed.read_text() != place:
                return
            # one of all agents alone can rename it
            mine = self._folder / f"armed.{os.getpid()}.{threading.get_ident()}"
            armed.rename(mine)
        except FileNotFoundError:
            return
        mine.write_text(str(os.getpid()))
        mine.rename(hit)
        deadline = time.monotonic() + 60.0
        while not (self._folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)


if __name__ == "__main__":
    # as a program: the folder, and the file for the reward
    given = json.loads(Path(os.environ["AGENT_EXAMPLE_FILE"]).read_text())
    reward = Staged(sys.argv[1]).run(given, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    Path(os.environ["AGENT_REWARD_FILE"]).write_text(str(reward))
    Staged(sys.argv[1])._reach("rewarded")
