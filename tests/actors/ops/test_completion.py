"""Completion in shells, as a shell asks for it: a process with the line in its environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def completions(line: str, folder: Path) -> list[str]:
    """Answers to a line, through the protocol of argcomplete's scripts: file descriptor 8, vertical tabs."""
    answers = folder / "answers"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "IFS": "\013",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line.encode())),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answers),
    }
    subprocess.run([sys.executable, "-m", "actors"], env=environment, cwd=folder, timeout=60, check=False)
    return [word for word in answers.read_text().split("\013") if word]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("actors im", ["import"]),
        ("actors up run.yaml trainer.learning_r", ["trainer.learning_rate="]),
        ("actors up run.yaml model.dtype=", ["model.dtype=bfloat16", "model.dtype=float32"]),
        ("actors up run.yaml model.trust_remote_code=", [f"model.trust_remote_code={v}" for v in ("false", "true")]),
        ("actors up run.yaml environments.0.prompt_col", ["environments.0.prompt_column="]),
        ("actors init --en", ["--engine"]),
    ],
)
def test_commands_options_keys_and_values_are_completed(tmp_path: Path, line: str, words: list[str]) -> None:
    """One word each."""
    assert sorted(word.strip() for word in completions(line, tmp_path)) == words


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(shell: str) -> None:
    """It names the program."""
    done = subprocess.run(
        [sys.executable, "-m", "actors", "completion", shell], capture_output=True, text=True, timeout=60, check=True
    )
    assert "actors" in done.stdout
    assert "_ARGCOMPLETE" in done.stdout
