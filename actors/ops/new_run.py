"""`actors init`: writes a commented run.yaml for a model, data and a reward, from flags or from questions.

`actors init --example NAME` copies an example that is installed with the package.
"""

import json
import re
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.ops.functions import needed_kwargs
from actors.reward.builtin import BUILTIN
from schemas.config.json_schema import json_schema
from schemas.config.load import dump
from schemas.errors import ConfigError

BUILT_IN = ("final_number", "exact_match")
"""Built-in rewards that compare a completion with a column `answer`."""
PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "query", "instruction", "input")
"""Usual names of the prompt's column, the likeliest first."""
SCHEMA = "run.schema.json"
MAX_TOKENS, OVERLONG_TOKENS = 512, 128
"""Length of a completion, and of its part at the end that rewards of the length punish."""
LENGTHS = dict.fromkeys(
    ("max_tokens", "max_completion_len", "soft_max_length", "max_len", "cosine_max_len"), MAX_TOKENS
)
LENGTHS |= dict.fromkeys(("overlong_tokens", "soft_punish_cache", "soft_cache_length"), OVERLONG_TOKENS)
"""Arguments of built-in rewards that follow from the length of a completion."""


@dataclass(frozen=True)
class Choices:
    """Choices for a run.yaml. None: not decided."""

    model: str | None = None
    """Model folder, or name on the Hugging Face hub."""
    data: str | None = None
    """JSON Lines file with the training examples."""
    reward: str | None = None
    """Built-in function, `module:function`, or `file.py:function`."""
    prompt_column: str | None = None
    """Column of the prompt in the data."""
    engine: str | None = None
    """`vllm` or `embedded`."""
    steps: int | None = None
    """Training steps."""
    lora: bool | None = None
    """Whether adapters are trained instead of all weights."""


def ask(choices: Choices, answer: Callable[[str], str] = input) -> Choices:
    """Return the choices with answers in place of what is not decided yet.

    Args:
        choices: choices from flags.
        answer: prints a question and returns a line; an empty line takes the default.
    """

    def question(text: str, default: str = "") -> str:
        while True:
            said = answer(f"{text} [{default}]: " if default else f"{text}: ").strip() or default
            if said:
                return said

    if choices.model is None:
        choices = replace(choices, model=question("Model (folder, or name on the Hugging Face hub)"))
    if choices.data is None:
        choices = replace(choices, data=question("Training data (JSON Lines file)"))
    assert choices.data is not None
    row = first_row(Path(choices.data))
    if choices.prompt_column is None:
        names = ", ".join(row)
        choices = replace(choices, prompt_column=question(f"Column of the prompt, of {names}", _prompt_column(row)))
    if choices.reward is None:
        text = f"Reward ({', '.join(BUILT_IN)}, or FILE.py:FUNCTION, which is written if it does not exist)"
        choices = replace(choices, reward=question(text, default_reward(row)))
    if choices.engine is None:
        choices = replace(choices, engine=question("Engine (vllm, or embedded without further packages)", "embedded"))
    if choices.lora is None:
        said = question("Train adapters (LoRA) instead of all weights? y or n", "n")
        choices = replace(choices, lora=said.lower().startswith("y"))
    if choices.steps is None:
        said = question("Training steps", "200")
        if not said.isdecimal() or not int(said):
            raise ConfigError(f"steps: {said!r} is not a number of 1 or more")
        choices = replace(choices, steps=int(said))
    return choices


def with_defaults(choices: Choices) -> Choices:
    """Return the choices with defaults for what is not decided.

    Raises:
        ConfigError: model or data is not given; the data can't be read.
    """
    missing = [flag for flag, value in (("--model", choices.model), ("--data", choices.data)) if value is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)}: required where there is no terminal to ask questions at")
    row = first_row(Path(str(choices.data)))
    return Choices(
        choices.model,
        choices.data,
        choices.reward or default_reward(row),
        choices.prompt_column or _prompt_column(row),
        choices.engine or "embedded",
        choices.steps or 200,
        bool(choices.lora),
    )


def first_row(path: Path) -> dict[str, Any]:
    """Return the first row of a JSON Lines file.

    Raises:
        ConfigError: the file can't be read, or has no row that is a JSON object.
    """
    try:
        with path.open(encoding="utf-8") as file:
            line = next((line for line in file if line.strip()), "")
        row = json.loads(line) if line else None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    except ValueError:
        row = None
    if not isinstance(row, dict) or not row:
        raise ConfigError(f'{path}: its first line is not a JSON object such as {{"prompt": "…", "answer": "…"}}')
    return row


def default_reward(row: Mapping[str, Any]) -> str:
    """Return the reward that fits the data's columns: a built-in one needs `answer`."""
    if "answer" not in row:
        return "rewards.py:score"
    return BUILT_IN[0] if re.search(r"\d", str(row["answer"])) else BUILT_IN[1]


def _prompt_column(row: Mapping[str, Any]) -> str:
    return next((name for name in PROMPT_COLUMNS if name in row), next(iter(row)))


def write_run(folder: Path, choices: Choices) -> list[Path]:
    """Write run.yaml, its schema for editors, and the reward function if its file does not exist; return the files.

    Args:
        folder: folder of the files; created if it does not exist.
        choices: all decided.

    Raises:
        ConfigError: run.yaml exists, the prompt's column does not, or a value is not allowed.
    """
    path = folder / "run.yaml"
    if path.exists():
        raise ConfigError(f"{path}: exists already; move it, or give another folder")
    assert choices.data is not None
    assert choices.reward is not None
    row = first_row(Path(choices.data))
    if choices.prompt_column not in row:
        raise ConfigError(f"prompt column: the data has no {choices.prompt_column!r}; it has {', '.join(row)}")
    if choices.engine not in ("vllm", "embedded"):
        raise ConfigError(f"engine: {choices.engine!r} is not one of vllm, embedded")
    texts = {path: run_text(choices, row), folder / SCHEMA: json.dumps(json_schema(), indent=1) + "\n"}
    file, colon, function = choices.reward.rpartition(":")
    code = folder / file
    # a path is looked up next to run.yaml first, then in the current directory
    if colon and file.endswith(".py") and not code.exists() and not Path(file).exists():
        if not function.isidentifier():
            raise ConfigError(f"reward: {function!r} is not a name of a function")
        texts[code] = reward_text(function, row, str(choices.prompt_column))
    folder.mkdir(parents=True, exist_ok=True)
    for target, text in texts.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return list(texts)


def run_text(choices: Choices, row: Mapping[str, Any]) -> str:
    """Return the text of run.yaml.

    Args:
        choices: all decided.
        row: first row of the data.
    """
    prompt = row[str(choices.prompt_column)]
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(str(choices.data)).stem) or "run"
    data = Path(str(choices.data)).absolute()
    # messages have their chat template already; a text of a chat model becomes a user message
    chat = "" if isinstance(prompt, list) else "\n    chat: true            # text prompts become a user message"
    lora = "\n  lora: {rank: 16, alpha: 32}" if choices.lora else ""
    rate = "1.0e-5" if choices.lora else "1.0e-6"
    columns = ", ".join(column for column in row if column != choices.prompt_column) or "none"
    return f"""# yaml-language-server: $schema={SCHEMA}
# Check with `actors check run.yaml`, start and continue with `actors up run.yaml`.
name: {name}
output_dir: outputs/{name}    # everything that the run writes; an earlier run there is continued

model:
  path: {dump(_model(choices))}
  dtype: bfloat16{lora}

environments:
  - type: jsonl
    path: {dump(str(data))}
    prompt_column: {dump(choices.prompt_column)}
    # columns for the reward functions: {columns}{chat}

rollout:
  group_size: 8        # completions of each prompt
  max_tokens: {MAX_TOKENS}      # of each completion
  temperature: 1.0

reward:
  functions:
    - path: {dump(choices.reward)}{_kwargs(str(choices.reward))}
  advantage:
    type: zscore       # GRPO

packer:
  groups_per_step: 8   # prompts of a training step
  sequence_len: 2048   # tokens of prompt and completion; a row of several samples
  max_async_level: 1   # steps that sampling may be ahead of training

trainer:
  max_steps: {choices.steps}
  learning_rate: {rate}
  checkpoint:
    interval: 50

inference:
  engine:
    type: {choices.engine}

eval:
  num_prompts: 0       # with `eval_path` in environments: prompts of an evaluation

up:
  colocate: true       # trainer and engine share a GPU where there is only one
"""


def _kwargs(reward: str) -> str:
    """Return the line with the arguments that a built-in function needs and that are known; empty for none."""
    needed = needed_kwargs(BUILTIN[reward]) if reward in BUILTIN else set()
    known = {name: LENGTHS[name] for name in sorted(needed & LENGTHS.keys())}
    return f"\n      kwargs: {dump(known)}" if known else ""


def _model(choices: Choices) -> str:
    folder = Path(str(choices.model)).expanduser()
    return str(folder.absolute()) if folder.is_dir() else str(choices.model)


def reward_text(function: str, row: Mapping[str, Any], prompt_column: str) -> str:
    """Return the text of a file with a reward function, to be filled in unless the data has a column `answer`."""
    columns = [name for name in row if name != prompt_column and name.isidentifier()]
    arguments = ", ".join(["prompts", "completions", *columns, "**others"])
    if "answer" in columns:
        body = "    return [float(str(right).strip() in text(one)) for right, one in zip(answer, completions)]"
    else:
        body = '    raise NotImplementedError("score: return a number for each completion")'
    return f'''"""Reward of a run. All arguments are lists with an item per completion."""


def text(completion):
    """Return a completion's text. Completions of chat prompts are lists of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def {function}({arguments}):
    """Return a number for each completion; None where the reward does not apply."""
{body}
'''


def shared(*parts: str) -> Path:
    """Return a folder of the files that come with the package: examples, dashboards, documents.

    Raises:
        ConfigError: the package was installed without them.
    """
    installed = Path(sysconfig.get_path("data"), "share", "grpo-actors", *parts)
    clone = Path(__file__).parents[2].joinpath(*parts)
    for folder in (installed, clone):
        if folder.is_dir():
            return folder
    raise ConfigError(f"{installed}: there is no such folder; install the package from its wheel")


def copy_example(name: str, folder: Path) -> list[Path]:
    """Copy an example's files to a folder; return the copies.

    Raises:
        ConfigError: there is no such example, or a file exists already.
    """
    examples = shared("examples")
    names = sorted(path.name for path in examples.iterdir() if path.is_dir() and not path.name.startswith("_"))
    if name not in names:
        raise ConfigError(f"--example: {name!r} is not one of {', '.join(names)}")
    copies = {file: folder / file.name for file in sorted((examples / name).iterdir()) if file.is_file()}
    if taken := [copy for copy in copies.values() if copy.exists()]:
        raise ConfigError(f"{taken[0]}: exists already; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file, copy in copies.items():
        shutil.copyfile(file, copy)
    return list(copies.values())
