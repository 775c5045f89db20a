"""Checks of environments with turns, from files alone: neither a worker nor code of the user is started."""

import ast
import difflib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from actors.environments.adapters import agent_command
from actors.environments.specs import spec_of
from actors.ops.fit import Finding, has_chat_template
from actors.ops.functions import bound_names
from schemas.config import RunConfig
from schemas.config.environments import AgentConfig, EnvironmentBase, PythonConfig


def environments_of(config: RunConfig) -> list[EnvironmentBase]:
    """Return the environments that are played with."""
    return [one for one in config.environments if isinstance(one, EnvironmentBase)]


def environment_problems(config: RunConfig) -> Iterator[str]:
    """Check that the files and names of environments in Python exist, as far as no user code need be run."""
    for one in environments_of(config):
        # the code of other machines is theirs
        if isinstance(one, PythonConfig) and one.path and not one.hosts:
            yield from (f"environments[].path: {problem} ({one.label})" for problem in _code_problems(one))
        # the workers' interpreter and machine are this one's
        if isinstance(one, AgentConfig) and one.command and not (one.hosts or one.python):
            options = spec_of(one, config.bus, "").options
            for key in ("folder", "keep_in"):
                if isinstance(path := options.get(key), str) and path:
                    # where the worker looks
                    options |= {key: str(Path(one.directory, path))}
            yield from (
                f"environments[].command: {problem} ({one.label})" for problem in agent_command.problems(options)
            )


def missing_of_workers(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield key and words for each interpreter and working directory of workers that this machine lacks."""
    for one in environments_of(config):
        if one.hosts:
            continue
        if one.python and (problem := _interpreter_problem(one.python)):
            yield "environments[].python", f"{problem}; the workers of {one.label} are started with it"
        if one.directory and not Path(one.directory).is_dir():
            yield (
                "environments[].directory",
                f"there is no folder {one.directory} for the workers of {one.label}",
            )


def template_findings(config: RunConfig) -> Iterator[Finding]:
    """Check that the model has a chat template: an environment and the model exchange messages."""
    played, model = environments_of(config), Path(config.model.path)
    # a name on the hub is not looked up
    if not (played and config.inference.engine.loads_model and model.is_absolute() and model.is_dir()):
        return
    if config.model.chat_template is None and not has_chat_template(model):
        yield Finding(
            f"model.path: {model} has no chat template, by which environment {played[0].label} exchanges messages with "
            "the model; use an instruct model, or add a chat_template.jinja to the folder"
        )


def _code_problems(config: PythonConfig) -> Iterator[str]:
    """Yield what is wrong with the file of an environment. A module of a package is left to the worker."""
    place, _, name = config.path.rpartition(":")
    if not place.endswith(".py"):
        return
    try:
        source = Path(place).read_bytes()
    except OSError as error:
        yield f"{place} can't be read: {error.strerror}"
        return
    # another interpreter may read another Python
    if config.python:
        return
    try:
        names = bound_names(ast.parse(source, place))
    except (SyntaxError, ValueError) as error:
        yield f"{place} is not Python: {error}"
        return
    # a star import may bind any name
    if name not in names and "*" not in names:
        close = difflib.get_close_matches(name, names, n=1)
        yield f"{place} has no {name!r}" + (f", did you mean {close[0]!r}?" if close else "")


def _interpreter_problem(python: str) -> str:
    """Return why an interpreter can't be started; empty if it can. A name without a slash is looked up in PATH."""
    if "/" not in python:
        return "" if shutil.which(python) else f"there is no program {python} in PATH"
    file = Path(python)
    if not file.is_file():
        return f"there is no file {file}; name the interpreter itself, such as FOLDER/bin/python"
    return "" if os.access(file, os.X_OK) else f"{file} is not executable"
