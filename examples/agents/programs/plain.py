"""An agent with two tools: a loop around OpenAI's client. Needs `openai`."""

from typing import Any

from openai import AsyncOpenAI
from shop import INSTRUCTIONS, TOOLS, Shop


async def run(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ask until an answer calls no tool; return its reward."""
    client, shop = AsyncOpenAI(base_url=base_url, api_key=api_key), Shop(data)
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, *data["prompt"]]
    for _ in range(4):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        if not message.tool_calls:
            return shop.reward(message.content)
        messages.append(message)
        for call in message.tool_calls:
            result = shop.called(call.function.model_dump())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
