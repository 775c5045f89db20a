"""Model card of a checkpoint: README.md with the base model, the objective, the data, and figures of the run.

The card is a function of the configuration and of lines of metrics.jsonl and evals.jsonl. It names data sets and models
on the hub, and no path, address or argument of this machine.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from actors.telemetry.reporter import read_lines
from actors.uploader.files import CARD
from schemas.config import RunConfig
from schemas.config.data import DatasetConfig

MARK = "<!-- written by grpo-actors -->"
"""Line of a card, by which a card of ours is known. A README.md without the line is somebody's own."""
FIGURES = {
    "reward_mean": "mean reward",
    "completion_tokens_mean": "tokens of a completion",
    "truncated_fraction": "share of completions cut off",
    "entropy": "entropy",
}
"""Words for metrics of a step that the card shows, if the step has them."""
Line = Mapping[str, Any]


def card_of(config: RunConfig, step: int) -> str:
    """Return the card of a checkpoint, with the figures in the run's files. Missing files leave out their part."""
    found = []
    for name in ("metrics.jsonl", "evals.jsonl"):
        path = config.output / name
        found.append(read_lines(path) if path.is_file() else [])
    return model_card(config, step, *found)


def write_card(config: RunConfig, step: int, folder: Path) -> None:
    """Write the card of a checkpoint into a folder, unless the folder has a README.md of somebody's own."""
    path = folder / CARD
    if not path.exists() or MARK in path.read_text(encoding="utf-8", errors="replace"):
        path.write_text(card_of(config, step), encoding="utf-8")


def model_card(config: RunConfig, step: int, metrics: Sequence[Line], evaluations: Sequence[Line]) -> str:
    """Return the text of README.md.

    Args:
        config: configuration of the run.
        step: step of the checkpoint.
        metrics: lines of metrics.jsonl.
        evaluations: lines of evals.jsonl.
    """
    blocks = [
        f"---\n{_header(config)}---\n{MARK}",
        f"# {config.name or config.output.name}",
        _words(config, step),
        _table("Training", _facts(config)),
        _table("Figures", list(_figures(step, metrics))),
        _table("Evaluation", list(_evaluation(step, evaluations))),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _header(config: RunConfig) -> str:
    """Return the metadata that the hub reads. JSON is YAML, so a name can't break out of its line."""
    base, sets = _on_hub(config.model.path), [one.path for one in _named_data(config)]
    values: dict[str, Any] = {
        "library_name": "peft" if config.model.lora is not None else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "grpo", "grpo-actors"],
    }
    values |= {"base_model": base} if base else {}
    values |= {"datasets": sets} if sets else {}
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items())


def _words(config: RunConfig, step: int) -> str:
    """Return the sentence about model, step and program."""
    kind = "Adapter (LoRA) of" if config.model.lora is not None else "Model trained from"
    try:
        program = f"grpo-actors {version('grpo-actors')}"
    except PackageNotFoundError:
        program = "grpo-actors"
    base = config.model.path.rstrip("/").rpartition("/")[2] if config.model.path.startswith("/") else config.model.path
    end = f" of {config.trainer.max_steps}" if config.trainer.max_steps else ""
    return f"{kind} `{base}` by reinforcement learning, after step {step}{end}, with {program}."


def _facts(config: RunConfig) -> list[tuple[str, str]]:
    """Return the configuration in rows of a table."""
    trainer, rollout = config.trainer, config.rollout
    rewards = [f"{one.title} ({one.weight:g})" for one in config.reward.functions]
    facts = [
        ("loss", trainer.loss.type),
        ("advantage", config.reward.advantage.type),
        ("rewards (weight)", ", ".join(rewards) or "of the environments"),
        ("data", ", ".join(dict.fromkeys(_data_names(config)))),
        ("completions per prompt", str(rollout.group_size)),
        ("prompts per step", str(config.packer.groups_per_step)),
        ("tokens of a completion, at most", str(rollout.max_tokens)),
        ("temperature", f"{rollout.temperature:g}"),
        ("learning rate", f"{trainer.learning_rate:g}, {trainer.lr_scheduler}"),
        ("steps ahead, at most", str(config.packer.max_async_level)),
        ("seed", str(config.seed)),
    ]
    if config.model.lora is not None:
        facts.append(("LoRA rank, alpha", f"{config.model.lora.rank}, {config.model.lora.alpha:g}"))
    if trainer.reference is not None:
        facts.append(("KL to the reference", f"{trainer.reference.beta:g}"))
    return facts


def _figures(step: int, metrics: Sequence[Line]) -> Iterator[tuple[str, str]]:
    """Yield figures of the first step and of the checkpoint's step."""
    lines = [line for line in metrics if line.get("step", 0) <= step]
    if not lines:
        return
    first, last = lines[0], lines[-1]
    names = [*FIGURES, *sorted(name for name in last if name.startswith("reward/"))]
    for name in names:
        if isinstance(last.get(name), int | float):
            words = FIGURES.get(name, f"reward `{name.removeprefix('reward/')}`")
            start = f"{_number(first.get(name))} at step {first['step']}"
            yield words, f"{start}, {_number(last[name])} at step {last['step']}"


def _evaluation(step: int, evaluations: Sequence[Line]) -> Iterator[tuple[str, str]]:
    """Yield results of the newest evaluation of a version up to the checkpoint's."""
    lines = [line for line in evaluations if line.get("version", 0) <= step]
    for name, values in (lines[-1].get("environments", {}) if lines else {}).items():
        for key, words in (("mean_reward", "mean reward"), ("exact_match", "exact match")):
            if isinstance(values.get(key), int | float):
                yield f"{name}, {words}, version {lines[-1]['version']}", _number(values[key])


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a section with a table; empty without rows."""
    if not rows:
        return ""
    cells = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *cells])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _on_hub(path: str) -> str:
    """Return the name of a model on the hub; empty for a folder, which is absolute in a loaded configuration."""
    return "" if path.startswith("/") else path


def _named_data(config: RunConfig) -> list[DatasetConfig]:
    """Return the data sets of training that are on the hub."""
    found = [one for one in config.environments if isinstance(one, DatasetConfig) and one.train]
    return [one for one in found if not one.path.startswith("/")]


def _data_names(config: RunConfig) -> Iterator[str]:
    named = _named_data(config)
    for one in config.environments:
        if one.train:
            yield one.path if isinstance(one, DatasetConfig) and one in named else one.label
