"""docs/howto/debugging.md: each mistake that it lists is made here, and answered in the words of the page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.cli import main
from actors.datasets import Dataset, make_dataset
from actors.datasets.identity import data_changes, identities
from actors.datasets.prepared import Prepared
from actors.ops.screens.diagnostics import learning
from schemas.config.data import DatasetConfig
from tests import models
from tests.howto.pages import CODE, matches, page

PAGE = page("debugging")
RUN: dict[str, Any] = {
    "output_dir": "out",
    "model": {"path": "model"},
    "environments": [{"type": "jsonl", "path": "train.jsonl", "prompt_column": "question"}],
    "rollout": {"group_size": 4, "max_tokens": 8},
    "reward": {"functions": [{"path": "rewards.py:correct"}]},
    "packer": {"groups_per_step": 2, "sequence_len": 64},
    "trainer": {"max_steps": 2},
    "inference": {"engine": {"type": "embedded", "max_sequence_len": 64}},
    "eval": {"num_prompts": 0},
}
MISTAKES: dict[str, list[str]] = {
    "trainer.learning_rat:": ["trainer.learning_rat=1"],
    "rollout.num_generations:": ["rollout.num_generations=8"],
    "trainer.loss:": ["trainer.loss=dapo"],
    "rollout.max_tokens:": ["rollout.max_tokens=2048", "packer.sequence_len=2048"],
    "trainer: correction:": ["trainer.correction={mode: mask}"],
    "environments[].path: there": ["environments.0.path=nowhere.jsonl"],
    "environments[].path: …": ["environments.0.prompt_column=prompt"],
    "reward.functions.0.path: … has": ["reward.functions.0.path=rewards.py:corect"],
    "reward.functions.0.path: …: correct": ["reward.functions.0.path=others.py:correct"],
    "reward.functions.0.path: …: strict": ["reward.functions.0.path=others.py:strict"],
    "eval.exact_match:": ["eval.num_prompts=2", "environments.0.eval_path=bare.jsonl"],
    "environments[].eval_path:": ["eval.num_prompts=2"],
    "model.path:": ["environments.0.chat=true"],
    "inference.engine.urls:": ["inference.engine={type: sglang, urls: ['http://a:1', 'http://b:1']}"],
    "bus.host:": ["bus.control=tcp://127.0.0.1:5555", "bus.host=10.0.0.5"],
}
"""Overrides that make a mistake, by the beginning of its words on the page."""
CHANGED_DATA = "… is not the data of this run: so far …"
OTHERS = """
def correct(prompts, completions, solution, **columns):
    return [0.0] * len(completions)

def strict(prompts, completions):
    return [0.0] * len(completions)
"""
Told = Callable[..., list[str]]


def words_of_the_page() -> list[str]:
    """The first column of the table of mistakes."""
    return [cell.strip("`") for cell, _ in PAGE.table("Words", "Change").rows]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """`told(command, overrides…)`: what a command prints of a small sound run with these overrides."""
    monkeypatch.chdir(tmp_path)
    PAGE.write_files(tmp_path)
    models.build(tmp_path / "model")
    (tmp_path / "others.py").write_text(OTHERS)
    rows = [json.dumps({"question": "ab", "answer": "ba"}) for _ in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    (tmp_path / "bare.jsonl").write_text(json.dumps({"question": "ab"}))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    capsys.readouterr()

    def tell(command: str, *overrides: str) -> list[str]:
        main([command, "run.yaml", *overrides])
        captured = capsys.readouterr()
        return [line.removeprefix("warning: ") for line in (captured.out + captured.err).splitlines()]

    return tell


def test_the_run_of_these_tests_is_sound(told: Told) -> None:
    """Else it would warn of more than one thing."""
    assert [line for line in told("check") if not line.startswith("model.")] == ["run.yaml: good"]


@pytest.mark.parametrize("words", [words for words in words_of_the_page() if any(map(words.startswith, MISTAKES))])
def test_a_mistake_is_answered_in_the_words_of_the_page(told: Told, words: str) -> None:
    """By `actors check`, or where files are missing, as `actors up` has it."""
    overrides = MISTAKES[max(filter(words.startswith, MISTAKES), key=len)]
    command = "up" if "there is no file" in words else "check"
    assert [line for line in told(command, *overrides) if matches(words, line)], told(command, *overrides)


def test_the_rest_of_the_mistakes(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    """Another group size in an old output_dir; dashes before an override."""
    from schemas.config import load_config
    from schemas.config.resume import as_tree, differences, refusal

    rest = [words for words in words_of_the_page() if not any(map(words.startswith, MISTAKES))]
    other, dashes = [words for words in rest if words != CHANGED_DATA]
    assert told("check")
    before = as_tree(load_config("run.yaml", ["rollout.group_size=8"]))
    assert refusal(differences(before, load_config("run.yaml"))) == [other]
    with pytest.raises(SystemExit):
        main(["check", "run.yaml", "--trainer.max_steps=5"])
    assert dashes in capsys.readouterr().err


def test_another_file_of_rows_is_refused_in_the_words_of_the_page(tmp_path: Path) -> None:
    """The file of the earlier start had other bytes."""
    path = tmp_path / "rows.csv"
    config = DatasetConfig(path=str(path), columns={"prompt": "question"})

    def sums() -> dict[str, Dataset]:
        return {"sums": make_dataset(config, "train", 0, prepared=Prepared(tmp_path / "prepared"))}

    path.write_text("question,answer\n1+1,3\n")
    before = json.loads(json.dumps(identities(sums())))
    path.write_text("question,answer\n1+1,2\n")
    (line,) = data_changes(before, sums())[0]
    assert CHANGED_DATA in words_of_the_page()
    assert matches(CHANGED_DATA, line)


@pytest.mark.parametrize(
    ("words", "progress"),
    [
        ("no group of the last", {"steps_without_variance": 30, "steps_without_gradient": 30}),
        ("the gradient of the last", {"steps_without_gradient": 30}),
        ("reward functions are late", {"late_reward_calls": 40, "reward_calls": 40}),
        ("data is lost", {"dropped": {"poison": 5}, "num_issued": 20}),
    ],
)
def test_what_screens_say_is_on_the_page(words: str, progress: dict[str, Any]) -> None:
    """The words to look for."""
    (line,) = learning(progress)
    named = [text for row in PAGE.table("You see", "Look at", "Then").rows for text in CODE.findall(row[0])]
    assert [text for text in named if words in text and matches(f"{text}…", line)]
