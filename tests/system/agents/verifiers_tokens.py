"""verifiers 0.3.1 as an agent: its tool environment plays with its own token client. Needs `verifiers` 0.3."""

import json
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from verifiers.legacy.clients.openai_chat_completions_token_client import OpenAIChatCompletionsTokenClient

sys.path.insert(0, str(Path(__file__).parents[1] / "environments"))
from verifiers_v0_worlds import load_environment


async def run(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play a sum; write the tokens that the client has seen, and return the reward."""
    client = OpenAIChatCompletionsTokenClient(AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0))
    environment = load_environment("tools")
    row = dict(environment.get_dataset()[0])
    # a task as a plain text is what this version refuses
    del row["task"]
    state = await environment.rollout(row, client, "policy", {"max_tokens": 200})
    if state.get("error") is not None:
        raise RuntimeError(repr(state["error"]))
    tokens = [step["tokens"] for step in state["trajectory"]]
    seen = [[one["prompt_ids"], one["completion_ids"], one["completion_logprobs"]] for one in tokens]
    Path(data["seen"], api_key[-8:]).write_text(json.dumps(seen))
    return float(state["completion"][-1]["content"] == row["answer"])
