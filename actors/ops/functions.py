"""Checks of the functions that a configuration names, against their files and against the columns of the data.

User code is never run here, since only the reward actor may import it: a function in a file is looked up in the file's
syntax tree, a function of an installed package is not checked. Of a function with an interpreter of its own only file
and interpreter are looked up, since its syntax may be that of another Python.
"""

import ast
import difflib
import inspect
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from actors.ops.fit import Finding
from actors.process.user_code import hidden_imports
from actors.reward.builtin import BUILTIN
from actors.reward.lookup import ARGUMENTS, TRL_ARGUMENTS, RewardFunction, is_maker, load_function
from schemas.config import RunConfig
from schemas.config.advantages import CustomAdvantageConfig
from schemas.config.data import RewardFunctionConfig, Split
from schemas.config.losses import CustomLossConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from actors.datasets.jsonl import Jsonl
    from actors.datasets.table import Preview

NO_FUNCTIONS = ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set | ast.JoinedStr
"""Syntax of values that surely can't be called."""
EXACT_MATCH = "eval.exact_match"


def function_problems(config: RunConfig) -> Iterator[str]:
    """Check that every function of the reward actor and the loss exists, as far as no user code need be run."""
    for key, function in _configured(config):
        place, colon, name = function.path.rpartition(":")
        # a path without a colon names a built-in function, so no user code is loaded
        if not colon:
            try:
                load_function(function.path, key)
            except ConfigError as error:
                yield from error.problems
                continue
            if missing := sorted(needed_kwargs(BUILTIN[function.path]) - function.kwargs.keys()):
                yield f"{key.removesuffix('.path')}.kwargs: {function.path} needs {', '.join(missing)}"
        elif place.endswith(".py"):
            if function.other_python:
                found: Iterable[str] = () if Path(place).is_file() else [f"there is no file {place}"]
            else:
                found = _in_file(Path(place), name, beside_ours=not function.python)
            yield from (f"{key}: {problem}" for problem in found)
        else:
            yield from _in_package(key, function)
        if function.other_python and shutil.which(function.other_python) is None:
            python = key.removesuffix("path") + "python"
            yield f"{python}: there is no program {function.python}; name a Python interpreter, or same"
    for i, one in enumerate(config.reward.functions):
        # a name on the hub is not absolute, and is looked up by the worker
        if Path(one.model).is_absolute() and not Path(one.model, "config.json").is_file():
            yield f"reward.functions.{i}.model: there is no model in {one.model}; it has no config.json"
    loss = config.trainer.loss
    if isinstance(loss, CustomLossConfig):
        file, _, name = loss.path.rpartition(":")
        found = _in_file(Path(file), name) if file.endswith(".py") else ()
        yield from (f"trainer.loss.path: {problem}" for problem in found)
    yield from _callback_problems(config)


def needed_kwargs(function: RewardFunction) -> set[str]:
    """Return the keyword arguments of a built-in function that have no default."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}


def _in_package(key: str, function: RewardFunctionConfig) -> Iterator[str]:
    """Check the path of a function in a package, which is not imported."""
    if is_maker(function.path) and (function.python or not key.startswith("reward.functions")):
        # the error names the function here that has no maker
        try:
            load_function(function.path, key)
        except ConfigError as error:
            yield from error.problems
    elif not re.fullmatch(r"\w+(\.\w+)*:\w+", function.path):
        yield f"{key}: {function.path!r} must be a built-in name, package.module:function or file.py:function"


def _callback_problems(config: RunConfig) -> Iterator[str]:
    """Check that each callback exists: in a file by its syntax tree, in a package as far as the path has its form."""
    for index, one in enumerate(config.callbacks):
        key, (place, _, name) = f"callbacks.{index}.path", one.path.rpartition(":")
        if place.endswith(".py"):
            yield from (f"{key}: {problem}" for problem in _in_file(Path(place), name))
        elif not re.fullmatch(r"\w+(\.\w+)*", place):
            yield f"{key}: {one.path!r} must be package.module:Class or file.py:Class"


def worker_notes(config: RunConfig) -> Iterator[Finding]:
    """Tell which functions are checked at the start only, by their workers."""
    for key, function in _configured(config):
        if function.other_python:
            words = f"{function.path} is loaded by {function.python} at the start, and not checked before"
            yield Finding(f"{key}: {words}", fatal=False)


def call_findings(config: RunConfig, split: Split, columns: set[str]) -> Iterator[Finding]:
    """Check reward functions in files against the columns that all rows of a file have."""
    for key, function in _configured(config):
        # step rewards and advantages have other signatures
        if not key.startswith(("reward.functions", EXACT_MATCH)) or (split == "train" and key == EXACT_MATCH):
            continue
        place, _, name = function.path.rpartition(":")
        if place.endswith(".py") and not function.other_python:
            definition = definition_of(ast.parse(Path(place).read_bytes()), name)
            passed = () if function.python else TRL_ARGUMENTS
            yield from signature_findings(definition, name, columns, set(function.kwargs), f"{key}: {place}", passed)


def missing_columns(config: RunConfig, split: Split, rows: "Jsonl | Preview") -> Iterator[str]:
    """Check that every row of a file has the columns that built-in functions need."""
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


def _configured(config: RunConfig) -> list[tuple[str, RewardFunctionConfig]]:
    """Return all functions of the reward actor, each with its key."""
    found = [(f"reward.functions.{i}.path", one) for i, one in enumerate(config.reward.functions) if one.path]
    steps, advantage = config.reward.steps, config.reward.advantage
    if steps is not None and steps.path is not None:
        found.append(("reward.steps.path", RewardFunctionConfig(path=steps.path, python=steps.python)))
    if isinstance(advantage, CustomAdvantageConfig):
        found.append(("reward.advantage.path", RewardFunctionConfig(path=advantage.path)))
    exact_match = config.eval.exact_match
    return [*found, *([(EXACT_MATCH, RewardFunctionConfig(path=exact_match))] if exact_match else [])]


def _in_file(file: Path, name: str, *, beside_ours: bool = True) -> Iterator[str]:
    """Yield what is wrong with a function in a file; `beside_ours`: its process has our packages too."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
        names = bound_names(tree)
    except OSError as error:
        yield f"{file} can't be read: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        yield f"{file} is not Python: {error}"
    else:
        if beside_ours:
            yield from hidden_imports(file)
        if isinstance(definition_of(tree, name), NO_FUNCTIONS):
            yield f"{file}: {name} is not a function"
        # a star import may bind any name
        if name not in names and "*" not in names:
            close = difflib.get_close_matches(name, names, n=1)
            yield f"{file} has no function {name!r}" + (f", did you mean {close[0]!r}?" if close else "")


def bound_names(tree: ast.Module) -> set[str]:
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


def signature_findings(
    definition: ast.AST | None, name: str, columns: set[str], kwargs: set[str], where: str, passed: Iterable[str] = ()
) -> Iterator[Finding]:
    """Check whether a function accepts the keyword arguments of a call.

    Args:
        definition: definition of the function in the file's syntax tree; anything but a plain function is not checked.
        name: name of the function.
        columns: columns that all rows of a file have.
        kwargs: names of the function's configured kwargs.
        where: configuration key and file, for the error.
        passed: further arguments that a function may name.
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
    given = {*ARGUMENTS, *passed, *columns, *kwargs}
    for missing in sorted(set(named) - set(optional) - given):
        has = f"; all rows have {', '.join(sorted(columns)) or 'no column but the prompt'}"
        yield Finding(f"{where}: {name} needs {missing!r}, and the data has no such column{has}")
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
