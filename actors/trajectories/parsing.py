"""Messages out of sampled tokens: text, reasoning and tool calls, by the syntax of the model's family.

Parsed from decoded text with all special tokens; nothing parsed flows back into tokens. Arguments stay as the model
wrote them wherever the syntax has JSON. A call that can't be read is no error of the run: the reason is handed on, and
the turn is text. Any text is read in time that grows with its length alone: a policy in training writes anything.
"""

import json
import math
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

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
BLANKS = (" ", "\t", "\n", "\r")
MAX_DEPTH = 100
"""Levels of lists and objects in a call; json ends at about a thousand, with an error of its own."""
NAME = re.compile(r"[^\s<>{}\"]+")
MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")
HARMONY_NAME = re.compile(r"to=functions\.([\w.-]+)")

Functions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool as the model wrote it."""

    name: str
    arguments: str
    """JSON object."""
    own_id: str = ""
    """Id that the model wrote, nine letters and digits, where the syntax has one (Mistral's)."""

    def message(self, call_id: str) -> dict[str, Any]:
        """Return the call as an entry of `tool_calls` of an OpenAI message, with its own id or else the given one."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.own_id or call_id, "type": "function", "function": function}


@dataclass
class Parsed:
    """Message of a sampled turn."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    """Reason for each call that can't be read."""


OPENING_TOKENS = 16
"""Tokens at the end of a prompt that tell whether the prompt has opened the model's thoughts."""


def looked_for(syntax: Syntax | None, tools: Sequence[Any] | None) -> Syntax | None:
    """Return the syntax to look for in an answer: none without tools, except harmony, which has channels for all."""
    return syntax if tools or syntax == "harmony" else None


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

    A turn with a call that can't be read has no calls: its whole text, thoughts excepted, is the content, as with vLLM
    and TRL. What the model wrote is shown to it again if the text is rendered, and half of what it asked for is never
    done.

    Args:
        text: sampled tokens as text, special tokens included.
        syntax: of tool calls; None leaves them in the text.
        tools: tools of the conversation, whose schemas give types to arguments that are written without (Qwen3.5, GLM).
        opened: end of the prompt, which may have opened the thoughts already.
        ends: tokens that end a completion, cut off the text.
    """
    is_ended = bool(ends) and text.endswith(tuple(ends))
    for end in ends:
        text = text.removesuffix(end)
    if syntax == "harmony":
        return _harmony(text, is_ended)
    found = Parsed()
    found.reasoning, text = _split_thoughts(text, opened)
    found.content = text.strip()
    if syntax is not None:
        functions = {one["name"]: one for tool in tools if "name" in (one := tool.get("function", tool))}
        around = READERS[syntax](text, found, functions)
        if found.malformed:
            found.calls = []
        else:
            found.content = around.strip()
    return found


def opens_thoughts(prompt: str) -> bool:
    """Return whether a prompt, or its end, has opened the model's thoughts."""
    return prompt.rstrip().endswith("<think>")


def _split_thoughts(text: str, opened: str) -> tuple[str, str]:
    """Return thoughts and the rest. A prompt that ends with <think> has opened them, and the text may close them."""
    is_open = opens_thoughts(opened)
    stripped = text.lstrip()
    if not is_open and not stripped.startswith("<think>"):
        return "", text
    thoughts, closed, rest = (text if is_open else stripped.removeprefix("<think>")).partition("</think>")
    # never closed: cut off while thinking, and there is no answer
    return thoughts.strip(), rest if closed else ""


def _split_calls(text: str) -> tuple[list[str], str, bool]:
    """Return what stands in each <tool_call>, the text around, and whether the last call has its end.

    Searched without a regular expression: those that skip blanks before an end need the square of the time on a text
    of blanks, and a policy in training writes such texts.
    """
    calls: list[str] = []
    around: list[str] = []
    at = 0
    while (start := text.find(CALL_START, at)) >= 0:
        around.append(text[at:start])
        start += len(CALL_START)
        end = text.find(CALL_END, start)
        if end < 0:
            return [*calls, text[start:].strip()], "".join(around), False
        calls.append(text[start:end].strip())
        at = end + len(CALL_END)
    return calls, "".join([*around, text[at:]]), True


def _loaded(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, or one that others can't read: too deep, half a character, a number without bounds.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"more than {MAX_DEPTH} levels") from None
    _check(value)
    return value


def _check(value: Any) -> None:
    """Check that a value can be written, sent and rendered.

    Raises:
        ValueError: says what is wrong.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += [*one, *one.values()]
            elif isinstance(one, list):
                below += one
            elif isinstance(one, str):
                one.encode()  # half of a surrogate pair raises UnicodeEncodeError, a ValueError
            elif isinstance(one, float) and not math.isfinite(one):
                raise ValueError(f"{one} is no JSON number")
        if not below:
            return
        level = below
    raise ValueError(f"more than {MAX_DEPTH} levels")


def _read_object(found: Parsed, text: str, key: str = "arguments", own_id: str = "") -> None:
    """Read a call written as {"name": …, key: {…}}."""
    try:
        call = _loaded(text)
        name, arguments = call["name"], call.get(key, {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found.malformed.append(f"tool call is no JSON object with name and {key}: {type(error).__name__}: {error}")
        return
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        found.malformed.append(f"tool call {name!r}: {key} must be a JSON object, and the name no empty text")
        return
    found.calls.append(ToolCall(name, _written(text).get(key, "{}"), own_id))


def _written(text: str) -> dict[str, str]:
    """Return the values of a JSON object as they stand in the text."""
    decoder, values = json.JSONDecoder(), {}
    at = _behind_blanks(text, 0) + 1
    while text[_behind_blanks(text, at)] == '"':
        key, at = decoder.raw_decode(text, _behind_blanks(text, at))
        start = _behind_blanks(text, _behind_blanks(text, at) + 1)
        _, end = decoder.raw_decode(text, start)
        values[key] = text[start:end]
        at = _behind_blanks(text, end) + 1
        if text[at - 1] == "}":
            break
    return values


def _behind_blanks(text: str, at: int) -> int:
    """Return the place of the first character from `at` on that is no blank of JSON."""
    while text[at : at + 1] in BLANKS:
        at += 1
    return at


def _read_json_arguments(found: Parsed, name: str, text: str, *, is_closed: bool, own_id: str = "") -> None:
    """Read a call whose name stands outside of its JSON arguments; if it has its end, it may leave them out."""
    arguments = text.strip() or ("{}" if is_closed else "")
    try:
        is_object = isinstance(_loaded(arguments), dict)
    except ValueError as error:
        found.malformed.append(f"tool call {name!r}: arguments are no JSON: {error}")
        return
    if is_object:
        found.calls.append(ToolCall(name.strip(), arguments, own_id))
    else:
        found.malformed.append(f"tool call {name!r}: arguments must be a JSON object")


def _typed(value: str, function: Mapping[str, Any] | None, key: str) -> Any:
    """Return an argument that is written without quotes: text where the schema says so, otherwise JSON if it is any."""
    schema: Any = function
    # a schema is whatever the user wrote: `true` is one too
    for part in ("parameters", "properties", key):
        schema = schema.get(part) if isinstance(schema, Mapping) else None
    kinds = _kinds(schema)
    if "null" in kinds and value in ("null", "None"):
        return None
    if "string" in kinds:
        return value
    if value in PYTHON_WORDS:
        return PYTHON_WORDS[value]
    try:
        return _loaded(value)
    except ValueError:
        return value


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema names, those of its alternatives included."""
    if not isinstance(schema, Mapping):
        return set()
    told = schema.get("type")
    kinds = {one for one in (told if isinstance(told, list) else [told]) if isinstance(one, str)}
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        for part in parts if isinstance(parts, list) else []:
            kinds |= _kinds(part)
    return kinds


def _read_pairs(
    found: Parsed, name: str, pairs: Sequence[tuple[str, str]], leftover: str, functions: Functions
) -> None:
    """Read a call whose arguments stand one by one in the text; a rest means that one of them has no end."""
    if not NAME.fullmatch(name):
        found.malformed.append(f"tool call {name!r}: this is no name of a function")
        return
    if leftover:
        found.malformed.append(f"tool call {name!r}: not whole, or other text in it: {leftover[:50]!r}")
        return
    arguments = {key: _typed(value, functions.get(name), key) for key, value in pairs}
    found.calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))


def _hermes(text: str, found: Parsed, functions: Functions) -> str:
    calls, around, _ = _split_calls(text)
    for call in calls:
        # an object that is complete needs no </tool_call>
        _read_object(found, call)
    return around


def _qwen3_coder(text: str, found: Parsed, functions: Functions) -> str:
    calls, around, _ = _split_calls(text)
    for call in calls:
        if not call.startswith("<function="):
            found.malformed.append("tool call names no <function=…>")
            continue
        name, _, rest = call.removeprefix("<function=").partition(">")
        body = rest.removesuffix("</function>")
        pairs, leftover = _parameters(body)
        _read_pairs(found, name.strip(), pairs, leftover or ("" if body != rest else "no </function>"), functions)
    return around


def _parameters(text: str) -> tuple[list[tuple[str, str]], str]:
    """Return the arguments in Qwen's syntax, and what is left behind the last one that is whole."""
    pairs, at = [], 0
    while (start := text.find("<parameter=", at)) >= 0 and not text[at:start].strip():
        end = text.find("</parameter>", start)
        key, mark, value = text[start + len("<parameter=") : max(end, start)].partition(">")
        # another parameter within the value: this one has no end
        if end < 0 or not mark or "\n" in key or "<parameter=" in value:
            break
        pairs.append((key.strip(), value.removeprefix("\n").removesuffix("\n")))
        at = end + len("</parameter>")
    return pairs, text[at:].strip()


def _glm4(text: str, found: Parsed, functions: Functions) -> str:
    calls, around, is_closed = _split_calls(text)
    for number, call in enumerate(calls):
        name, mark, rest = call.partition("<arg_key>")
        if not name.strip():
            found.malformed.append("tool call names no function")
            continue
        pairs, leftover = _arg_pairs(mark + rest)
        if not is_closed and number == len(calls) - 1:
            # nothing else tells that the last argument was the last
            leftover = leftover or "no </tool_call>"
        _read_pairs(found, name.strip(), pairs, leftover, functions)
    return around


def _arg_pairs(text: str) -> tuple[list[tuple[str, str]], str]:
    """Return the arguments in GLM's syntax, and what is left behind the last one that is whole."""
    pairs: list[tuple[str, str]] = []
    parts = text.split("</arg_value>")
    for number, part in enumerate(parts[:-1]):
        key, mark, value = part.partition("<arg_value>")
        before, opened, name = key.partition("<arg_key>")
        name, closed, behind = name.partition("</arg_key>")
        if before.strip() or not (opened and closed and mark) or behind.strip() or "<arg_key>" in value:
            return pairs, "</arg_value>".join(parts[number:]).strip()
        pairs.append((name.strip(), value))
    return pairs, parts[-1].strip()


def _llama3(text: str, found: Parsed, functions: Functions) -> str:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    # the whole answer is the call; several are separated by semicolons. A task may ask for JSON with a name too, so
    # only an object that also has arguments is a call
    has_arguments = '"parameters"' in body or '"arguments"' in body
    if not body.startswith("{") or '"name"' not in body or not has_arguments:
        return text
    decoder, at = json.JSONDecoder(), 0
    while at < len(body):
        try:
            call, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError) as error:
            found.malformed.append(f"tool call is no JSON object: {type(error).__name__}: {error}")
            return text
        if not at and not (isinstance(call, dict) and "name" in call and {"parameters", "arguments"} & call.keys()):
            return text
        key = "arguments" if isinstance(call, dict) and "parameters" not in call else "parameters"
        _read_object(found, body[at:end], key)
        at = _behind_blanks(body, end)
        if at < len(body):
            if body[at] != ";":
                found.malformed.append(f"other text behind a tool call: {body[at : at + 50]!r}")
                return text
            at = _behind_blanks(body, at + 1)
    return ""


def _deepseek(text: str, found: Parsed, functions: Functions) -> str:
    start, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    before, _, rest = text.partition("<｜tool▁calls▁begin｜>" if "<｜tool▁calls▁begin｜>" in text else start)
    inside, _, behind = rest.partition("<｜tool▁calls▁end｜>")
    for call in filter(None, map(str.strip, inside.split(start))):
        name, _, block = call.removesuffix(end).partition("<｜tool▁sep｜>")[2].partition("\n")
        block = block.strip()
        body = block.removeprefix("```json").removesuffix("```")
        if not NAME.fullmatch(name.strip()) or len(body) != len(block) - len("```json```"):
            found.malformed.append("tool call has no name and JSON block")
            break
        _read_json_arguments(found, name, body, is_closed=True)
    if start in behind:
        found.malformed.append("tool call outside of the list of calls")
    return before.rstrip() + behind


def _mistral(text: str, found: Parsed, functions: Functions) -> str:
    before, mark, after = text.partition("[TOOL_CALLS]")
    if not mark:
        return text
    # the newer syntax has the name before its arguments, the older one a list of objects
    if "[ARGS]" in after.partition("{")[0]:
        calls = after.split("[TOOL_CALLS]")
        for number, call in enumerate(calls, 1):
            name, has_arguments, arguments = call.partition("[ARGS]")
            name, _, own_id = name.partition("[CALL_ID]")
            name = name.strip()
            if not has_arguments or not re.fullmatch(r"[\w.-]+", name):
                found.malformed.append("tool call has no name before [ARGS]")
                break
            is_closed = number < len(calls)
            _read_json_arguments(found, name, arguments, is_closed=is_closed, own_id=_new_id(found, own_id.strip()))
        return before
    try:
        listed = _loaded(after.strip())
    except ValueError as error:
        found.malformed.append(f"tool calls are no JSON list: {error}")
        return before
    for one in listed if isinstance(listed, list) else [listed]:
        own_id = _new_id(found, one.get("id") if isinstance(one, dict) else None)
        _read_object(found, json.dumps(one, ensure_ascii=False), own_id=own_id)
    return before


def _new_id(found: Parsed, own_id: Any) -> str:
    """Return the id that the model wrote, to which the result will refer; empty if it is none, or has been given."""
    is_id = isinstance(own_id, str) and MISTRAL_ID.fullmatch(own_id) is not None
    return own_id if is_id and all(call.own_id != own_id for call in found.calls) else ""


def _harmony(text: str, is_ended: bool) -> Parsed:
    """Read gpt-oss's channels: analysis is reasoning, final is the answer, commentary to functions.NAME is a call."""
    found = Parsed()
    answers, thoughts, written = [], [], []
    at = 0
    while (mark := text.find("<|message|>", at)) >= 0:
        header, start = text[at:mark].rpartition("<|start|>")[2], mark + len("<|message|>")
        end = HARMONY_END.search(text, start)
        body, at = (text[start : end.start()], end.end()) if end else (text[start:], len(text))
        if name := HARMONY_NAME.search(header):
            _read_json_arguments(found, name[1], body, is_closed=is_ended or end is not None)
            # without the special tokens: gpt-oss's template refuses a content with a channel in it
            written.append(f"{name[0]} {body}")
        elif "analysis" in header:
            thoughts.append(body)
        else:
            answers.append(body)
            written.append(body)
    if not (answers or thoughts or found.calls or found.malformed):
        answers = [text]
    if found.malformed:
        found.calls, answers = [], written
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
