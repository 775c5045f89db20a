"""Data, environments and reward functions of TRL."""

import ast
from dataclasses import replace
from typing import Any

from actors.imports.huggingface import TEMPLATES, chat_variables, function_of_option, prompt_limit
from actors.imports.job import Import, Unreadable
from actors.imports.syntax import Call, Imported, Local, Method
from actors.imports.trl.data_sets import DataSet, held_out_rows, training_rows
from actors.imports.trl.inputs import Inputs
from schemas.errors import ConfigError

_OF_TRL = {
    "accuracy_reward": "accuracy",
    "reasoning_accuracy_reward": "reasoning_accuracy",
    "think_format_reward": "think_format",
}
"""Names here of TRL's reward functions."""
_MADE_BY_TRL: dict[str, tuple[str, dict[str, str]]] = {
    "get_soft_overlong_punishment": (
        "soft_overlong",
        {"max_completion_len": "max_tokens", "soft_punish_cache": "overlong_tokens"},
    ),
    "get_repetition_penalty_reward": (
        "repetition_penalty",
        {"ngram_size": "ngram_size", "max_penalty": "max_penalty"},
    ),
    "get_cosine_scaled_reward": (
        "cosine_scaled",
        {
            name: name
            for name in ("max_len", "min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct")
        },
    ),
}
"""Functions of TRL that make a reward function: the name here, and the names of the arguments, in their order."""
_OPEN_R1 = ("system_prompt", "dataset_prompt_column", "benchmarks", "dataset_mixture", "code_provider", "chat_template")
_OPEN_R1_DEFAULT = ["accuracy", "format", "tag_count"]
_SOURCES = ("train_dataset", "dataset_name", "dataset_config", "dataset_configs", "dataset_train_split", "datasets")
NO_TURN_LIMIT = 1000
"""Turns where the origin has no limit."""


def is_open_r1(job: Import) -> bool:
    """Tell whether a file is a recipe of open-r1, whose script has keys and rewards of its own."""
    return any(job.given.get(key) is not None for key in _OPEN_R1)


def data(job: Import, inputs: Inputs, has_evaluation: bool) -> None:
    """Write the environments: rows of JSON Lines, or code of the script that answers."""
    named = None if _turns(job, inputs) else _rows(job, inputs, has_evaluation)
    job.settle("chat_template_kwargs", "empty")
    _template(job)
    name = job.given.get("train_dataset", job.given.get("dataset_name"))
    keys = [key for key in _SOURCES if key in job.given]
    if named is not None:
        _named_rows(job, inputs, named, has_evaluation, keys)
        keys = []
    prompt_limit(job, "max_prompt_length", "truncate_left", "TRL keeps the last tokens of longer prompts")
    for key in keys:
        if job.options.data is not None and not job.unreadable([key]):
            target = "environments.0.rows" if job.run.get("environments.0.type") == "python" else "environments.0.path"
            job.convert(key, {target: str(job.options.data)}, "--data has the rows")
        else:
            job.refuse(key, f"only the script itself has the rows; export {name} to JSON Lines", "--data FILE.jsonl")
    for key in ("eval_dataset", "dataset_test_split"):
        job.settle(key, "environments[].eval_path has held-out rows" if has_evaluation else "nothing is evaluated")


def _rows(job: Import, inputs: Inputs, has_evaluation: bool) -> DataSet | None:
    """Write an environment with rows; return the data set that the input names, if it is read as it is."""
    at = "environments.0"
    # the rows of --data are those that the user wants
    named = training_rows(job, inputs) if job.options.data is None else None
    if named is None:
        job.run.set(f"{at}.type", "jsonl")
        _file(job, f"{at}.path", "--data FILE.jsonl, with the rows after the script's own conversions")
        if has_evaluation:
            job.ask(f"{at}.eval_path", "held-out rows as JSON Lines, which the origin evaluates")
    if is_open_r1(job):
        column = job.value("dataset_prompt_column")
        if named is None:
            job.rename("dataset_prompt_column", f"{at}.prompt_column")
        elif column != "prompt":
            job.convert("dataset_prompt_column", {}, "columns has the name")
            named = replace(named, columns={"prompt": str(column)})
        job.settle("dataset_prompt_column", "the name here too")
        if job.value("system_prompt") is not None:
            job.rename("system_prompt", f"{at}.system_prompt")
        else:
            job.run.set(f"{at}.chat", True, "open-r1 makes a user message of each prompt")
    chat_variables(job, "chat_template_kwargs", at)
    return named


def _named_rows(job: Import, inputs: Inputs, named: DataSet, has_evaluation: bool, keys: list[str]) -> None:
    """Write a data set that is read as it is, with its held-out rows."""
    targets = {f"environments.0.{key}": value for key, value in named.targets.items()}
    job.convert(keys, targets, f"{named.path}: a data set with its columns as they are")
    if not has_evaluation:
        return
    held_out = held_out_rows(job, inputs, named)
    if held_out is None:
        job.ask("environments.0.eval_path", "held-out rows in files, which the origin evaluates")
    else:
        held_out_keys = ["eval_dataset", "dataset_test_split"]
        job.convert(held_out_keys, {f"environments.0.{key}": value for key, value in held_out.items()}, "held-out rows")


def _template(job: Import) -> None:
    """Write a chat template of the run, as a text (open-r1) or a file."""
    if job.is_set("chat_template"):
        job.rename("chat_template", "model.chat_template")
    job.settle("chat_template", "empty: the model's own")
    path = job.given.get("chat_template_path")
    if path is not None and (job.unreadable(["chat_template_path"]) or str(path).endswith(TEMPLATES)):
        job.rename("chat_template_path", "model.chat_template.file")
    elif path is not None:
        job.refuse(
            "chat_template_path",
            f"the template of the tokenizer {path}",
            "write it to a file, and set model.chat_template: {file: PATH}",
        )
    job.settle("chat_template_path", "empty: the model's own")


def _file(job: Import, target: str, text: str) -> None:
    if job.options.data is None:
        job.ask(target, f"training data; {text}")
    else:
        job.run.set(target, str(job.options.data), "--data")


def _turns(job: Import, inputs: Inputs) -> bool:
    """Write environments that answer, if the script has some."""
    call = inputs.trainer_call
    parts = call.kwargs if call is not None else {}
    factory, tools, rollout = (parts.get(key) for key in ("environment_factory", "tools", "rollout_func"))
    if rollout is not None:
        job.refuse(
            "rollout_func",
            "code that samples gets a policy here, not a trainer",
            "write `async def run(example, policy)`, or a class with reset and step",
        )
        job.ask("environments.0.path", "class or function that plays an episode, FILE.py:NAME")
    elif not factory and not tools:
        return False
    # several environments come as a map from names to factories
    factories = factory if isinstance(factory, dict) else {"": factory if factory else tools}
    for index, (name, value) in enumerate(factories.items()):
        at = f"environments.{index}"
        job.run.set(f"{at}.type", "python")
        if name:
            job.run.set(f"{at}.name", str(name))
        path = path_of(value, inputs) if factory else _path_of_tools(value, inputs)
        if rollout is None and path is not None:
            job.run.set(f"{at}.path", path, "environment_factory" if factory else "tools")
        elif rollout is None:
            job.ask(f"{at}.path", f"FILE.py:NAME of {text_of_value(value)}, at the top level of its file")
        if factory is None or "train_dataset" in job.given or job.options.data is not None:
            _file(job, f"{at}.rows", "--data FILE.jsonl, a row for each example")
        turns = job.value("max_tool_calling_iterations") if "max_tool_calling_iterations" in job.defaults else None
        limit = NO_TURN_LIMIT if turns is None else turns + 1
        job.run.set(f"{at}.max_turns", limit, "no limit in TRL" if turns is None else "max_tool_calling_iterations + 1")
        job.run.set(f"{at}.max_total_tokens", job.value("max_completion_length"), "max_completion_length, of all turns")
        for key in [key for key in job.given if key.startswith("chat_template_kwargs.")]:
            job.run.set(f"{at}.{key}", job.given[key], key)
    count = range(len(factories))
    key = "environment_factory" if factory else "tools"
    job.convert(key, {f"environments.{index}.type": "python" for index in count}, "an environment that answers")
    if "max_tool_calling_iterations" in job.given and job.given["max_tool_calling_iterations"] is not None:
        turns = job.given["max_tool_calling_iterations"]
        job.convert(
            "max_tool_calling_iterations",
            {f"environments.{index}.max_turns": turns + 1 for index in count},
            f"{turns} calls and an answer",
        )
    for key in [key for key in job.given if key.startswith("chat_template_kwargs.")]:
        job.convert(key, {f"environments.{index}.{key}": job.given[key] for index in count}, "of each environment")
    return True


def path_of(value: Any, inputs: Inputs) -> str | None:
    """Return the path of a function or class, None if no other process could import it."""
    if isinstance(value, Local) and value.importable and value.name:
        return f"{inputs.script}:{value.name}"
    if isinstance(value, Imported) and not value.path.startswith((".", "builtins.")) and "." in value.path:
        module, _, name = value.path.rpartition(".")
        return f"{module}:{name}"
    return None


def _path_of_tools(value: Any, inputs: Inputs) -> str | None:
    """Return the path of a list of tools that has a name at the top level of the script."""
    call, script = inputs.trainer_call, inputs.followed
    if script is None or call is None or not isinstance(value, list | tuple):
        return None
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Call) and node.lineno == call.line:
            for word in node.keywords:
                if word.arg == "tools" and isinstance(word.value, ast.Name):
                    names = [
                        target.id
                        for statement in script.tree.body
                        if isinstance(statement, ast.Assign)
                        for target in statement.targets
                        if isinstance(target, ast.Name)
                    ]
                    return f"{inputs.script}:{word.value.id}" if word.value.id in names else None
    return None


def text_of_value(value: Any) -> str:
    """Return a value of a script as short text, for reports."""
    match value:
        case list() | tuple():
            return "[" + ", ".join(text_of_value(one) for one in value) + "]"
        case Local():
            return value.name or "a lambda"
        case Imported(path):
            return path
        case Call() | Unreadable():
            return value.source
        case Method():
            return value.name
    return str(value)


def rewards(job: Import, inputs: Inputs) -> None:
    """Write the reward functions and their weights.

    Raises:
        ConfigError: the number of weights is another than that of the functions.
    """
    functions = _functions(job, inputs)
    has_environment = job.run.get("environments.0.type") == "python"
    weights = None if job.unreadable(["reward_weights"]) else job.value("reward_weights")
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"reward_weights: {len(weights)} weights for {len(functions)} reward functions; TRL refuses that"
        )
    open_names = [index for index, function in enumerate(functions) if _known(function, job, inputs) is None]
    targets = []
    for index, function in enumerate(functions):
        at = f"reward.functions.{index}"
        known = _known(function, job, inputs)
        if known is None and (path := function_of_option(job, text_of_value(function), len(open_names))):
            known = path, {}
        if known is None:
            job.ask(f"{at}.path", _question(function))
        else:
            path, kwargs = known
            job.run.set(f"{at}.path", path, text_of_value(function) if text_of_value(function) != path else "")
            if kwargs:
                job.run.set(f"{at}.kwargs", kwargs, "arguments of the origin's function")
        job.run.set(f"{at}.weight", float(weights[index]) if weights else 1.0)
        targets.append(f"{at}.path")
    keys = ("reward_funcs", "reward_model_name_or_path")
    for key in keys:
        if key in job.given:
            # the values stand already; the entry names them
            job.convert(key, {target: job.run.get(target) for target in targets}, f"{len(functions)} functions")
    _weights(job, weights)
    if not functions and has_environment:
        job.run.set("reward.functions", [], "the environment gives the reward")
    elif not functions:
        if job.options.reward is not None:
            job.run.set("reward.functions.0.path", job.options.reward, "--reward")
        else:
            job.ask("reward.functions.0.path", "reward function; --reward FILE.py:F")
    _warn(job, inputs, functions)
    for key in ("reward_processing_classes", "optimizers"):
        job.refuse(key, "nothing of the origin's code runs inside the trainer here", "read metrics.jsonl")
    job.settle("processing_class", "the tokenizer of model.path")


def _weights(job: Import, weights: list[float] | None) -> None:
    """Report the weights, which stand with their functions already."""
    key, first = "reward_weights", "reward.functions.0.weight"
    if weights is not None:
        shown = {f"reward.functions.{index}.weight": float(weight) for index, weight in enumerate(weights)}
        job.convert(key, shown, "in the order of the functions")
    elif job.unreadable([key]):
        job.rename(key, first)
    job.settle(key, "empty: 1 each")


def _functions(job: Import, inputs: Inputs) -> list[Any]:
    call = inputs.trainer_call
    if call is not None:
        found = call.kwargs.get("reward_funcs")
        if found is None and len(call.args) > 1:
            found = call.args[1]
        if isinstance(found, list | tuple):
            return list(found)
        return [] if found is None else [found]
    found = job.given.get("reward_funcs")
    if found is None and is_open_r1(job):
        found = _OPEN_R1_DEFAULT
        job.note(f"reward_funcs: open-r1's default, {', '.join(found)}")
    names = [found] if isinstance(found, str) else list(found or [])
    model = job.given.get("reward_model_name_or_path")
    return [*([Unreadable(f"the reward model {model}")] if model else []), *names]


def _known(function: Any, job: Import, inputs: Inputs) -> tuple[str, dict[str, Any]] | None:
    """Return path and arguments of a function that other processes can call; None if there is none."""
    if isinstance(function, str) and inputs.script is None:
        return _named(function, job)
    if _is_of_trl(function) and _last(function) in _OF_TRL:
        return _OF_TRL[_last(function)], {}
    if isinstance(function, Call):
        arguments = [*function.args, *function.kwargs.values()]
        if any(isinstance(one, Call | Unreadable) for one in arguments) or function.is_partial:
            return None
        if function.name in _MADE_BY_TRL and _is_of_trl(function.function):
            names = dict(zip(_MADE_BY_TRL[function.name][1], function.args, strict=False))
            return _made(function.name, names | function.kwargs)
        if function.name == "partial" and function.args and not function.args[1:]:
            path = path_of(function.args[0], inputs)
            return None if path is None else (path, dict(function.kwargs))
        return None
    path = path_of(function, inputs)
    return None if path is None else (path, {})


def _last(function: Imported) -> str:
    return function.path.rpartition(".")[2]


def _is_of_trl(function: Any) -> bool:
    return isinstance(function, Imported) and function.path.startswith("trl.")


def _made(maker: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    name, names = _MADE_BY_TRL[maker]
    return (name, {names[key]: value for key, value in arguments.items()}) if set(arguments) <= set(names) else None


def _named(name: str, job: Import) -> tuple[str, dict[str, Any]] | None:
    """Return a function by its name in the command line's registry, or a dotted path."""
    if name in _OF_TRL:
        return _OF_TRL[name], {}
    if name == "get_soft_overlong_punishment":
        return _made(name, {"max_completion_len": 1280, "soft_punish_cache": 256})
    if name == "soft_overlong_punishment":
        # open-r1: keys of its own
        length, cache = job.given.get("max_completion_len", 16384), job.given.get("soft_punish_cache", 4096)
        shown = _made("get_soft_overlong_punishment", {"max_completion_len": length, "soft_punish_cache": cache})
        for key in ("max_completion_len", "soft_punish_cache"):
            if key in job.given and not job.is_reported(key):
                job.convert(key, {}, "an argument of soft_overlong in reward.functions")
        return shown
    module, dot, function = name.rpartition(".")
    return (f"{module}:{function}", {}) if dot else None


def _question(function: Any) -> str:
    name = text_of_value(function)
    if isinstance(function, Local):
        reason = "is made inside a function" if function.name else "has no name"
        return f"{name} {reason}, so no other process can import it; move it to the top level, or --reward FILE.py:F"
    if isinstance(function, str):
        return f"the reward {name} of the origin's own table; --reward FILE.py:F, or --reward FILE.py for all by name"
    return f"{name}; --reward FILE.py:F"


def _warn(job: Import, inputs: Inputs, functions: list[Any]) -> None:
    """Add a note where importing the script would do work."""
    paths = [job.run.get(f"environments.{index}.path") for index in range(8)]
    paths += [job.run.get(f"reward.functions.{index}.path") for index in range(len(functions))]
    is_used = any(isinstance(path, str) and path.startswith(f"{inputs.script}:") for path in paths)
    if inputs.followed is not None and is_used and (lines := inputs.followed.effects()):
        numbers = ", ".join(map(str, lines[:8])) + (", …" if len(lines) > 8 else "")
        job.note(
            f"importing {inputs.script} does work (lines {numbers}), which each reward worker would repeat; put that "
            'below `if __name__ == "__main__":`, or move the functions to a file of their own'
        )
