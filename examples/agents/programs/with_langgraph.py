"""A graph of LangGraph: the model and its tools in a circle. Needs `langgraph` and `langchain-openai`."""

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from shop import INSTRUCTIONS, Shop


async def run(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer the row's question; return its reward."""
    shop = Shop(data)
    tools = [tool(shop.price), tool(shop.stock)]
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key).bind_tools(tools)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    messages = [("system", INSTRUCTIONS), ("user", shop.question)]
    try:
        state = await graph.compile().ainvoke({"messages": messages}, {"recursion_limit": 8})
    except GraphRecursionError:
        return 0.0
    return shop.reward(state["messages"][-1].content)
