"""Tools out of Python functions: the description for the model, and the call with the model's arguments."""

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Json = dict[str, Any]

SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
ARGUMENT = re.compile(r"^(\s*)\*?(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def described(function: Callable[..., Any], name: str = "") -> Json:
    """Return the description of a function for `tools` of a chat, as transformers' `get_json_schema` makes it.

    Types come from the annotations, texts from the docstring (Google's style). An argument without an annotation may
    have any type, where transformers refuses the function.

    Args:
        function: the tool.
        name: name for the model; by default the function's.
    """
    hints = get_type_hints(function)
    about, texts, returned = _split(inspect.getdoc(function) or "")
    properties: dict[str, Json] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        schema = _schema(hints[parameter.name]) if parameter.name in hints else {}
        text = texts.get(parameter.name, "")
        if choices := CHOICES.search(text):
            schema["enum"] = json.loads(choices[1])
            text = text[: choices.start()].strip()
        if text:
            schema["description"] = text
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: Json = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    described: Json = {"name": name or function.__name__, "description": about, "parameters": parameters}
    if "return" in hints:
        described["return"] = _schema(hints["return"]) | ({"description": returned} if returned else {})
    return {"type": "function", "function": described}


def public_methods(environment: Any, but: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return an object's methods that are tools: all public ones except `but`, by name, in the order of the class."""
    found: dict[str, Callable[..., Any]] = {}
    for kind in reversed(type(environment).__mro__):
        for name, value in vars(kind).items():
            if kind is object or name.startswith("_") or name in but:
                continue
            # looked at in the class first: a property must not be computed for this
            if not (callable(value) or isinstance(value, (classmethod, staticmethod))):
                continue
            # a class inside the class can be called too, but is no method
            if inspect.isroutine(method := getattr(environment, name)):
                found[name] = method
    return found


async def called(tools: Mapping[str, Callable[..., Any]], call: Json, run: Callable[..., Any]) -> tuple[Json, str]:
    """Call a tool; return the message with its result, and the failure's text (empty if there is none).

    A failure is the model's to learn from: its message holds `{"error": …}`, as in TRL.

    Args:
        tools: functions by name.
        call: entry of an assistant message's `tool_calls`.
        run: coroutine function that runs a function with arguments, outside of the event loop if it is not async.
    """
    name = call["function"]["name"]
    failure = ""
    try:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        if name not in tools:
            raise LookupError(f"there is no tool {name!r}; the tools are {', '.join(tools)}")
        # before the call, so that the tool's own TypeErrors are told apart
        inspect.signature(tools[name]).bind(**arguments)
        content = await run(tools[name], **arguments)
        if inspect.isasyncgen(content) or inspect.isgenerator(content):
            raise TypeError(f"the tool {name} yields; a tool returns its result")
    except Exception as error:  # noqa: BLE001 - told to the model, and counted
        failure = f"{type(error).__name__}: {error}"
        content = {"error": str(error)}
    shown = content if isinstance(content, str) or _are_parts(content) else str(content)
    return {"role": "tool", "name": name, "tool_call_id": call.get("id", ""), "content": shown}, failure


def _are_parts(content: Any) -> bool:
    """Return whether a result is a content in parts, one of them an image; any other list is shown as a text."""
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content] if type(content) is list else []
    return not {"image", "image_url"}.isdisjoint(kinds) and {*kinds} <= {"text", "image", "image_url"}


def _split(text: str) -> tuple[str, dict[str, str], str]:
    """Return a docstring's description, its arguments' texts and the text on what is returned."""
    parts = re.split(r"^(Args|Arguments|Returns|Raises|Yields|Examples?):[ \t]*$", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    texts: dict[str, str] = {}
    name, depth = "", -1
    for line in sections.get("Args", sections.get("Arguments", "")).splitlines():
        match = ARGUMENT.match(line)
        if match and (depth < 0 or len(match[1]) == depth):
            depth, name = len(match[1]), match[2]
            texts[name] = match[3].strip()
        elif name and line.strip():
            texts[name] = f"{texts[name]} {line.strip()}".strip()
    return parts[0].strip(), texts, sections.get("Returns", "").strip()


def _schema(hint: Any) -> Json:
    """Return the JSON schema of an annotation; {} for any value, as for a type that JSON does not have."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in SCALARS:
        return {"type": SCALARS[hint]}
    if origin is Literal:
        kinds = list(dict.fromkeys(SCALARS[type(value)] for value in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin in (Union, types.UnionType):
        return _union(inner)
    if hint is list or origin is list:
        return {"type": "array"} | ({"items": _schema(inner[0])} if inner else {})
    if hint is tuple or origin is tuple:
        fixed = bool(inner) and ... not in inner
        return {"type": "array"} | ({"prefixItems": [_schema(part) for part in inner]} if fixed else {})
    if hint is dict or origin is dict:
        return {"type": "object"} | ({"additionalProperties": _schema(inner[1])} if len(inner) == 2 else {})
    return {}


def _union(members: Sequence[Any]) -> Json:
    """Return the schema of one of several types; None among them is `nullable`."""
    schemas = [_schema(member) for member in members if member is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(isinstance(one.get("type"), str) and len(one) == 1 for one in schemas):
        names = sorted({one["type"] for one in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if type(None) in members else {})
