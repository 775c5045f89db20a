"""Runs that are started in a folder whose modules have the names of ours and of Python's."""

import subprocess
import sys

import pytest

from schemas.config import dump_config
from tests.ring.harness import ring_config, summary_of

REWARDS = """
from letters import share


def score(prompts, completions, **columns):
    return [share(text) for text in completions]
"""


@pytest.mark.slow
def test_modules_of_the_users_folder_break_no_actor_whatever_their_names(tmp_path):
    """Modules named like our packages and like Python's hide nothing; what lies beside the rewards is still found."""
    for name in ("schemas", "actors", "logging", "queue"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong module')\n")
    (tmp_path / "bus.py").write_text("raise RuntimeError('the wrong module')\n")
    (tmp_path / "letters.py").write_text("def share(text):\n    return len(text) / 100\n")
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    functions = {"functions": [{"path": str(tmp_path / "my_rewards.py") + ":score"}]}
    config = ring_config(tmp_path, reward=functions, trainer={"max_steps": 2}, eval={"num_prompts": 0})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    command = [sys.executable, "-P", "-m", "actors", "up", "run.yaml"]
    up = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert up.returncode == 0, up.stdout + up.stderr
    assert summary_of(config)["steps"] == 2
