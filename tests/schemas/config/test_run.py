"""Rules that span sections: what the trainer is given must fit what it is asked for."""

from pathlib import Path
from typing import Any

import pytest

from schemas.config import check_tree, load_config
from schemas.errors import ConfigError

TEACHER = {"path": "some/teacher"}
SFT = {"path": "a.jsonl", "batch_size": 3, "mu_peak": 0.5, "mu_valley": 0.1, "mu_warmup_steps": 0, "mu_decay_steps": 0}


def problems(**trainer: Any) -> list[str]:
    """Those of a run with 2 groups of 3 completions per step."""
    tree = {
        "model": {"path": "some/model"},
        "environments": [{"type": "reverse_text"}],
        "rollout": {"group_size": 3},
        "packer": {"groups_per_step": 2},
        "reward": {"functions": [{"path": "characters_in_place"}]},
        "trainer": {"max_steps": 10} | trainer,
    }
    try:
        check_tree(tree)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("trainer", "problem"),
    [
        ({"num_minibatches": 6, "num_iterations": 9}, None),
        ({"num_minibatches": 7}, "trainer.num_minibatches: 7, but a step has 6 completions, packer.groups_per_"),
        ({"num_minibatches": 3, "sft": SFT}, None),
        ({"num_minibatches": 4, "sft": SFT}, "trainer.sft.batch_size: 3 examples can't be shared out to trainer.num_"),
        ({"loss": {"type": "surogate", "teacher_tau": 0.5}, "teacher": TEACHER}, None),
        ({"loss": {"type": "surogate", "teacher_tau": 0.5}}, "trainer.loss.teacher_tau: 0.5 needs a teacher; set"),
        ({"loss": {"type": "ref_kl"}}, "trainer.loss: ref_kl needs a teacher; set trainer.teacher.path"),
        ({"loss": {"type": "ref_kl"}, "teacher": TEACHER}, None),
        ({"teacher": TEACHER}, "trainer.teacher: trainer.loss surogate does not read it; set "),
        ({"loss": {"type": "grpo"}, "teacher": TEACHER}, "trainer.teacher: trainer.loss grpo does not read it"),
        ({"loss": {"type": "custom", "path": "mine.py:loss"}, "teacher": TEACHER}, None),
    ],
)
def test_rules_of_the_trainer(trainer: dict[str, Any], problem: str | None) -> None:
    """A problem names both keys, and there is one of it."""
    found = problems(**trainer)
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)


def test_paths_of_the_trainer_are_looked_for_beside_the_file(tmp_path: Path) -> None:
    """A teacher's folder and a file of examples; a teacher's name on the hub stays."""
    (tmp_path / "teacher").mkdir()
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "run.yaml").write_text(
        "model: {path: some/model}\nenvironments: [{type: reverse_text}]\n"
        "reward: {functions: [{path: characters_in_place}]}\n"
        "trainer: {max_steps: 1, loss: {type: ref_kl}, teacher: {path: teacher}, sft: {path: a.jsonl, batch_size: 1, "
        "mu_peak: 1.0, mu_valley: 1.0, mu_warmup_steps: 0, mu_decay_steps: 0}}\n"
    )
    trainer = load_config(tmp_path / "run.yaml").trainer
    assert trainer.teacher is not None
    assert trainer.sft is not None
    assert (trainer.teacher.path, trainer.sft.path) == (str(tmp_path / "teacher"), str(tmp_path / "a.jsonl"))
    named = load_config(tmp_path / "run.yaml", ["trainer.teacher.path=some/teacher"]).trainer.teacher
    assert named is not None
    assert named.path == "some/teacher"
