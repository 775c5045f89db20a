"""An agent of the OpenAI Agents SDK with two tools. Needs `openai-agents`."""

from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient
from shop import INSTRUCTIONS, Shop

# traces go to OpenAI otherwise
set_tracing_disabled(True)
# for all trajectories: each client of its own would read the certificates of the machine, 20 ms of CPU
HTTP = DefaultAsyncHttpxClient()


async def run(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer the row's question; return its reward."""
    client, shop = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP), Shop(data)
    agent = Agent(
        name="clerk",
        instructions=INSTRUCTIONS,
        model=OpenAIChatCompletionsModel("policy", client),
        tools=[function_tool(shop.price), function_tool(shop.stock)],
    )
    try:
        result = await Runner.run(agent, shop.question, max_turns=4)
    except (MaxTurnsExceeded, ModelBehaviorError, BadRequestError):
        # the model is to blame: too many calls, a tool that is not there, an answer that never ends
        return 0.0
    return shop.reward(result.final_output)
