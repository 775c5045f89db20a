"""Checks of everything named in a configuration, before the start: folders, files, functions, packages, programs.

Needs no GPU, model or network. User code is never run here, since only the reward actor may import it: a function in a
file is looked up in the file's syntax tree, a function of an installed package is not checked.
"""

import ast
import difflib
import inspect
import itertools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from actors.engines.http.access import api_key, server_tls
from actors.ops.fit import (
    NO_FUNCTIONS,
    Finding,
    column_findings,
    definition_of,
    machine_findings,
    model_findings,
    prompt_findings,
    signature_findings,
)
from actors.process import ledger_file
from actors.process.output_dir import problem_of
from actors.process.user_code import hidden_imports
from actors.reward.builtin import BUILTIN
from actors.reward.lookup import ARGUMENTS, load_function
from bus.run_folder import weights_directory, weights_folder
from schemas.config import RunConfig
from schemas.config.advantages import CustomAdvantageConfig
from schemas.config.data import JsonlConfig, RewardFunctionConfig, Split
from schemas.config.losses import CustomLossConfig
from schemas.config.optimizers import AdamW8bitConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from actors.datasets.jsonl import Jsonl

MODEL_FILES = ("config.json", "tokenizer.json")
"""Files in a model's directory without which no actor can start."""
EXACT_MATCH = "eval.exact_match"
Tables = dict[tuple[str, Split], "Jsonl"]
"""Data files, read once, by environment and split."""
BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight, by model.dtype."""


def preflight(config: RunConfig, *, starts: bool = True) -> list[str]:
    """Check everything outside the configuration on which the run relies.

    Args:
        config: configuration of the run.
        starts: True if the run starts here and now. With False, missing files, packages, programs and room are only
            warnings, since a configuration may be checked on a machine without the data.

    Returns:
        Warnings: likely mistakes, and with `starts=False` everything missing on this machine, as `path.to.key: …`.

    Raises:
        ConfigError: with all problems found, each as `path.to.key: what is wrong, what is allowed`.
    """
    files = [(key, path) for key, path in _data_files(config) if not path.exists()]
    packages = [(key, name, extra) for key, name, extra in _packages(config) if find_spec(name) is None]
    packages += [(key, name, name) for key, name in _programs(config) if shutil.which(name) is None]
    looks = (_model, _folders, _keys, _functions, _supervised)
    tables: Tables = {}
    problems = [problem for look in looks for problem in look(config)] + list(_rows(config, tables))
    # these checks read the same files again, so they run only if the files are sound
    found = [] if problems else [*model_findings(config), *_fit(config, tables)]
    machine = list(machine_findings(config))
    if starts:
        found += machine
        machine = []
    # findings about this machine are problems only if the run starts here
    problems += [finding.words for finding in found if finding.fatal]
    notes = [finding.words for finding in (*found, *machine) if not (finding in found and finding.fatal)]
    room = list(_room(config))
    if starts:
        problems += room
        problems += [f"{key}: there is no file {path}" for key, path in files]
        problems += [f"{key}: needs {name}, which is not installed; install {extra}" for key, name, extra in packages]
    if problems:
        raise ConfigError(*problems)
    missing = [f"{key}: {path} is not here; `actors up` needs it" for key, path in files]
    missing += [
        f"{key}: {name} is not installed here; a run needs it, install {extra}" for key, name, extra in packages
    ]
    return [*room, *missing, *notes]


def _data_files(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yield the data files, each with its key."""
    for environment in config.environments:
        if isinstance(environment, JsonlConfig):
            yield "environments[].path", Path(environment.path)
            if environment.eval_path:
                yield "environments[].eval_path", Path(environment.eval_path)
    if config.trainer.sft is not None:
        yield "trainer.sft.path", Path(config.trainer.sft.path)


def _packages(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield key, package and installation advice for packages that not every installation has."""
    engine = config.inference.engine
    if not config.inference.attached:
        yield from (("inference.engine.type", *package) for package in engine.packages())
    if not engine.loads_model:
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
    """Yield key and name of the programs called by torch."""
    if config.model.compile and config.inference.engine.loads_model:
        yield "model.compile", os.environ.get("CXX", "g++")


def _model(config: RunConfig) -> Iterator[str]:
    """Check that a local directory holds a model. A name on the hub is not looked up."""
    if not config.inference.engine.loads_model:
        return
    teacher = config.trainer.teacher
    for key, path in (("model.path", config.model.path), ("trainer.teacher.path", teacher.path if teacher else "")):
        folder = Path(path)
        if not folder.is_absolute():
            continue
        if not folder.is_dir():
            yield (
                f"{key}: there is no folder {folder}; a relative path is looked for next to the configuration file, "
                "then in the working directory; a name on the hub reads organisation/model"
            )
        else:
            yield from (f"{key}: {folder} has no {name}" for name in MODEL_FILES if not (folder / name).is_file())


def _folders(config: RunConfig) -> Iterator[str]:
    """Check that each folder for output exists or can be created, and is writable."""
    folders = {"output_dir": config.output}
    if config.ledger.path:
        folders["ledger.path"] = config.ledger_path.parent
    weights = weights_directory(config)
    used = config.weights.channel == "filesystem" and not weights.is_relative_to(config.output)
    if config.weights.directory or used:
        folders["weights.directory"] = weights
    for key, folder in folders.items():
        nearest = next(place for place in (folder, *folder.parents) if os.access(place, os.F_OK))
        if not nearest.is_dir():
            yield f"{key}: {folder} can't be created, since {nearest} is not a folder"
        elif not os.access(nearest, os.W_OK | os.X_OK):
            yield f"{key}: {folder} can't be written to, since {nearest} is not writable"
        elif reason := _takes_no_folder(nearest):
            yield f"{key}: {folder} can't be written to: {reason}; set a folder that can be"
    yield from filter(None, [problem_of(config), ledger_file.problem_of(config.ledger_path)])
    if config.weights.channel == "filesystem":
        yield from filter(None, [weights_folder(config).problem()])


def _takes_no_folder(place: Path) -> str:
    """Try to create a folder; return the reason if that fails. The file system may refuse in spite of the rights."""
    try:
        Path(tempfile.mkdtemp(prefix=".grpo-actors-", dir=place)).rmdir()
    except OSError as error:
        return f"{place}: {error.strerror}"
    return ""


def _room(config: RunConfig) -> Iterator[str]:
    """Warn if the folder for weights has too little free room, if the size of a version is known."""
    size = _published_bytes(config)
    if config.weights.channel != "filesystem" or not size:
        return
    versions = 1 + min(
        config.weights.keep, config.trainer.max_steps
    )  # a version is written before the oldest is removed
    folder = weights_folder(config).path
    nearest = next(place for place in folder.parents if place.is_dir())
    ours = sum(path.lstat().st_size for path in folder.rglob("*"))  # left by a killed run; removed at the start
    free = shutil.disk_usage(nearest).free + ours
    if free < versions * size:
        yield (
            f"weights.directory: {folder.parent} has {free / 1e9:.2f} GB free, and {versions} versions of "
            f"{size / 1e9:.2f} GB each will be stored there (weights.keep + 1); free space, set weights.directory to a "
            "folder with room, or lower weights.keep"
        )


def _published_bytes(config: RunConfig) -> int:
    """Return the bytes of a published version; 0 if the model's files are elsewhere, or adapters are published."""
    folder = Path(config.model.path)
    loads_model = config.inference.engine.loads_model
    if not loads_model or config.model.lora is not None or not (folder.is_absolute() and folder.is_dir()):
        return 0
    from actors.engines.external.staging import model_shapes  # imported here, since it loads numpy

    try:
        shapes = model_shapes(config.model)
    except (OSError, ValueError, KeyError):  # not a model: another check reports that
        return 0
    return BYTES[config.model.dtype] * sum(math.prod(shape) for shape in shapes.values())


def _keys(config: RunConfig) -> Iterator[str]:
    """Check that the bus's keys are there and readable by no other user, and that the engine's key is set."""
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
        from bus.keys import load  # imported here, since it loads zmq

        load(Path(config.bus.keys))


def _functions(config: RunConfig) -> Iterator[str]:
    for key, function in _configured(config):
        place, colon, name = function.path.rpartition(":")
        if not colon:
            try:
                load_function(function.path, key)  # built in, so no user code is loaded
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
    """Return all functions of the reward actor, each with its key."""
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
        tree = ast.parse(file.read_bytes(), str(file))
        names = _bound(tree)
    except OSError as error:
        yield f"{file} can't be read: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        yield f"{file} is not Python: {error}"
    else:
        yield from hidden_imports(file)
        if isinstance(definition_of(tree, name), NO_FUNCTIONS):
            yield f"{file}: {name} is not a function"
        if name not in names and "*" not in names:
            close = difflib.get_close_matches(name, names, n=1)
            yield f"{file} has no function {name!r}" + (f", did you mean {close[0]!r}?" if close else "")


def _bound(tree: ast.Module) -> set[str]:
    """Return all names bound in a module: by def, class, assignment, import; includes `*` for a star import."""
    found, rest = set[str](), list[ast.AST]([tree])
    while rest:
        node = rest.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue  # names inside a function or class are not the module's
        if isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        rest += ast.iter_child_nodes(node)
    return found


def _supervised(config: RunConfig) -> Iterator[str]:
    """Check every row of the supervised data. Lengths in tokens are checked by the trainer."""
    sft = config.trainer.sft
    if sft is None or not Path(sft.path).exists():
        return
    from actors.datasets.supervised import read_supervised  # imported here, since it loads numpy

    try:
        read_supervised(Path(sft.path))
    except ConfigError as error:
        yield from error.problems


def _rows(config: RunConfig, tables: Tables) -> Iterator[str]:
    """Check that every row of the data files is an example and has the columns needed by built-in functions.

    Args:
        config: configuration of the run.
        tables: filled with the files read, so that later checks need not read them again.
    """
    files = [environment for environment in config.environments if isinstance(environment, JsonlConfig)]
    if not files:
        return
    from actors.datasets.jsonl import Jsonl  # imported here, since it loads numpy

    for environment, split in itertools.product(files, get_args(Split)):
        file = environment.path if split == "train" else environment.eval_path
        if file and not Path(file).exists():
            continue  # reported as a missing file
        try:
            rows = tables[environment.label, split] = Jsonl(environment, split)
        except ConfigError as error:
            yield from error.problems
            continue
        if rows.num_examples and (split == "train" or config.eval.num_prompts):
            yield from _lacking(config, split, rows)


def _fit(config: RunConfig, tables: Tables) -> Iterator[Finding]:
    """Check prompts and columns of each file against the model and the functions."""
    for (_, split), rows in tables.items():
        if not rows.num_examples or (split == "eval" and not config.eval.num_prompts):
            continue
        key = "environments[].path" if split == "train" else "environments[].eval_path"
        yield from column_findings(config, rows, key)
        yield from prompt_findings(config, rows, key)
        if split == "train":
            yield from _few_rows(config, rows)
        yield from _signatures(config, split, rows.columns)


def _few_rows(config: RunConfig, rows: "Jsonl") -> Iterator[Finding]:
    wanted = config.packer.groups_per_step
    if len(config.environments) == 1 and (rows.num_examples or 0) < wanted:
        yield Finding(
            f"packer.groups_per_step: {wanted}, but {rows.path} has {rows.num_examples} rows; each step repeats some",
            fatal=False,
        )


def _signatures(config: RunConfig, split: Split, columns: set[str]) -> Iterator[Finding]:
    """Check reward functions in files against the columns. Step rewards and advantages have other signatures."""
    for key, function in _configured(config):
        if not key.startswith(("reward.functions", EXACT_MATCH)) or (split == "train" and key == EXACT_MATCH):
            continue
        place, _, name = function.path.rpartition(":")
        if place.endswith(".py"):
            definition = definition_of(ast.parse(Path(place).read_bytes()), name)
            yield from signature_findings(definition, name, columns, set(function.kwargs), f"{key}: {place}")


def _lacking(config: RunConfig, split: Split, rows: "Jsonl") -> Iterator[str]:
    for key, function in _configured(config):
        if function.path not in BUILTIN or (split == "train" and key == EXACT_MATCH):
            continue
        # without prompts and completions, which every function gets
        parameters = list(inspect.signature(BUILTIN[function.path]).parameters.values())[2:]
        columns = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
        needed = columns - function.kwargs.keys() - set(ARGUMENTS)
        for column in sorted(needed - rows.columns):
            hint = "; name another function, or null to measure none" if key == EXACT_MATCH else ""
            yield (
                f"{key}: {function.path} needs a column {column!r}, which not every row of {rows.path} has; all rows "
                f"have {', '.join(sorted(rows.columns)) or 'no column but the prompt'}{hint}"
            )
