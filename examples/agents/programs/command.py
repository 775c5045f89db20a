"""An agent that is a program, with nothing but Python's standard library. It writes its reward into a file."""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from shop import INSTRUCTIONS, TOOLS, Shop


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model's next message."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return dict(json.load(answer)["choices"][0]["message"])


def main() -> float:
    """Ask until an answer calls no tool; return its reward."""
    data = json.loads(Path(os.environ["AGENT_EXAMPLE_FILE"]).read_text())
    shop = Shop(data)
    messages = [{"role": "system", "content": INSTRUCTIONS}, *data["prompt"]]
    for _ in range(4):
        message = ask(messages)
        if not message.get("tool_calls"):
            return shop.reward(message["content"])
        messages.append(message)
        for call in message["tool_calls"]:
            result = shop.called(call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return 0.0


# an exception ends the program with the status 1 and without the file: a failure, and no reward
Path(os.environ["AGENT_REWARD_FILE"]).write_text(json.dumps(main()))
