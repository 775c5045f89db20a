"""A tool-calling agent of smolagents. Needs `smolagents[openai]`."""

from typing import Any

from shop import INSTRUCTIONS, Shop
from smolagents import LogLevel, OpenAIModel, Tool, ToolCallingAgent


class LookUp(Tool):
    """Tool of the shop that takes the name of a thing."""

    inputs = {"item": {"type": "string", "description": "name of the thing"}}
    output_type = "string"

    def __init__(self, name: str = "", description: str = "", look_up: Any = None) -> None:
        self.name, self.description, self._look_up = name, description, look_up
        super().__init__()

    def forward(self, item: str) -> str:
        """Return what the shop knows."""
        return str(self._look_up(item))


# not async, as smolagents is not: it runs in a thread
def run(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer the row's question; return its reward."""
    shop = Shop(data)
    agent = ToolCallingAgent(
        # smolagents demands a call with each answer otherwise, and answers in a demanded form are not trained
        model=OpenAIModel("policy", base_url, api_key, tool_choice="auto"),
        tools=[
            LookUp("price", "Price of a thing.", shop.price),
            LookUp("stock", "Number of pieces that are left.", shop.stock),
        ],
        max_steps=3,
        verbosity_level=LogLevel.OFF,
    )
    # the long one of smolagents would do as well
    agent.prompt_templates["system_prompt"] = INSTRUCTIONS
    return shop.reward(agent.run(shop.question))
