"""A tool-calling agent of smolagents. Needs `smolagents[openai]`."""

from typing import Any

from openai import BadRequestError, DefaultHttpxClient
from shop import INSTRUCTIONS, Shop
from smolagents import AgentGenerationError, LogLevel, OpenAIModel, Tool, ToolCallingAgent

# for all trajectories: each client of its own would read the certificates of the machine, 20 ms of CPU
HTTP = DefaultHttpxClient()


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
        model=OpenAIModel("policy", base_url, api_key, client_kwargs={"http_client": HTTP}, tool_choice="auto"),
        tools=[
            LookUp("price", "Price of a thing.", shop.price),
            LookUp("stock", "Number of pieces that are left.", shop.stock),
        ],
        max_steps=3,
        verbosity_level=LogLevel.OFF,
    )
    # the long one of smolagents would do as well
    agent.prompt_templates["system_prompt"] = INSTRUCTIONS
    try:
        return shop.reward(agent.run(shop.question))
    except AgentGenerationError as error:
        # the model is to blame for an answer that never ends, which leaves no room for the next one; for a lost
        # connection it is not
        if not isinstance(error.__cause__, BadRequestError):
            raise
        return 0.0
