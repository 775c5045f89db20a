"""Text, thoughts and tool calls: what a template writes is read back, and what can't be read is told."""

import json
from time import thread_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trajectories.chat import assistant_message
from actors.trajectories.parsing import Syntax, ToolCall, parse, syntax_of
from tests.actors.trajectories.families import FAMILIES, Chat
from tests.actors.trajectories.test_bridges import USER

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "exact": {"type": "boolean"},
                "fields": {"type": "array"},
            },
        },
    },
}
ARGUMENTS: dict[str, Any] = {"query": "7", "limit": 7, "exact": True, "fields": ["a b", {"c": None}]}
SYNTAX: dict[str, Syntax] = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "llama3_1": "llama3",
    "glm4moe": "glm4",
    "gptoss": "harmony",
    "deepseekv3": "deepseek",
    "mistral_v3_tekken": "mistral",
}


def written(family: str, message: dict[str, Any]) -> tuple[str, str]:
    """What a model of the family samples for a message, and the end of its prompt."""
    chat = Chat(family)
    opened = chat.encode(chat.render([USER], [SEARCH], add_generation_prompt=True))
    whole = chat.encode(chat.render([USER, message], [SEARCH], add_generation_prompt=False))
    common = next((i for i, (a, b) in enumerate(zip(opened, whole, strict=False)) if a != b), len(opened))
    return chat.decode(whole[common:]).rstrip("\n"), chat.decode(opened[:common])


def calling(family: str, arguments: dict[str, Any], content: str = "") -> dict[str, Any]:
    """An assistant's message with a call."""
    given: Any = json.dumps(arguments) if family == "deepseekv3" else arguments
    function = {"name": "search", "arguments": given}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_tells_the_syntax(family: str) -> None:
    """By a word of it."""
    assert syntax_of(FAMILIES[family].template) == SYNTAX[family]


def test_a_template_without_tools_tells_none() -> None:
    """And calls are text then."""
    assert syntax_of("{{ messages }}") is None
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert parse(text, None).content == text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_the_template_writes_is_read_back(family: str) -> None:
    """Name and arguments, typed: a text of digits is a text."""
    text, opened = written(family, calling(family, ARGUMENTS))
    found = parse(text, SYNTAX[family], [SEARCH], opened, FAMILIES[family].ends)
    assert found.malformed == []
    [call] = found.calls
    assert (call.name, json.loads(call.arguments)) == ("search", ARGUMENTS)
    assert (found.content, found.reasoning) == ("", "")


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"llama3_1", "mistral_v3_tekken", "gptoss"}))
def test_text_beside_a_call_is_content(family: str) -> None:
    """Llama's and Mistral's templates leave such text out; gpt-oss has it in a channel."""
    text, opened = written(family, calling(family, {"query": "x"}, "Let me see."))
    found = parse(text, SYNTAX[family], [SEARCH], opened, FAMILIES[family].ends)
    assert (found.content, len(found.calls)) == ("Let me see.", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_read_back(family: str) -> None:
    """Without a call."""
    text, opened = written(family, {"role": "assistant", "content": "It is 4 < 5.\nDone."})
    found = parse(text, SYNTAX[family], [SEARCH], opened, FAMILIES[family].ends)
    assert (found.content, found.calls, found.malformed) == ("It is 4 < 5.\nDone.", [], [])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_think", "glm4moe"])
def test_thoughts_are_apart(family: str) -> None:
    """Opened by the model or by the prompt."""
    message = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
    text, opened = written(family, message)
    found = parse(text, SYNTAX[family], [], opened, FAMILIES[family].ends)
    assert (found.content, found.reasoning) == ("Four.", "Two and two.")
    assert opened.rstrip().endswith("<think>") == (family == "qwen3_5_think")


def test_thoughts_that_never_end_are_no_answer() -> None:
    """Cut off in the middle."""
    found = parse("<think>\nTwo and", "hermes")
    assert (found.content, found.reasoning) == ("", "Two and")
    found = parse("Two and", "hermes", opened="<|im_start|>assistant\n<think>\n")
    assert (found.content, found.reasoning) == ("", "Two and")


def test_channels_of_gpt_oss() -> None:
    """Thoughts, a call, and a final answer."""
    text = (
        "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant to=functions.search<|channel|>commentary "
        '<|constrain|>json<|message|>{"query": "x"}<|call|>'
    )
    found = parse(text, "harmony")
    assert (found.reasoning, found.content) == ("Look it up.", "")
    assert found.calls == [ToolCall("search", '{"query": "x"}')]
    text = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    found = parse(text, "harmony")
    assert (found.reasoning, found.content, found.calls) == ("Easy.", "Four.", [])
    assert parse("Four.<|return|>", "harmony", ends=["<|return|>"]).content == "Four."


def test_a_call_of_mistral_has_the_id_that_the_model_wrote() -> None:
    """Its result refers to this id in the next prompt; an id of another form, or given twice, is replaced."""
    calls = [{"name": "search", "arguments": {}, "id": one} for one in ("aB3dE6gH9", "short", "aB3dE6gH9", 7)]
    message = assistant_message(parse(f"[TOOL_CALLS]{json.dumps(calls)}</s>", "mistral", ends=["</s>"]), turn=2)
    assert [one["id"] for one in message["tool_calls"]] == ["aB3dE6gH9", "call00201", "call00202", "call00203"]
    newer = "[TOOL_CALLS]search[CALL_ID]aB3dE6gH9[ARGS]{}"
    assert [one.own_id for one in parse(newer, "mistral").calls] == ["aB3dE6gH9"]
    for broken in (
        '[{"name": "search", "id": "aB3dE6gH9"}, {"id": "zZ3dE6gH9"}]',
        f"{newer[12:]}[TOOL_CALLS]x[CALL_ID]zZ3dE6gH9[ARGS]no",
    ):
        found = parse(f"[TOOL_CALLS]{broken}", "mistral")
        assert found.malformed
        assert "zZ3dE6gH9" not in [one.own_id for one in found.calls], (
            "a call that can't be read gives its id to no other"
        )
    reply = {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": "7"}
    chat = Chat("mistral_v3_tekken")
    bridge = chat.bridges.next(chat.token("</s>"), [reply], [message["tool_calls"][0]], [SEARCH])
    assert '"call_id": "aB3dE6gH9"' in chat.decode(bridge.environment_ids)


@pytest.mark.parametrize(
    "text",
    ['[TOOL_CALLS][{"name": "search", "arguments": {"query": "x"}}]', '[TOOL_CALLS]search[ARGS]{"query": "x"}'],
)
def test_both_syntaxes_of_mistral(text: str) -> None:
    """Version 3 and version 11 of its tokenizer."""
    found = parse(f"Let me see.{text}</s>", "mistral", ends=["</s>"])
    assert (found.content, found.malformed) == ("Let me see.", [])
    [call] = found.calls
    assert (call.name, json.loads(call.arguments)) == ("search", {"query": "x"})


def test_several_calls_of_one_turn() -> None:
    """In their order."""
    one, two = (
        '<tool_call>\n{"name": "a", "arguments": {"n": 1}}\n</tool_call>',
        '<tool_call>{"name": "b"}</tool_call>',
    )
    assert parse(f"{one}\n{two}", "hermes").calls == [ToolCall("a", '{"n": 1}'), ToolCall("b", "{}")]
    text = '{"name": "a", "parameters": {"n": 1}}; {"name": "b", "parameters": {}}'
    assert [call.name for call in parse(text, "llama3").calls] == ["a", "b"]


def test_arguments_stay_as_the_model_wrote_them() -> None:
    """Spaces, escapes, and numbers of any writing: for the record, and for an agent that looks."""
    written = '{ "q" :"\\u00e9",   "n": 1.50 }'
    [call] = parse(f'<tool_call>{{"arguments": {written}, "name": "a"}}</tool_call>', "hermes").calls
    assert call.arguments == written


@pytest.mark.parametrize(
    ("syntax", "text", "words"),
    [
        ("hermes", "<tool_call>\n{name: search}\n</tool_call>", "no JSON object with name and arguments"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "KeyError: 'name'"),
        ("hermes", "<tool_call>[1]</tool_call>", "TypeError"),
        ("hermes", '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>', "'a': arguments must be a JSON object"),
        ("hermes", '<tool_call>{"name": "a", "argu', "no JSON object"),
        ("qwen3_coder", "<tool_call>search</tool_call>", "names no <function="),
        ("glm4", "<tool_call>\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "names no function"),
        ("harmony", "<|channel|>commentary to=functions.a<|message|>{x<|call|>", "'a': arguments are no JSON"),
        ("harmony", "<|channel|>commentary to=functions.a<|message|>[]<|call|>", "must be a JSON object"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function", "no name and JSON block"),
        ("mistral", "[TOOL_CALLS]search(x)", "no JSON list"),
        ("mistral", "[TOOL_CALLS][ARGS]{}", "no name before"),
    ],
)
def test_a_call_that_can_not_be_read_is_told(syntax: Syntax, text: str, words: str) -> None:
    """No call, no error of the run, and the reason for the model."""
    found = parse(text, syntax)
    assert found.calls == []
    assert len(found.malformed) == 1
    assert words in found.malformed[0]


CALL = '<tool_call>{"name": "a"}</tool_call>'


@pytest.mark.parametrize(
    ("syntax", "text", "content"),
    [
        ("hermes", "Look. <tool_call>oh</tool_call>", "Look. <tool_call>oh</tool_call>"),
        ("hermes", f"<think>hm</think>{CALL}<tool_call>oh</tool_call>", f"{CALL}<tool_call>oh</tool_call>"),
        ("llama3", '{"name": "a", "parameters": {}', '{"name": "a", "parameters": {}'),
        ("mistral", "So:[TOOL_CALLS]search(x)", "So:[TOOL_CALLS]search(x)"),
        (
            "deepseek",
            "So <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
            "So <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.a<|message|>{x",
            "to=functions.a {x",
        ),
    ],
)
def test_a_turn_with_a_call_that_can_not_be_read_is_text(syntax: Syntax, text: str, content: str) -> None:
    """The model sees what it wrote; a readable call beside it is not made, so that nothing is done by half."""
    found = parse(text, syntax)
    assert (found.calls, len(found.malformed), found.content) == ([], 1, content)


DEEP = "[" * 99_999


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("hermes", f'<tool_call>{{"name": "a", "arguments": {{"b": {DEEP}'),
        ("hermes", f'<tool_call>{{"name": "a", "arguments": {{"b": {"[" * 500}{"]" * 500}}}}}</tool_call>'),
        ("llama3", f'{{"name": "a", "parameters": {{"b": {DEEP}'),
        ("harmony", f'<|channel|>commentary to=functions.a<|message|>{{"b": {DEEP}'),
        ("deepseek", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{DEEP}\n```"),
        ("mistral", f"[TOOL_CALLS]{DEEP}"),
        ("mistral", f"[TOOL_CALLS]a[ARGS]{DEEP}"),
    ],
)
def test_a_deep_call_is_malformed(syntax: Syntax, text: str) -> None:
    """Python's json ends at a depth with an error that is no ValueError; an environment's may end sooner."""
    found = parse(text, syntax)
    assert (found.calls, len(found.malformed)) == ([], 1)


def test_a_deep_argument_without_quotes_is_text() -> None:
    """As one that is no JSON is."""
    text = f"<tool_call><function=f><parameter=a>{DEEP}</parameter></function></tool_call>"
    [call] = parse(text, "qwen3_coder").calls
    assert json.loads(call.arguments) == {"a": DEEP}


@pytest.mark.parametrize(
    "call",
    [
        r'{"name": "\ud800", "arguments": {}}',
        r'{"name": "a", "arguments": {"b": ["\udfff"]}}',
        r'{"name": "a", "arguments": {"\ud800": 1}}',
        '{"name": "a", "arguments": {"b": NaN}}',
        '{"name": "a", "arguments": {"b": -Infinity}}',
        '{"name": "", "arguments": {}}',
    ],
)
def test_a_call_that_no_other_program_can_read_is_malformed(call: str) -> None:
    """Half a character can't be sent, and NaN is no JSON."""
    found = parse(f"<tool_call>{call}</tool_call>", "hermes")
    assert (found.calls, len(found.malformed)) == ([], 1)


def test_a_character_of_two_halves_is_whole() -> None:
    """As JSON escapes it."""
    [call] = parse(r'<tool_call>{"name": "a", "arguments": {"b": "\ud83d\ude00"}}</tool_call>', "hermes").calls
    assert json.loads(call.arguments) == {"b": "\N{GRINNING FACE}"}


@pytest.mark.parametrize(
    "text",
    [
        *("a", " ", "\n", "{", "};", "} ; ", "<tool_call>", "<tool_call> ", "<tool_call></tool_call>", "<function=f>"),
        *("<parameter=a>", "<arg_key>", "<arg_value>", "<arg_key>a</arg_key> <arg_value>", "[TOOL_CALLS]", "[ARGS]"),
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "to=functions.", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁begin｜>f<｜tool▁sep｜>f\n```json\n", "[TOOL_CALLS]a[ARGS]", '"arguments": ', "<think>"),
    ],
)
@pytest.mark.parametrize(
    ("syntax", "start"),
    [
        *(("hermes", "<tool_call>"), ("hermes", '<tool_call>{"name": "a", "arguments": {'), ("glm4", "<tool_call>f")),
        *(("qwen3_coder", "<tool_call><function=f>"), ("llama3", '{"name": "a", "parameters": {}}'), ("harmony", "")),
        *(("mistral", "[TOOL_CALLS]"), ("deepseek", "<｜tool▁calls▁begin｜>")),
    ],
)
def test_a_long_text_is_read_at_once(syntax: Syntax, start: str, text: str) -> None:
    """A hundred thousand characters of anything: time grows with the length alone."""
    long = start + text * (100_000 // len(text))
    began = thread_time()
    parse(long, syntax, [SEARCH])
    assert thread_time() - began < 0.5


@pytest.mark.parametrize(
    ("syntax", "call"),
    [
        ("qwen3_coder", "<function=f>\n<parameter=code>\nunfinished"),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</function></tool_call>"),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function></tool_call>"),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter></tool_call>"),
        ("qwen3_coder", "<function=f></function><function=g></function></tool_call>"),
        ("qwen3_coder", "<function=f>a = 1</function></tool_call>"),
        ("qwen3_coder", "<function=f"),
        ("glm4", "f\n<arg_key>a</arg_key>\n<arg_value>1"),
        ("glm4", "f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>"),
        ("glm4", "f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value><arg_key>b</arg_key></tool_call>"),
        ("glm4", "f\n<arg_key>a</arg_key>\n<arg_value>1\n<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>"),
        ("glm4", "f\n<arg_key>a<arg_value>1</arg_value></tool_call>"),
        ("glm4", "I will call f.</tool_call>"),
        ("hermes", '{"name": "a"} and more</tool_call>'),
    ],
)
def test_a_call_that_is_not_whole_is_malformed(syntax: Syntax, call: str) -> None:
    """Without an end, or with other text in it: it would be made with fewer arguments than the model gave."""
    found = parse(f"<tool_call>\n{call}", syntax)
    assert (found.calls, len(found.malformed)) == ([], 1)


def test_whole_calls_need_no_end_of_the_block() -> None:
    """A stop token may stand in its place."""
    assert parse('<tool_call>{"name": "a", "arguments": {}}', "hermes").calls == [ToolCall("a", "{}")]
    assert parse("<tool_call>\n<function=a>\n</function>", "qwen3_coder").calls == [ToolCall("a", "{}")]
    assert parse("<tool_call>a</tool_call>", "glm4").calls == [ToolCall("a", "{}")]


@pytest.mark.parametrize("text", ["[TOOL_CALLS]a[ARGS]", "[TOOL_CALLS]a[ARGS]{"])
def test_a_call_of_mistral_that_is_cut_off_is_malformed(text: str) -> None:
    """Before its arguments, or in them."""
    assert parse(text, "mistral").calls == []


@pytest.mark.parametrize(("end", "count"), [("<|call|>", 1), ("", 0)])
def test_a_call_of_gpt_oss_that_is_cut_off_before_its_arguments_is_malformed(end: str, count: int) -> None:
    """With its end, it has none."""
    found = parse(f"<|channel|>commentary to=functions.a<|message|>{end}", "harmony", ends=["<|call|>"])
    assert (len(found.calls), len(found.malformed)) == (count, 1 - count)


@pytest.mark.parametrize("answer", ['{"name": "Bob", "age": 3}', '{"name": "Bob", "age": "the \\"parameters\\""}'])
def test_a_json_answer_with_a_name_is_no_call_of_llama(answer: str) -> None:
    """A call has parameters."""
    found = parse(answer, "llama3")
    assert (found.content, found.calls, found.malformed) == (answer, [], [])


def test_a_semicolon_between_braces_of_a_text_parts_no_call() -> None:
    """Arguments may be a program."""
    [call] = parse('{"name": "run", "parameters": {"code": "if (a) {b()}; {c()}"}}', "llama3").calls
    assert json.loads(call.arguments) == {"code": "if (a) {b()}; {c()}"}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"oneOf": [{"type": "integer"}, {"anyOf": [{"type": "string"}]}]}, "12345", "12345"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "12345", 12345),
        *((schema, "12345", 12345) for schema in (True, "string", None, [], {"anyOf": "x", "type": 3})),
    ],
)
def test_a_schema_gives_an_argument_its_type(schema: Any, written: str, value: Any) -> None:
    """Alternatives count; a schema may be anything at all."""
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    [call] = parse(text, "qwen3_coder", [tool]).calls
    assert json.loads(call.arguments) == {"a": value}


def test_a_json_answer_is_no_call_of_llama() -> None:
    """A task may ask for JSON."""
    assert parse('{"answer": 4}', "llama3").content == '{"answer": 4}'


def test_a_call_as_a_message() -> None:
    """As OpenAI's chat completions have it."""
    assert ToolCall("a", "{}").message("call_1") == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "a", "arguments": "{}"},
    }


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "<parameter=a>", "\n"),
        *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "f"),
        *("<|channel|>", "<|message|>", "<|end|>", "to=functions.f", "final", '{"name": "f"}', "{}", "[1]", '"', "{"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json\n", "\n```", "; ", '"name"'),
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join), st.sampled_from([None, *sorted(set(SYNTAX.values())), "mistral"]))
def test_any_text_is_read_without_an_error(text: str, syntax: Syntax | None) -> None:
    """A policy in training writes anything; each call has a name and a JSON object."""
    for call in parse(text, syntax, [SEARCH]).calls:
        assert call.name
        assert isinstance(json.loads(call.arguments), dict)
