"""`actors init`: what it writes is a good configuration, from options or from questions."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.ops.new_run import Choices, ask, with_defaults
from actors.reward.builtin import BUILTIN, EXTRAS
from schemas.config import load_config
from schemas.errors import ConfigError
from tests.marks import long_but
from tests.models import build


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a model and three data files."""
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "model")
    rows = {
        "sums.jsonl": {"question": "2 + 2?", "answer": "4"},
        "words.jsonl": {"prompt": "Name a fruit.", "answer": "apple"},
        "chat.jsonl": {"messages": [{"role": "user", "content": "hi"}], "level": 3},
    }
    for name, row in rows.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    return tmp_path


def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the terminal away, as in a script."""
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)


@pytest.mark.parametrize(
    ("data", "column", "reward"),
    [
        ("sums.jsonl", "question", "final_number"),
        ("words.jsonl", "prompt", "exact_match"),
        ("chat.jsonl", "messages", "rewards.py:score"),
    ],
)
def test_model_and_data_are_enough_for_a_file_that_check_accepts(
    folder: Path, data: str, column: str, reward: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Column and reward follow from the data; a reward function that does not exist is written."""
    no_terminal(monkeypatch)
    assert main(["init", "new", "--model", "model", "--data", data]) == 0
    config = load_config(folder / "new/run.yaml")
    (environment,), (function,) = config.environments, config.reward.functions
    assert environment.model_dump()["prompt_column"] == column
    assert function.path == (str(folder / "new" / reward) if ".py" in reward else reward)
    assert config.model.path == str(folder / "model")
    # the tiny model has no chat template, and its context is short
    overrides = ["environments.0.chat=false", "packer.sequence_len=64", "rollout.max_tokens=16"]
    if data != "chat.jsonl":
        assert main(["check", "new/run.yaml", *overrides]) == 0, capsys.readouterr().err
    assert json.loads((folder / "new/run.schema.json").read_text())["title"] == "RunConfig"


COLUMNS: dict[str, Any] = {"answer": "4", "solution": "$4$", "tests": ["assert True"], "schema": {"type": "object"}}
ASKED = {"llm_judge": "model, url", "relative_judge": "model, url"}
"""Arguments of built-in rewards that only the user knows."""


@pytest.mark.slow
@pytest.mark.parametrize("reward", long_but(sorted(BUILTIN)[::6], sorted(BUILTIN)))
def test_each_named_reward_passes_the_check_or_says_what_is_missing(
    folder: Path, reward: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With all columns that built-in functions read, and without each of them."""
    no_terminal(monkeypatch)
    if package := EXTRAS.get(reward):
        pytest.importorskip(package)
    parameters = inspect.signature(BUILTIN[reward]).parameters.values()
    needed = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty} & COLUMNS.keys()
    overrides = ["environments.0.chat=false", "packer.sequence_len=64", "rollout.max_tokens=16"]
    for missing in (None, *COLUMNS):
        row = {"prompt": "p", **{name: value for name, value in COLUMNS.items() if name != missing}}
        (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
        name = f"without-{missing}"
        assert main(["init", name, "--model", "model", "--data", "rows.jsonl", "--reward", reward]) == 0
        capsys.readouterr()
        code = main(["check", f"{name}/run.yaml", *overrides])
        errors = capsys.readouterr().err
        words = [f"reward.functions.0.kwargs: {reward} needs {ASKED[reward]}"] if reward in ASKED else []
        if missing in needed:
            words.append(f"reward.functions.0.path: {reward} needs a column {missing!r}, which not every row of")
        assert code == (2 if words else 0), errors
        assert all(one in errors for one in words), errors


def test_a_written_reward_names_the_columns_of_the_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `answer` it compares; without it says what to fill in."""
    no_terminal(monkeypatch)
    main(["init", "a", "--model", "model", "--data", "words.jsonl", "--reward", "mine.py:right"])
    names: dict = {}
    exec((folder / "a/mine.py").read_text(), names)
    assert names["right"](prompts=["?"] * 2, completions=["an apple", "a pear"], answer=["apple"] * 2) == [1.0, 0.0]
    chat = [[{"role": "assistant", "content": "apple"}]]
    assert names["right"](prompts=["?"], completions=chat, answer=["apple"]) == [1.0]
    main(["init", "b", "--model", "model", "--data", "chat.jsonl"])
    exec((folder / "b/rewards.py").read_text(), names)
    with pytest.raises(NotImplementedError):
        names["score"](prompts=["?"], completions=["x"], level=[3])


def test_nothing_is_overwritten(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Neither run.yaml nor a reward file of the user."""
    no_terminal(monkeypatch)
    (folder / "rewards.py").write_text("def score(**_): ...")
    assert main(["init", "--model", "model", "--data", "chat.jsonl"]) == 0
    assert (folder / "rewards.py").read_text() == "def score(**_): ..."
    assert main(["init", "--model", "model", "--data", "chat.jsonl"]) == 2
    assert "run.yaml: exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--model and --data: required"),
        (["--model", "m", "--data", "none.jsonl"], "none.jsonl: can't be read"),
        (["--model", "m", "--data", "sums.jsonl", "--prompt-column", "text"], "it has question, answer"),
        (["--example", "nothing"], "is not one of"),
        (["--model", "m", "--data", "sums.jsonl", "--reward", "a.py:two words"], "is not a name of a function"),
    ],
)
def test_mistakes_are_told_in_words(
    folder: Path, words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """And nothing is written."""
    no_terminal(monkeypatch)
    assert main(["init", "new", *words]) == 2
    assert told in capsys.readouterr().err
    assert not (folder / "new").exists()


def test_questions_are_asked_for_what_the_options_leave_open(folder: Path) -> None:
    """An empty answer takes the default, and an empty answer to a question without default is asked again."""
    said = iter(["", "model", "sums.jsonl", "", "", "vllm", "y", "30"])
    asked: list[str] = []

    def answer(text: str) -> str:
        asked.append(text)
        return next(said)

    choices = with_defaults(ask(Choices(), answer))
    assert choices == Choices("model", "sums.jsonl", "final_number", "question", "vllm", 30, lora=True)
    assert len(asked) == 8
    assert "of question, answer" in asked[3]
    assert ask(choices, lambda text: pytest.fail(text)) == choices
    with pytest.raises(ConfigError, match="steps: 'many'"):
        ask(Choices("m", "sums.jsonl", "r", "question", "vllm", None, lora=True), lambda _: "many")


def test_an_example_of_the_package_is_copied_once(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """With all its files."""
    assert main(["init", "first", "--example", "quickstart"]) == 0
    assert {"run.yaml", "quickstart.py", "common.py"} <= {path.name for path in (folder / "first").iterdir()}
    assert main(["init", "first", "--example", "quickstart"]) == 2
    assert "exists already" in capsys.readouterr().err
