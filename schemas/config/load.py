"""Loading of a run's configuration: YAML file and dotted overrides to a checked `RunConfig`, or to a `ConfigError`."""

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from schemas.config.advantages import CustomAdvantageConfig
from schemas.config.data import DATA_SUFFIX, DatasetConfig
from schemas.config.environments import EnvironmentBase, PythonConfig
from schemas.config.losses import CustomLossConfig
from schemas.config.moved import with_keys_moved
from schemas.config.problems import describe
from schemas.config.resolved import RESOLVED
from schemas.config.run import RESOLVED_CONTEXT, RunConfig
from schemas.config.texts import FOLDER, locate
from schemas.errors import ConfigError

MISSING = "MISSING: "
"""Start of a text that stands for a value which `actors import` could not know."""
# NAME or OWNER/NAME on the Hugging Face hub
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read and check a run's configuration.

    Relative paths of files that the run reads are looked up next to the YAML file first, then in the current directory,
    and become absolute, so that every actor finds the same files.

    Args:
        path: the YAML file.
        overrides: items `dotted.key=value` with the value in YAML; list items by number (`environments.0.name=x`).

    Raises:
        ConfigError: all problems found, each as `path.to.key: problem, allowed values`.
    """
    path = Path(path)
    tree = _read(path)
    # only a file that a run has written may be of an earlier release; in a user's file an old key is an error
    if path.name == RESOLVED and isinstance(tree, dict):
        tree = with_keys_moved(tree)
    for override in overrides or []:
        # steps in a file written by a run follow from its epochs
        if override.startswith("trainer.max_epochs=") and path.name == RESOLVED:
            tree.get("trainer", {}).pop("max_steps", None)
        _apply(tree, override)
    folder = path.parent.absolute()
    return _resolve_paths(check_tree(tree, folder, resolved=path.name == RESOLVED), folder)


def check_tree(tree: Any, folder: Path | None = None, *, resolved: bool = False) -> RunConfig:
    """Return the configuration of a tree of plain values. Paths stay as given.

    Args:
        tree: map of sections.
        folder: folder of the configuration file, for texts in files; None: the current directory.
        resolved: True for values written by a run: the steps stand next to the epochs.

    Raises:
        ConfigError: all problems found, each as `path.to.key: problem, allowed values`.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"run: must be a map of sections, got {type(tree).__name__}")
    if missing := _missing(tree):
        raise ConfigError(*missing)
    try:
        context = {RESOLVED_CONTEXT: resolved, FOLDER: folder or Path.cwd()}
        return RunConfig.model_validate(tree, context=context)
    except ValidationError as error:
        # `from None`: pydantic's own text would repeat the problems with class names
        problems = [describe(problem) for problem in error.errors(include_url=False)]
        raise ConfigError(*[line for problem in problems for line in problem.splitlines()]) from None


def _missing(node: Any, path: str = "") -> list[str]:
    """Return a line for each value that an import left open."""
    if isinstance(node, str) and node.startswith(MISSING):
        return [f"{path}: is missing: {node.removeprefix(MISSING)}"]
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [line for key, value in items for line in _missing(value, f"{path}.{key}" if path else str(key))]


class _Loader(yaml.SafeLoader):
    """YAML loader for two cases of PyYAML: a repeated key is an error, and 1e-5 is a number instead of text."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the node of a map.

        Raises:
            MarkedYAMLError: a key occurs twice.
        """
        node = super().compose_mapping_node(anchor)
        first: dict[str, yaml.ScalarNode] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            earlier = first.setdefault(key.value, key)
            # PyYAML itself would silently take the last of the two
            if earlier is not key:
                line = earlier.start_mark.line + 1
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} stands in line {line} already", problem_mark=key.start_mark
                )
        return node


class _Dumper(yaml.SafeDumper):
    """YAML writer whose texts are read back by `_Loader`: text such as "1e-5" is quoted."""


for _class in (_Loader, _Dumper):
    # YAML 1.1 wants a dot in a float: PyYAML alone reads the learning rate 1e-6 as text
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def parse(text: str) -> Any:
    """Return the value of a YAML text; 1e-5 is a number."""
    return yaml.load(text, _Loader)  # noqa: S506 - it is a SafeLoader


def dump(value: Any) -> str:
    """Return a value as YAML on one line, which `parse` reads back."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _read(path: Path) -> Any:
    try:
        # an empty file is an empty map, so that the error names the keys that are required
        return parse(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; save it in that encoding") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{path}: is not YAML: {error.reason}") from None
    except yaml.MarkedYAMLError as error:
        mark, context = error.problem_mark, ""
        assert mark is not None
        # PyYAML's own text speaks of a character that can't start a token
        if "'\\t'" in str(error.problem):
            raise ConfigError(f"{path}: line {mark.line + 1}: a tab; YAML indents with spaces") from None
        if error.context and error.context_mark:
            context = f"{error.context} of line {error.context_mark.line + 1}, "
        place = f"line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{path}: {place}: {context}{error.problem}") from None


def _apply(tree: Any, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{override}: an override is written path.to.key=value")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        if isinstance(node, list):
            node = node[_index(node, parent, key)]
            continue
        if not isinstance(node, dict):
            raise ConfigError(f"{key}: {parent!r} is inside a plain value")
        # a section that is missing, or empty (`trainer:` with nothing below), is made for its key
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
    try:
        value = parse(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: {text!r} is not a YAML value") from None
    if isinstance(node, list):
        node[_index(node, last, key)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"{key}: {last!r} is inside a plain value")


def _index(node: list[Any], name: str, key: str) -> int:
    if not name.isdigit() or int(name) >= len(node):
        raise ConfigError(f"{key}: {name!r} is not an item of a list with {len(node)} items, counted from 0")
    return int(name)


def _resolve_paths(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration with absolute paths, so that actors started in other directories find the same files."""
    environments = []
    for one in config.environments:
        update = {key: str(locate(value, folder)) for key, value in one.files.values()}
        if isinstance(one, DatasetConfig):
            update |= {key: _locate_data(path, folder) for key, path, _ in one.sources.values()}
            update |= {"filter": _locate_code(one.filter, folder)} if one.filter else {}
        if isinstance(one, PythonConfig) and one.path:
            update |= {"path": _locate_code(one.path, folder)}
        if isinstance(one, EnvironmentBase):
            update |= {"python": _locate_python(one.python, folder)}
            update |= {"directory": str(locate(one.directory, folder))} if one.directory else {}
        environments.append(one.model_copy(update=update))
    tls = {key: getattr(config.inference, key) for key in ("tls_cert", "tls_key")}
    sessions = config.rollout.sessions
    session_tls = {key: str(locate(value, folder)) for key in tls if (value := getattr(sessions, key))}
    trainer, teacher, sft = config.trainer, config.trainer.teacher, config.trainer.sft
    trained = {
        "loss": _with_code(trainer.loss, folder) if isinstance(trainer.loss, CustomLossConfig) else trainer.loss,
        "teacher": teacher and teacher.model_copy(update={"path": _locate_model(teacher.path, folder)}),
        "sft": sft and sft.model_copy(update={"path": str(locate(sft.path, folder))}),
    }
    reward = config.reward
    located: dict[str, Any] = {"functions": [_with_code(function, folder) for function in reward.functions]}
    located["steps"] = _with_code(reward.steps, folder) if reward.steps and reward.steps.path else reward.steps
    located["functions"] = [
        _with_python(function, folder).model_copy(
            update={"model": function.model and _locate_model(function.model, folder)}
        )
        for function in located["functions"]
    ]
    located["steps"] = located["steps"] and _with_python(located["steps"], folder)
    if isinstance(reward.advantage, CustomAdvantageConfig):
        located["advantage"] = _with_code(reward.advantage, folder)
    exact_match = config.eval.exact_match and _locate_code(config.eval.exact_match, folder)
    return config.model_copy(
        update={
            "output_dir": str(config.output),
            "bus": config.bus.model_copy(update={"keys": config.bus.keys and str(locate(config.bus.keys, folder))}),
            "model": config.model.model_copy(update={"path": _locate_model(config.model.path, folder)}),
            "environments": environments,
            "rollout": config.rollout.model_copy(
                update={"sessions": config.rollout.sessions.model_copy(update=session_tls)}
            ),
            "inference": config.inference.model_copy(
                update={key: str(locate(path, folder)) for key, path in tls.items() if path}
            ),
            "trainer": trainer.model_copy(update=trained),
            "reward": reward.model_copy(update=located),
            "eval": config.eval.model_copy(update={"exact_match": exact_match}),
            "callbacks": [_with_code(one, folder) for one in config.callbacks],
        }
    )


def _locate_model(path: str, folder: Path) -> str:
    """Return a model's path, absolute for a directory and unchanged for a name on the Hugging Face hub.

    If a folder `a` exists, `a/b` means a directory in it, even a missing one: a typo must not become a download.
    """
    located = locate(path, folder)
    owner, slash, _ = path.partition("/")
    is_hub_name = _HUB_NAME.fullmatch(path) and not (slash and locate(owner, folder).is_dir())
    return path if is_hub_name and not located.exists() else str(located)


def _locate_data(path: str, folder: Path) -> str:
    """Return the path of files, absolute, or unchanged the name of a data set on the Hugging Face hub (OWNER/NAME).

    If a folder `a` exists, `a/b` means a file in it, even a missing one. A name with the suffix of a data file is a
    file as well.
    """
    magic = re.search(r"[*?[]", path)
    if magic:
        # a pattern exists where its folder does
        head, _, tail = path[: magic.start()].rpartition("/")
        return str(locate(f"{head}/" if head or path.startswith("/") else ".", folder) / (tail + path[magic.start() :]))
    located, (owner, slash, name) = locate(path, folder), path.partition("/")
    is_file = DATA_SUFFIX.search(name) or located.exists() or locate(owner, folder).is_dir()
    return path if slash and _HUB_NAME.fullmatch(path) and not is_file else str(located)


def _locate_code(path: str, folder: Path) -> str:
    file, colon, function = path.rpartition(":")
    return f"{locate(file, folder)}:{function}" if colon and file.endswith(".py") else path


def _locate_python(python: str, folder: Path) -> str:
    """Return an interpreter's path. A bare name stays: it is looked up in PATH."""
    return str(locate(python, folder)) if "/" in python else python


def _with_python(section: Any, folder: Path) -> Any:
    return section.model_copy(update={"python": _locate_python(section.python, folder)})


def _with_code(section: Any, folder: Path) -> Any:
    return section.model_copy(update={"path": _locate_code(section.path, folder)})
