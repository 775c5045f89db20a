"""Descriptions of tools equal those of transformers; calls by the model end in words, whatever they raise."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from actors.environments.worker.tools import called, described, public_methods
from tests.actors.environments.worlds import Counter, lookup


def plain(city: str, days: int = 3) -> str:
    """Return the forecast.

    Args:
        city: Name of the city,
            with its country
        days: Number of days
    """
    return city * days


def rich(
    names: list[str],
    table: dict[str, int],
    unit: Literal["c", "f"],
    maybe: float | None = None,
    either: int | str = 0,
    pair: tuple[int, str] = (0, ""),
    free: Any = None,
    nested: list[dict[str, list[float]]] | None = None,
    drink: str = "tea",
    mixed: Literal[1, "a", None] = 1,
    several: list[int] | dict[str, str] | None = None,
    anything: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Do many things at once.

    And more, in a second paragraph.

    Args:
        names: All names
        table: A table
        unit: The unit
        maybe: A number, or nothing
        either: One or the other
        pair: Two
        free: Anything
        nested: Deep
        drink: What to drink (choices: ["tea", "coffee"])
        mixed: Values of three types
        several: A list or a map
        anything: A map

    Returns:
        A map of numbers
    """
    return {}


def silent() -> None:
    """Do nothing."""


@pytest.mark.parametrize("function", [plain, rich, silent, lookup, Counter.add])
def test_a_description_is_that_of_transformers(function: Callable[..., Any]) -> None:
    """For functions that transformers accepts."""
    expected = get_json_schema(function)
    ours = described(function if function is not Counter.add else Counter().add)
    assert ours == expected


def test_a_function_without_annotations_is_described_all_the_same() -> None:
    """transformers refuses it; a model can still be told names and texts."""

    def bare(a, b=1, *rest, **more):  # type: ignore[no-untyped-def]
        """Try.

        Args:
            a (int): The first
        """

    found = described(bare)["function"]
    assert found["parameters"] == {
        "type": "object",
        "properties": {"a": {"description": "The first"}, "b": {}},
        "required": ["a"],
    }


def test_tools_of_an_object_are_its_public_methods() -> None:
    """In the order of the class; of a parent class too."""

    class Child(Counter):
        class State:
            pass

        def last(self) -> int:
            return 1

        @classmethod
        def of_class(cls) -> int:
            return 2

        @staticmethod
        def free() -> int:
            return 3

        @property
        def costly(self) -> Any:
            raise AssertionError

        constant = 3

    found = public_methods(Child(), ("reset", "get_reward"))
    assert list(found) == ["add", "explode", "last", "of_class", "free"]
    assert found["of_class"]() == 2


async def test_a_tool_that_yields_is_refused_in_words() -> None:
    """The model would be shown the name of a generator."""

    async def count() -> Any:
        yield 1

    message, failed = await called({"count": count}, {"function": {"name": "count", "arguments": "{}"}}, run)
    assert "the tool count yields" in message["content"]
    assert failed.startswith("TypeError")


async def run(function: Callable[..., Any], **arguments: Any) -> Any:
    """Run a function as the service does, without threads."""
    result = function(**arguments)
    return await result if hasattr(result, "__await__") else result


@pytest.mark.parametrize(
    ("name", "arguments", "content", "failure"),
    [
        ("add", '{"number": 2}', "2", ""),
        ("add", {"number": 3}, "3", ""),
        ("add", "{", "error", "JSONDecodeError"),
        ("add", "[1]", "error", "TypeError"),
        ("add", "{}", "missing a required argument: 'number'", "TypeError"),
        ("add", '{"number": 1, "x": 2}', "unexpected keyword argument 'x'", "TypeError"),
        ("explode", "", "boom", "RuntimeError: boom"),
        ("fly", "{}", "there is no tool 'fly'; the tools are add, explode", "LookupError"),
        ("_hidden", "{}", "there is no tool '_hidden'", "LookupError"),
    ],
)
async def test_a_call_ends_in_a_message(name: str, arguments: Any, content: str, failure: str) -> None:
    """The model is told its mistake; the failure is counted."""
    counter = Counter()
    counter.reset()
    tools = public_methods(counter, ("reset", "get_reward"))
    message, failed = await called(tools, {"id": "c7", "function": {"name": name, "arguments": arguments}}, run)
    assert (message["role"], message["name"], message["tool_call_id"]) == ("tool", name, "c7")
    assert content in message["content"]
    assert failed.startswith(failure)
    assert bool(failed) == bool(failure)


async def test_a_tool_may_return_parts_with_an_image() -> None:
    """They stand in the message; any other list is shown as a text."""
    parts = [{"type": "text", "text": "a map"}, {"type": "image", "bytes": b"x"}]
    results: dict[str, Any] = {"look": parts, "list": [{"type": "text", "text": "a"}], "other": [1, parts[1]]}

    async def run(function: Callable[..., Any], **named: Any) -> Any:
        return function(**named)

    found = {}
    for name, result in results.items():
        call = {"function": {"name": name, "arguments": {}}}
        message, failure = await called({name: lambda result=result: result}, call, run)
        assert not failure
        found[name] = message["content"]
    assert found == {"look": parts, "list": str(results["list"]), "other": str(results["other"])}
