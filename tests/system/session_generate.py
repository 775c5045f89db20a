"""The client with which verifiers trains asks for tokens: `session_generate.py URL`, in an interpreter with renderers.

Prints what the client made of the answer as JSON.
"""

import asyncio
import json
import sys

from openai import AsyncOpenAI
from renderers.base import ParsedResponse
from renderers.client import generate


class Renderer:
    """Renderer without a tokenizer: of the whole class, only what is asked for beside a prompt of tokens."""

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end a turn."""
        return [2]

    def parse_response(self, token_ids: list[int], **_: object) -> ParsedResponse:
        """A message whose text is the tokens."""
        return ParsedResponse(content=str(token_ids), reasoning_content=None, tool_calls=[])


async def main(url: str) -> None:
    """Ask once."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="of no account", max_retries=0, timeout=60)
    told = await generate(
        client=client,
        renderer=Renderer(),
        messages=[],
        model="policy",
        prompt_ids=[1, 2, 3],
        sampling_params={"temperature": 0.5, "max_tokens": 4},
        cache_salt="salt",
        priority=1,
        max_prompt_len=100,
    )
    names = ("request_id", "prompt_ids", "completion_ids", "completion_logprobs", "finish_reason", "content")
    print(json.dumps({name: told[name] for name in names}, default=str))


asyncio.run(main(*sys.argv[1:]))
