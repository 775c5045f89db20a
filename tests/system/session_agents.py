"""An agent of openai-agents with a tool, in an interpreter of its own: `session_agents.py URL chat|responses [stream]`.

Prints the final answer as JSON.
"""

import asyncio
import json
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


async def main(url: str, api: str, way: str = "") -> None:
    """Run the agent to its end."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="of no account", max_retries=0, timeout=60)
    kind = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[api]
    agent = Agent(name="adder", instructions="You add.", model=kind("policy", client), tools=[add])
    if way == "stream":
        run = Runner.run_streamed(agent, "What is 1 + 2 + 3 + 4?")
        async for _ in run.stream_events():
            pass
    else:
        run = await Runner.run(agent, "What is 1 + 2 + 3 + 4?")
    print(json.dumps(run.final_output))


asyncio.run(main(*sys.argv[1:]))
