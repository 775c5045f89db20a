"""From a YAML file and dotted overrides to a checked `RunConfig`, or to problems said in words."""

import difflib
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from schemas.config.run import RunConfig
from schemas.errors import ConfigError

_ENVIRONMENT_PATHS = ("path", "eval_path")


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run's configuration.

    Args:
        path: the YAML file. Paths inside it to data and reward files are relative to its folder.
        overrides: `dotted.key=value` each, the value in YAML; list items by number (`environments.0.name=x`).

    Raises:
        ConfigError: every problem found, each as `path.to.key: what is wrong, what is allowed`.
    """
    path = Path(path)
    tree = _read(path)
    for override in overrides or []:
        _apply(tree, override)
    config = check_tree(tree)
    return _resolve_paths(config, path.parent.absolute())


def check_tree(tree: Any) -> RunConfig:
    """A configuration from plain values.

    Raises:
        ConfigError: every problem found.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"run: must be a map of sections, got {type(tree).__name__}")
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = [_describe(problem) for problem in error.errors(include_url=False)]
        raise ConfigError(*[line for problem in problems for line in problem.splitlines()]) from None


def dump_config(config: RunConfig) -> str:
    """YAML of the whole configuration, defaults included; loads to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None


def _apply(tree: Any, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override}: an override is written path.to.key=value")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        node = _child(node, parent, key)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: {text!r} is not a YAML value") from None
    if isinstance(node, list):
        node[_index(node, last, key)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"{key}: {last!r} is inside a plain value")


def _child(node: Any, name: str, key: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, name, key)]
    if not isinstance(node, dict):
        raise ConfigError(f"{key}: {name!r} is inside a plain value")
    if node.get(name) is None:
        node[name] = {}
    return node[name]


def _index(node: list[Any], name: str, key: str) -> int:
    if not name.isdigit() or int(name) >= len(node):
        raise ConfigError(f"{key}: {name!r} is not an item of a list with {len(node)} items, counted from 0")
    return int(name)


def _describe(problem: Any) -> str:
    """One pydantic problem as `path.to.key: what is wrong, what is allowed`."""
    where = _without_union_tags(problem["loc"])
    dotted = ".".join(str(part) for part in where) or "run"
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{dotted}: no such key{_nearest(where)}"
    if kind == "missing":
        return f"{dotted}: is required"
    if kind == "union_tag_invalid":
        return f"{dotted}.type: {context['tag']!r} is not one of {context['expected_tags']}{_closest(context)}"
    if kind == "union_tag_not_found":
        return f"{dotted}.type: is required"
    if kind == "model_type":
        return f"{dotted}: must be a map of keys, got {problem['input']!r}"
    message = problem["msg"].removeprefix("Value error, ")
    seen = "" if isinstance(problem["input"], dict | list | BaseModel) else f", got {problem['input']!r}"
    return f"{dotted}: {message[0].lower()}{message[1:]}{seen}" if where else message


def _without_union_tags(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The path as a user writes it: pydantic puts the tag of a discriminated union between key and field."""
    kept: list[str | int] = []
    for part in location:
        fields, tags = _fields_at(tuple(kept))
        if (part in tags and part not in fields) or _is_member_of_union(part):
            continue
        kept.append(part)
    return tuple(kept)


def _is_member_of_union(part: str | int) -> bool:
    """Whether pydantic names a member of a plain union here, like `list[str]`."""
    return isinstance(part, str) and part.endswith("]")


def _nearest(where: tuple[str | int, ...]) -> str:
    """The declared key that the unknown one resembles, or all of the section's keys."""
    *parents, last = where
    allowed = sorted(_fields_at(tuple(parents))[0])
    close = difflib.get_close_matches(str(last), allowed, n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else f", allowed are {', '.join(allowed)}"


def _closest(context: dict[str, Any]) -> str:
    tags = [tag.strip(" '") for tag in str(context["expected_tags"]).split(",")]
    close = difflib.get_close_matches(str(context["tag"]), tags, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _fields_at(where: tuple[str | int, ...]) -> tuple[set[str], set[str]]:
    """(keys, union tags) that are declared at a path; for a union the keys of all its members."""
    models: list[type[BaseModel]] = [RunConfig]
    for part in where:
        if isinstance(part, int):
            continue
        annotations = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [found for annotation in annotations for found in _models_in(annotation)]
    fields = {name for model in models for name in model.model_fields}
    tags = {str(model.model_fields["type"].default) for model in models if "type" in model.model_fields}
    return fields, tags


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is None and not isinstance(annotation, Union.__class__):
        return []
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _resolve_paths(config: RunConfig, folder: Path) -> RunConfig:
    """Make paths of data, reward files and a local model absolute, so that every actor finds them wherever it runs."""
    environments = [_resolve_environment(environment, folder) for environment in config.environments]
    functions = [f.model_copy(update={"path": _absolute_code(f.path, folder)}) for f in config.reward.functions]
    local_model = folder / config.model.path
    model_path = str(local_model) if (local_model / "config.json").exists() else config.model.path
    return config.model_copy(
        update={
            "output_dir": str(config.output),
            "model": config.model.model_copy(update={"path": model_path}),
            "environments": environments,
            "reward": config.reward.model_copy(update={"functions": functions}),
            "eval": config.eval.model_copy(update={"exact_match": _absolute_code(config.eval.exact_match, folder)}),
        }
    )


def _resolve_environment(environment: Any, folder: Path) -> Any:
    values = {key: getattr(environment, key, None) for key in _ENVIRONMENT_PATHS}
    return environment.model_copy(update={key: str(folder / value) for key, value in values.items() if value})


def _absolute_code(path: str, folder: Path) -> str:
    file, colon, function = path.rpartition(":")
    return f"{folder / file}:{function}" if colon and file.endswith(".py") else path
