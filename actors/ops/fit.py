"""Checks that model, data, functions and machine fit each other, from files alone: no model is loaded.

Each check yields Findings: problems no run survives, and notes on settings that are likely a mistake. `actors up` would
run into the problems only 10 to 20 seconds after its start.
"""

import ast
import errno
import json
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.models.positions import num_positions
from actors.process.devices import has_gpu
from actors.reward.lookup import ARGUMENTS
from schemas.config import RunConfig

if TYPE_CHECKING:
    from actors.datasets.jsonl import Jsonl

PROMPT_SECONDS = 2.0
"""Time limit in seconds for the prompts of one file; prompts after it are not looked at."""
NO_FUNCTIONS = ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set | ast.JoinedStr
"""Syntax of values that surely can't be called."""


@dataclass(frozen=True)
class Finding:
    """Result of a check, in words: `path.to.key: …`. `fatal`: a run would fail because of it."""

    words: str
    fatal: bool = True


def model_findings(config: RunConfig) -> Iterator[Finding]:
    """Check the model's directory: its lengths in tokens, and the module names given for adapters."""
    path, engine = Path(config.model.path), config.inference.engine
    if not engine.loads_model:
        return
    if not path.is_absolute() and "/" not in config.model.path:
        yield Finding(
            f"model.path: there is no folder {config.model.path} next to the configuration file or in the working "
            "directory; it is taken as a name on the Hugging Face Hub",
            fatal=False,
        )
    own = own_length(path)
    for key, length in engine.max_tokens_per_sequence().items():
        if own and length > own:
            yield Finding(f"{key}: {length} is more than the {own} tokens that {path} can attend to", fatal=False)
    if own and config.rollout.max_tokens >= own:
        yield Finding(
            f"rollout.max_tokens: {config.rollout.max_tokens} leaves no room for a prompt in the {own} tokens that "
            f"{path} can attend to",
            fatal=not engine.has_server,  # a server may be configured to go beyond its model
        )
    if config.model.lora is not None and isinstance(config.model.lora.target_modules, list):
        yield from _target_findings(config.model.lora.target_modules, module_names(path))


def own_length(model: Path) -> int:
    """Return the number of positions of a model, in tokens; 0 if the directory's config.json does not tell."""
    return num_positions(_json(model / "config.json"))


def module_names(model: Path) -> list[str]:
    """Return the names of all modules with weights, from the headers of a directory's safetensors files."""
    names = {name for file in model.glob("*.safetensors") for name in _tensor_names(file)}
    return sorted({name.rpartition(".")[0] for name in names})


def _tensor_names(file: Path) -> list[str]:
    with file.open("rb") as opened:
        # format: 8 bytes with the header's length, then the header as JSON
        head = opened.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        try:
            header = json.loads(opened.read(min(size, 100 << 20)))
        except ValueError:
            return []
    return [name for name in header if name != "__metadata__"]


def _target_findings(targets: Sequence[str], names: Sequence[str]) -> Iterator[Finding]:
    known = sorted({name.rpartition(".")[2] for name in names})
    missing = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    # without local files (a model on the hub) there are no names to compare with
    if names and missing:
        words = f"model.lora.target_modules: the model has no module {', '.join(missing)}; it has {', '.join(known)}"
        yield Finding(words, fatal=len(missing) == len(targets))


def prompt_findings(config: RunConfig, rows: "Jsonl", key: str) -> Iterator[Finding]:
    """Check the prompts of a file, as many as PROMPT_SECONDS allow: chat template, and length in tokens.

    Texts are counted as the engine gets them. Messages are counted without the chat template, which only makes them
    longer: a prompt found too long here is too long in any case.
    """
    model, engine = Path(config.model.path), config.inference.engine
    if not engine.loads_model or not (model / "tokenizer.json").is_file():
        return
    from tokenizers import Tokenizer  # imported here, since it is a native library

    tokenizer, own = Tokenizer.from_file(str(model / "tokenizer.json")), own_length(model)
    # a server may be configured to go beyond the model's positions; an engine in the actor refuses more
    hard = prompt_limit(config, 0 if engine.has_server else own)
    if hard < 1:
        return  # another check reports this
    limit = max(prompt_limit(config, own), 0) or hard
    deadline, longest, shortest, too_long, number = time.monotonic() + PROMPT_SECONDS, 0, hard + 1, 0, 0
    for number in range(1, (rows.num_examples or 0) + 1):
        prompt = rows.example(number - 1).prompt
        if not isinstance(prompt, str) and not has_chat_template(model):
            yield Finding(
                f"model.path: {model} has no chat template, but the prompt in row {number} of {rows.path} is a list of "
                "messages; use an instruct model, or text prompts (environments[].chat: false)"
            )
            return
        text = prompt if isinstance(prompt, str) else _contents(prompt)
        length = len(tokenizer.encode(text, add_special_tokens=isinstance(prompt, str)).ids)
        if not length and isinstance(prompt, str):
            yield Finding(f"{key}: row {number} of {rows.path} has an empty prompt, which has no token to continue")
            return
        longest, shortest, too_long = max(longest, length), min(shortest, length), too_long + (length > limit)
        if time.monotonic() > deadline:
            break
    if too_long:
        looked_at = number if number == rows.num_examples else f"the first {number}"
        yield Finding(
            f"{key}: {too_long} of {looked_at} prompts of {rows.path} have more than {limit} tokens (the longest "
            f"{longest}), which is what rollout.max_tokens {config.rollout.max_tokens} leaves of packer.sequence_len "
            f"{config.packer.sequence_len} and of the engine's length; they are dropped as poison",
            # fatal only if every prompt was looked at and none fits
            fatal=shortest > hard and number == rows.num_examples,
        )


def prompt_limit(config: RunConfig, own: int = 0) -> int:
    """Return the largest number of tokens for a prompt; 0 or less: there is no room for any.

    Args:
        config: configuration of the run.
        own: positions of the model; 0 if unknown.
    """
    limits = config.inference.engine.max_tokens_per_sequence().values()
    lengths = [config.packer.sequence_len, *limits, *([own] if own else [])]
    return min(lengths) - config.rollout.max_tokens


def has_chat_template(model: Path) -> bool:
    """Return whether a model's directory has a chat template, as a file or in tokenizer_config.json."""
    files = ("chat_template.jinja", "chat_template.json")
    return any((model / file).is_file() for file in files) or bool(
        _json(model / "tokenizer_config.json").get("chat_template")
    )


def _contents(messages: list[dict[str, Any]]) -> str:
    return "\n".join(turn["content"] for turn in messages if isinstance(turn["content"], str))


def column_findings(config: RunConfig, rows: "Jsonl", key: str) -> Iterator[Finding]:
    """Check a file for column names that the sampled group needs, and for rows that no message can carry."""
    if rows.num_unsendable:
        yield Finding(
            f"{key}: {rows.num_unsendable} of {rows.num_examples} rows of {rows.path} can't be sent and are dropped as "
            f"poison; the first is {rows.first_unsendable} (integers have 64 bits; write a long list as text, or keep "
            "what is large in a file and name the file in a column)",
            fatal=rows.num_unsendable > config.packer.max_drop_fraction * (rows.num_examples or 0)
            or rows.num_unsendable == rows.num_examples,
        )
    for column in sorted(rows.columns & set(ARGUMENTS)):
        yield Finding(
            f"{key}: {rows.path} has a column {column!r}, but under that name reward functions receive what was "
            "sampled; rename the column"
        )


def signature_findings(
    definition: ast.AST | None, name: str, columns: set[str], kwargs: set[str], where: str
) -> Iterator[Finding]:
    """Check whether a function accepts the keyword arguments of a call.

    Args:
        definition: definition of the function in the file's syntax tree; anything but a plain function is not checked.
        name: name of the function.
        columns: columns that all rows of a file have.
        kwargs: names of the function's configured kwargs.
        where: configuration key and file, for the error.
    """
    # a decorator may change the arguments
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef) or definition.decorator_list:
        return
    arguments = definition.args
    named = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    # defaults belong to the last of the positional arguments
    optional = [a.arg for a in arguments.args[len(arguments.args) - len(arguments.defaults) :]]
    optional += [
        a.arg for a, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value is not None
    ]
    given = {*ARGUMENTS, *columns, *kwargs}
    for missing in sorted(set(named) - set(optional) - given):
        why = "TRL's trainer_state is not passed" if missing == "trainer_state" else "the data has no such column"
        has = f"; all rows have {', '.join(sorted(columns)) or 'no column but the prompt'}"
        yield Finding(f"{where}: {name} needs {missing!r}, and {why}{has}")
    surplus = sorted({"prompts", "completions", *columns, *kwargs} - set(named))
    if arguments.kwarg is None and surplus:
        yield Finding(f"{where}: {name} does not take {', '.join(map(repr, surplus))}; add **columns to its arguments")


def definition_of(tree: ast.Module, name: str) -> ast.AST | None:
    """Return the last top-level definition of a name in a module; None if the syntax tree does not show it plainly."""
    found: ast.AST | None = None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            found = node
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            found = node.value
    return found


def machine_findings(config: RunConfig) -> Iterator[Finding]:
    """Check that there is a GPU for `model.device: cuda`."""
    if config.model.device == "cuda" and config.inference.engine.loads_model and not has_gpu():
        yield Finding("model.device: cuda, but this machine has no GPU (/dev/nvidia*); use cpu or auto")


def busy_ports(config: RunConfig) -> list[str]:
    """Return an error text for each configured port on this machine that is in use, each as `path.to.key: …`."""
    wanted: list[tuple[str, str, int]] = []
    if config.inference.port:
        wanted += [
            ("inference.port", config.inference.host, config.inference.port + i) for i in range(config.up.inference)
        ]
    if first := config.telemetry.metrics_port:
        engines = config.up.inference if config.inference.pool is None else 1
        children = 1 + config.trainer.num_ranks + engines + config.up.reward + config.up.rollout
        wanted += [("telemetry.metrics_port", config.telemetry.metrics_host, first + i) for i in range(children)]
    if config.bus.control.startswith("tcp://"):
        host, _, port = config.bus.control.removeprefix("tcp://").rpartition(":")
        wanted.append(("bus.control", host, int(port)))
    firsts = {"inference.port": config.inference.port, "telemetry.metrics_port": config.telemetry.metrics_port}
    return [
        f"{key}: {host}:{port} is in use"
        + (f" (`actors up` gives its actors the ports from {firsts[key]} on)" if port != firsts.get(key, port) else "")
        + "; another process has bound it"
        for key, host, port in wanted
        if _is_bound(host, port)
    ]


def _is_bound(host: str, port: int) -> bool:
    """Return whether an address of this machine is in use; False for an address of another machine."""
    try:
        found = socket.getaddrinfo(host.strip("[]") or "0.0.0.0", port, type=socket.SOCK_STREAM)  # noqa: S104
    except (OSError, UnicodeError):  # UnicodeError: an empty label, or one of more than 63 characters
        return False
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # as the actors do: a port of connections that have just been closed counts as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
