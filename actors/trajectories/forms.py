"""Forms of an answer that a caller demands: JSON by a schema, or calls of tools in the syntax of the model's family.

An engine with structured outputs masks every token that the form forbids, and draws from the rest. Its logprobs are of
this masked distribution, while the trainer's are of the whole one: a token drawn under a form has a biased importance
ratio. Callers that train decide what to do with such tokens.

    thoughts opened by the prompt   any text up to </think>, then the form
    otherwise                       the form from the first token on
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from actors.trajectories.parsing import Syntax

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""Schema of any JSON object (OpenAI: `json_object`)."""
WRITABLE: tuple[Syntax, ...] = ("hermes", "qwen3_coder", "llama3")
"""Syntaxes in which calls can be demanded."""

Json = dict[str, Any]


@dataclass(frozen=True)
class AnswerForm:
    """Form of a completion, in the words of vLLM and SGLang."""

    kind: Literal["json_schema", "structural_tag"]
    text: str
    """JSON of a schema, or of a structural tag (xgrammar's description of a text that is partly free)."""


@dataclass(frozen=True)
class Demand:
    """Demand on a message: JSON by a schema, or calls of tools."""

    schema: Mapping[str, Any] | None = None
    """JSON schema of the message's text; None for calls of tools."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools of which at least one must be called, as OpenAI's API describes them."""
    once: bool = False
    """Whether the message must have a single call."""


def demand_of(
    response_format: Mapping[str, Any] | None, tool_choice: Any, tools: Sequence[Mapping[str, Any]], once: bool = False
) -> Demand | None:
    """Return the demand of a request in OpenAI's words; None if the model is free.

    Args:
        response_format: `{"type": "text"}`, `json_object` or `json_schema`; None: text.
        tool_choice: `auto`, `none`, `required`, or `{"type": "function", "function": {"name": …}}`; None: `auto`.
        tools: all tools of the conversation.
        once: a single call is enough, where calls are demanded.

    Raises:
        ValueError: the demand is none that can be met; starts with the parameter's name.
    """
    schema = _schema(response_format or {"type": "text"})
    named: Any = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if tool_choice not in (None, "auto", "none", "required") and not isinstance(name, str):
        raise ValueError('tool_choice: must be auto, none, required or {"type": "function", "function": {"name": …}}')
    forced = [tool for tool in tools if name is None or _function(tool).get("name") == name]
    if tool_choice in (None, "auto", "none"):
        return None if schema is None else Demand(schema)
    if not forced:
        raise ValueError(f"tool_choice: {'there are no tools' if name is None else f'no tool is called {name!r}'}")
    if schema is not None:
        raise ValueError("response_format: tool_choice demands a call already; give one of the two")
    return Demand(None, tuple(forced), once or name is not None)


def form_of(demand: Demand, syntax: Syntax | None, thinks: bool) -> AnswerForm:
    """Return the form that meets a demand.

    Args:
        syntax: of the model's tool calls; None if it has none that is known.
        thinks: whether the prompt has opened the model's thoughts, which stay free.

    Raises:
        ValueError: calls can't be demanded in this syntax; starts with the parameter's name.
    """
    if demand.schema is not None:
        if not thinks:
            return AnswerForm("json_schema", json.dumps(demand.schema))
        wanted: Json = {"type": "json_schema", "json_schema": demand.schema}
    else:
        if syntax not in WRITABLE:
            raise ValueError(
                f"tool_choice: a call can be demanded in the syntaxes {', '.join(WRITABLE)}, and the chat template of "
                f"this model has {syntax or 'none that is known'}; use auto"
            )
        calls = [_call(_function(tool), syntax) for tool in demand.tools]
        # llama's calls have no marks around them, so a second one could not be told from the first
        once = demand.once or syntax == "llama3"
        wanted = {"type": "tags_with_separator", "tags": calls, "separator": "\n", "at_least_one": True}
        wanted["stop_after_first"] = once
    if thinks:
        thoughts = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>\n\n"}
        wanted = {"type": "sequence", "elements": [thoughts, wanted]}
    return AnswerForm("structural_tag", json.dumps({"type": "structural_tag", "format": wanted}))


def _schema(response_format: Mapping[str, Any]) -> Mapping[str, Any] | None:
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise ValueError(f"response_format.type: {kind!r} is not known; text, json_object and json_schema are")
    given = response_format.get("json_schema")
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ValueError('response_format.json_schema: must be {"name": …, "schema": {…}}')
    return schema


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def _call(function: Mapping[str, Any], syntax: Syntax) -> Json:
    """Return the tag of a call: the words around it, and the schema of what stands in between."""
    name, parameters = function["name"], function.get("parameters") or {"type": "object", "properties": {}}
    if syntax == "qwen3_coder":
        content = {"type": "json_schema", "json_schema": parameters, "style": "qwen_xml"}
        begin, end = f"<tool_call>\n<function={name}>\n", "\n</function>\n</tool_call>"
        return {"type": "tag", "begin": begin, "content": content, "end": end}
    around = ("<tool_call>\n", "\n</tool_call>") if syntax == "hermes" else ("", "")
    key = "arguments" if syntax == "hermes" else "parameters"
    begin = f'{around[0]}{{"name": {json.dumps(name)}, "{key}": '
    content = {"type": "json_schema", "json_schema": parameters}
    return {"type": "tag", "begin": begin, "content": content, "end": f"}}{around[1]}"}
