"""Tools through the official OpenAI client: real chat templates in, tool calls read from sampled tokens out.

The engine has the tokenizer of a family and samples what a test has written down; a tiny model would never write a
call. Prompts are compared with what transformers renders.
"""

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.engines.fake import FakeEngine
from actors.engines.http.requests import ChatRequest, parse
from actors.engines.http.server import CompletionServer
from actors.engines.protocol import Completion, RequestError, SampleRequest
from actors.engines.tokenizing import Tokenizing
from actors.trajectories.forms import AnswerForm
from schemas.config.fake_engine import FakeEngineConfig
from schemas.config.model import ModelConfig
from tests.actors.engines.engines import WAIT
from tests.actors.trajectories.families import FAMILIES, tokenizer_of

MODEL = "tiny"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is Graz?"}]
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Graz"}}\n</tool_call>'
CALLS = {
    "qwen2_5": HERMES_CALL,
    "qwen3": HERMES_CALL,
    "qwen3_instruct_2507": HERMES_CALL,
    "qwen3_5_think": "hm\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nGraz\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama3_1": '{"name": "weather", "parameters": {"city": "Graz"}}',
    "glm4moe": "\n<think></think>\n"
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Graz</arg_value>\n</tool_call>",
    "gptoss": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Graz"}',
    "deepseekv3": "</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Graz"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
"""What a model of the family writes to call the tool; the end of the turn follows."""
ENDS = {"gptoss": "<|call|>", "glm4moe": "<|observation|>"}


class Scripted(Tokenizing):
    """Samples texts in the given order, and notes its prompts. Parts of an engine that no chat uses are missing."""

    def __init__(self, folder: Path, family: str) -> None:
        super().__init__(ModelConfig(path=str(folder)))
        self.family, self.texts, self.prompts = FAMILIES[family], iter([""]), []
        self.forms: list[AnswerForm | None] = []
        self.encode, self.decode = tokenizer_of(family).encode, tokenizer_of(family).decode

    def write(self, *texts: str) -> None:
        """Sample these texts next; each ends with the end of a turn."""
        self.texts = iter(texts)

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Answer at once: a token per piece."""
        self.prompts.append(request.prompt_ids)
        self.forms.append(request.form)
        completions = []
        for number, text in enumerate(itertools.islice(self.texts, request.num_completions)):
            end = ENDS.get(self.family.name, self.family.ends[0])
            ids = list(self.encode(text + end, add_special_tokens=False))
            pieces = [Completion([token], [-0.5], [(0, 0, 7)] if at == 0 else []) for at, token in enumerate(ids)]
            pieces[-1].finish_reason = "stop"
            for piece in pieces:
                if request.on_piece is not None:
                    request.on_piece(number, piece)
            completions.append(Completion(ids, [-0.5] * len(ids), [(0, 0, 7)], "stop"))
        future: Future[list[Completion]] = Future()
        future.set_result(completions)
        return future


Start = Callable[[str], tuple[Scripted, openai.OpenAI]]


def client_of(engine: Any, stack: list[CompletionServer]) -> openai.OpenAI:
    """A client of a new server, which is closed with the stack."""
    stack.append(CompletionServer(engine, MODEL, "boot7", "127.0.0.1", 0, WAIT))
    url = f"http://127.0.0.1:{stack[-1].port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WAIT)


@pytest.fixture
def servers() -> Iterator[list[CompletionServer]]:
    """Closed at the end."""
    stack: list[CompletionServer] = []
    yield stack
    for server in stack:
        server.close()


@pytest.fixture
def start(tmp_path: Path, servers: list[CompletionServer]) -> Start:
    """Starts an engine and a client of a family."""

    def started(family: str) -> tuple[Scripted, openai.OpenAI]:
        tokenizer = tokenizer_of(family)
        tokenizer.save_pretrained(tmp_path)
        ends = [tokenizer.convert_tokens_to_ids(end) for end in FAMILIES[family].ends]
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": ends}))
        engine = Scripted(tmp_path, family)
        return engine, client_of(engine, servers)

    return started


@pytest.mark.parametrize("family", list(CALLS))
def test_a_call_of_each_family_comes_as_a_message_that_may_be_sent_back(start: Start, family: str) -> None:
    """The next prompt is what transformers renders of the client's messages, with arguments as an object."""
    engine, client = start(family)
    # the prompt of this family has opened the thoughts
    engine.write(CALLS[family], "so\n</think>\n\nRain." if family == "qwen3_5_think" else "Rain.")
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER])
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert (call.type, call.function.name) == ("function", "weather")  # type: ignore[union-attr]
    assert json.loads(call.function.arguments) == {"city": "Graz"}  # type: ignore[union-attr]
    assert choice.message.content is None
    sent = choice.message.model_dump(exclude_none=True) | {"content": None}
    result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "rain"}
    again = client.chat.completions.create(model=MODEL, messages=[*ASKED, sent, result], tools=[WEATHER])
    assert again.choices[0].message.content == "Rain."
    rendered = sent | {"content": "", "tool_calls": [json.loads(call.model_dump_json())]}
    as_object = {"city": "Graz"}
    # DeepSeek's template puts texts together, the others write an object out
    rendered["tool_calls"][0]["function"]["arguments"] = json.dumps(as_object) if family == "deepseekv3" else as_object
    for messages, prompt in zip(([*ASKED], [*ASKED, rendered, result]), engine.prompts, strict=True):
        text = tokenizer_of(family).apply_chat_template(
            messages, tools=[WEATHER], tokenize=False, add_generation_prompt=True
        )
        assert prompt == engine.encode(text, add_special_tokens=False)


def test_the_next_prompt_begins_with_the_tokens_so_far(start: Start) -> None:
    """For a template that keeps earlier turns, so that engines find the prefix in their caches."""
    engine, client = start("qwen3_instruct_2507")
    engine.write(HERMES_CALL, "Rain.")
    answer = client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=[WEATHER], extra_body={"return_token_ids": True}
    )
    sent: Any = answer.choices[0].message.model_dump(include={"role", "content", "tool_calls"})
    tool: Any = {"role": "tool", "tool_call_id": sent["tool_calls"][0]["id"], "content": "rain"}
    client.chat.completions.create(model=MODEL, messages=[*ASKED, sent, tool], tools=[WEATHER])
    sampled: Any = answer.choices[0].model_extra
    so_far = engine.prompts[0] + sampled["token_ids"]
    assert engine.prompts[1][: len(so_far)] == so_far


@pytest.mark.parametrize("family", ["qwen3_5_think", "gptoss", "llama3_1"])
def test_a_stream_has_the_message_of_the_whole_answer(start: Start, family: str) -> None:
    """Role first, the message in one chunk, each token counted once; two choices don't mix."""
    engine, client = start(family)
    texts = [CALLS[family], "hm</think>Sunny." if family == "qwen3_5_think" else "Sunny."]
    asked: Any = {"model": MODEL, "messages": ASKED, "tools": [WEATHER], "n": 2, "logprobs": True}
    engine.write(*texts)
    whole = client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    engine.write(*texts)
    chunks = list(
        client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        opening, message = (c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index)
        assert opening.delta.content == ""
        assert opening.finish_reason is None
        assert message.finish_reason == choice.finish_reason
        assert (message.delta.content or "") == (choice.message.content or "")
        assert getattr(message.delta, "reasoning_content", None) == getattr(choice.message, "reasoning_content", None)
        streamed = [(call.index, call.function) for call in message.delta.tool_calls or []]
        assert [(at, f and (f.name, f.arguments)) for at, f in streamed] == [
            (at, (call.function.name, call.function.arguments))  # type: ignore[union-attr]
            for at, call in enumerate(choice.message.tool_calls or [])
        ]
        assert message.logprobs
        assert choice.logprobs
        assert message.logprobs.model_dump() == choice.logprobs.model_dump()
        assert message.model_extra
        assert choice.model_extra
        assert message.model_extra["token_ids"] == choice.model_extra["token_ids"]
        assert message.model_extra["segments"] == choice.model_extra["segments"] == [[0, 0, 7]]


def test_a_message_from_a_stream_may_be_sent_back(start: Start) -> None:
    """OpenAI's client puts the chunks together, and keeps fields of its own in the message."""
    engine, client = start("qwen3_instruct_2507")
    engine.write(HERMES_CALL)
    with client.chat.completions.stream(model=MODEL, messages=ASKED, tools=[WEATHER]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.role == "assistant"
    sent = json.loads(message.model_dump_json(exclude_none=True))
    sent["tool_calls"][0] |= {"index": 0}
    sent["tool_calls"][0]["function"] |= {"parsed_arguments": {"city": "Graz"}}
    result = {"role": "tool", "tool_call_id": sent["tool_calls"][0]["id"], "content": "rain"}
    engine.write("Rain.")
    client.chat.completions.create(model=MODEL, messages=[*ASKED, sent, result], tools=[WEATHER])
    assert "parsed_arguments" not in engine.decode(engine.prompts[-1])
    assert '"index"' not in engine.decode(engine.prompts[-1])


def test_thoughts_stand_apart_where_there_are_tools_or_a_client_asks(start: Start) -> None:
    """Otherwise the text is what was sampled, as vLLM has it without a parser of thoughts."""
    engine, client = start("qwen3_5_think")
    seen = []
    for extra in (
        {"tools": [WEATHER]},
        {},
        {"separate_reasoning": True},
        {"tools": [WEATHER], "separate_reasoning": False},
    ):
        engine.write("so\n</think>\n\nSunny.")
        message = client.chat.completions.create(model=MODEL, messages=ASKED, extra_body=extra).choices[0].message
        seen.append((message.content, getattr(message, "reasoning_content", None)))
    assert seen[0] == seen[2] == ("Sunny.", "so")
    assert seen[1] == ("so\n</think>\n\nSunny.", None)


def test_calls_are_read_only_where_the_client_wants_them(start: Start) -> None:
    """none leaves them in the text; parallel_tool_calls: false gives the first; what can't be read stays text."""
    engine, client = start("qwen3_instruct_2507")
    broken = "<tool_call>\n{name: weather}\n</tool_call>"

    def ask(text: str, **options: Any) -> Any:
        engine.write(text)
        return client.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER], **options).choices[0]

    left = ask(HERMES_CALL, tool_choice="none")
    assert (left.message.content, left.message.tool_calls, left.finish_reason) == (HERMES_CALL, None, "stop")
    two = ask("Both." + HERMES_CALL + HERMES_CALL)
    assert (two.message.content, len(two.message.tool_calls)) == ("Both.", 2)
    assert len({call.id for call in two.message.tool_calls}) == 2
    assert len(ask(HERMES_CALL + HERMES_CALL, parallel_tool_calls=False).message.tool_calls) == 1
    unread = ask(HERMES_CALL + broken)
    assert (unread.message.content, unread.message.tool_calls, unread.finish_reason) == (
        HERMES_CALL + broken,
        None,
        "stop",
    )
    assert engine.prompts[0] == engine.prompts[1], "the prompt has the tools whatever the choice"


@pytest.mark.parametrize(
    ("choice", "names", "once"),
    [("required", ["weather", "now"], False), ({"type": "function", "function": {"name": "now"}}, ["now"], True)],
)
def test_a_demanded_call_reaches_the_engine_in_the_syntax_of_the_family(
    start: Start, choice: Any, names: list[str], once: bool
) -> None:
    """And the calls are read from the answer like free ones, in a stream too."""
    engine, client = start("qwen3_instruct_2507")
    tools: Any = [WEATHER, {"type": "function", "function": {"name": "now"}}]
    engine.write(HERMES_CALL)
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, tools=tools, tool_choice=choice)
    assert answer.choices[0].finish_reason == "tool_calls"
    engine.write(HERMES_CALL)
    list(client.chat.completions.create(model=MODEL, messages=ASKED, tools=tools, tool_choice=choice, stream=True))
    assert engine.forms[0] == engine.forms[1]
    form = engine.forms[0]
    assert form is not None
    assert form.kind == "structural_tag"
    wanted = json.loads(form.text)["format"]
    assert (wanted["at_least_one"], wanted["stop_after_first"]) == (True, once)
    assert [tag["begin"] for tag in wanted["tags"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names
    ]


def test_demanded_json_begins_behind_the_thoughts_that_the_prompt_has_opened(start: Start, tmp_path: Path) -> None:
    """Otherwise with the first token, as a plain schema, which all backends of structured outputs know."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    for family, kind in (("qwen3_5_think", "structural_tag"), ("qwen2_5", "json_schema")):
        engine, client = start(family)
        engine.write("{}")
        client.chat.completions.create(model=MODEL, messages=ASKED, response_format=wanted)
        [form] = engine.forms
        assert form is not None
        assert form.kind == kind
        told = json.loads(form.text)
        if kind == "structural_tag":
            thoughts, answer = told["format"]["elements"]
            assert thoughts["end"].startswith("</think>")
            told = answer["json_schema"]
        assert told == schema


def test_a_call_cannot_be_demanded_in_every_syntax(start: Start) -> None:
    """The words name the syntaxes in which it can."""
    _, client = start("gptoss")
    with pytest.raises(openai.BadRequestError, match="tool_choice: a call can be demanded in the syntaxes hermes"):
        client.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER], tool_choice="required")


def test_variables_of_the_template_reach_it(start: Start) -> None:
    """Those that transformers takes itself are refused by name."""
    engine, client = start("qwen3")
    engine.write("a", "b")
    for thinking in (True, False):
        client.chat.completions.create(
            model=MODEL, messages=ASKED, extra_body={"chat_template_kwargs": {"enable_thinking": thinking}}
        )
        rendered = tokenizer_of("qwen3").apply_chat_template(
            ASKED, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert engine.prompts[-1] == engine.encode(rendered, add_special_tokens=False)
    assert engine.prompts[0] != engine.prompts[1]
    with pytest.raises(openai.BadRequestError, match=r"chat_template_kwargs\.tokenize: is set here"):
        client.chat.completions.create(
            model=MODEL, messages=ASKED, extra_body={"chat_template_kwargs": {"tokenize": True}}
        )


ANSWERED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tool_choice": "always"}, "tool_choice: must be auto, none, required or "),
        ({"tools": [], "tool_choice": "required"}, "tool_choice: there are no tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "moon"}}},
            "tool_choice: no tool is called 'moon'",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type: 'xml' is not known"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: must be"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format: tool_choice demands a call already",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools: 'weather' is the name of several"),
        ({"tools": [{"type": "web_search"}]}, r"tools.0.type: Input should be 'function'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name: Field required"),
        ({"tools": [WEATHER] * 129}, "tools: .*at most 128 items"),
        ({"messages": [{"role": "user"}]}, "messages.0: content is missing"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0: content is missing"),
        ({"messages": [{"role": "user", "tool_calls": [ANSWERED]}]}, "messages.0: tool_calls are the assistant's"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [ANSWERED | {"function": {"name": "a", "arguments": "[" * 100_000}}],
                    }
                ]
            },
            r"messages.0.tool_calls.0.function.arguments: is no JSON",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [ANSWERED | {"function": {"name": "a", "arguments": "{"}}]}
                ]
            },
            "messages.0.tool_calls.0.function.arguments: is no JSON",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [ANSWERED | {"function": {"name": "a", "arguments": "1"}}]}
                ]
            },
            "messages.0.tool_calls.0.function.arguments: Input should be an object",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    """Nothing is ignored."""
    with pytest.raises(RequestError, match=words):
        parse(ChatRequest, json.dumps({"model": MODEL, "messages": ASKED} | changes).encode())


def test_a_body_as_verifiers_sends_it_is_understood() -> None:
    """Recorded from verifiers 0.1.11 and 0.3.1: nulls for absent fields, `strict` beside the function, a free form."""
    call = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Graz"}'}}
    body = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": "How is Graz?"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": None},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
        "logprobs": True,
        "max_completion_tokens": 9,
        "temperature": 1.0,
        "return_token_ids": True,
        "top_k": -1,
        "min_p": 0,
        "tools": [WEATHER | {"strict": True}],
        "tool_choice": None,
        "response_format": {"type": "text"},
    }
    asked = parse(ChatRequest, json.dumps(body).encode())
    [messages] = asked.prompts
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call | {"function": {"name": "weather", "arguments": {"city": "Graz"}}}],
    }
    assert messages[2] == body["messages"][2]  # type: ignore[index]
    assert asked.template_tools == [WEATHER | {"strict": True}]


def test_a_model_without_tools_in_its_template_says_so(tmp_path: Path, servers: list[CompletionServer]) -> None:
    """Rendering the chat without them would ask another question. So does the engine without a model."""
    # a copy: the families' tokenizers are shared by all tests of a process
    tokenizer = copy.deepcopy(tokenizer_of("qwen3"))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    engines: list[tuple[Any, str]] = [
        (Scripted(tmp_path, "qwen3"), "chat template writes no tool calls in a form that is known here"),
        (FakeEngine(FakeEngineConfig(vocab_size=30)), "tools: the fake engine has no chat template"),
    ]
    for engine, words in engines:
        with pytest.raises(openai.BadRequestError, match=words):
            client_of(engine, servers).chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER])
    engines[1][0].close()
