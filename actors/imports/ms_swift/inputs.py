"""What ms-swift's files say: the command `swift rlhf` in a shell script, or a YAML file of its arguments."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.imports.files import map_of, text_of
from actors.imports.job import Unreadable
from actors.imports.keys import flat
from actors.imports.ms_swift import versions
from actors.imports.shell import UNKNOWN, Command, commands
from actors.imports.words import items, options, typed, without_negations
from schemas.errors import ConfigError

ENVIRONMENT = ("NPROC_PER_NODE", "NNODES", "CUDA_VISIBLE_DEVICES", "MAX_PIXELS", "VIDEO_MAX_PIXELS")
_ALIASES = {"train_type": "tuner_type", "sft_type": "tuner_type", "tensor_parallel_size": "vllm_tensor_parallel_size"}
_ALIASES |= {"model_id_or_path": "model", "evaluation_strategy": "eval_strategy"}
_ALIASES |= {"lora_target_modules": "target_modules"}
_OF_ENGINE = ("tensor_parallel_size", "data_parallel_size", "max_model_len", "gpu_memory_utilization", "enforce_eager")
_LAUNCHERS = {"nproc_per_node": "NPROC_PER_NODE", "nnodes": "NNODES", "num_processes": "NPROC_PER_NODE"}


@dataclass
class Inputs:
    """Everything given."""

    given: dict[str, Any]
    """Values by key; unreadable ones too."""
    names: dict[str, str] = field(default_factory=dict)
    """Names in the input of keys that have another name now."""
    folder: Path = Path()
    """Folder against which files that the command names are looked up."""
    is_shell: bool = False
    """Whether a shell script was read, which says how many processes there are."""
    version: tuple[int, int] = versions.NEWEST
    """Release whose defaults hold."""
    notes: list[str] = field(default_factory=list)
    """Remarks."""


def gather(files: list[Path], words: list[str], version: str | None) -> Inputs:
    """Return all inputs.

    Args:
        files: scripts, and YAML of arguments.
        words: further words of the command.
        version: release that the user names, or None.

    Raises:
        ConfigError: a file can't be read, or has no command that is known.
    """
    values: dict[str, Any] = {}
    found = Inputs({}, folder=files[0].parent if files else Path())
    for file in files:
        if file.suffix in (".yaml", ".yml", ".json"):
            values |= _of_yaml(file, found)
        else:
            values |= _of_shell(file, found)
    values |= options(words)
    if not values:
        raise ConfigError("no file has arguments of `swift rlhf`; give a shell script or a YAML file")
    found.version, sign = versions.release_of(version, values)
    if sign:
        name = ".".join(map(str, found.version))
        text = f"{sign}: only releases up to {name} read it, so its defaults hold"
        if sign == versions.OF_THREE[0]:
            text = (
                f"{sign} is a word of 3.x, which 4.1 no longer takes: the defaults of {name} hold (top_p 0.9, top_k 50)"
            )
        found.notes.append(f"{text}; --from-version says others")
    _type(values, found, found.version)
    kind = found.given.get("rlhf_type", "dpo")
    if kind != "grpo" and not isinstance(kind, Unreadable):
        raise ConfigError(f"rlhf_type: {kind} is no reinforcement learning with rewards; only grpo is translated")
    return found


def _of_yaml(file: Path, found: Inputs) -> dict[str, Any]:
    tree = map_of(file, found.notes)
    for name, value in (tree.pop("ENV", None) or {}).items():
        found.given[str(name)] = str(value)
    return tree


def _of_shell(file: Path, found: Inputs) -> dict[str, Any]:
    """Return the arguments of the one `swift rlhf` of a script."""
    found.is_shell = True
    trainers: list[tuple[Command, list[str]]] = []
    values: dict[str, Any] = {}
    for command in commands(text_of(file), file):
        kind, words = _swift(command)
        if kind == "rlhf":
            trainers.append((command, words))
        elif kind == "rollout":
            for key, value in options(words).items():
                # before 4.0 the server's keys had no prefix
                name = f"rollout.vllm_{key}" if key in _OF_ENGINE else f"rollout.{key}"
                values[name] = value
                found.names |= {name: f"rollout.{key}"} if key in _OF_ENGINE else {}
        elif kind is not None:
            found.notes.append(f"the command swift {kind} of {file.name} is left out")
    if not trainers:
        raise ConfigError(f"{file}: has no command `swift rlhf`")
    if len(trainers) > 1:
        raise ConfigError(f"{file}: has {len(trainers)} commands `swift rlhf`; give a file with one of them")
    command, words = trainers[0]
    for name, value in command.environment.items():
        if name in ENVIRONMENT:
            found.given[name] = Unreadable(f"${name}") if UNKNOWN in value else value
        else:
            found.given[f"env.{name}"] = value.replace(UNKNOWN, "…")
    given = options(words)
    path = given.pop("config", None)
    if path is not None:
        values |= _of_yaml(found.folder / str(path), found)
        found.given["config"] = path
    return values | given


def _swift(command: Command) -> tuple[str | None, list[str]]:
    """Return the subcommand of swift and its words; the processes of torchrun become environment variables."""
    words = command.words
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        launched = next((one for one in ("rlhf", "rollout", "sft") if name in (f"{one}.py", f"swift.cli.{one}")), None)
        is_swift = name in ("swift", "megatron") and index + 1 < len(words) and index == 0
        if is_swift and name == "megatron":
            return f"megatron {words[1]}", []
        if not (is_swift or (launched and index > 0)):
            continue
        for before, after in itertools.pairwise(words[: index + 1]):
            key, _, value = before.lstrip("-").replace("-", "_").partition("=")
            if key in _LAUNCHERS:
                command.environment[_LAUNCHERS[key]] = value or after
        kind, rest = (words[1], words[2:]) if is_swift else (str(launched), words[index + 1 :])
        if rest and rest[0].endswith((".yaml", ".yml", ".json")):
            rest = ["--config", *rest]
        return kind, rest
    return None, []


def _type(values: dict[str, Any], found: Inputs, version: tuple[int, int]) -> None:
    """Add values of the types that ms-swift's parser gives them, under the names of today."""
    known = versions.defaults(version) | {"bf16": False, "fp16": False}
    values = without_negations(values, known)
    for given, value in values.items():
        key = _ALIASES.get(given, given)
        if key in found.given:
            raise ConfigError(f"{given}: means {key}, which is given too; leave one of them out")
        if key != given:
            found.names[key] = given
        # a part that only the shell would know makes the whole value unknown
        is_open = UNKNOWN in str(value)
        if is_open:
            found.given[key] = Unreadable(str(value).replace(UNKNOWN, "$…"))
        elif key in versions.LISTS and value is True:
            raise ConfigError(f"{given}: takes one value or more, as in ms-swift; give some, or leave it out")
        elif key in versions.LISTS and value is not None:
            found.given[key] = items(key, value, numeric=key == "reward_weights")
        elif isinstance(value, list | tuple) and key not in known:
            found.given[key] = value
        elif key == "columns":
            found.given[key] = typed(key, value, None)
        else:
            found.given[key] = typed(key, value, known.get(key), numeric=key in versions.NUMBERS)
    if isinstance(found.given.get("columns"), dict):
        found.given |= flat({"columns": found.given.pop("columns")})
    if isinstance(kwargs := found.given.get("lr_scheduler_kwargs"), dict):
        del found.given["lr_scheduler_kwargs"]
        found.given |= flat({"lr_scheduler_kwargs": kwargs})
