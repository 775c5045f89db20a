"""What TRL's files say: keys of a YAML file, of accelerate's file, of a script and of the command line, as one map."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.imports.files import map_of, text_of
from actors.imports.job import Unreadable
from actors.imports.keys import flat
from actors.imports.syntax import Call, Imported, Local, Method, Parsed, Script
from actors.imports.trl import versions
from actors.imports.words import items, options, typed, without_negations
from schemas.errors import ConfigError

TRAINERS = {"GRPOTrainer": "grpo", "RLOOTrainer": "rloo", "AsyncGRPOTrainer": "async"}
_CONFIGS = {"GRPOConfig": "grpo", "RLOOConfig": "rloo", "AsyncGRPOConfig": "async"}
_SIGNATURE = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
_ACCELERATE = ("compute_environment", "distributed_type", "main_training_function", "machine_rank")
_SAME_MODEL = ("to", "cuda", "cpu", "eval", "train", "bfloat16", "float", "requires_grad_")
_LAUNCHER = ("accelerate_config", "config_file", "config")


@dataclass
class Inputs:
    """Everything given, and whose trainer reads it."""

    trainer: str
    """`grpo`, `rloo` or `async`."""
    given: dict[str, Any]
    """Values by dotted key; unreadable ones too."""
    files: list[Path]
    """Files."""
    script: Path | None = None
    """Script, if there is one."""
    followed: Script | None = None
    """The script, followed."""
    trainer_call: Call | None = None
    """Call of the trainer."""
    uses_model_arguments: bool = True
    """Whether ModelConfig's keys of adapters and quantisation are read."""
    own_options: set[str] = field(default_factory=set)
    """Options of the script's own parser."""
    notes: list[str] = field(default_factory=list)
    """Remarks."""
    names: dict[str, str] = field(default_factory=dict)
    """Names in the input of keys that have another name today."""


def gather(files: list[Path], words: list[str], version: tuple[int, int]) -> Inputs:
    """Return all inputs.

    Raises:
        ConfigError: a file can't be read, or the files do not go together.
    """
    command = options(words)
    commands = [file.name for file in files if file.name in ("grpo", "rloo") and not file.exists()]
    # `trl rloo --config x.yaml`: the subcommand stands among the files
    paths = [file for file in files if file.name not in commands or file.exists()]
    # files that the command line itself names
    paths += [Path(str(command[key])) for key in _LAUNCHER if key in command and Path(str(command[key])).is_file()]
    values: dict[str, Any] = {}
    accelerate: dict[str, Any] = {}
    notes: list[str] = []
    scripts = [path for path in paths if path.suffix == ".py"]
    if len(scripts) > 1:
        raise ConfigError(f"{scripts[1]}: is a second script; give one")
    for path in paths:
        if path in scripts:
            continue
        tree = map_of(path, notes)
        # both files have keys such as num_processes and debug, so accelerate's keep a name of their own
        if any(key in tree for key in _ACCELERATE):
            accelerate |= flat({"accelerate": tree})
        else:
            values |= tree
    values |= without_negations(command, versions.defaults(_trainer_of(values | command, commands), versions.NEWEST))
    if not (values or scripts):
        raise ConfigError("no file has keys of a trainer; give a YAML file of `trl grpo`, or a script")
    if scripts:
        found = _of_script(scripts[0], values, version)
        found.files = files
    else:
        trainer = _trainer_of(values, commands)
        values, names = versions.of_today(values, trainer)
        found = Inputs(trainer, typed_values(values, trainer, version), files, names=names)
    _count_episodes(found)
    found.given |= accelerate
    found.notes += notes
    return found


def _count_episodes(found: Inputs) -> None:
    """Turn episodes of the first RLOOTrainer to updates, as TRL 0.22 to 0.24 do."""
    episodes = found.given.get("max_steps")
    if found.names.get("max_steps") != "total_episodes" or isinstance(episodes, Unreadable):
        return
    accumulation = found.given.get("gradient_accumulation_steps", 1)
    found.given["max_steps"] = episodes // accumulation
    found.notes.append(
        f"total_episodes {episodes} ÷ gradient_accumulation_steps {accumulation} are max_steps in TRL 0.22 to 0.24; "
        "earlier releases, with an RLOOTrainer of another kind, counted completions"
    )


def _trainer_of(values: dict[str, Any], commands: list[str]) -> str:
    if commands:
        return commands[0]
    if any(key in values for key in ("normalize_advantages", "reward_clip_range", "rloo_k")):
        return "rloo"
    return "async" if any(key in values for key in ("max_staleness", "weight_sync_steps", "queue_maxsize")) else "grpo"


def typed_values(values: dict[str, Any], trainer: str, version: tuple[int, int]) -> dict[str, Any]:
    """Return flat values of the types that TRL's parser gives them."""
    defaults = versions.defaults(trainer, version) | {"bf16": False, "num_processes": None}
    found: dict[str, Any] = {}
    for key, value in values.items():
        # lists of keys without a default here pass as they are
        is_list = isinstance(value, list | tuple) and (key in versions.OTHER_LISTS or key not in defaults)
        if isinstance(value, Unreadable) or is_list:
            found[key] = value
        elif key in versions.LISTS and value is not None:
            found[key] = items(key, value, numeric=key == "reward_weights")
        else:
            found[key] = typed(key, value, defaults.get(key), numeric=key in versions.NUMBERS)
    return flat(found)


def _of_script(path: Path, values: dict[str, Any], version: tuple[int, int]) -> Inputs:
    """Return the inputs of a script with the options of its command line."""
    text = text_of(path)
    defaults = versions.defaults(_trainer_in(text), version)
    plain = {
        one: value
        if isinstance(value, list | tuple)
        else typed(one, value, defaults.get(one), numeric=one in versions.NUMBERS)
        for one, value in values.items()
    }
    # TRL's getters give nothing where their switch is off
    is_quantized = any(plain.get(key) is True for key in ("load_in_4bit", "load_in_8bit"))
    getters = {} if is_quantized else {"get_quantization_config": None, "get_kbit_device_map": None}
    if plain.get("use_peft", False) is False:
        getters["get_peft_config"] = None
    script = Script(text, path.name, plain, defaults, getters)
    calls = [(call, name) for call in script.calls if (name := _known_name(call, script, TRAINERS)) is not None]
    configs = [(call, name) for call in script.calls if (name := _known_name(call, script, _CONFIGS)) is not None]
    if not calls and not configs:
        raise ConfigError(f"{path}: calls none of {', '.join(TRAINERS)}; give the script that does")
    notes = []
    if len(calls) > 1:
        lines = ", ".join(str(call.line) for call, _ in calls)
        notes.append(f"the script makes several trainers (lines {lines}); the last one is translated")
    call, name = calls[-1] if calls else (Call(Unreadable(""), [], {"args": configs[-1][0]}, "", 0), configs[-1][1])
    trainer = TRAINERS.get(name) or _CONFIGS[name]
    if calls and call.name != name:
        notes.append(f"{call.name} is a class of the script, taken for the {name} that it extends")
    parts = dict(zip(_SIGNATURE, call.args, strict=False)) | call.kwargs
    if call.is_partial:
        notes.append("arguments behind ** of the trainer can't be read")
    given, uses_model_arguments = _arguments_of(parts, plain, trainer, notes)
    given, names = versions.of_today(given, trainer)
    found = Inputs(trainer, typed_values(given, trainer, version), [path], path, script, call, names=names)
    found.uses_model_arguments, found.notes = uses_model_arguments, notes
    found.own_options = {key for key in plain if key not in given}
    for key in found.own_options:
        found.given[key] = plain[key]
    return found


def _trainer_in(text: str) -> str:
    return "async" if "AsyncGRPO" in text else "rloo" if "RLOOTrainer" in text or "RLOOConfig" in text else "grpo"


def _known_name(call: Call, script: Script, names: dict[str, str]) -> str | None:
    """Return the class of TRL that a call makes, itself or by a class of the script that extends it."""
    if isinstance(call.function, Imported) and call.name in names:
        return call.name
    if isinstance(call.function, Local):
        for base in getattr(call.function.node, "bases", []):
            last = getattr(base, "id", getattr(base, "attr", ""))
            if last in names:
                return str(last)
    return None


def _arguments_of(
    parts: dict[str, Any], plain: dict[str, Any], trainer: str, notes: list[str]
) -> tuple[dict[str, Any], bool]:
    """Return keys of a trainer's arguments, and whether ModelConfig's keys of adapters count."""
    arguments = parts.pop("args", None)
    given = _configuration_of(arguments, plain, trainer, notes)
    model = parts.pop("model", None)
    if isinstance(model, Call) and model.name == "get_peft_model":
        model, adapter, *_ = [*model.args, None, None]
        parts.setdefault("peft_config", adapter)
    given |= _model_of(model, plain)
    uses = isinstance(arguments, Parsed)
    for name, maker in (("peft_config", "LoraConfig"), ("quantization_config", "BitsAndBytesConfig")):
        value = parts.pop(name, None)
        if isinstance(value, Call) and value.name == maker:
            given |= flat({name: {key: plain_value(one) for key, one in value.kwargs.items()} or value.source})
            uses = False
        elif not isinstance(value, Call) or value.name != f"get_{name}":
            given |= {name: plain_value(value)} if value is not None else {}
            # without get_peft_config the script does not read ModelConfig's adapter
            uses = uses and name != "peft_config"
    for name, value in parts.items():
        if value is not None:
            given[name] = plain.get(name, _shown(value))
    return given, uses


def _configuration_of(arguments: Any, plain: dict[str, Any], trainer: str, notes: list[str]) -> dict[str, Any]:
    """Return the keys of the trainer's configuration."""
    if isinstance(arguments, Parsed):
        return plain | {key: plain_value(value) for key, value in arguments.attributes.items()}
    if isinstance(arguments, Call):
        given = {key: plain_value(value) for key, value in arguments.kwargs.items()}
        if arguments.args:
            given["output_dir"] = plain_value(arguments.args[0])
        if arguments.is_partial:
            notes.append("arguments behind ** of the configuration can't be read; give them as --KEY VALUE")
        # words of the command line complete what the script computes
        known = versions.defaults(trainer, versions.NEWEST)
        return given | {key: value for key, value in plain.items() if key in known or key in given}
    if arguments is not None:
        notes.append("the configuration of the trainer can't be read; give its keys as --KEY VALUE")
        return dict(plain)
    return {}


def _model_of(model: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a model: its name, and the arguments with which the script loads it."""
    if "model" in plain:
        return {"model": plain["model"]}
    # `.to("cuda")` and the like give the same model
    while isinstance(model, Call) and isinstance(model.function, Method) and model.name in _SAME_MODEL:
        model = model.function.base
    if not (isinstance(model, Call) and model.name == "from_pretrained"):
        is_option = isinstance(model, str) and model == plain.get("model_name_or_path")
        return {} if model is None or is_option else {"model": plain_value(model)}
    name = model.args[0] if model.args else model.kwargs.get("pretrained_model_name_or_path")
    found = {"model": plain_value(name)}
    for key, value in model.kwargs.items():
        if isinstance(value, Call) and value.name == "BitsAndBytesConfig":
            found |= flat({"quantization_config": {one: plain_value(other) for one, other in value.kwargs.items()}})
        elif key != "pretrained_model_name_or_path":
            found[f"model_init_kwargs.{key}"] = plain_value(value)
    return found


def plain_value(value: Any) -> Any:
    """Return a value of a script as a plain one: `torch.bfloat16` is its name; what can't be read is `Unreadable`."""
    match value:
        case Imported(path):
            return path.rpartition(".")[2].lower()
        case Call():
            return Unreadable(value.source)
        case Local():
            return Unreadable(value.name or "a lambda")
        case Method():
            return Unreadable(value.name)
        case Parsed():
            return Unreadable("options of the command line")
        case dict():
            return {str(key): plain_value(one) for key, one in value.items()}
        case list() | tuple():
            values = [plain_value(one) for one in value]
            # one item that can't be read makes the list so
            return next((one for one in values if isinstance(one, Unreadable)), values)
    return value


def _shown(value: Any) -> Any:
    """Return an argument that is no plain value, such as a list of functions, as short text."""
    match value:
        case list() | tuple():
            return ", ".join(str(_shown(one)) for one in value)
        case Imported(path):
            return path
        case Local():
            return value.name or "lambda"
        case Call() | Unreadable():
            return value.source
        case Method():
            return value.name
        case dict():
            return ", ".join(f"{key}: {_shown(one)}" for key, one in value.items())
    return value
