"""Data and reward functions of ms-swift."""

import ast
import json
import re
from pathlib import Path
from typing import Any

from actors.imports.files import text_of
from actors.imports.huggingface import function_of_option, prompt_limit
from actors.imports.job import Import
from actors.imports.ms_swift.inputs import Inputs
from schemas.errors import ConfigError

_NAMED: dict[str, tuple[str, dict[str, str]]] = {
    "accuracy": ("accuracy_swift", {}),
    "format": ("format_swift", {}),
    "react_format": ("react_format", {}),
    "cosine": (
        "cosine_swift",
        {
            name: name
            for name in (
                *("cosine_max_len", "cosine_min_len_value_wrong", "cosine_max_len_value_wrong"),
                *("cosine_min_len_value_correct", "cosine_max_len_value_correct"),
            )
        },
    ),
    "repetition": (
        "repetition_swift",
        {"repetition_n_grams": "repetition_n_grams", "repetition_max_penalty": "repetition_max_penalty"},
    ),
    "soft_overlong": ("overlong", {"soft_max_length": "max_tokens", "soft_cache_length": "overlong_tokens"}),
}
"""Rewards by their names: the name here, and the arguments by the keys that give them."""

_COUNT = re.compile(r"(.*)#(\d+)")
_COLUMNS = ("messages", "prompt", "query")


def rows_of(job: Import, inputs: Inputs) -> int | None:
    """Return the number of training rows: `--rows`, the rows of a file, or the numbers behind `#`."""
    if job.options.rows is not None:
        return job.options.rows
    file = _file(job, inputs)
    names = [] if job.unreadable(["dataset"]) else job.value("dataset") or []
    counts = [_COUNT.fullmatch(str(name)) for name in names]
    if names and all(counts):
        number = sum(int(found[2]) for found in counts if found)
    elif file is not None and file.is_file():
        with file.open("rb") as lines:
            number = sum(bool(line.strip()) for line in lines)
    else:
        return None
    # a held-out share is taken from the rows; val_dataset leaves them whole
    share = 0.0 if job.value("val_dataset") else float(job.value("split_dataset_ratio") or 0.0)
    return number - max(int(number * share), 1) if share else number


def _file(job: Import, inputs: Inputs) -> Path | None:
    """Return the file with the training data: of `--data`, or the one file that the command names."""
    if job.options.data is not None:
        return job.options.data
    names = [] if job.unreadable(["dataset"]) else job.value("dataset") or []
    if len(names) == 1 and str(names[0]).partition("#")[0].endswith(".jsonl"):
        return inputs.folder / str(names[0]).partition("#")[0]
    return None


def data(job: Import, inputs: Inputs, has_evaluation: bool) -> None:
    """Write the environment with its rows, or the environment that answers."""
    file = _file(job, inputs)
    answers = next((key for key in ("gym_env", "multi_turn_scheduler") if job.is_set(key)), None)
    at = "environments.0"
    if answers is not None:
        _turns(job, inputs, answers, file)
    else:
        job.run.set(f"{at}.type", "jsonl")
        job.run.set(f"{at}.chat", True, "ms-swift makes a user message of each prompt")
        _column(job, file)
    _system(job, inputs)
    _limit(job, inputs.version)
    if job.is_set("enable_thinking"):
        job.rename("enable_thinking", f"{at}.chat_template_kwargs.enable_thinking")
    job.settle("enable_thinking", "empty: as the template has it")
    target = f"{at}.path" if answers is None else f"{at}.rows"
    if answers is None and file is None:
        job.ask(target, "training data as JSON Lines; --data FILE.jsonl")
    elif answers is None:
        job.run.set(target, str(file), "--data" if job.options.data is not None else "dataset")
    names = job.given.get("dataset")
    if file is not None:
        job.convert("dataset", {target: str(file)}, "rows as JSON Lines")
    if not job.is_reported("dataset"):
        job.refuse(
            "dataset",
            f"prepared by ms-swift's own code; export {names} to JSON Lines",
            "--data FILE.jsonl, or write an environment of type dataset",
        )
    if has_evaluation:
        held = job.value("val_dataset") or []
        if len(held) == 1 and str(held[0]).endswith(".jsonl"):
            path = str(inputs.folder / str(held[0]))
            job.convert("val_dataset", {f"{at}.eval_path": path}, "held-out rows")
        else:
            job.ask(f"{at}.eval_path", "held-out rows as JSON Lines, which the origin evaluates")
            job.refuse("val_dataset", "held-out rows come from a file", "set environments[].eval_path")
        job.convert("split_dataset_ratio", {}, "a share of the rows is held out")
    for key in ("val_dataset", "split_dataset_ratio"):
        job.settle(key, "nothing is evaluated")


def _turns(job: Import, inputs: Inputs, key: str, file: Path | None) -> None:
    at = "environments.0"
    job.run.set(f"{at}.type", "python")
    path = _registered(job, inputs, "envs").get(str(job.value(key))) if key == "gym_env" else None
    if path is not None:
        job.convert(key, {f"{at}.path": path}, "the class as it is")
    else:
        job.refuse(key, "code that answers is an environment here", "write a class with reset and step")
        job.ask(f"{at}.path", f"class of {job.value(key)}, FILE.py:NAME")
    if file is not None:
        job.run.set(f"{at}.rows", str(file))
    if job.is_set("max_turns"):
        job.rename("max_turns", f"{at}.max_turns")


def _column(job: Import, file: Path | None) -> None:
    """Write the column of the prompt: as `--columns` names it, or as the first row of the data has it."""
    columns = {key.partition(".")[2]: value for key, value in job.given.items() if key.startswith("columns.")}
    # ms-swift's own names of a prompt; a column that is renamed to one of these holds it
    renamed = next((theirs for theirs, ours in columns.items() if ours in _COLUMNS), None)
    names: list[str] = []
    if file is not None and file.is_file():
        with file.open(encoding="utf-8") as lines:
            try:
                first = json.loads(lines.readline())
            except ValueError as error:
                raise ConfigError(f"{file}: line 1 is not JSON: {error}") from None
        names = list(first) if isinstance(first, dict) else []
    column = renamed or next((name for name in _COLUMNS if name in names), None)
    if column is not None and column != "prompt":
        job.run.set("environments.0.prompt_column", column, "column of the prompt")
    if column == "messages":
        job.note("messages of the data end with an answer in ms-swift's format; the prompt here has none: leave it out")
    for key in [key for key in job.given if key.startswith("columns.")]:
        if key.partition(".")[2] == renamed:
            job.convert(key, {"environments.0.prompt_column": renamed}, f"column of {columns[str(renamed)]}")
        else:
            job.refuse(key, "columns of a JSON Lines file keep their names", "type dataset with columns renames them")
    job.refuse("columns", "columns of a JSON Lines file keep their names", "type dataset with columns renames them")


_TREATMENTS = {
    "left": ("truncate_left", "the first tokens of longer prompts are cut off"),
    "delete": ("drop", "longer prompts are left out"),
}
"""Values of `long_prompts` by those of truncation_strategy."""
_WITHOUT_DELETE = (3, 6)
"""Last release with one strategy alone."""


def _limit(job: Import, version: tuple[int, int]) -> None:
    """Write the longest prompt, which is ms-swift's max_length, and what becomes of longer ones.

    Raises:
        ConfigError: ms-swift refuses the strategy for GRPO too.
    """
    key = "truncation_strategy"
    strategy = job.value(key) or "left"
    allowed = ("left",) if version <= _WITHOUT_DELETE else tuple(_TREATMENTS)
    if job.unreadable([key]):
        strategy = "left"
    elif strategy not in allowed:
        raise ConfigError(f"{key}: {strategy!r} must be {' or '.join(allowed)}, as ms-swift requires for GRPO")
    treatment, text = _TREATMENTS[strategy]
    prompt_limit(job, "max_length", treatment, text)
    target = "environments.0.long_prompts"
    if job.run.get(target) is not None:
        job.convert(key, {target: treatment}, text)
    job.settle(key, "only with max_length")


def _system(job: Import, inputs: Inputs) -> None:
    text, target = job.value("system"), "environments.0.system_prompt"
    if isinstance(text, str) and text.endswith(".txt") and not job.unreadable(["system"]):
        file = next((place for place in (inputs.folder / text, Path(text)) if place.is_file()), None)
        if file is None:
            job.convert("system", {target: text}, "a file")
            job.ask(target, f"text of {text}, which is not in {inputs.folder}")
        else:
            job.convert("system", {f"{target}.file": str(file)}, "the text of the file")
    elif isinstance(text, str) and "\\n" in text:
        job.convert("system", {target: text.replace("\\n", "\n")}, "with \\n as a new line")
    elif job.is_set("system"):
        job.rename("system", target)
    job.settle("system", "empty: that of the model's template")


def rewards(job: Import, inputs: Inputs) -> None:
    """Write the reward functions, their arguments and weights.

    Raises:
        ConfigError: weights do not fit, or a reward lacks a key, as in ms-swift.
    """
    names = [] if job.unreadable(["reward_funcs"]) else [str(name) for name in job.value("reward_funcs") or []]
    models = [] if job.unreadable(["reward_model"]) else [str(name) for name in job.value("reward_model") or []]
    weights = None if job.unreadable(["reward_weights"]) else job.value("reward_weights")
    number = len(names) + len(models)
    if weights is not None and len(weights) != number:
        raise ConfigError(f"reward_weights: {len(weights)} weights for {number} rewards; ms-swift refuses that")
    plugins = _registered(job, inputs, "orms")
    used = _functions(job, names, plugins)
    for index, name in enumerate(models, len(names)):
        job.ask(f"reward.functions.{index}.path", f"the reward model {name}; --reward FILE.py:F")
    for index in range(number):
        job.run.set(f"reward.functions.{index}.weight", float(weights[index]) if weights else 1.0)
    paths = {f"reward.functions.{index}.path": job.run.get(f"reward.functions.{index}.path") for index in range(number)}
    job.convert("reward_funcs", {key: paths[key] for key in list(paths)[: len(names)]}, f"{len(names)} functions")
    for key in ("reward_model", "reward_model_plugin"):
        job.refuse_unless(key, (None, []), "models that score are asked by a function here", "write one, or llm_judge")
    if weights is not None:
        shown = {f"reward.functions.{index}.weight": float(weight) for index, weight in enumerate(weights)}
        job.convert("reward_weights", shown, "in the order of the functions")
    else:
        job.convert("reward_weights", {"reward.functions.0.weight": 1.0} if number else {}, "1 each")
    if job.is_set("external_plugins"):
        found = ", ".join(sorted(plugins)) or "no reward that could be read"
        job.convert("external_plugins", {}, f"read for the names of its rewards: {found}")
    job.settle("external_plugins", "empty")
    _without_functions(job, number)
    for name, (_, keys) in _NAMED.items():
        for key in keys:
            if key in used:
                job.convert(key, used[key], f"an argument of {name}")
            job.settle(key, f"only with the reward {name}")


def _functions(job: Import, names: list[str], plugins: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Write the paths of rewards, and return the keys of the origin that are arguments of one, with their targets."""
    open_names = [name for name in names if name not in _NAMED and name not in plugins]
    used: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(names):
        at = f"reward.functions.{index}"
        path = plugins.get(name) or function_of_option(job, name, len(open_names))
        if name in _NAMED and name not in plugins:
            job.run.set(f"{at}.path", _NAMED[name][0], name)
            if kwargs := _arguments(job, name):
                job.run.set(f"{at}.kwargs", kwargs, f"keys of {name}")
                used |= {key: {f"{at}.kwargs": kwargs} for key in _NAMED[name][1]}
        elif path is not None:
            job.run.set(f"{at}.path", path, name)
        else:
            job.ask(f"{at}.path", f"the reward {name}; --reward FILE.py:F, or --reward FILE.py for all by name")
    return used


def _without_functions(job: Import, number: int) -> None:
    """Write what holds if no reward is named."""
    if not number and job.run.get("environments.0.type") == "python":
        job.run.set("reward.functions", [], "the environment gives the reward")
    elif not number and job.options.reward is not None:
        job.run.set("reward.functions.0.path", job.options.reward, "--reward")
    elif not number:
        job.ask("reward.functions.0.path", "reward function; --reward FILE.py:F")


def _arguments(job: Import, name: str) -> dict[str, Any]:
    """Return the arguments of a named reward, with the defaults that follow from other keys.

    Raises:
        ConfigError: soft_overlong lacks its length, as in ms-swift.
    """
    tokens = job.run.get("rollout.max_tokens")
    if name == "soft_overlong" and job.value("soft_cache_length") is None:
        raise ConfigError("soft_cache_length: is missing; the reward soft_overlong needs it")
    found = {}
    for key, ours in _NAMED[name][1].items():
        value = job.value(key)
        found[ours] = tokens if value is None and key in ("cosine_max_len", "soft_max_length") else value
    return found


def _registered(job: Import, inputs: Inputs, table: str) -> dict[str, str]:
    """Return paths of classes by the names that plugins give them in a table: `orms["name"] = Class`."""
    found: dict[str, str] = {}
    plugins = [] if job.unreadable(["external_plugins"]) else job.value("external_plugins") or []
    for plugin in plugins:
        file = next((place for place in (inputs.folder / str(plugin), Path(str(plugin))) if place.is_file()), None)
        if file is None:
            job.note(f"external_plugins: {plugin} is not in {inputs.folder}, so its rewards are not known")
            continue
        try:
            tree = ast.parse(text_of(file))
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: is not Python: {error}") from None
        for node in ast.walk(tree):
            match node:
                case ast.Assign(
                    targets=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)))],
                    value=ast.Name(id=made),
                ) if name == table:
                    found[key] = f"{file}:{made}"
    return found


def mixed_in(job: Import, world: int | None, updates: int) -> None:
    """Write supervised examples mixed in (CHORD)."""
    if not job.is_set("chord_sft_dataset"):
        for key in [key for key in job.given if key.startswith("chord_")]:
            job.settle(key, "only with chord_sft_dataset")
        return
    per_device, accumulation = job.value("chord_sft_per_device_train_batch_size") or 1, 1
    accumulation = job.value("gradient_accumulation_steps") or 1
    size = per_device * (world or 1) * accumulation * updates
    text = f"{per_device} per device × {world} processes × {accumulation} accumulated × {updates} updates = {size}"
    job.convert("chord_sft_per_device_train_batch_size", {"trainer.sft.batch_size": size}, text)
    if "chord_sft_per_device_train_batch_size" not in job.given:
        job.run.set("trainer.sft.batch_size", size, text)
    if world is None:
        job.ask("trainer.sft.batch_size", "examples of a step; --world N")
    for key in ("warmup_steps", "decay_steps"):
        number = int(job.value(f"chord_mu_{key}") or 0) // updates
        job.convert(f"chord_mu_{key}", {f"trainer.sft.mu_{key}": number}, f"÷ {updates} updates per step = {number}")
        job.run.set(f"trainer.sft.mu_{key}", number)
    for key in ("mu_peak", "mu_valley"):
        job.rename(f"chord_{key}", f"trainer.sft.{key}", job.value(f"chord_{key}") or 0.0)
    job.rename("chord_enable_phi_function", "trainer.sft.phi")
    names = [] if job.unreadable(["chord_sft_dataset"]) else job.value("chord_sft_dataset")
    if len(names) == 1 and str(names[0]).endswith(".jsonl"):
        job.convert("chord_sft_dataset", {"trainer.sft.path": str(names[0])}, "rows of prompt and completion")
    else:
        job.ask("trainer.sft.path", f"{names} as JSON Lines with prompt and completion")
        job.refuse("chord_sft_dataset", "examples come from a file", "export them to JSON Lines")
