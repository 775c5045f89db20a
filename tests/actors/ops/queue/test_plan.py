"""Plan of a queue: one run per file and combination, with a name, a folder and a ledger of its own."""

from pathlib import Path
from typing import Any

import pytest

from actors.ops.queue.plan import QueuedRun, planned
from actors.ops.queue.sweep import Axis
from schemas.config import dump_config, load_config
from schemas.errors import ConfigError
from tests.ring.harness import ring_config

SEEDS = Axis("seed", ("1", "2"))
RATES = Axis("trainer.learning_rate", ("1e-5", "3e-5", "1e-4"))


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    """A good run.yaml."""
    return write(tmp_path, "run")


def write(folder: Path, name: str, **sections: Any) -> Path:
    """A run.yaml with a folder of its own."""
    path = folder / f"{name}.yaml"
    path.write_text(dump_config(ring_config(folder / name, **sections)))
    return path


def problems_of(*arguments: Any) -> list[str]:
    """Texts with which a plan is refused."""
    with pytest.raises(ConfigError) as caught:
        planned(*arguments)
    return list(caught.value.problems)


@pytest.mark.parametrize("axes", [[], [SEEDS], [RATES, SEEDS]], ids=[1, 2, 6])
def test_there_is_a_run_per_combination_with_a_place_of_its_own(run_yaml: Path, axes: list[Axis]) -> None:
    """The swept values are in the configuration; all else is as in the file."""
    runs = planned([run_yaml], ["trainer.max_steps=5"], axes)
    number = 1
    for axis in axes:
        number *= len(axis.values)
    assert len(runs) == len({run.config.output for run in runs}) == len({run.config.name for run in runs}) == number
    base = load_config(run_yaml)
    for run in runs:
        assert run.config.trainer.max_steps == 5
        if axes:
            assert f"seed={run.config.seed}" in run.values
            assert run.config.output.parent == base.output
            assert run.config.name.startswith("ring.")
        else:
            assert run.config.output == base.output
        # what the process of the run loads
        assert load_config(run.path, list(run.overrides)) == run.config


def test_a_ledger_outside_of_the_folder_is_each_runs_own(tmp_path: Path) -> None:
    """Next to the configured file, with the combination in its name."""
    path = write(tmp_path, "run", ledger={"path": str(tmp_path / "disk" / "ledger.sqlite")})
    runs = planned([path], [], [SEEDS])
    assert [run.config.ledger_path for run in runs] == [
        tmp_path / "disk" / f"ledger.seed-{seed}.sqlite" for seed in (1, 2)
    ]


def test_each_file_is_swept(tmp_path: Path) -> None:
    """File by file."""
    paths = [write(tmp_path, name) for name in "ab"]
    runs = planned(paths, [], [SEEDS])
    assert [(run.path, run.config.seed) for run in runs] == [(path, seed) for path in paths for seed in (1, 2)]
    assert runs[0].title == f"{paths[0]} seed=1 in {tmp_path / 'a' / 'out' / 'seed-1'}"


def test_all_mistakes_are_told_before_anything_starts(tmp_path: Path, run_yaml: Path) -> None:
    """With the file and the values that they belong to."""
    assert problems_of([run_yaml], [], [Axis("trainer.lr", ("1",))])[0].startswith("trainer.lr=1: trainer.lr: ")
    other = write(tmp_path, "other")
    other.write_text("name: 5\n")
    found = problems_of([run_yaml, other], [], [Axis("seed", ("1", "-1"))])
    assert found[0].startswith(f"{run_yaml} seed=-1: seed: ")
    assert all(text.startswith(f"{other} seed=") for text in found[1:])
    assert len(found) > 2
    assert problems_of([run_yaml], ["trainer.max_steps=0"], [])[0].startswith("trainer.max_steps: ")


def test_the_same_value_in_two_forms_is_refused(run_yaml: Path) -> None:
    """It would be the same run under two names."""
    (words,) = problems_of([run_yaml], [], [Axis("trainer.learning_rate", ("1e-5", "0.00001", "2e-5"))])
    assert words == "--sweep: trainer.learning_rate=0.00001 is the same run as trainer.learning_rate=1e-5"


def test_a_folder_with_odd_letters_arrives_as_it_is(tmp_path: Path) -> None:
    """Overrides are YAML: a colon or a hash sign must not end the text."""
    path = write(tmp_path, "run")
    folder = str(tmp_path / "a: b #1 'c' ü")
    (run,) = planned([path], [f"output_dir='{folder.replace(chr(39), chr(39) * 2)}'"], [Axis("seed", ("7",))])
    assert isinstance(run, QueuedRun)
    assert run.config.output == Path(folder) / "seed-7"
