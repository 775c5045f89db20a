"""The dialects of sessions, spoken by the official clients: agents with a tool, several turns, whole and in streams."""

import asyncio
import json
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from tests.actors.rollout.sessions.replies import TOOL, reply
from tests.system.environments.scripted import python_of
from tests.system.session_server import QUESTION, SYSTEM, TURNS, add, expected, serving
from tests.system.tools import missing

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
KEY = "of no account"
FLAT: Any = {"type": "function", **TOOL["function"]}
OWN: Any = {
    "name": "add",
    "description": TOOL["function"]["description"],
    "input_schema": TOOL["function"]["parameters"],
}
WAIT = 120.0
"""Imports take up to a minute on a busy machine."""


def _package(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        missing(f"pip install {name}")


def _openai(url: str) -> Any:
    return _package("openai").OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=WAIT)


def _anthropic(url: str) -> Any:
    return _package("anthropic").Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=WAIT)


def _chat_agent(url: str, streams: bool) -> list[Any]:
    client = _openai(url)
    told: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    answers = []
    while True:
        asked: Any = {"model": "policy", "messages": told, "tools": [TOOL]}
        if streams:
            with client.chat.completions.stream(**asked) as stream:
                completion = stream.get_final_completion()
        else:
            completion = client.chat.completions.create(**asked)
        [choice] = completion.choices
        answers.append(choice)
        if not choice.message.tool_calls:
            return answers
        told.append(choice.message)
        for call in choice.message.tool_calls:
            result = add(json.loads(call.function.arguments))
            told.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _responses_agent(url: str, streams: bool) -> list[Any]:
    client = _openai(url)
    told: list[Any] = [{"role": "user", "content": QUESTION}]
    answers = []
    while True:
        asked: Any = {"model": "policy", "instructions": SYSTEM, "input": told, "tools": [FLAT], "store": False}
        if streams:
            with client.responses.stream(**asked) as stream:
                texts = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
                response = stream.get_final_response()
            assert texts == response.output_text
        else:
            response = client.responses.create(**asked)
        answers.append(response)
        told += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return answers
        for call in calls:
            result = add(json.loads(call.arguments))
            told.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def _messages_agent(url: str, streams: bool) -> list[Any]:
    client = _anthropic(url)
    told: list[Any] = [{"role": "user", "content": QUESTION}]
    answers = []
    while True:
        asked: Any = {"model": "policy", "system": SYSTEM, "messages": told, "tools": [OWN], "max_tokens": 99}
        if streams:
            with client.messages.stream(**asked) as stream:
                texts = "".join(stream.text_stream)
                message = stream.get_final_message()
            assert texts == "".join(block.text for block in message.content if block.type == "text")
        else:
            message = client.messages.create(**asked)
        answers.append(message)
        told.append({"role": "assistant", "content": message.content})
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            return answers
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": add(use.input)} for use in uses]
        told.append({"role": "user", "content": results})


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_on_openais_chat_completions(streams: bool) -> None:
    """Thoughts, calls and text arrive, and come back as they were."""
    async with serving() as server:
        choices = await asyncio.to_thread(_chat_agent, server.url, streams)
        assert [choice.finish_reason for choice in choices] == ["tool_calls", "tool_calls", "stop"]
        for choice, turn in zip(choices, TURNS, strict=True):
            assert (choice.message.content or "") == turn.message["content"]
            assert getattr(choice.message, "reasoning_content", None) == turn.message.get("reasoning_content")
            made = [(one.id, one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()]
            assert made == _calls(turn)
        assert server.conversation == expected()
        assert server.calls[0].tools == (TOOL,)


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_on_openais_responses(streams: bool) -> None:
    """Without a change, since the arguments are texts here; the calls need no restoring."""
    async with serving() as server:
        answers = await asyncio.to_thread(_responses_agent, server.url, streams)
        assert [answer.status for answer in answers] == ["completed"] * 3
        for answer, turn in zip(answers, TURNS, strict=True):
            assert answer.id == f"resp_{turn.id}"
            assert answer.output_text == turn.message["content"]
            thoughts = "".join(item.content[0].text for item in answer.output if item.type == "reasoning")
            assert thoughts == turn.message.get("reasoning_content", "")
            made = [(item.call_id, item.name, item.arguments) for item in answer.output if item.type == "function_call"]
            assert made == _calls(turn)
            assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (3, 2, 5)
        assert server.calls[-1].messages == expected()
        assert server.calls[0].tools == (TOOL,)


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_on_anthropics_messages(streams: bool) -> None:
    """The arguments arrive as objects, and the recorded texts are found again."""
    async with serving() as server:
        answers = await asyncio.to_thread(_messages_agent, server.url, streams)
        assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use", "end_turn"]
        for answer, turn in zip(answers, TURNS, strict=True):
            texts = "".join(block.text for block in answer.content if block.type == "text")
            thoughts = "".join(block.thinking for block in answer.content if block.type == "thinking")
            assert (texts, thoughts) == (turn.message["content"], turn.message.get("reasoning_content", ""))
            uses = [(block.id, block.name, block.input) for block in answer.content if block.type == "tool_use"]
            assert uses == [(one, name, json.loads(arguments)) for one, name, arguments in _calls(turn)]
            assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, 2)
        assert server.calls[-1].messages != expected()
        assert server.conversation == expected()
        assert server.calls[0].tools == (TOOL,)


@pytest.mark.parametrize("streams", [False, True])
async def test_the_tool_runner_of_anthropics_client_sends_the_whole_conversation(streams: bool) -> None:
    """It would leave the past to the server, and is told that a session keeps none."""
    anthropic = _package("anthropic")

    def run(url: str) -> str:
        @anthropic.beta_tool
        def add(a: int, b: int) -> str:
            """Add two numbers."""
            return str(a + b)

        asked: Any = {"model": "policy", "max_tokens": 99, "system": SYSTEM, "tools": [add], "stream": streams}
        question = [{"role": "user", "content": QUESTION}]
        runner = _anthropic(url).beta.messages.tool_runner(**asked, messages=question)
        return str(runner.until_done().content[-1].text)

    async with serving() as server:
        assert await asyncio.to_thread(run, server.url) == TURNS[-1].message["content"]
        assert len(server.calls) == 3
        assert server.conversation == expected()


async def test_openais_client_parses_a_json_answer() -> None:
    """The schema reaches the session, and the client makes its own object of the text."""
    pydantic = _package("pydantic")
    point = pydantic.create_model("Point", x=(int, ...))

    def ask(url: str) -> list[Any]:
        client = _openai(url)
        parsed = client.responses.parse(model="policy", input=QUESTION, text_format=point)
        with client.responses.stream(model="policy", input=QUESTION, text_format=point) as stream:
            streamed = stream.get_final_response()
        return [parsed.output_parsed, streamed.output_parsed]

    async with serving([reply('{"x": 1}'), reply('{"x": 2}')]) as server:
        assert await asyncio.to_thread(ask, server.url) == [point(x=1), point(x=2)]
        for call in server.calls:
            assert call.response_format is not None
            assert call.response_format["json_schema"]["schema"]["properties"]["x"]["type"] == "integer"


@pytest.mark.parametrize("streams", [False, True])
async def test_openais_client_asks_for_completions(streams: bool) -> None:
    """By text and by tokens."""

    def ask(url: str) -> list[Any]:
        client = _openai(url)
        prompts: list[Any] = ["Go.", [[1, 2, 3]]]
        if not streams:
            return [client.completions.create(model="policy", prompt=one, logprobs=1) for one in prompts]
        return [next(iter(client.completions.create(model="policy", prompt=one, stream=True))) for one in prompts]

    async with serving([reply("", text=" One."), reply("", text=" Two.", finish_reason="length")]) as server:
        answers = await asyncio.to_thread(ask, server.url)
        told = [(answer.choices[0].text, answer.choices[0].finish_reason) for answer in answers]
        assert told == [(" One.", "stop"), (" Two.", "length")]
        assert [call.prompt for call in server.calls] == ["Go.", [1, 2, 3]]
        assert streams or answers[0].choices[0].logprobs.token_logprobs == [-0.5, -0.25]


async def test_an_answer_that_is_cut_off_is_told_to_each_client() -> None:
    """In the words of its own API."""
    cut = reply("It is", finish_reason="length")

    def ask(url: str) -> list[Any]:
        openai, anthropic = _openai(url), _anthropic(url)
        asked: Any = {"model": "policy", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2}
        streamed = list(openai.responses.create(model="policy", input=QUESTION, stream=True))[-1]
        with anthropic.messages.stream(**asked) as stream:
            message = stream.get_final_message()
        return [
            openai.responses.create(model="policy", input=QUESTION, max_output_tokens=2).incomplete_details.reason,
            (streamed.type, streamed.response.output_text),
            openai.chat.completions.create(**asked).choices[0].finish_reason,
            message.stop_reason,
        ]

    async with serving([cut] * 4) as server:
        assert await asyncio.to_thread(ask, server.url) == [
            "max_output_tokens", ("response.incomplete", "It is"), "length", "max_tokens",
        ]  # fmt: skip
        assert [call.max_tokens for call in server.calls] == [None, 2, 2, 2]


async def test_a_refusal_is_the_clients_own_exception() -> None:
    """With our words in it."""
    openai, anthropic = _package("openai"), _package("anthropic")

    def ask(url: str) -> None:
        with pytest.raises(openai.BadRequestError, match=r"previous_response_id: .*send the whole") as refused:
            _openai(url).responses.create(model="policy", input=QUESTION, previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.BadRequestError, match="n: a session answers with one choice"):
            _openai(url).chat.completions.create(model="policy", n=2, messages=[{"role": "user", "content": "Go."}])
        prefill: Any = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "I"}]
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.1: the last message") as wrong:
            _anthropic(url).messages.create(model="policy", max_tokens=9, messages=prefill)
        assert wrong.value.type == "invalid_request_error"

    async with serving([]) as server:
        await asyncio.to_thread(ask, server.url)


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_an_agent_of_openais_agents(api: str, way: str) -> None:
    """The framework leaves thoughts out on chat completions, and keeps all on responses."""
    async with serving() as server:
        told = await _program("verifiers-v03", "session_agents.py", server.url, api, way)
        assert told == TURNS[-1].message["content"]
        assert server.conversation == expected()
        assert (server.calls[-1].messages == expected()) is (api == "responses")
        assert [one["function"]["name"] for one in server.calls[0].tools] == ["add"]


async def test_the_training_client_of_verifiers_asks_for_tokens() -> None:
    """It refuses answers whose logprobs do not belong to their tokens."""
    async with serving([reply("Well.")]) as server:
        told = await _program("verifiers-v1", "session_generate.py", server.url)
        assert told == {
            "request_id": "turn0",
            "prompt_ids": [1, 2, 3],
            "completion_ids": [7, 8],
            "completion_logprobs": [-0.5, -0.25],
            "finish_reason": "stop",
            "content": "[7, 8]",
        }
        [call] = server.calls
        assert (call.prompt, call.max_tokens, call.ignored) == ([1, 2, 3], 4, ())


async def _program(environment: str, name: str, *arguments: str) -> Any:
    """What a program in an interpreter of its own prints, as JSON."""
    command = [python_of(environment), str(HERE / name), *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    try:
        printed, problems = await asyncio.wait_for(process.communicate(), WAIT)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, problems.decode()[-3000:]
    return json.loads(printed)


def _calls(turn: Any) -> list[tuple[str, str, str]]:
    made = turn.message.get("tool_calls") or ()
    return [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in made]
