"""An agent of the OpenAI Agents SDK with two tools. Needs `openai-agents`."""

from typing import Any

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from shop import INSTRUCTIONS, Shop

# traces go to OpenAI otherwise
set_tracing_disabled(True)


async def run(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer the row's question; return its reward."""
    client, shop = AsyncOpenAI(base_url=base_url, api_key=api_key), Shop(data)
    agent = Agent(
        name="clerk",
        instructions=INSTRUCTIONS,
        model=OpenAIChatCompletionsModel("policy", client),
        tools=[function_tool(shop.price), function_tool(shop.stock)],
    )
    try:
        result = await Runner.run(agent, shop.question, max_turns=4)
    except MaxTurnsExceeded:
        return 0.0
    return shop.reward(result.final_output)
