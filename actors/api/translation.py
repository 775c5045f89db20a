"""TRL's arguments, as objects of a Python program, to the configuration of a run."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors.api.grpo_config import GRPOConfig, plain
from actors.imports.huggingface import ALL
from actors.imports.job import Import, Options
from actors.imports.keys import flat
from actors.imports.report import Report, Verdict, describe
from actors.imports.syntax import Call, Imported
from actors.imports.trl import translate, versions
from actors.imports.trl.inputs import Inputs, typed_values
from schemas.config import RunConfig
from schemas.config.load import check_tree
from schemas.errors import ConfigError

EVALUATED = "eval"
"""Name of the environment with the rows of `eval_dataset`."""
HERE = {"push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "hub_strategy", "hub_revision"}
"""Keywords that the program serves itself: it uploads at its end, and no process of the run does."""


@dataclass(frozen=True)
class Program:
    """Arguments of GRPOTrainer, with data sets as files and functions as paths."""

    model: str
    rewards: Sequence[str]
    """Path of each reward function, or the name of a reward model."""
    arguments: GRPOConfig
    rows: Path
    num_rows: int
    eval_rows: Path | None = None
    peft_config: Any = None
    quantization_config: Any = None
    environment: str | None = None
    """Path of an environment's class, or of a list of tools; None: completions of a single turn."""
    is_tools: bool = False


def translated(program: Program) -> tuple[dict[str, Any], Report]:
    """Return the tree of the run's configuration, and the report on each keyword.

    Raises:
        ConfigError: a keyword has no counterpart; each is named with the reason.
    """
    arguments = program.arguments
    given = {name: value for name, value in arguments.to_dict().items() if name not in HERE}
    given |= {"model": program.model, "reward_funcs": [_dotted(one) for one in program.rewards]}
    given["train_dataset"] = program.rows.name
    if program.eval_rows is not None:
        given["eval_dataset"] = program.eval_rows.name
    for name, config in (("peft_config", program.peft_config), ("quantization_config", program.quantization_config)):
        if config is not None:
            given |= {f"{name}.{key}": value for key, value in _changed(config).items()} or {name: "defaults"}
    call = None
    if program.environment is not None:
        role = "tools" if program.is_tools else "environment_factory"
        parts = {role: Imported(program.environment.replace(":", ".")), "reward_funcs": given["reward_funcs"]}
        call = Call(Imported("trl.GRPOTrainer"), [], parts, "", 0)
        given[role] = program.environment
    inputs = Inputs("grpo", typed_values(flat(given), "grpo", versions.NEWEST), [], trainer_call=call)
    world = int(arguments.run_keys.get("trainer.num_ranks", 1))
    job = translate(inputs, Options(world=world, rows=program.num_rows, data=program.rows))
    _adjust(job, program)
    refused = [describe(entry) for entry in job.report.of(Verdict.REFUSED)]
    if refused:
        raise ConfigError(*(f"GRPOConfig: {words}" for words in refused))
    for key, value in arguments.run_keys.items():
        # a whole section replaces what is below it
        job.run.remove(key)
        job.run.set(key, plain(value))
    return job.run.tree, job.report


def configuration(tree: Mapping[str, Any]) -> RunConfig:
    """Return the checked configuration of a tree.

    Raises:
        ConfigError: all problems, each with its key.
    """
    return check_tree(dict(tree))


def _adjust(job: Import, program: Program) -> None:
    """Write what objects say, and files do not: names of models, held-out rows, the reward actor of this process."""
    run = job.run
    for number, path in enumerate(program.rewards):
        if ":" not in path:
            run.remove(f"reward.functions.{number}.path")
            run.set(f"reward.functions.{number}.model", path)
        elif program.environment is not None or run.get(f"reward.functions.{number}.path") != path:
            run.set(f"reward.functions.{number}.path", path)
    if program.environment is not None:
        run.set("environments.0.path", program.environment)
    run.set("up.reward", 0, "the reward actor is in the program")
    run.remove("environments.0.eval_path")
    job.report.questions = [one for one in job.report.questions if "eval_path" not in one.target]
    if program.eval_rows is None:
        return
    # an environment of its own may have other rows when the run continues
    source = {"type": "jsonl", "name": EVALUATED, "path": str(program.eval_rows), "train": False}
    for key, value in source.items():
        run.set(f"environments.1.{key}", value)
    if run.get("eval.num_prompts") == 0:
        # by `evaluate()` alone
        completions = job.given.get("num_generations_eval") or job.value("num_generations")
        keys = {"num_prompts": ALL, "completions_per_prompt": completions, "temperature": job.value("temperature")}
        for key, value in (keys | {"at_start": False, "at_end": False, "exact_match": None}).items():
            run.set(f"eval.{key}", value)
        return
    every, steps = run.get("eval.every_steps"), run.get("trainer.max_steps")
    if isinstance(every, int) and isinstance(steps, int) and steps % every == 0:
        run.set("eval.at_end", True, "eval_steps divides the steps of the run")


def _dotted(path: str) -> str:
    """Return a path as the table reads functions; a reward model gets the place of a function."""
    module, colon, name = path.rpartition(":")
    return f"{module}.{name}" if colon and not module.endswith(".py") else "actors.api.caller.model"


def _changed(config: Any) -> dict[str, Any]:
    """Return the values of a configuration of peft or bitsandbytes that differ from its defaults.

    Raises:
        ConfigError: the object has no values.
    """
    if not hasattr(config, "to_dict"):
        raise ConfigError(f"peft_config: must be a configuration of peft, got {type(config).__name__}")
    defaults = plain(type(config)().to_dict())
    return {name: value for name, value in plain(config.to_dict()).items() if defaults.get(name) != value}


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name as a part of a path: a letter or digit each, `lambda` for a lambda."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return "".join(sign if sign.isalnum() else "_" for sign in name).strip("_") or "reward"


def import_path(target: Any) -> str | None:
    """Return `module:name` or `file.py:name` of a function or class that another process can import, else None.

    A name of the program itself is found in the program's file.
    """
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    found = inspect.getmodule(target)
    # a name inside a function, a lambda, or an object that a decorator has replaced
    if module is None or not name.isidentifier() or getattr(found, name, None) is not target:
        return None
    if module != "__main__":
        return f"{module}:{name}"
    file = getattr(found, "__file__", None)
    return f"{Path(file).resolve()}:{name}" if file else None
