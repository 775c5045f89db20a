"""What else can be wrong with a run than its configuration: folders, files and functions that it names.

Found before anything starts, without GPU, model and network. No code of the user's runs here: where it is imported is
the reward actor's affair (DESIGN §7), so a function in a file is looked for in its syntax tree, and one of a package
not at all.
"""

import ast
import difflib
import inspect
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from actors.engines.access import api_key, server_tls
from actors.rewards.builtin import BUILTIN
from actors.rewards.load import ARGUMENTS, load_function
from schemas.config import RunConfig
from schemas.config.actors import FakeEngineConfig
from schemas.config.advantages import CustomAdvantageConfig
from schemas.config.data import JsonlConfig, RewardFunctionConfig, Split
from schemas.config.losses import CustomLossConfig
from schemas.config.optimizers import AdamW8bitConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from actors.environments.jsonl import Jsonl

MODEL_FILES = ("config.json", "tokenizer.json")
"""Of a model's directory: those without which no actor can begin."""
EXACT_MATCH = "eval.exact_match"


def preflight(config: RunConfig, *, starts: bool = True) -> list[str]:
    """Look at everything outside the configuration that it relies on.

    Args:
        starts: whether the run starts here and now. A configuration is as good on a machine where the data is not.

    Returns:
        files, packages and programs that are missing, each as `path.to.key: …`; with `starts` they are problems.

    Raises:
        ConfigError: every problem found, each as `path.to.key: what is wrong, what is allowed`.
    """
    files = [(key, path) for key, path in _data_files(config) if not path.exists()]
    packages = [(key, name, extra) for key, name, extra in _packages(config) if find_spec(name) is None]
    packages += [(key, name, name) for key, name in _programs(config) if shutil.which(name) is None]
    looks = (_model, _folders, _keys, _functions, _rows, _supervised)
    problems = [problem for look in looks for problem in look(config)]
    if starts:
        problems += [f"{key}: there is no file {path}" for key, path in files]
        problems += [f"{key}: needs {name}, which is not installed; install {extra}" for key, name, extra in packages]
    if problems:
        raise ConfigError(*problems)
    return [f"{key}: {path} is not here; `actors up` needs it" for key, path in files] + [
        f"{key}: {name} is not installed here; the trainer needs it, install {extra}" for key, name, extra in packages
    ]


def _data_files(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """By key: files with rows."""
    for environment in config.environments:
        if isinstance(environment, JsonlConfig):
            yield "environments[].path", Path(environment.path)
            if environment.eval_path:
                yield "environments[].eval_path", Path(environment.eval_path)
    if config.trainer.sft is not None:
        yield "trainer.sft.path", Path(config.trainer.sft.path)


def _packages(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """By key: what not every installation has, and what brings it."""
    if isinstance(config.inference.engine, FakeEngineConfig):
        return
    if config.model.lora is not None:
        yield "model.lora", "peft", "grpo-actors[lora]"
    if config.model.quantization is not None:
        yield "model.quantization", "accelerate", "grpo-actors[bnb]"
        yield "model.quantization", "bitsandbytes", "grpo-actors[bnb]"
    if isinstance(config.trainer.optimizer, AdamW8bitConfig):
        yield "trainer.optimizer.type", "bitsandbytes", "grpo-actors[bnb]"
    if config.model.attention == "flash":
        yield "model.attention", "flash_attn", "flash-attn, or take auto"


def _programs(config: RunConfig) -> Iterator[tuple[str, str]]:
    """By key: what torch calls."""
    if config.model.compile and not isinstance(config.inference.engine, FakeEngineConfig):
        yield "model.compile", os.environ.get("CXX", "g++")


def _model(config: RunConfig) -> Iterator[str]:
    """A directory must hold a model; whether the hub knows a name is not asked."""
    if isinstance(config.inference.engine, FakeEngineConfig):
        return
    teacher = config.trainer.teacher
    for key, path in (("model.path", config.model.path), ("trainer.teacher.path", teacher.path if teacher else "")):
        folder = Path(path)
        if not folder.is_absolute():
            continue
        if not folder.is_dir():
            yield (
                f"{key}: there is no folder {folder}; a relative path is looked for beside the configuration file, "
                "then where the command is given; a name on the hub reads organisation/model"
            )
        else:
            yield from (f"{key}: {folder} has no {name}" for name in MODEL_FILES if not (folder / name).is_file())


def _folders(config: RunConfig) -> Iterator[str]:
    """Those that the run writes to must be there, or there must be a place to make them."""
    folders = {"output_dir": config.output}
    if config.ledger.path:
        folders["ledger.path"] = config.ledger_path.parent
    if config.weights.directory:
        folders["weights.directory"] = Path(config.weights.directory).absolute()
    for key, folder in folders.items():
        nearest = next(place for place in (folder, *folder.parents) if os.access(place, os.F_OK))
        if not nearest.is_dir():
            yield f"{key}: {folder} can't be made, since {nearest} is no folder"
        elif not os.access(nearest, os.W_OK | os.X_OK):
            yield f"{key}: {folder} can't be written to, since {nearest} may not be"


def _keys(config: RunConfig) -> Iterator[str]:
    """Those of the bus must be there and closed to others, and that of the engine in the environment."""
    looks: tuple[Callable[[], object], ...] = (
        lambda: _bus_keys(config),
        lambda: api_key(config.inference),
        lambda: server_tls(config.inference),
    )
    for look in looks:
        try:
            look()
        except ConfigError as error:
            yield from error.problems


def _bus_keys(config: RunConfig) -> None:
    if config.bus.keys:
        from bus.keys import load  # here: it loads zmq

        load(Path(config.bus.keys))


def _functions(config: RunConfig) -> Iterator[str]:
    for key, function in _configured(config):
        place, colon, name = function.path.rpartition(":")
        if not colon:
            try:
                load_function(function.path, key)  # one of ours
                yield from _without_kwargs(key, function)
            except ConfigError as error:
                yield from error.problems
        elif place.endswith(".py"):
            yield from (f"{key}: {problem}" for problem in _in_file(Path(place), name))
        elif not re.fullmatch(r"\w+(\.\w+)*:\w+", function.path):
            yield f"{key}: {function.path!r} must be a built-in name, package.module:function or file.py:function"
    loss = config.trainer.loss
    if isinstance(loss, CustomLossConfig):
        file, _, name = loss.path.rpartition(":")
        found = _in_file(Path(file), name) if file.endswith(".py") else ()
        yield from (f"trainer.loss.path: {problem}" for problem in found)


def _configured(config: RunConfig) -> list[tuple[str, RewardFunctionConfig]]:
    """All functions of the reward actor by key."""
    found = [(f"reward.functions.{i}.path", function) for i, function in enumerate(config.reward.functions)]
    steps, advantage = config.reward.steps, config.reward.advantage
    if steps:
        found.append(("reward.steps.path", RewardFunctionConfig(path=steps.path)))
    if isinstance(advantage, CustomAdvantageConfig):
        found.append(("reward.advantage.path", RewardFunctionConfig(path=advantage.path)))
    exact_match = config.eval.exact_match
    return [*found, *([(EXACT_MATCH, RewardFunctionConfig(path=exact_match))] if exact_match else [])]


def _without_kwargs(key: str, function: RewardFunctionConfig) -> Iterator[str]:
    parameters = inspect.signature(BUILTIN[function.path]).parameters.values()
    needed = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    if missing := sorted(needed - function.kwargs.keys()):
        yield f"{key.removesuffix('.path')}.kwargs: {function.path} needs {', '.join(missing)}"


def _in_file(file: Path, name: str) -> Iterator[str]:
    try:
        names = _bound(ast.parse(file.read_bytes(), str(file)))
    except OSError as error:
        yield f"{file} can't be read: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        yield f"{file} is not Python: {error}"
    else:
        if name not in names and "*" not in names:
            close = difflib.get_close_matches(name, names, n=1)
            yield f"{file} has no function {name!r}" + (f", did you mean {close[0]!r}?" if close else "")


def _bound(tree: ast.Module) -> set[str]:
    """Names that a module binds: by def, class, assignment and import; `*` where it imports what can't be known."""
    found, rest = set[str](), list[ast.AST]([tree])
    while rest:
        node = rest.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        rest += ast.iter_child_nodes(node)
    return found


def _supervised(config: RunConfig) -> Iterator[str]:
    """Every row must be an example; how many tokens it has is for the trainer to find."""
    sft = config.trainer.sft
    if sft is None or not Path(sft.path).exists():
        return
    from actors.environments.supervised import read_supervised  # here: it loads numpy

    try:
        read_supervised(Path(sft.path))
    except ConfigError as error:
        yield from error.problems


def _rows(config: RunConfig) -> Iterator[str]:
    """Every row must be an example, and have the columns that built-in functions ask for."""
    files = [environment for environment in config.environments if isinstance(environment, JsonlConfig)]
    if not files:
        return
    from actors.environments.jsonl import Jsonl  # here: it loads numpy

    for environment, split in itertools.product(files, get_args(Split)):
        file = environment.path if split == "train" else environment.eval_path
        if file and not Path(file).exists():
            continue
        try:
            rows = Jsonl(environment, split)
        except ConfigError as error:
            yield from error.problems
            continue
        if rows.num_examples and (split == "train" or config.eval.num_prompts):
            yield from _lacking(config, split, rows)


def _lacking(config: RunConfig, split: Split, rows: "Jsonl") -> Iterator[str]:
    for key, function in _configured(config):
        if function.path not in BUILTIN or (split == "train" and key == EXACT_MATCH):
            continue
        parameters = list(inspect.signature(BUILTIN[function.path]).parameters.values())[2:]
        columns = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
        needed = columns - function.kwargs.keys() - set(ARGUMENTS)
        for column in sorted(needed - rows.columns):
            hint = "; name another function, or null to measure none" if key == EXACT_MATCH else ""
            yield (
                f"{key}: {function.path} needs a column {column!r}, which not every row of {rows.path} has; all rows "
                f"have {', '.join(sorted(rows.columns)) or 'no column but the prompt'}{hint}"
            )
