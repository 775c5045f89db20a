"""Number of steps of a run that is given in epochs."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.ops.run_length import run_length_note, with_run_length
from schemas.config import RunConfig, dump_config
from schemas.errors import ConfigError
from tests.ring.harness import ring_config

WORLDS = Path(__file__).parents[1] / "environments" / "worlds.py"


def rows(folder: Path, name: str, number: int) -> dict[str, Any]:
    """An environment with so many rows."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": "ab"}) + "\n" for i in range(number)))
    return {"type": "jsonl", "name": name, "path": str(path)}


def in_epochs(folder: Path, epochs: float, *environments: dict[str, Any], **sections: Any) -> RunConfig:
    """A run in steps of three groups."""
    reward = {"functions": [{"path": "exact_match"}]}
    trainer = {"max_steps": 0, "max_epochs": epochs}
    return ring_config(folder, environments=list(environments), reward=reward, trainer=trainer, **sections)


def test_examples_of_all_environments_are_counted(tmp_path):
    """Seven and ten rows are five steps of three groups; two and a half epochs are 13."""
    config = in_epochs(tmp_path, 2.5, rows(tmp_path, "a", 7), rows(tmp_path, "b", 10))
    assert with_run_length(config).trainer.max_steps == 13
    assert run_length_note(config) == "trainer.max_epochs: 2.5 epochs are 13 steps"


def test_a_run_in_steps_is_left_alone(tmp_path):
    """No data is read."""
    config = ring_config(tmp_path, environments=[{"type": "jsonl", "path": str(tmp_path / "missing.jsonl")}])
    assert with_run_length(config) is config
    assert run_length_note(config) == ""


def test_an_environment_without_end_is_refused_by_name(tmp_path):
    """It has no epochs."""
    words = "trainer.max_epochs: environment reverse_text makes examples without end, so it has no epochs"
    with pytest.raises(ConfigError, match=words):
        with_run_length(in_epochs(tmp_path, 1, rows(tmp_path, "a", 7), {"type": "reverse_text"}))


def test_fewer_examples_than_a_step_are_refused(tmp_path):
    """The run would have no steps."""
    with pytest.raises(ConfigError, match=r"an epoch of 2 examples has no step of packer.groups_per_step 3"):
        with_run_length(in_epochs(tmp_path, 9, rows(tmp_path, "a", 2)))


def test_a_worker_tells_how_many_examples_its_environment_has(tmp_path):
    """The configuration alone does not say; `actors check` starts no worker and tells so."""
    world = tmp_path / "world.py"
    world.write_text(
        "class World:\n"
        "    examples = staticmethod(lambda split: 7)\n"
        "    def reset(self, **kwargs): return 'say a'\n"
        "    def step(self, action): return '', 1.0, True, False, {}\n"
    )
    environment = {"type": "python", "name": "world", "path": f"{world}:World"}
    config = in_epochs(tmp_path, 2, environment, packer={"sequence_len": 512})
    assert "counted at the start, when environment world is opened" in run_length_note(config)
    assert with_run_length(config).trainer.max_steps == 4


def test_check_tells_the_number_of_steps(tmp_path, capsys):
    """Next to the verdict."""
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(in_epochs(tmp_path, 2, rows(tmp_path, "a", 7), eval={"num_prompts": 0})))
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: good\ntrainer.max_epochs: 2 epochs are 4 steps\n"
