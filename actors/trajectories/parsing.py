"""Messages out of sampled tokens: text, reasoning and tool calls, by the syntax of the model's family.

Parsed from decoded text with all special tokens; nothing parsed flows back into tokens. Arguments stay as the model
wrote them wherever the syntax has JSON. A call that can't be read is no error of the run: its words are handed on, so
that the environment can tell the model.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Syntax = Literal["hermes", "qwen3_coder", "llama3", "glm4", "harmony", "deepseek", "mistral"]
"""Ways of writing tool calls, named as vLLM's `--tool-call-parser` names them where it has them."""

MARKS: tuple[tuple[str, Syntax], ...] = (
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm4"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
)
"""Words of a chat template that tell the syntax, the first that is found; several templates contain later ones too."""


PYTHON_WORDS = {"True": True, "False": False, "None": None}
"""Values that chat templates write as Python does, and so the models trained on them."""


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool as the model wrote it."""

    name: str
    arguments: str
    """JSON object."""

    def message(self, call_id: str) -> dict[str, Any]:
        """Return the call as an entry of `tool_calls` of an OpenAI message."""
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class Parsed:
    """Message of a sampled turn."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    """Reason for each call that can't be read."""


def syntax_of(chat_template: str) -> Syntax | None:
    """Return the syntax of tool calls that a chat template teaches; None if it has none that is known."""
    return next((syntax for mark, syntax in MARKS if mark in chat_template), None)


def parse(
    text: str,
    syntax: Syntax | None,
    tools: Sequence[Mapping[str, Any]] = (),
    opened: str = "",
    ends: Sequence[str] = (),
) -> Parsed:
    """Return the message of a turn.

    Args:
        text: sampled tokens as text, special tokens included.
        syntax: of tool calls; None leaves them in the text.
        tools: tools of the conversation, whose schemas give types to arguments that are written without (Qwen3.5, GLM).
        opened: end of the prompt, which may have opened the thoughts already.
        ends: tokens that end a completion, cut off the text.
    """
    for end in ends:
        text = text.removesuffix(end)
    if syntax == "harmony":
        return _harmony(text)
    found = Parsed()
    found.reasoning, text = _split_thoughts(text, opened)
    if syntax is not None:
        text = READERS[syntax](text, found, {tool["function"]["name"]: tool["function"] for tool in tools})
    found.content = text.strip()
    return found


def _split_thoughts(text: str, opened: str) -> tuple[str, str]:
    """Return thoughts and the rest. A prompt that ends with <think> has opened them, and the text may close them."""
    is_open = opened.rstrip().endswith("<think>")
    stripped = text.lstrip()
    if not is_open and not stripped.startswith("<think>"):
        return "", text
    thoughts, closed, rest = (text if is_open else stripped.removeprefix("<think>")).partition("</think>")
    # never closed: cut off while thinking, and there is no answer
    return thoughts.strip(), rest if closed else ""


def _blocks(text: str, pattern: re.Pattern[str], read: Callable[[re.Match[str]], None]) -> str:
    """Read each match; return the text without the matches."""
    for match in pattern.finditer(text):
        read(match)
    return pattern.sub("", text)


def _read_object(found: Parsed, text: str, key: str = "arguments") -> None:
    """Read a call written as {"name": …, key: {…}}."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get(key, {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found.malformed.append(f"tool call is no JSON object with name and {key}: {type(error).__name__}: {error}")
        return
    if not isinstance(name, str) or not isinstance(arguments, dict):
        found.malformed.append(f"tool call {name!r}: {key} must be a JSON object")
        return
    found.calls.append(ToolCall(name, _written(text, key, arguments)))


def _written(text: str, key: str, arguments: dict[str, Any]) -> str:
    """Return the arguments as they stand in the text, otherwise written anew."""
    for match in re.finditer(rf'"{key}"\s*:\s*', text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, match.end())
        except ValueError:
            continue
        if value == arguments:
            return text[match.end() : end]
    return json.dumps(arguments)


def _read_json_arguments(found: Parsed, name: str, text: str) -> None:
    """Read a call whose name stands outside of its JSON arguments."""
    arguments = text.strip() or "{}"
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except ValueError as error:
        found.malformed.append(f"tool call {name!r}: arguments are no JSON: {error}")
        return
    if is_object:
        found.calls.append(ToolCall(name.strip(), arguments))
    else:
        found.malformed.append(f"tool call {name!r}: arguments must be a JSON object")


def _typed(value: str, function: Mapping[str, Any] | None, key: str) -> Any:
    """Return an argument that is written without quotes: text where the schema says so, otherwise JSON if it is any."""
    properties = ((function or {}).get("parameters") or {}).get("properties") or {}
    kinds = (properties.get(key) or {}).get("type", "any")
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
        return value
    if value in PYTHON_WORDS:
        return PYTHON_WORDS[value]
    try:
        return json.loads(value)
    except ValueError:
        return value


HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>[^<]*<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n```(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL
)
DEEPSEEK_AROUND = re.compile(r"\s*<｜tool▁calls▁begin｜>\s*|\s*<｜tool▁calls▁end｜>\s*")
MISTRAL = re.compile(
    r"\[TOOL_CALLS\]\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*(.*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL
)
HARMONY = re.compile(
    r"(?:<\|start\|>)?(?P<header>[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?)<\|message\|>"
    r"(?P<text>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)

Functions = Mapping[str, Mapping[str, Any]]


def _hermes(text: str, found: Parsed, functions: Functions) -> str:
    return _blocks(text, HERMES, lambda match: _read_object(found, match[1]))


def _qwen3_coder(text: str, found: Parsed, functions: Functions) -> str:
    def read(match: re.Match[str]) -> None:
        written = FUNCTION.search(match[1])
        if written is None:
            found.malformed.append("tool call names no <function=…>")
            return
        name = written[1].strip()
        pairs = PARAMETER.findall(written[2])
        arguments = {key.strip(): _typed(value, functions.get(name), key.strip()) for key, value in pairs}
        found.calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))

    return _blocks(text, HERMES, read)


def _glm4(text: str, found: Parsed, functions: Functions) -> str:
    def read(match: re.Match[str]) -> None:
        name = match[1].partition("<arg_key>")[0].strip()
        if not name:
            found.malformed.append("tool call names no function")
            return
        pairs = ARGUMENT.findall(match[1])
        arguments = {key.strip(): _typed(value, functions.get(name), key.strip()) for key, value in pairs}
        found.calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))

    return _blocks(text, HERMES, read)


def _llama3(text: str, found: Parsed, functions: Functions) -> str:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    # the whole answer is the call; several are separated by semicolons
    if not body.startswith("{") or '"name"' not in body:
        return text
    for part in re.split(r"(?<=\})\s*;\s*(?=\{)", body):
        _read_object(found, part, "parameters" if '"parameters"' in part else "arguments")
    return ""


def _deepseek(text: str, found: Parsed, functions: Functions) -> str:
    rest = _blocks(text, DEEPSEEK, lambda match: _read_json_arguments(found, match[1], match[2]))
    if "<｜tool▁call▁begin｜>" in rest:
        found.malformed.append("tool call has no name and JSON block")
        rest = rest.partition("<｜tool▁calls▁begin｜>")[0]
    return DEEPSEEK_AROUND.sub("", rest)


def _mistral(text: str, found: Parsed, functions: Functions) -> str:
    before, mark, after = text.partition("[TOOL_CALLS]")
    if not mark:
        return text
    if "[ARGS]" in after:
        rest = _blocks(mark + after, MISTRAL, lambda match: _read_json_arguments(found, match[1], match[2]))
        if rest.strip():
            found.malformed.append("tool call has no name before [ARGS]")
        return before
    try:
        calls, _ = json.JSONDecoder().raw_decode(after.strip())
    except ValueError as error:
        found.malformed.append(f"tool calls are no JSON list: {error}")
        return before
    for call in calls if isinstance(calls, list) else [calls]:
        _read_object(found, json.dumps(call, ensure_ascii=False))
    return before


def _harmony(text: str) -> Parsed:
    """Read gpt-oss's channels: analysis is reasoning, final is the answer, commentary to functions.NAME is a call."""
    found = Parsed()
    answers, thoughts = [], []
    for match in HARMONY.finditer(text):
        header, body = match["header"], match["text"]
        if name := re.search(r"to=functions\.([\w.-]+)", header):
            _read_json_arguments(found, name[1], body)
        elif "analysis" in header:
            thoughts.append(body)
        else:
            answers.append(body)
    if not (answers or thoughts or found.calls or found.malformed):
        answers = [text]
    found.reasoning, found.content = "\n".join(thoughts).strip(), "\n".join(answers).strip()
    return found


READERS: dict[Syntax, Callable[[str, Parsed, Functions], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3": _llama3,
    "glm4": _glm4,
    "deepseek": _deepseek,
    "mistral": _mistral,
}
